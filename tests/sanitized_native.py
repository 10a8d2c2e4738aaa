"""Every native op over random shapes, in buffers of exactly the right size: what a sanitizer build is run on.

``python sanitized_native.py LIBRARY SEEDS``.  Without torch, whose memory nobody watches; results are not looked at.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from random import Random

from gtp_serve.ops.cpu import structs
from gtp_serve.ops.cpu.library import Library, Threads

WIDTHS = {structs.F32: 4, structs.BF16: 2, structs.I8: 1}


class Memory:
    """Buffers of one case, each an allocation of its own."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._kept: list[ctypes.Array[ctypes.c_char]] = []

    def numbers(self, count: int, dtype: int) -> int:
        """Small floats or integers; some are not numbers."""
        random = self._random
        if dtype == structs.I8:
            return self._keep(random.randbytes(count))
        values = (ctypes.c_float * count)(*(random.gauss(0, 1) for _ in range(count)))
        if random.random() < 0.2:
            values[random.randrange(count)] = random.choice((float("nan"), float("inf"), -float("inf"), 3e38))
        raw = bytes(values)
        return self._keep(raw if dtype == structs.F32 else b"".join(raw[i + 2 : i + 4] for i in range(0, len(raw), 4)))

    def integers(self, values: list[int]) -> int:
        return self._keep(bytes((ctypes.c_int64 * len(values))(*values)))

    def floats(self, values: list[float]) -> int:
        return self._keep(bytes((ctypes.c_float * len(values))(*values)))

    def doubles(self, values: list[float]) -> int:
        return self._keep(bytes((ctypes.c_double * len(values))(*values)))

    def room(self, size: int) -> int:
        return self._keep(bytes(size))

    def _keep(self, data: bytes) -> int:
        # At least a page of the interpreter's own allocator away: malloc gives each its own place.
        buffer = (ctypes.c_char * max(len(data), 1)).from_buffer_copy(data or b"\0")
        self._kept.append(buffer)
        return ctypes.addressof(buffer)


def rows_of(random: Random, rows: int, size: int) -> tuple[int, int]:
    """A stride for rows of this size, and the elements that they span."""
    stride = size + random.choice((0, 0, 1, 5))
    return stride, (rows - 1) * stride + size


def gather(random: Random, memory: Memory, dtype: int) -> structs.Op:
    rows, table_rows, width = random.randint(1, 40), random.randint(1, 20), random.randint(1, 40) * WIDTHS[dtype]
    ids = [random.choice((-1, table_rows, 1 << 60, *range(table_rows))) for _ in range(rows)]
    return structs.Gather(
        rows=rows,
        ids=memory.integers(ids),
        table=memory.room(table_rows * width),
        out=memory.room(rows * width),
        table_rows=table_rows,
        width_bytes=width,
        table_stride_bytes=width,
        out_stride_bytes=width,
    )


def norm(random: Random, memory: Memory, dtype: int, rows: int = 0, size: int = 0) -> structs.Op:
    rows, size, width = rows or random.randint(1, 9), size or random.randint(1, 70), WIDTHS[dtype]
    stride, span = rows_of(random, rows, size)
    return structs.Norm(
        rows=rows,
        x=memory.numbers(span, dtype),
        delta=memory.numbers(span, dtype),
        weight=memory.numbers(size, dtype),
        out=memory.room(rows * size * width),
        total=memory.room(rows * size * width),
        inner=1,
        size=size,
        x_row=stride,
        delta_row=stride,
        total_row=size,
        out_row=size,
        dtype=dtype,
        eps=1e-5,
    )


