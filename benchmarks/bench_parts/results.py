"""Where results are kept: one JSON for each run, and what else the same run made beside it."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from bench_parts.machine import cores, describe
from bench_parts.table import fill_file

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "performance.md"


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options that every benchmark has."""
    parser.add_argument("--model", type=Path, default=ROOT / ".demo" / "hf", help="Hugging Face folder (.demo/hf)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each program (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="a look: fewer and shorter measurements")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON (benchmarks/results)")
    parser.add_argument("--document", action="store_true", help="put table and picture into docs/performance.md too")


class Keeper:
    """Of one benchmark's results.

    :param name: of its files and of its section in the documentation.
    """

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self._name = name
        self._folder: Path = args.results
        self._document: bool = args.document
        self._facts = {
            "benchmark": name,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": describe(),
            "threads": args.threads,
            "quick": args.quick,
            "model": args.model.parent.name + "/" + args.model.name,
        }

    def keep(self, found: dict[str, Any], words: str, picture: str | None = None) -> Path:
        """Write everything; the JSON's path.  The table goes to standard output."""
        self._folder.mkdir(parents=True, exist_ok=True)
        stamp = str(self._facts["began"]).replace(":", "").replace("-", "")
        path = self._folder / f"{self._name}-{stamp}.json"
        path.write_text(json.dumps(self._facts | found, indent=1) + "\n", encoding="utf-8")
        if picture is not None:
            path.with_suffix(".svg").write_text(picture, encoding="utf-8")
        print(f"\n{words}\n\n{path}", flush=True)
        if self._document:
            fill_file(DOCUMENT, self._name, f"{words}\n\n{self.machine_words()}")
            if picture is not None:
                (DOCUMENT.parent / "img" / f"{self._name}.svg").write_text(picture, encoding="utf-8")
        return path

    def machine_words(self) -> str:
        """The machine and the day, in one line."""
        machine = describe()
        return (
            f"Measured on {str(self._facts['began'])[:10]}: {machine['processor']}, {machine['cores']} cores"
            f" ({machine['instructions'] or 'no vector extensions'}), {self._facts['threads']} threads"
            f"{', quick' if self._facts['quick'] else ''}."
        )
