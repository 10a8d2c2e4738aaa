"""Compiles the native CPU ops: once for each instruction set, into one library.

Standard library only, and imported by ``setup.py`` from its path: the package is not installed yet then.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
LIBRARY = "_native.so"
"""File name of the library, beside this file."""

# Contraction is off so that only what is written as a fused multiply-add is one: a sum has one order of roundings.
_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-maybe-uninitialized",
    "-Wno-uninitialized",
)
_AVX512 = ("-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_X86 = {
    "avx2": ("-mavx2", "-mfma"),
    "avx512": _AVX512,
    "avx512bf16": (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
}


class BuildError(Exception):
    """The library could not be compiled; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class _Unit:
    source: str
    name: str
    flags: tuple[str, ...] = ()


def find_compiler() -> str | None:
    """``CXX`` where it is set, else g++ or clang++; None when there is none."""
    if asked := os.environ.get("CXX"):
        return asked
    return next((name for name in ("g++", "clang++") if shutil.which(name)), None)


def build(
    output: Path,
    *,
    flags: Sequence[str] = (),
    machine: str | None = None,
    sets: Collection[str] | None = None,
    kept: Path | None = None,
) -> None:
    """Compile to ``output``, which is replaced when everything has worked.

    :param flags: further flags for compiler and linker, such as sanitizers.
    :param machine: as ``platform.machine()``.
    :param sets: instruction sets to compile for, beside ``generic``; all that the machine's kind may have by default.
    :param kept: folder of objects: one that an earlier build has left there is not compiled again, and afterwards
        those of this build are there.
    :raises BuildError: there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found (g++ or clang++, or CXX)")
    command = [*shlex.split(compiler), *_FLAGS]
    units = _units(machine or platform.machine(), sets)
    with tempfile.TemporaryDirectory(prefix="gtp-native-") as folder:

        def compile_one(unit: _Unit) -> Path:
            target = Path(folder) / f"{unit.name}.o"
            full = [*command, *unit.flags, *flags, "-c", str(SOURCES / unit.source), "-o"]
            known = kept / f"{unit.name}-{_digest(full, unit)}.o" if kept else target
            if not known.exists():
                _run([*full, str(target)])
                if kept:
                    _replace(target, known)
            return known

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as threads:
            objects = list(threads.map(compile_one, units))
        linked = Path(folder) / LIBRARY
        _run([*command, *flags, "-shared", "-pthread", *map(str, objects), "-o", str(linked)])
        _replace(linked, output)
    for old in set(kept.glob("*.o")) - set(objects) if kept else ():
        old.unlink(missing_ok=True)


def _units(machine: str, wanted: Collection[str] | None) -> list[_Unit]:
    possible = _X86 if machine.lower() in ("x86_64", "amd64") else {}
    sets = {"generic": (), **{name: flags for name, flags in possible.items() if wanted is None or name in wanted}}
    kernels = [_Unit("kernels.cpp", f"kernels-{name}", (f"-DGTP_ISA={name}", *flags)) for name, flags in sets.items()]
    without = tuple(f"-DGTP_WITHOUT_{name}" for name in possible if name not in sets)
    others = [
        _Unit(source.name, source.stem, without) for source in sorted(SOURCES.glob("*.cpp")) if source.stem != "kernels"
    ]
    return kernels + others


def _digest(command: Sequence[str], unit: _Unit) -> str:
    """Of all that an object comes from: the compiler and its words, the source, and any header that it may include."""
    version = subprocess.run([command[0], "--version"], capture_output=True, check=False).stdout
    found = hashlib.sha256(repr((command, version)).encode())
    for path in (SOURCES / unit.source, *sorted(SOURCES.rglob("*.h"))):
        found.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return found.hexdigest()[:32]


def _replace(made: Path, target: Path) -> None:
    """Put a file in a place at once; a process that has the old one mapped keeps it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.copyfile(made, fresh)
    os.replace(fresh, target)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} could not be started: {error.strerror}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else f'status {done.returncode}'}")