def linear(random: Random, memory: Memory, dtype: int) -> structs.Op:
    rows, size, gated = random.choice((1, 2, 3, 5, 9, 40)), random.randint(1, 150), random.random() < 0.3
    outputs = random.randint(1, 150) * (2 if gated else 1)
    weight_dtype = random.choice((dtype, structs.I8))
    noted = not gated and random.random() < 0.5
    vocab = random.randint(1, outputs)
    stride, span = rows_of(random, rows, size)
    weight_stride, weight_span = rows_of(random, outputs, size)
    wide = noted or random.random() < 0.2
    width = 4 if wide else WIDTHS[dtype]
    blocks = -(-vocab // structs.HEAD_BLOCK)
    return structs.Linear(
        rows=rows,
        x=memory.numbers(span, dtype),
        weight=memory.numbers(weight_span, weight_dtype),
        bias=memory.numbers(outputs, dtype) if random.random() < 0.5 else 0,
        scale=memory.numbers(outputs, structs.F32) if weight_dtype == structs.I8 else 0,
        out=memory.room(rows * outputs * max(width, 4)) if gated else memory.room(rows * outputs * width),
        partials=memory.room(rows * blocks * 4 * structs.PARTIAL_FLOATS) if noted else 0,
        in_size=size,
        out_size=outputs,
        x_row=stride,
        weight_row=weight_stride,
        out_row=outputs // 2 if gated else outputs,
        dtype=dtype,
        weight_dtype=weight_dtype,
        out_dtype=structs.F32 if wide and not gated else dtype,
        swiglu=gated,
        vocab=vocab if noted else 0,
    )


def rope(random: Random, memory: Memory, dtype: int) -> structs.Op:
    rows, half, kv_heads, width = random.randint(1, 9), random.randint(1, 40), random.randint(1, 3), WIDTHS[dtype]
    heads, size, slots = kv_heads * random.randint(1, 3), 2 * half, random.randint(1, 30)
    q, q_span = rows_of(random, rows, heads * size)
    k, k_span = rows_of(random, rows, kv_heads * size)
    angles, angles_span = rows_of(random, rows, half)
    return structs.Rope(
        rows=rows,
        q=memory.numbers(q_span, dtype),
        k=memory.numbers(k_span, dtype),
        v=memory.numbers(k_span, dtype),
        cos=memory.numbers(angles_span, dtype),
        sin=memory.numbers(angles_span, dtype),
        out_q=memory.room(rows * heads * size * width),
        keys=memory.room(slots * kv_heads * size * width),
        values=memory.room(slots * kv_heads * size * width),
        slots=memory.integers([i if i < slots else random.choice((-1, slots, 1 << 60)) for i in range(rows)]),
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        q_row=q,
        k_row=k,
        v_row=k,
        cos_row=angles,
        num_slots=slots,
        dtype=dtype,
    )


def attention(random: Random, memory: Memory, dtype: int) -> structs.Op:
    kv_heads, size, block = random.randint(1, 3), random.choice((1, 3, 8, 20, 33, 64)), random.choice((1, 4, 16))
    heads, sequences = kv_heads * random.randint(1, 8), random.randint(1, 3)
    counts = [random.choice((1, 1, 2, 30)) for _ in range(sequences)]
    contexts = [count + random.choice((0, 1, 60, 250, 300)) for count in counts]
    if decode := random.random() < 0.4:
        counts = [1] * sequences
    width = max(-(-context // block) for context in contexts)
    blocks = random.randint(1, width + 2)
    wrong = (-1, blocks, 1 << 60) if random.random() < 0.3 else ()
    tables = [random.choice((*range(blocks), *wrong)) for _ in range(sequences * width)]
    positions = [p for count, context in zip(counts, contexts, strict=True) for p in range(context - count, context)]
    if random.random() < 0.1:
        positions[0] = random.choice((-1, 1 << 40))
    starts = [sum(counts[:s]) for s in range(sequences + 1)]
    rows = len(positions)
    stride, span = rows_of(random, rows, heads * size)
    cache = blocks * block * kv_heads * size
    return structs.Attention(
        rows=rows,
        q=memory.numbers(span, dtype),
        keys=memory.numbers(cache, dtype),
        values=memory.numbers(cache, dtype),
        out=memory.room(rows * heads * size * WIDTHS[dtype]),
        tables=memory.integers(tables),
        starts=0 if decode else memory.integers(starts),
        positions=memory.integers(positions),
        sequences=sequences,
        table_row=width,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        q_row=stride,
        block_size=block,
        num_blocks=blocks,
        window=random.choice((0, 0, 1, 40, 256)),
        max_context=width * block,
        dtype=dtype,
        scale=size**-0.5,
    )


def swiglu(random: Random, memory: Memory, dtype: int) -> structs.Op:
    rows, size = random.randint(1, 9), random.randint(1, 70)
    stride, span = rows_of(random, rows, 2 * size)
    out = memory.room(rows * size * WIDTHS[dtype])
    return structs.Swiglu(
        rows=rows, x=memory.numbers(span, dtype), out=out, size=size, x_row=stride, out_row=size, dtype=dtype
    )


def add_shared(random: Random, memory: Memory, dtype: int) -> structs.Op:
    rows, size = random.randint(1, 9), random.randint(1, 70)
    return structs.AddShared(
        rows=rows,
        base=memory.numbers(rows * size, dtype),
        y=memory.numbers(rows * size, dtype),
        gate=memory.numbers(rows, dtype) if random.random() < 0.5 else 0,
        out=memory.room(rows * size * WIDTHS[dtype]),
        size=size,
        dtype=dtype,
    )


def route(random: Random, memory: Memory, dtype: int) -> structs.Op:
    rows, num_experts = random.randint(1, 9), random.randint(1, 40)
    chosen = random.randint(1, num_experts)
    stride, span = rows_of(random, rows, num_experts)
    return structs.Route(
        rows=rows,
        logits=memory.numbers(span, dtype),
        weights=memory.room(rows * chosen * 4),
        experts=memory.room(rows * chosen * 8),
        num_experts=num_experts,
        chosen=chosen,
        logits_row=stride,
        normalise=random.randint(0, 1),
        dtype=dtype,
    )


def experts(random: Random, memory: Memory, dtype: int) -> structs.Op:
    rows, size, ffn = random.choice((1, 2, 9, 30)), random.randint(1, 70), random.randint(1, 70)
    num_experts = random.randint(1, 6)
    chosen = random.randint(1, num_experts)
    stride, span = rows_of(random, rows, size)
    weight_dtype = random.choice((dtype, structs.I8))
    scaled = weight_dtype == structs.I8
    numbers = [random.choice((*range(num_experts), *range(num_experts), -1, num_experts)) for _ in range(rows * chosen)]
    return structs.Experts(
        rows=rows,
        x=memory.numbers(span, dtype),
        weights=memory.numbers(rows * chosen, structs.F32),
        experts=memory.integers(numbers),
        gate_up=memory.numbers(num_experts * 2 * ffn * size, weight_dtype),
        down=memory.numbers(num_experts * ffn * size, weight_dtype),
        gate_up_scale=memory.numbers(num_experts * 2 * ffn, structs.F32) if scaled else 0,
        down_scale=memory.numbers(num_experts * size, structs.F32) if scaled else 0,
        out=memory.room(rows * size * WIDTHS[dtype]),
        size=size,
        ffn=ffn,
        num_experts=num_experts,
        chosen=chosen,
        x_row=stride,
        dtype=dtype,
        weight_dtype=weight_dtype,
    )


def greedy(random: Random, memory: Memory, dtype: int) -> structs.Op:
    del dtype
    rows, vocab = random.randint(1, 9), random.choice((1, 63, 64, 65, 300))
    stride, span = rows_of(random, rows, vocab)
    return structs.Greedy(
        rows=rows,
        logits=memory.numbers(span, structs.F32),
        token_ids=memory.room(rows * 8),
        logprobs=memory.room(rows * 4),
        finite=memory.room(rows),
        vocab=vocab,
        logits_row=stride,
    )


def draw(random: Random, memory: Memory, dtype: int) -> structs.Op:
    del dtype
    rows, vocab = random.randint(1, 4), random.choice((1, 7, 63, 64, 65, 300, 1111))
    stride, span = rows_of(random, rows, vocab)
    logits = memory.numbers(span, structs.F32)
    return structs.Draw(
        rows=rows,
        logits=logits,
        at=memory.integers([random.randrange(rows) for _ in range(rows)]),
        temperatures=memory.floats([random.choice((1e-5, 0.3, 1.0, 30.0)) for _ in range(rows)]),
        top_k=memory.integers([random.choice((-1, 1, 64, 65, vocab, 5000)) for _ in range(rows)]),
        top_p=memory.doubles([random.choice((1e-9, 0.5, 0.999, 1.0)) for _ in range(rows)]),
        min_p=memory.doubles([random.choice((0.0, 0.1, 1.0)) for _ in range(rows)]),
        uniform=memory.doubles([random.choice((0.0, random.random(), 1 - 2**-53)) for _ in range(rows)]),
        ids=memory.room(rows * 8),
        vocab=vocab,
        logits_row=stride,
    )


def linear_after_norm(random: Random, memory: Memory, dtype: int) -> structs.Op:
    later = linear(random, memory, dtype)
    earlier = norm(random, memory, dtype, later.rows, later.in_size)
    if random.random() < 0.5:
        earlier.delta = earlier.total = 0
    earlier.out = 0
    later.x = 0
    later.join(earlier)
    return later


def attention_after_rotation(random: Random, memory: Memory, dtype: int) -> structs.Op:
    kv_heads, half, block, width = random.randint(1, 3), random.choice((1, 4, 16, 20)), random.choice((1, 4, 16)), 40
    heads, size, rows = kv_heads * random.randint(1, 4), 2 * half, random.randint(1, 4)
    positions = [random.randrange(width * block) for _ in range(rows)]
    tables = list(range(rows * width))
    slots = [(row * width + at // block) * block + at % block for row, at in enumerate(positions)]
    cache, bytes_of = rows * width * block * kv_heads * size, WIDTHS[dtype]
    keys, values = memory.numbers(cache, dtype), memory.numbers(cache, dtype)
    q, q_span = rows_of(random, rows, heads * size)
    k, k_span = rows_of(random, rows, kv_heads * size)
    angles, angles_span = rows_of(random, rows, half)
    shared = {"rows": rows, "keys": keys, "values": values, "heads": heads, "kv_heads": kv_heads, "size": size}
    earlier = structs.Rope(
        **shared,
        q=memory.numbers(q_span, dtype),
        k=memory.numbers(k_span, dtype),
        v=memory.numbers(k_span, dtype),
        cos=memory.numbers(angles_span, dtype),
        sin=memory.numbers(angles_span, dtype),
        slots=memory.integers([random.choice((slot, slot, slot, -1, 1 << 60)) for slot in slots]),
        q_row=q,
        k_row=k,
        v_row=k,
        cos_row=angles,
        num_slots=rows * width * block,
        dtype=dtype,
    )
    later = structs.Attention(
        **shared,
        out=memory.room(rows * heads * size * bytes_of),
        tables=memory.integers(tables),
        positions=memory.integers(positions),
        sequences=rows,
        table_row=width,
        q_row=heads * size,
        block_size=block,
        num_blocks=rows * width,
        window=random.choice((0, 0, 1, 40)),
        max_context=width * block,
        dtype=dtype,
        scale=size**-0.5,
    )
    later.join(earlier)
    return later


OPS = (
    gather,
    norm,
    linear,
    rope,
    attention,
    swiglu,
    add_shared,
    route,
    experts,
    greedy,
    draw,
    linear_after_norm,
    attention_after_rotation,
)


def main(path: str, seeds: int) -> None:
    library = Library(Path(path))
    for name in library.instruction_sets():
        for seed in range(seeds):
            threads = Threads(library, 1 + seed % 3, name)
            random = Random(seed)
            for make in OPS:
                for dtype in (structs.F32, structs.BF16):
                    memory = Memory(random)
                    threads.run([make(random, memory, dtype)])
        print(name, "ok", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
