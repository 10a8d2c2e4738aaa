"""The commands of the README and the docs, run as they stand there against one server on a small checkpoint.

A block that is run has a comment before it: ``<!-- run: TEXT -->`` (exit status 0, and TEXT in what it prints) or
``<!-- serve -->`` (the command that starts the server).  Any other block with a command is a synopsis (PATH, URL and
so on in capitals) or says why it is not run: ``<!-- not run: REASON -->``.  What differs from a reader's machine is
put in: the port, and a fixture where the text has a checkpoint of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from serve_command import Command

from gtp_serve.server import cli

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
FIRST = DATA / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
NEXT = DATA / "megatron" / "llama-tp1-pp1-gtp4-pad16-logical"
TOKENIZER = DATA / "tokenizer251"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^<!-- (run|serve)(?:: (.+?))? -->\n\n?((?:(?:    .*)?\n)+)", re.MULTILINE)
_NOT_RUN = re.compile(r"^<!-- not run: (.{15,}) -->\n\n?((?:(?:    .*)?\n)+)", re.MULTILINE)
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_WORDS = "gtp-serve|curl|python3?|make|pip|docker|torchrun|ray|git|kubectl|ssh|export|kill"
_OWN = ("docker ", "make ", "pip ")
"""What needs a daemon, builds this environment or changes it."""


@dataclass(frozen=True)
class Block:
    """An indented block with a mark before it."""

    page: str
    kind: str
    text: str
    """What the output must contain."""
    command: str


def blocks_of(page: Path) -> list[Block]:
    return [
        Block(page.name, kind, text or "", re.sub(r"^    ", "", body, flags=re.MULTILINE).strip())
        for kind, text, body in _BLOCK.findall(page.read_text() + "\n")
    ]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.kind == "run"]


def test_each_mark_stands_before_a_block_and_each_page_that_must_has_one() -> None:
    marks = sum(len(re.findall(r"^<!-- (?:run|serve)", page.read_text(), re.MULTILINE)) for page in PAGES)

    assert len(BLOCKS) == marks
    assert {"README.md", "index.md", "checkpoints.md", "operations.md"} <= {block.page for block in RUN}
    assert len(RUN) >= 12
    assert not [block for block in RUN if block.command.startswith(_OWN)]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: str(page.name))
def test_every_command_of_every_page_is_run_or_says_why_not(page: Path) -> None:
    """A line that looks like a command and is in no marked block would rot unseen."""
    text = page.read_text() + "\n"
    assert len(_NOT_RUN.findall(text)) == text.count("<!-- not run")
    for kind, body in _FENCED.findall(text):
        if kind == "python":
            compile(body, page.name, "exec")
        elif kind == "toml":
            tomllib.loads(body)
        else:
            raise AssertionError(f"{page.name}: commands stand in indented blocks, so that they can be run: {body}")
    text = _NOT_RUN.sub("", _BLOCK.sub("", text))
    for line in re.findall(rf"^    (?:\$ )?((?:{_WORDS}) .*)$", text, re.MULTILINE):
        assert re.search(r"\b(PATH|URL|DIR|CODE)\b", line) or line.startswith("make "), f"{page.name}: {line}"


def test_commands_inside_a_sentence_exist() -> None:
    """``gtp-serve push --stream`` in running text names a command and options that there are."""
    helps = {name: help_of(name) for name in cli.COMMANDS if name not in ("serve", "cluster")}
    for page in PAGES:
        for command in re.findall(r"`gtp-serve ([^`]+)`", page.read_text()):
            words = command.split()
            known = helps.get(words[0])
            if known is None:
                assert words[0].startswith("--") or words[0] in ("serve", "cluster"), f"{page.name}: {command}"
                continue
            for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", command):
                assert option in known, f"{page.name}: {command}"


def help_of(name: str) -> str:
    """What ``gtp-serve NAME --help`` prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        cli.main([name, "--help"])
    return out.getvalue()


def test_serve_commands_are_understood() -> None:
    from gtp_serve.server.cli import parse_serve

    served = [block for block in BLOCKS if block.kind == "serve"]
    assert {"README.md", "index.md"} <= {block.page for block in served}
    for block in served:
        words = shlex.split(block.command, comments=True)
        assert words[0] == "gtp-serve"
        assert parse_serve(words[1:]).ckpt == Path("/ckpts/my-run")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    command = Command("--ckpt", str(FIRST), "--tokenizer", str(TOKENIZER), "--port", "0", "--max-running", "8")
    try:
        yield command.url()
    finally:
        command.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run: ``gtp-serve`` and ``python`` are this environment's."""
    made = tmp_path_factory.mktemp("reader")
    places = made / "bin"
    places.mkdir()
    for name, words in (("gtp-serve", "-m gtp_serve.server"), ("python", "")):
        script = places / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        script.chmod(0o755)
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@pytest.mark.parametrize("block", RUN, ids=[f"{block.page}-{index}" for index, block in enumerate(RUN)])
def test_the_command_does_what_the_page_says(block: Block, server: str, folder: Path) -> None:
    command = block.command.replace("/ckpts/my-run/iter_0000200", str(NEXT)).replace("/ckpts/my-run", str(FIRST))
    command = re.sub(r"(http://)?(localhost|127\.0\.0\.1):30000", server, command)
    env = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "NO_PROXY": "*",
    }

    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=200
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert block.text in done.stdout + done.stderr
