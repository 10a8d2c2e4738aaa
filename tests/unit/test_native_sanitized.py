"""The native ops under the sanitizers of addresses and undefined behaviour: odd shapes in buffers of exact size."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from native_library import the_library

from gtp_serve.ops.cpu.build import build, find_compiler

# Compiling with sanitizers takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(3600)

ROOT = Path(__file__).parents[2]
SEEDS = 60 if os.environ.get("GTP_SERVE_LONG_TESTS") else 8
# No optimisation: the code is the same, and compiled in a fraction of the time.
FLAGS = ["-O0", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def sanitizer_runtime(compiler: str) -> str | None:
    """The address sanitizer's library, which must come first in a process that was not built with it."""
    for name in ("libasan.so", "libclang_rt.asan-x86_64.so"):
        asked = [*shlex.split(compiler), f"-print-file-name={name}"]
        found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if os.path.isabs(found) and os.path.exists(found):
            return os.path.realpath(found)
    return None


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a script on the sanitized library; returns its process."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    runtime = sanitizer_runtime(compiler)
    if runtime is None:
        pytest.skip(f"{compiler} comes without the address sanitizer")
    library = tmp_path_factory.mktemp("sanitized") / "native.so"
    build(library, flags=FLAGS, sets=the_library().instruction_sets())
    env = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        # Each buffer from malloc, so that its ends are watched.
        "PYTHONMALLOC": "malloc",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }

    def start(*command: str) -> subprocess.CompletedProcess[str]:
        arguments = [part.replace("LIBRARY", str(library)) for part in command]
        return subprocess.run(
            [sys.executable, *arguments], capture_output=True, text=True, env=env, check=False, timeout=1800
        )

    return start


def test_no_op_reads_or_writes_beside_its_buffers_or_does_what_is_undefined(run: Run) -> None:
    done = run(str(ROOT / "tests" / "sanitized_native.py"), "LIBRARY", str(SEEDS))
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split("\n")[:-1] == [f"{name} ok" for name in the_library().instruction_sets()]


def test_a_buffer_that_is_one_element_short_is_noticed(run: Run) -> None:
    done = run(
        "-c",
        "import sys; from random import Random; from sanitized_native import *\n"
        "memory = Memory(Random(0))\n"
        "op = swiglu(Random(0), memory, structs.F32)\n"
        "op.out = memory.room(op.rows * op.size * 4 - 4)\n"
        "Threads(Library(Path(sys.argv[1])), 1).run([op])",
        "LIBRARY",
    )
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
