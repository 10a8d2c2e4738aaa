"""How near native attention and experts come to the machine's limits, which are measured beside them in the same run.

    python benchmarks/native_attention.py [--threads 2] [--rounds 9] [--only decode]

Decode is compared with the rate at which as many threads only read memory, prefill with the rate at which they only
multiply and add.  Medians of ratios over rounds; a limit is measured just before each round.  Needs g++ or clang++ on
x86-64 with AVX2.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gtp_serve.kv.pool import KVPool
from gtp_serve.ops.cpu import structs
from gtp_serve.ops.cpu.build import find_compiler
from gtp_serve.ops.cpu.library import Threads, find_library

_LIMITS = r"""
#include <immintrin.h>
#include <cstddef>
#include <thread>
#include <vector>
#include <chrono>
#include <atomic>
namespace {
template <class F> double timed(int threads, F work) {
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t)
    all.emplace_back([&, t] { ++ready; while (!go) {} work(t); });
  while (ready < threads) std::this_thread::yield();
  const auto start = std::chrono::steady_clock::now();
  go = true;
  for (auto& one : all) one.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
volatile float sink;
}
extern "C" double read_rate(const char* memory, size_t bytes, int threads) {
  return bytes / timed(threads, [&](int t) {
    const size_t size = bytes / threads;
    const char* from = memory + size * t;
    __m256 s[4] = {};
    for (size_t i = 0; i + 128 <= size; i += 128)
      for (int j = 0; j < 4; ++j) s[j] = _mm256_xor_ps(s[j], _mm256_loadu_ps((const float*)(from + i + 32 * j)));
    sink = _mm256_cvtss_f32(_mm256_xor_ps(_mm256_xor_ps(s[0], s[1]), _mm256_xor_ps(s[2], s[3])));
  });
}
extern "C" double fma_rate(long rounds, int threads) {
  return 192.0 * rounds * threads / timed(threads, [&](int t) {
    __m256 a[12], x = _mm256_set1_ps(1.0001f + t), y = _mm256_set1_ps(0.5f);
    for (auto& one : a) one = x;
    for (long r = 0; r < rounds; ++r)
      for (auto& one : a) one = _mm256_fmadd_ps(one, y, x);
    for (int i = 1; i < 12; ++i) a[0] = _mm256_add_ps(a[0], a[i]);
    sink = _mm256_cvtss_f32(a[0]);
  });
}
"""


@dataclass(frozen=True)
class Work:
    """Operations that are timed together, what they read, and what they compute."""

    name: str
    ops: list[structs.Op]
    kept: Sequence[object]
    read_bytes: float
    flops: float
    by_reading: bool


def attention(name: str, sequences: int, context: int, chunk: int, heads: tuple[int, int], size: int) -> Work:
    """Several layers of bf16, so that the cache of the processor does not hold them all."""
    block, kv_heads = 16, heads[1]
    width = -(-context // block)
    blocks, rows = sequences * width, sequences * chunk
    bytes_each = 2 * sequences * context * kv_heads * size * 2
    layers = 1 if chunk > 1 else max(1, (96 << 20) // bytes_each)
    ops: list[structs.Op] = []
    kept: list[object] = []
    for _ in range(layers):
        cache = KVPool(
            num_layers=1, num_blocks=blocks, block_size=block, num_kv_heads=kv_heads, head_dim=size,
            dtype=torch.bfloat16, device="cpu",
        )  # fmt: skip
        for tensor in (*cache.keys, *cache.values):
            tensor.copy_(torch.randn(tensor.shape))
        q = torch.randn(rows, heads[0], size).bfloat16()
        out, tables = torch.empty_like(q), torch.randperm(blocks).view(sequences, width)
        positions = torch.arange(context - chunk, context).repeat(sequences)
        starts = torch.arange(0, rows + 1, chunk)
        kept += [cache, q, out, tables, positions, starts]
        ops.append(
            structs.Attention(
                rows=rows,
                q=q.data_ptr(),
                keys=cache.keys[0].data_ptr(),
                values=cache.values[0].data_ptr(),
                out=out.data_ptr(),
                tables=tables.data_ptr(),
                starts=0 if chunk == 1 else starts.data_ptr(),
                positions=positions.data_ptr(),
                sequences=sequences,
                table_row=width,
                heads=heads[0],
                kv_heads=kv_heads,
                size=size,
                q_row=heads[0] * size,
                block_size=block,
                num_blocks=blocks,
                max_context=width * block,
                dtype=structs.BF16,
                scale=size**-0.5,
            )
        )
    seen = context - (chunk - 1) / 2
    return Work(name, ops, kept, layers * bytes_each, layers * 4 * rows * heads[0] * size * seen, chunk == 1)


def experts(name: str, rows: int, size: int, ffn: int, num_experts: int, chosen: int) -> Work:
    """One layer of bf16; of a few tokens each has experts of its own."""
    gate_up = torch.randn(num_experts, 2 * ffn, size).bfloat16()
    down = torch.randn(num_experts, size, ffn).bfloat16()
    x = torch.randn(rows, size).bfloat16()
    out = torch.empty_like(x)
    numbers = torch.stack([(torch.arange(chosen) + row * chosen) % num_experts for row in range(rows)])
    weights = torch.full((rows, chosen), 1 / chosen)
    op = structs.Experts(
        rows=rows,
        x=x.data_ptr(),
        weights=weights.data_ptr(),
        experts=numbers.data_ptr(),
        gate_up=gate_up.data_ptr(),
        down=down.data_ptr(),
        out=out.data_ptr(),
        size=size,
        ffn=ffn,
        num_experts=num_experts,
        chosen=chosen,
        x_row=size,
        dtype=structs.BF16,
        weight_dtype=structs.BF16,
    )
    touched = min(num_experts, rows * chosen)
    kept = [gate_up, down, x, out, numbers, weights]
    return Work(
        name, [op], kept, touched * 6 * ffn * size, rows * chosen * 6 * ffn * size, rows * chosen <= num_experts
    )


def cases() -> list[Callable[[], Work]]:
    """Made one at a time: together they would not fit."""
    return [
        lambda: attention("decode, 1 x 8192, 9/3 heads of 64", 1, 8192, 1, (9, 3), 64),
        lambda: attention("decode, 32 x 512, 9/3 heads of 64", 32, 512, 1, (9, 3), 64),
        lambda: attention("decode, 8 x 2048, 8/2 heads of 128", 8, 2048, 1, (8, 2), 128),
        lambda: attention("decode, 8 x 2048, 4/4 heads of 64", 8, 2048, 1, (4, 4), 64),
        lambda: attention("prefill 1024, 9/3 heads of 64", 1, 1024, 1024, (9, 3), 64),
        lambda: attention("prefill 1024, 8/2 heads of 128", 1, 1024, 1024, (8, 2), 128),
        lambda: experts("decode experts, 1 token, 8 of 32", 1, 1024, 512, 32, 8),
        lambda: experts("decode experts, 4 tokens, 8 of 32", 4, 1024, 512, 32, 8),
        lambda: experts("prefill experts, 256 tokens, 8 of 32", 256, 1024, 512, 32, 8),
    ]


def limits() -> ctypes.CDLL:
    """The library that measures the machine."""
    compiler = find_compiler()
    if compiler is None:
        raise SystemExit("no C++ compiler was found (g++ or clang++, or CXX)")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "limits.cpp", Path(folder) / "limits.so"
        source.write_text(_LIMITS)
        flags = ["-O2", "-funroll-loops", "-mavx2", "-mfma", "-shared", "-fPIC", "-pthread"]
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        found = ctypes.CDLL(str(library))
    found.read_rate.restype = found.fma_rate.restype = ctypes.c_double
    found.read_rate.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    found.fma_rate.argtypes = [ctypes.c_long, ctypes.c_int]
    return found


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    asked = parser.parse_args()
    library = find_library()
    if isinstance(library, str):
        raise SystemExit(library)
    threads, machine = Threads(library, asked.threads), limits()
    memory = KVPool(  # on the same kind of pages
        num_layers=1, num_blocks=1 << 13, block_size=16, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16, device="cpu"
    ).keys[0].fill_(1)  # fmt: skip
    for make in cases():
        work = make()
        if asked.only not in work.name:
            continue
        ratios, rates = [], []
        threads.run(work.ops)
        for _ in range(asked.rounds):
            if work.by_reading:
                limit = machine.read_rate(memory.data_ptr(), memory.nbytes, asked.threads)
            else:
                limit = machine.fma_rate(1_000_000, asked.threads)
            start = time.perf_counter()
            threads.run(work.ops)
            rate = (work.read_bytes if work.by_reading else work.flops) / (time.perf_counter() - start)
            ratios.append(rate / limit)
            rates.append(rate / 1e9)
        of, unit = ("read bandwidth", "GB/s") if work.by_reading else ("multiply-add peak", "GFLOP/s")
        print(
            f"{work.name:40} {statistics.median(ratios):.2f} of {of}"
            f" ({min(ratios):.2f} to {max(ratios):.2f}); {statistics.median(rates):.1f} {unit}",
            flush=True,
        )


if __name__ == "__main__":
    main()
