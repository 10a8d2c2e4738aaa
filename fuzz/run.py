"""Fuzz one target with atheris (libFuzzer): ``python fuzz/run.py TARGET [libFuzzer's options]``.

Without atheris, ``python fuzz/run.py TARGET --plain SECONDS`` changes inputs without looking at coverage.
Found inputs go to ``build/fuzz/TARGET``, those that break something to ``build/fuzz/crash-TARGET-*``.
"""

from __future__ import annotations

import importlib
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOUND = ROOT / "build" / "fuzz"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def main() -> None:
    """Run until told to stop, or until an input breaks something."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    name, options = sys.argv[1], sys.argv[2:]
    if options[:1] == ["--plain"]:
        _plain(name, float(options[1]))
    else:
        _guided(name, options)


def _guided(name: str, options: list[str]) -> None:
    try:
        atheris: Any = importlib.import_module("atheris")
    except ModuleNotFoundError:
        sys.exit(f"atheris is not installed: pip install atheris, or use: python fuzz/run.py {name} --plain 60")
    with atheris.instrument_imports(include=["gtp_serve"]):
        table = importlib.import_module("fuzz_targets")
    check, seeds = _target(table, name, Path(tempfile.mkdtemp(prefix="gtp-fuzz-")))
    (FOUND / name).mkdir(parents=True, exist_ok=True)
    for title, data in seeds.items():
        (FOUND / name / f"seed-{title}").write_bytes(data)
    rng = random.Random(0)
    inputs = [*seeds.values(), *table.kept_inputs(name).values()]

    def change(data: bytes, most: int, seed: int) -> bytes:
        """Half of the time libFuzzer's own changes, else those that know JSON."""
        rng.seed(seed)
        if rng.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        changed: bytes = table.mutate(data, rng, inputs)
        return changed[:most]

    kept = [str(ROOT / "fuzz" / "corpus" / name)] if table.kept_inputs(name) else []
    defaults = ["-timeout=30", "-rss_limit_mb=3000", "-max_len=65536", f"-artifact_prefix={FOUND}/crash-{name}-"]
    arguments = [sys.argv[0], str(FOUND / name), *kept, *defaults, *options]
    atheris.Setup(arguments, lambda data: check(bytes(data)), custom_mutator=change)
    atheris.Fuzz()


def _plain(name: str, seconds: float) -> None:
    table = importlib.import_module("fuzz_targets")
    with tempfile.TemporaryDirectory(prefix="gtp-fuzz-") as folder:
        check, seeds = _target(table, name, Path(folder))
        inputs = [*seeds.values(), *table.kept_inputs(name).values()]
        count, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            data = table.mutate(random.Random(count).choice(inputs), random.Random(count), inputs)
            try:
                check(data)
            except BaseException:
                FOUND.mkdir(parents=True, exist_ok=True)
                (FOUND / f"crash-{name}-{count}").write_bytes(data)
                raise
            count += 1
        sys.stdout.write(f"{name}: {count} inputs, {count / seconds:.0f} a second, nothing broke\n")


def _target(table: Any, name: str, folder: Path) -> Any:
    targets = table.make_targets(folder)
    if name not in targets:
        sys.exit(f"there is no target {name}; there are {', '.join(targets)}")
    return targets[name]


if __name__ == "__main__":
    main()
