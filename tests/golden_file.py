"""Answers that are committed: compared in a test, rewritten by ``make golden``."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def same_as_golden(name: str, text: str) -> None:
    """Assert that ``text`` is the committed one; UPDATE_GOLDEN=1 makes it so."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"not as in {name}; `make golden` rewrites it"
