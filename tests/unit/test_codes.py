"""The table of error codes holds exactly the codes that the source raises, and the page is made from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from gtp_serve.server import cli
from gtp_serve.server.app import _CODES
from gtp_serve.server.codes import all_codes, as_markdown, find_code, nearest_code

ROOT = Path(__file__).parents[2]
SOURCES = [
    path
    for folder in ("gtp_serve", "server", "loaders")
    for path in (ROOT / folder).rglob("*.py")
    if not path.is_relative_to(ROOT / "gtp_serve" / "server") and not path.is_relative_to(ROOT / "gtp_serve/loaders")
]
#: Raised through a name that the search below cannot follow.
THROUGH_A_NAME = {"not-ready", "shutting-down", "worker-died", "http-error", *_CODES.values()}


def texts(node: ast.AST) -> set[str]:
    """String constants in an expression that can be its value; keys and arguments of calls cannot."""
    if isinstance(node, ast.Constant):
        return {node.value} if isinstance(node.value, str) else set()
    if isinstance(node, ast.IfExp):
        return texts(node.body) | texts(node.orelse)
    if isinstance(node, ast.BoolOp):
        return set().union(*map(texts, node.values))
    return set()


def codes_in(tree: ast.AST) -> Iterator[str]:
    """What is given as ``code=``, as ``default_code`` or as the second argument of ``plain_error``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (text for word in node.keywords if word.arg == "code" for text in texts(word.value))
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            if name == "plain_error" and len(node.args) > 1:
                yield from texts(node.args[1])
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "default_code" for target in node.targets
        ):
            yield from texts(node.value)


def raised() -> dict[str, str]:
    """Every code with a file that raises it."""
    return {code: path.name for path in SOURCES for code in codes_in(ast.parse(path.read_text()))}


def test_every_code_that_is_raised_is_in_the_table() -> None:
    known = {code.name for code in all_codes()}

    assert len(SOURCES) > 200
    assert {code: file for code, file in raised().items() if code not in known} == {}
    assert known >= THROUGH_A_NAME


def test_the_table_holds_no_code_that_nothing_raises() -> None:
    used = {*raised(), *THROUGH_A_NAME}

    assert [code.name for code in all_codes() if code.name not in used] == []


def test_the_search_sees_each_way_in_which_a_code_is_given() -> None:
    tree = ast.parse(
        "raise E('x', code='a')\nclass E:\n    default_code = 'b'\nplain_error(503, 'c', 'm')\n"
        "E(code='d' if x else 'e')\nE(code=old or 'f')\nE(code=table['no'])\n"
    )

    assert set(codes_in(tree)) == {"a", "b", "c", "d", "e", "f"}


def test_no_code_is_told_twice_and_each_says_what_to_do() -> None:
    codes = list(all_codes())

    assert len({code.name for code in codes}) == len(codes)
    for code in codes:
        assert code.seen, code.name
        for text in (code.meaning, code.do):
            assert text[0].isupper() or text[0] in "`/'" or text.split()[0] in ("float32,", "gloo"), code.name
            assert text.endswith("."), code.name


def test_the_troubleshooting_page_is_made_from_the_table() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()

    assert page == as_markdown(), "gtp-serve explain --markdown > docs/troubleshooting.md"


@pytest.mark.parametrize("name", ["too-big", "error[too-big]", "TOO_BIG", " weights-torn "])
def test_a_code_is_found_however_it_is_written(name: str) -> None:
    assert find_code(name) is not None


def test_explain_prints_meaning_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "error[port-in-use]"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("port-in-use   (memory and machine; Exit 5)\n  means  Another process listens")
    assert "--port 0" in told
    assert max(map(len, told.splitlines())) <= 100


def test_explain_names_the_nearest_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "ckpt-notfound"]) == 2
    assert capsys.readouterr().err == (
        "error[usage] there is no error code 'ckpt-notfound'\n  nearest  ckpt-not-found\n"
    )
    assert nearest_code("qqqq") is None


def test_explain_without_a_code_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {code.name} " in told for code in all_codes())
