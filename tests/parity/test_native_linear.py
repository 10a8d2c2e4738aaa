"""Linear layers of native ops: within the bounds of float32 sums, the same bits whatever is computed beside them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from native_library import the_library
from torch import Tensor

from gtp_serve.ops.cpu import structs
from gtp_serve.ops.cpu.library import Threads

LIBRARY = the_library()
SETS = LIBRARY.instruction_sets()
CODES = {torch.float32: structs.F32, torch.bfloat16: structs.BF16, torch.int8: structs.I8}
TYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
    (torch.float32, torch.bfloat16),
]
NAMES = ["bf16", "fp32", "int8 for bf16", "int8 for fp32", "bf16 for fp32"]
UNIT = 2.0**-24
GUARD = 3.0


@cache
def threads_of(instruction_set: str, count: int) -> Threads:
    return Threads(LIBRARY, count, instruction_set)


@dataclass(frozen=True)
class Layer:
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    scale: Tensor | None = None
    gated: bool = False
    wide: bool = False
    """The output is stored as float32, rounded as ever."""
    gap: int = 0
    """Elements between rows of the output."""

    def run(self, threads: Threads, rows: slice = slice(None), vocab: int = 0) -> tuple[Tensor, Tensor]:
        """The output, and what greedy choice needs of it; nothing beside the output was written."""
        x = self.x[rows]
        width = self.weight.shape[0] // (2 if self.gated else 1)
        around = torch.full((x.shape[0], width + self.gap), GUARD, dtype=torch.float32 if self.wide else x.dtype)
        blocks = -(-vocab // structs.HEAD_BLOCK)
        partials = torch.full((x.shape[0], blocks, structs.PARTIAL_FLOATS), GUARD)
        op = structs.Linear(
            x=x.data_ptr(),
            weight=self.weight.data_ptr(),
            bias=0 if self.bias is None else self.bias.data_ptr(),
            scale=0 if self.scale is None else self.scale.data_ptr(),
            out=around.data_ptr(),
            partials=partials.data_ptr() if vocab else 0,
            rows=x.shape[0],
            in_size=self.weight.shape[1],
            out_size=self.weight.shape[0],
            x_row=x.stride(0),
            weight_row=self.weight.stride(0),
            out_row=around.stride(0),
            dtype=CODES[x.dtype],
            weight_dtype=CODES[self.weight.dtype],
            out_dtype=CODES[around.dtype],
            swiglu=self.gated,
            vocab=vocab,
        )
        threads.run([op])
        assert (around[:, width:] == GUARD).all()
        return around[:, :width], partials

    def exact(self) -> tuple[Tensor, Tensor]:
        """In float64, before any rounding; and how far a float32 sum of any order may be off, or one of activations
        that were rounded to 15 bits below a power of two at most twice their largest, as products with int8 do.
        """
        x, weight = self.x.double(), self.weight.double()
        total, bound = x @ weight.T, x.abs() @ weight.T.abs() * (self.weight.shape[1] + 4) * UNIT
        if self.weight.dtype == torch.int8:
            bound = bound + x.abs().amax(1)[:, None] * weight.abs().sum(1) * 2.0**-15
        if self.scale is not None:
            total, bound = total * self.scale.double(), bound * self.scale.double() * (1 + UNIT)
        if self.bias is not None:
            total = total + self.bias.double()
        return total, bound + total.abs() * 2 * UNIT + 1e-37


def spread(
    rows: int, columns: int, dtype: torch.dtype, *, gap: int = 0, offset: int = 0, whole: bool = False
) -> Tensor:
    """Random numbers [rows, columns], `gap` elements between rows, `offset` before the first; NaN all around."""
    stride = columns + gap
    count = offset + rows * stride + 1
    if dtype == torch.int8:
        memory = torch.full((count,), 111, dtype=dtype)
        values = torch.randint(-127, 128, (rows, columns))
    else:
        memory = torch.full((count,), float("nan"), dtype=dtype)
        values = torch.randint(-8, 9, (rows, columns)) if whole else torch.randn(rows, columns)
    if whole and dtype == torch.int8:
        values = values // 16
    view = memory.as_strided((rows, columns), (stride, 1), offset)
    view.copy_(values.to(dtype))
    return view


def layer(
    types: tuple[torch.dtype, torch.dtype],
    rows: int,
    size: int,
    outputs: int,
    *,
    bias: bool = False,
    gaps: tuple[int, int, int] = (0, 0, 0),
    offset: int = 0,
    gated: bool = False,
    wide: bool = False,
    whole: bool = False,
) -> Layer:
    dtype, weight_dtype = types
    count = outputs * (2 if gated else 1)
    scaled = weight_dtype == torch.int8 and not whole
    return Layer(
        spread(rows, size, dtype, gap=gaps[0], offset=offset, whole=whole),
        spread(count, size, weight_dtype, gap=gaps[1], offset=offset, whole=whole),
        spread(1, count, dtype, offset=offset, whole=whole)[0] if bias else None,
        torch.rand(count) * 0.02 if scaled else None,
        gated,
        wide,
        gaps[2],
    )


def close(found: Tensor, dtype: torch.dtype, exact: Tensor, bound: Tensor) -> None:
    """Rounded to ``dtype``, ``found`` is within ``bound``."""
    if dtype == torch.bfloat16:
        bound = bound + (exact.abs() + bound) * 2.0**-8
    excess = (found.double() - exact).abs() - bound
    assert (excess <= 0).all(), f"off by {excess.max()} more than the bound at {excess.argmax()}"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(7)


SHAPES = [(1, 1, 1), (1, 576, 65), (2, 7, 3), (3, 33, 17), (4, 64, 130), (5, 1000, 9), (6, 31, 64), (23, 129, 70)]


@pytest.mark.parametrize("types", TYPES, ids=NAMES)
@pytest.mark.parametrize("name", SETS)
def test_outputs_are_within_the_bounds_of_float32_sums(name: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    threads = threads_of(name, 2)
    for rows, size, outputs in SHAPES:
        for bias, wide in ((False, True), (True, False)):
            made = layer(types, rows, size, outputs, bias=bias, wide=wide)
            close(made.run(threads)[0], made.x.dtype, *made.exact())


@pytest.mark.parametrize("types", TYPES, ids=NAMES)
@pytest.mark.parametrize("name", SETS)
def test_whole_numbers_are_added_exactly(name: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    # No rounding can excuse a wrong term here.
    for rows, size, outputs in [*SHAPES, (70, 200, 40), (130, 96, 33)]:
        made = layer(types, rows, size, outputs, wide=True, whole=True, gaps=(3, 5, 2), offset=1)
        found, exact = made.run(threads_of(name, 2))[0], made.exact()[0].to(types[0]).float()
        assert torch.equal(found, exact), (rows, size, outputs)


@pytest.mark.parametrize("types", TYPES, ids=NAMES)
@pytest.mark.parametrize("name", SETS)
def test_a_row_has_the_same_bits_among_any_others(name: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    chance = random.Random(11)
    for size, outputs in ((576, 48), (chance.randrange(1, 300), chance.randrange(1, 150)), (1537, 19), (5000, 6)):
        made = layer(types, 70, size, outputs, bias=True, wide=True)
        alone = torch.cat([made.run(threads_of(name, 1), slice(row, row + 1))[0] for row in range(70)])
        for rows in (*range(2, 14), 16, 31, 33, 64, 69, 70):
            first = chance.randrange(0, 71 - rows)
            among = made.run(threads_of(name, chance.choice((1, 2, 3))), slice(first, first + rows))[0]
            assert torch.equal(among, alone[first : first + rows]), (size, outputs, rows)


@pytest.mark.parametrize("types", TYPES, ids=NAMES)
@pytest.mark.parametrize("name", SETS)
def test_an_output_has_the_same_bits_wherever_its_operands_lie(
    name: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    for rows, size, outputs in ((1, 77, 50), (3, 130, 20), (9, 77, 50), (65, 200, 30)):
        made = layer(types, rows, size, outputs, wide=True)
        expected = made.run(threads_of(name, 1))[0]
        for gaps, offset in (((1, 3, 5), 1), ((0, 7, 0), 3), ((64, 64, 1), 0)):
            moved = Layer(
                spread(rows, size, types[0], gap=gaps[0], offset=offset).copy_(made.x),
                spread(outputs, size, types[1], gap=gaps[1], offset=offset).copy_(made.weight),
                scale=made.scale,
                wide=True,
                gap=gaps[2],
            )
            assert torch.equal(moved.run(threads_of(name, 2))[0], expected)
        # Each output alone, by a weight that is one row.
        for column in (0, outputs // 2, outputs - 1):
            scale = None if made.scale is None else made.scale[column : column + 1].clone()
            single = Layer(made.x, made.weight[column : column + 1], scale=scale, wide=True)
            assert torch.equal(single.run(threads_of(name, 1))[0], expected[:, column : column + 1])


@pytest.mark.parametrize("types", TYPES, ids=NAMES)
@pytest.mark.parametrize("name", SETS)
def test_gate_and_up_are_rounded_before_they_meet(name: str, types: tuple[torch.dtype, torch.dtype]) -> None:
    for rows, size, outputs in ((1, 96, 100), (4, 33, 7), (30, 70, 41)):
        made = layer(types, rows, size, outputs, bias=True, gated=True, gaps=(2, 1, 3))
        found = made.run(threads_of(name, 2))[0]
        both = Layer(made.x, made.weight, made.bias, made.scale).run(threads_of(name, 1))[0]
        gate, up = both.double().chunk(2, dim=1)
        silu = torch.nn.functional.silu(gate).to(types[0]).double()
        # One unit of the type's rounding for silu, which may fall to the other side, one for the product.
        unit = 2.0**-8 if types[0] == torch.bfloat16 else 2.0**-22
        torch.testing.assert_close(found.double(), silu * up, rtol=3 * unit, atol=1e-30)
        for row in range(rows):
            assert torch.equal(made.run(threads_of(name, 1), slice(row, row + 1))[0], found[row : row + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETS)
def test_gates_beyond_what_an_exponential_can_hold_spoil_none_beside_them(name: str, dtype: torch.dtype) -> None:
    gates = torch.tensor([-torch.inf, -200.0, -89.0, -87.0, -20.0, 0.0, 20.0, 100.0, torch.inf, torch.nan, 1e38])
    count = 11 * 70
    gate = torch.randn(count)
    gate[::70] = gates
    up = torch.randn(count).abs() + 0.5
    bias = torch.cat((gate, up)).to(dtype)
    found = Layer(torch.ones(2, 8, dtype=dtype), torch.zeros(2 * count, 8, dtype=dtype), bias, gated=True).run(
        threads_of(name, 2)
    )[0]
    gate, up = bias.chunk(2)
    wanted = torch.nn.functional.silu(gate.double()).to(dtype) * up
    for row in found:
        torch.testing.assert_close(
            row, wanted, rtol=2.0**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-35, equal_nan=True
        )


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 300])
def test_blocks_of_logits_are_summed_up_for_greedy_choice(name: str, vocab: int) -> None:
    for rows in (1, 3, 20):
        made = layer(TYPES[0], rows, 48, 300, wide=True, gaps=(0, 0, 4))
        if rows == 3:
            made.x[1, 5] = float("inf")
        logits, partials = made.run(threads_of(name, 2), vocab=vocab)
        for row in range(rows):
            for block, part in enumerate(partials[row]):
                own = logits[row, block * structs.HEAD_BLOCK : min(vocab, (block + 1) * structs.HEAD_BLOCK)]
                if not own.isfinite().all():
                    assert part[0].isnan()
                    continue
                assert part[0] == own.max()
                assert part[2:].view(torch.int64).item() == block * structs.HEAD_BLOCK + int(
                    (own == own.max()).nonzero()[0]
                )
                torch.testing.assert_close(part[1].log() + part[0], own.double().logsumexp(0).float())


@pytest.mark.parametrize("name", SETS)
def test_what_is_not_finite_stays_in_its_row(name: str) -> None:
    for rows in (3, 12):
        made = layer(TYPES[0], rows, 100, 20, wide=True)
        clean = made.run(threads_of(name, 1))[0].clone()
        made.x[1, 99] = float("nan")
        found = made.run(threads_of(name, 2))[0]
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], clean[[0, 2]])


def test_no_rows_and_no_terms() -> None:
    for name in SETS:
        empty = Layer(torch.empty(0, 8), torch.randn(5, 8))
        assert empty.run(threads_of(name, 2))[0].shape == (0, 5)


@pytest.mark.parametrize("pick", [lambda n: 1, lambda n: n], ids=["one thread", "threads"])
def test_thousands_of_outputs_and_rows(pick: Callable[[int], int]) -> None:
    threads = threads_of(SETS[0], pick(2))
    made = layer(TYPES[0], 300, 256, 1030)
    close(made.run(threads)[0], made.x.dtype, *made.exact())
