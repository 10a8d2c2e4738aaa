"""The documentation as a site: every page and picture that is named exists, and nothing is fetched from elsewhere."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
PICTURES = sorted((DOCS / "img").glob("*.svg"))


def nav() -> list[str]:
    """Pages of the site, in its order."""
    section = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return re.findall(r"^  - [^:]+: (\S+\.md)$", section, re.MULTILINE)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_page_of_the_site_is_there_and_named_once() -> None:
    assert len(nav()) >= 11
    assert [name for name in nav() if not (DOCS / name).is_file()] == []
    assert len(set(nav())) == len(nav())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", target):
            continue
        name, _, anchor = target.partition("#")
        file = page if not name else page.parent / name
        assert file.is_file(), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target}"


def test_each_picture_is_shown_and_is_a_picture_without_scripts_or_foreign_parts() -> None:
    text = "".join(page.read_text() for page in PAGES)

    assert len(PICTURES) >= 3
    for picture in PICTURES:
        assert f"(img/{picture.name})" in text, picture.name
        root = ET.fromstring(picture.read_text())
        names = {element.tag.rpartition("}")[2] for element in root.iter()}
        assert root.find("{http://www.w3.org/2000/svg}title") is not None
        assert names & {"script", "image", "foreignObject", "use"} == set()


def test_each_module_of_the_api_page_exists() -> None:
    names = re.findall(r"^::: (gtp_serve[\w.]+)$", (DOCS / "api.md").read_text(), re.MULTILINE)

    assert len(names) >= 6
    for name in names:
        parts = name.split(".")
        while not (ROOT.joinpath(*parts).is_dir() or ROOT.joinpath(*parts).with_suffix(".py").is_file()):
            parts = parts[:-1]
            assert len(parts) > 1, name
        rest = name.split(".")[len(parts) :]
        source = ROOT.joinpath(*parts).with_suffix(".py")
        assert not rest or re.search(rf"^(class|def) {rest[0]}\b", source.read_text(), re.MULTILINE), name


def test_the_site_asks_no_other_host() -> None:
    text = (ROOT / "mkdocs.yml").read_text()

    assert "highlightjs: false" in text
    assert not re.search(r"https?://", text)


def test_the_metrics_page_has_every_name_that_is_frozen() -> None:
    frozen = (ROOT / "tests" / "golden" / "metrics.txt").read_text().split("\n")[:-1]
    page = (DOCS / "operations.md").read_text()

    for line in frozen:
        name = line.split()[0].removeprefix("gtp_serve_")
        assert re.search(rf"`{name}[`{{]", page), name


def test_every_example_is_run_by_a_test() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("[eu]*/test_*.py") if path != Path(__file__))

    examples = sorted((ROOT / "examples").glob("*.py"))
    assert len(examples) >= 3
    assert [path.name for path in examples if f'"{path.name}"' not in tests and f"/{path.name}" not in tests] == []
