"""Threads of the native ops: as many as there are, none after a fork, and an error where none can be had."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from native_library import the_library

from gtp_serve.ops.cpu.library import Threads
from gtp_serve.ops.cpu.native import Native


def test_a_forked_process_computes_alone_and_gives_the_same_bits() -> None:
    native = Native(Threads(the_library(), 3))
    x, weight = torch.randn(9, 40), torch.randn(70, 40)
    expected = native.linear(x, weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(native.linear(x, weight), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(native.linear(x, weight), expected)


def test_threads_that_the_system_does_not_give_are_an_error_and_no_crash() -> None:
    program = (
        "import resource\n"
        "from gtp_serve.errors import EnvironmentFault\n"
        "from gtp_serve.ops.cpu.library import Threads, find_library\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "try:\n"
        "    Threads(find_library(), 200)\n"
        "except EnvironmentFault as error:\n"
        "    print(error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("200 threads for ")
