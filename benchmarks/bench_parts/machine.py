"""The machine's limits, measured beside what is compared with them: read bandwidth and matrix products."""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("read_speed.c")
_MIB = 512


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0))


def describe() -> dict[str, str | int]:
    """What a reader has to know of the machine."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = set(facts.get("flags", "").split())
    known = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    return {
        "processor": facts.get("model name", platform.machine()),
        "cores": cores(),
        "instructions": " ".join(flag for flag in known if flag in flags),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def read_bandwidth(threads: int, repetitions: int = 9) -> tuple[float, str]:
    """GB/s that so many threads read from memory (median), and how it was measured."""
    with tempfile.TemporaryDirectory() as folder:
        program = _compile(Path(folder))
        if program is not None:
            words = [str(program), str(_MIB), str(threads), str(repetitions)]
            said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
            return statistics.median(map(float, said.split())), "read_speed.c"
    return numpy_bandwidth(threads, repetitions), "numpy"


def _compile(folder: Path) -> Path | None:
    """``read_speed.c``; None without a compiler."""
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    if compiler is None:
        return None
    program = folder / "read_speed"
    command = [compiler, "-O3", "-march=native", "-pthread", str(_SOURCE), "-o", str(program)]
    return program if subprocess.run(command, capture_output=True).returncode == 0 else None


class ReadSpeed:
    """The read bandwidth again and again, by threads that stay: new ones share a core at first.

    :raises FileNotFoundError: without a compiler.
    """

    def __init__(self, threads: int, folder: Path) -> None:
        program = _compile(folder)
        if program is None:
            raise FileNotFoundError("a C compiler is needed")
        words = [str(program), str(_MIB), str(threads), "0"]
        self._program = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def gbps(self, repetitions: int = 3) -> float:
        """GB/s, the best of some."""
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        found = []
        for _ in range(repetitions):
            self._program.stdin.write("again\n")
            self._program.stdin.flush()
            found.append(float(self._program.stdout.readline()))
        return max(found)

    def close(self) -> None:
        """End it."""
        self._program.communicate()


def numpy_bandwidth(threads: int, repetitions: int = 9, mib: int = _MIB) -> float:
    """The same without a compiler: numpy adds up pieces in threads."""
    import numpy as np  # only without a compiler

    data = np.ones((mib << 20) // 8, dtype=np.int64)
    pieces = np.array_split(data, threads)
    rates = []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repetitions):
            began = time.perf_counter()
            list(pool.map(np.add.reduce, pieces))
            rates.append(data.nbytes / (time.perf_counter() - began) / 1e9)
    return statistics.median(rates)


_GEMM = """
import json, statistics, sys, time
import torch
torch.set_num_threads(int(sys.argv[1]))
found = {}
for name in ("bfloat16", "float32"):
    dtype = getattr(torch, name)
    rates = []
    for rows, columns, inner in ((1024, 1024, 1024), (1024, 3072, 576)):
        one, other = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
        torch.nn.functional.linear(one, other)
        times, end = [], time.perf_counter() + float(sys.argv[2])
        while not times or time.perf_counter() < end and len(times) < 50:
            began = time.perf_counter()
            torch.nn.functional.linear(one, other)
            times.append(time.perf_counter() - began)
        rates.append(2 * rows * columns * inner / statistics.median(times) / 1e9)
    found[name] = max(rates)
print(json.dumps(found))
"""


def gemm_rates(threads: int, seconds: float = 0.6) -> dict[str, float]:
    """GFLOP/s of torch's matrix products in each dtype, in a process of their own."""
    command = [sys.executable, "-c", _GEMM, str(threads), str(seconds)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(said)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one run, and what they make of a model."""

    read_gbps: float
    gemm_gflops: float
    """The best of all dtypes."""

    def decode_tps(self, weight_bytes: int, parameters: int, streams: int) -> float:
        """Tokens a second when a step does no more than read all weights once, or multiply with them."""
        read = weight_bytes / (self.read_gbps * 1e9)
        multiply = 2 * parameters * streams / (self.gemm_gflops * 1e9)
        return streams / max(read, multiply)

    def prefill_tps(self, parameters: int) -> float:
        """Prompt tokens a second when nothing costs time but the products of the layers."""
        return self.gemm_gflops * 1e9 / (2 * parameters)


class Busy:
    """How many cores other processes used meanwhile."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._all, self._own = _busy_seconds(), _own_seconds()

    def others(self) -> float:
        """Cores, on average since the beginning; ours and our children's are not among them."""
        spent = (_busy_seconds() - self._all) - (_own_seconds() - self._own)
        return max(0.0, spent / (time.monotonic() - self._began))


def _busy_seconds() -> float:
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, soft, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
