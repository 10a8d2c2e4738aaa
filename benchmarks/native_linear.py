"""Native linear layers beside what the machine gives in the same run: read bandwidth, multiply-adds in registers.

All linears of a Llama-like decoder (SmolLM2-135M's by default) run as one program over weights that no cache holds, on
huge pages where asked.  Each layer is timed by itself, limits and kernels in turn, and the best times of the rounds are
summed up, so that a busy machine spoils a round and not the result; one thread is timed by the processor time it used.

    python benchmarks/native_linear.py --rows 1,8,128 --types bf16,int8
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gtp_serve.ops.cpu import structs
from gtp_serve.ops.cpu.build import find_compiler
from gtp_serve.ops.cpu.library import Library, Threads, addresses_of, find_library

HUGE_PAGE = 2 << 20
TYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32": (torch.float32, torch.float32),
    "int8": (torch.bfloat16, torch.int8),
}

CODES = {torch.float32: structs.F32, torch.bfloat16: structs.BF16, torch.int8: structs.I8}


@dataclass(frozen=True)
class Shape:
    """One linear layer; ``gated``: gate above up, whose SwiGLU is the output."""

    in_size: int
    out_size: int
    gated: bool = False
    head: bool = False


@dataclass(frozen=True)
class Result:
    """What one number of rows on one number of threads gave."""

    types: str
    rows: int
    threads: int
    milliseconds: float
    read_gb_s: float
    read_limit_gb_s: float
    multiply_g_s: float
    multiply_limit_g_s: float

    def line(self) -> str:
        read, multiply = self.read_gb_s / self.read_limit_gb_s, self.multiply_g_s / self.multiply_limit_g_s
        return (
            f"{self.types:5}{self.rows:6} rows {self.threads:3} threads {self.milliseconds:10.2f} ms  "
            f"read {self.read_gb_s:6.2f} of {self.read_limit_gb_s:6.2f} GB/s = {read:.3f}  "
            f"multiply-adds {self.multiply_g_s:6.2f} of {self.multiply_limit_g_s:6.2f} G/s = {multiply:.3f}"
        )


class Limits:
    """``native_limits.cpp``, compiled for this machine."""

    def __init__(self, folder: Path) -> None:
        library = folder / "limits.so"
        source = Path(__file__).with_name("native_limits.cpp")
        flags = ["-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread"]
        subprocess.run([find_compiler() or "g++", *flags, str(source), "-o", str(library)], check=True)
        dll = ctypes.CDLL(str(library))
        self._read, self._multiply = dll.read_rate, dll.multiply_rate
        self._read.restype = self._multiply.restype = ctypes.c_double
        self._read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
        self._multiply.argtypes = [ctypes.c_int64, ctypes.c_int, ctypes.c_int]

    def read_seconds(self, address: int, size: int, threads: int) -> float:
        return size / float(self._read(address, size, threads))

    def multiply_rate(self, threads: int, *, pairs: bool) -> float:
        """Multiply-adds a second, the best of several short runs.

        :param pairs: of bfloat16 in pairs, where the processor has that; otherwise of float32.
        """
        return max(float(self._multiply(5000, threads, pairs)) for _ in range(20))


class Model:
    """Random weights of all layers, one after the other, and the operations that use them."""

    def __init__(self, shapes: list[Shape], types: str, rows: int, *, huge: bool) -> None:
        dtype, weight_dtype = TYPES[types]
        width = weight_dtype.itemsize
        self.bytes = sum(shape.in_size * shape.out_size for shape in shapes) * width
        self.products = [shape.in_size * shape.out_size * rows for shape in shapes]
        self._memory = mmap.mmap(-1, self.bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        start = -whole.data_ptr() % HUGE_PAGE
        weights = whole[start : start + self.bytes]
        if weight_dtype == torch.int8:
            some = torch.randint(-127, 128, (1 << 20,)).to(torch.int8)
        else:
            some = (torch.randn(1 << 20) * 0.05).to(weight_dtype)
        for part in torch.split(weights, some.nbytes):
            part.copy_(some.view(torch.uint8)[: part.numel()])
        self.address = weights.data_ptr()
        widest_in = max(shape.in_size for shape in shapes)
        widest_out = max(shape.out_size for shape in shapes)
        x, out = torch.randn(rows, widest_in).to(dtype), torch.empty(rows, widest_out)
        scale = torch.full((widest_out,), 0.01)
        self._kept = (x, out, scale)
        self.ops: list[structs.Op] = []
        at = self.address
        for shape in shapes:
            self.ops.append(
                structs.Linear(
                    x=x.data_ptr(),
                    weight=at,
                    scale=scale.data_ptr() if weight_dtype == torch.int8 else 0,
                    out=out.data_ptr(),
                    rows=rows,
                    in_size=shape.in_size,
                    out_size=shape.out_size,
                    x_row=widest_in,
                    weight_row=shape.in_size,
                    out_row=widest_out,
                    dtype=CODES[dtype],
                    weight_dtype=CODES[weight_dtype],
                    out_dtype=structs.F32 if shape.head else CODES[dtype],
                    swiglu=shape.gated,
                )
            )
            at += shape.in_size * shape.out_size * width


def measure(model: Model, threads: Threads, limits: Limits, rounds: int, name: str, rows: int) -> Result:
    """The best of each layer, and of each 30th of its weights read, summed up."""
    clock = time.thread_time if threads.count == 1 else time.perf_counter
    parts = [(addresses_of(part), len(part)) for part in (model.ops[at : at + 4] for at in range(0, len(model.ops), 4))]
    slice_bytes = model.bytes // 30
    best, read, rate = [float("inf")] * len(parts), [float("inf")] * 30, 0.0
    threads.run_array(addresses_of(model.ops), len(model.ops), None)
    for _ in range(rounds):
        for at in range(30):
            seconds = limits.read_seconds(model.address + at * slice_bytes, slice_bytes, threads.count)
            read[at] = min(read[at], seconds)
        rate = max(rate, limits.multiply_rate(threads.count, pairs=name == "bf16"))
        for at, (ops, count) in enumerate(parts):
            before = clock()
            threads.run_array(ops, count, None)
            best[at] = min(best[at], clock() - before)
    return Result(
        types=name,
        rows=rows,
        threads=threads.count,
        milliseconds=sum(best) * 1e3,
        read_gb_s=model.bytes / sum(best) / 1e9,
        read_limit_gb_s=30 * slice_bytes / sum(read) / 1e9,
        multiply_g_s=sum(model.products) / sum(best) / 1e9,
        multiply_limit_g_s=rate / 1e9,
    )


def shapes_of(arguments: argparse.Namespace) -> Iterator[Shape]:
    hidden, ffn = arguments.hidden, arguments.ffn
    for _ in range(arguments.layers):
        yield Shape(hidden, arguments.qkv)
        yield Shape(hidden, hidden)
        yield Shape(hidden, 2 * ffn, gated=True)
        yield Shape(ffn, hidden)
    if arguments.vocab:
        yield Shape(hidden, arguments.vocab, head=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,32,128", help="tokens in a step, several with commas")
    parser.add_argument("--types", default="bf16", help=f"of {', '.join(TYPES)}")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--instruction-set", help="the machine's best by default")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--plain-pages", action="store_true", help="weights on pages of 4 KiB")
    parser.add_argument("--library", type=Path, help="another build of the native ops")
    parser.add_argument("--json", type=Path, help="file for the results")
    for name, size in (("layers", 30), ("hidden", 576), ("qkv", 960), ("ffn", 1536), ("vocab", 49152)):
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args()
    library = Library(arguments.library) if arguments.library else find_library()
    if isinstance(library, str):
        raise SystemExit(library)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        limits = Limits(Path(folder))
        for types in arguments.types.split(","):
            for rows in map(int, arguments.rows.split(",")):
                model = Model(list(shapes_of(arguments)), types, rows, huge=not arguments.plain_pages)
                for count in map(int, arguments.threads.split(",")):
                    threads = Threads(library, count, arguments.instruction_set)
                    results.append(measure(model, threads, limits, arguments.rounds, types, rows))
                    print(results[-1].line(), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
