"""Tables in Markdown, and sections of a document that a measurement fills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; a bar inside a cell is escaped.

    :raises ValueError: a row has another number of cells than the header.
    """
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (header, *rows)]
    if any(len(row) != len(header) for row in cells):
        raise ValueError(f"every row needs {len(header)} cells")
    widths = [max(3, *(len(row[at]) for row in cells)) for at in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def fill_section(document: str, name: str, text: str) -> str:
    """The document with the text between ``<!-- measured: name -->`` and ``<!-- end -->``.

    :raises ValueError: there is no such section.
    """
    begin, end = f"<!-- measured: {name} -->", "<!-- end -->"
    head, found, rest = document.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the document has no section {name!r}")
    return f"{head}{begin}\n\n{text.strip()}\n\n{end}{tail}"


def fill_file(path: Path, name: str, text: str) -> None:
    """The same in a file."""
    path.write_text(fill_section(path.read_text(encoding="utf-8"), name, text), encoding="utf-8")
