"""The native CPU ops' AVX-512 and AVX-512 BF16 code on a machine that has AVX2 only: compiled with SIMDe, then tested.

    .venv/bin/python scripts/emulate_avx512.py [--simde DIR] [arguments of pytest ...]

Needs g++ and SIMDe's headers (https://github.com/simd-everywhere/simde, Debian's libsimde-dev).  The library goes to
build/emulated; the installed one is left alone.  Without arguments, the parity tests of the native ops run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "gtp_serve" / "ops" / "cpu" / "native"
FOLDER = ROOT / "build" / "emulated"
TESTS = [
    f"tests/parity/test_native_{name}.py" for name in ("linear", "small", "attention", "experts", "steps", "order")
]
_FLAGS = ["-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]
_EMULATED = ["-mavx2", "-mfma", "-include", str(Path(__file__).with_name("avx512_emulation.h"))]
_SETS = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": _EMULATED,
    "avx512bf16": ["-DEMULATE_BF16", *_EMULATED],
}
_PLUGIN = """
from pathlib import Path

import gtp_serve.native_library
import gtp_serve.ops.cpu.library

found = Path(__file__).with_name("_native.so")
gtp_serve.native_library.PATH = gtp_serve.ops.cpu.library.PATH = found
gtp_serve.ops.cpu.library.find_library.__wrapped__.__defaults__ = (found,)
"""


def main() -> int:
    """Compile and test; pytest's exit code, or 2 when nothing could be compiled."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simde", type=Path, default=Path("/usr/include"), help="folder with simde/x86/avx512.h")
    args, tests = parser.parse_known_args()
    if not (args.simde / "simde" / "x86" / "avx512.h").exists():
        print(f"SIMDe's headers are not in {args.simde}; install libsimde-dev or give --simde DIR", file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda job: compile_one(job[0], job[1], job[2], args.simde), jobs()))
    subprocess.run(["g++", "-shared", "-pthread", *map(str, objects), "-o", str(FOLDER / "_native.so")], check=True)
    (FOLDER / "emulated_library.py").write_text(_PLUGIN, encoding="utf-8")
    path = os.pathsep.join([str(FOLDER), str(ROOT / "tests"), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "emulated_library", *(tests or TESTS)]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, check=False).returncode


def jobs() -> list[tuple[str, str, list[str]]]:
    """(source, name of its object, flags) of each compilation; the library is told that the machine has everything."""
    found = [("kernels.cpp", f"kernels-{name}", [f"-DGTP_ISA={name}", *flags]) for name, flags in _SETS.items()]
    for source in sorted(SOURCES.glob("*.cpp")):
        if source.stem != "kernels":
            flags = ["-D__builtin_cpu_supports(name)=1"] if source.stem == "library" else []
            found.append((source.name, source.stem, flags))
    return found


def compile_one(source: str, name: str, flags: list[str], simde: Path) -> Path:
    """One object."""
    target = FOLDER / f"{name}.o"
    command = ["g++", *_FLAGS, f"-I{simde}", *flags, "-c", str(SOURCES / source), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


if __name__ == "__main__":
    raise SystemExit(main())
