"""Every benchmark of docs/performance.md, one after another, within a time: 12 minutes, or 4 with ``--quick``.

For a quiet machine: the numbers of one run are compared with one another.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench_parts.results import add_common

HERE = Path(__file__).resolve().parent
#: Scripts with the minutes of a whole and of a quick run; those that take no limit have none to give.
SCRIPTS: tuple[tuple[str, float | None, float | None], ...] = (
    ("start.py", None, None),
    ("decode_limit.py", None, None),
    ("http_overhead.py", None, None),
    ("scaling.py", 2.5, 0.5),
    ("compare.py", 7.0, 1.8),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; the number of those that failed or passed one of their limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser)
    args = parser.parse_args(argv)
    failed = []
    for script, whole, quick in SCRIPTS:
        words = ["--model", str(args.model), "--threads", str(args.threads), "--results", str(args.results)]
        words += ["--quick"] if args.quick else []
        words += ["--document"] if args.document else []
        minutes = quick if args.quick else whole
        words += [] if minutes is None else ["--minutes", str(minutes)]
        began = time.monotonic()
        print(f"== {script}", flush=True)
        code = subprocess.run([sys.executable, str(HERE / script), *words]).returncode
        print(f"== {script}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
        failed += [script] if code else []
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
