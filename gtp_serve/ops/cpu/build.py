"""Compiles the native CPU ops: once for each instruction set, into one library.

Standard library only, and imported by ``setup.py`` from its path: the package is not installed yet then.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
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
    "avx512bf16": (*_AVX512, "-mavx512bf16"),
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


def build(output: Path, *, flags: Sequence[str] = (), machine: str | None = None) -> None:
    """Compile to ``output``, which is replaced when everything has worked.

    :param flags: further flags for compiler and linker, such as sanitizers.
    :param machine: as ``platform.machine()``.
    :raises BuildError: there is no compiler, or it fails.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler was found (g++ or clang++, or CXX)")
    command = shlex.split(compiler)
    units = _units(machine or platform.machine())
    with tempfile.TemporaryDirectory(prefix="gtp-native-") as folder:
        objects = [Path(folder) / f"{unit.name}.o" for unit in units]

        def compile_one(unit: _Unit, target: Path) -> None:
            source = str(SOURCES / unit.source)
            _run([*command, *_FLAGS, *unit.flags, *flags, "-c", source, "-o", str(target)])

        with ThreadPoolExecutor(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2) as threads:
            list(threads.map(compile_one, units, objects))
        linked = Path(folder) / LIBRARY
        _run([*command, *flags, "-shared", "-pthread", *map(str, objects), "-o", str(linked)])
        output.parent.mkdir(parents=True, exist_ok=True)
        # A process that has the old file mapped keeps it.
        fresh = output.with_name(output.name + ".new")
        shutil.copyfile(linked, fresh)
        os.replace(fresh, output)


def _units(machine: str) -> list[_Unit]:
    sets = {"generic": (), **(_X86 if machine.lower() in ("x86_64", "amd64") else {})}
    kernels = [_Unit("kernels.cpp", f"kernels-{name}", (f"-DGTP_ISA={name}", *flags)) for name, flags in sets.items()]
    others = [_Unit(source.name, source.stem) for source in sorted(SOURCES.glob("*.cpp")) if source.stem != "kernels"]
    return kernels + others


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} could not be started: {error.strerror}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} failed: {lines[0] if lines else f'status {done.returncode}'}")
