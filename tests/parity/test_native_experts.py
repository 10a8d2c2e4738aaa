"""Native mixtures of experts: the reference's numbers, and bits that neither the batch nor threads change."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
import torch
from native_library import the_library
from torch import Tensor

from gtp_serve.ops import reference
from gtp_serve.ops.cpu import structs
from gtp_serve.ops.cpu.library import Threads
from gtp_serve.ops.cpu.native import Native

LIBRARY = the_library()
SETS = LIBRARY.instruction_sets()
TABLES = {(name, count): Native(Threads(LIBRARY, count, name)) for name in SETS for count in (1, 2, 3)}
DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class Case:
    x: Tensor
    weights: Tensor
    experts: Tensor
    gate_up: Tensor
    down: Tensor

    def run(self, native: Native, rows: slice = slice(None)) -> Tensor:
        return native.experts(self.x[rows], self.weights[rows], self.experts[rows], self.gate_up, self.down)


def case_of(random: Random, dtype: torch.dtype, rows: int | None = None) -> Case:
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    rows = rows or random.choice((1, 2, 3, 5, 12, 30, 70))
    size, ffn = random.choice((1, 7, 16, 33, 64, 100)), random.choice((1, 5, 16, 31, 64, 90))
    num_experts = random.choice((1, 2, 5, 8))
    chosen = random.randint(1, num_experts)
    logits = torch.randn(rows, num_experts, generator=generator)
    weights, experts = logits.softmax(-1).topk(chosen)
    wide = torch.randn(rows, size + 3, generator=generator).to(dtype)
    return Case(
        wide[:, :size],
        weights.contiguous(),
        experts.contiguous(),
        (torch.randn(num_experts, 2 * ffn, size, generator=generator) / size**0.5).to(dtype),
        (torch.randn(num_experts, size, ffn, generator=generator) / ffn**0.5).to(dtype),
    )


def expected(case: Case) -> Tensor:
    return reference.experts(case.x, case.weights, case.experts, case.gate_up, case.down)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("seed", range(15))
def test_a_step_gives_the_reference_s_numbers(name: str, dtype: torch.dtype, seed: int) -> None:
    case = case_of(Random(seed), dtype)
    bound = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(case.run(TABLES[name, 1 + seed % 3]), expected(case), rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("seed", range(6))
def test_a_row_has_the_same_bits_alone_in_a_batch_and_on_any_number_of_threads(
    name: str, dtype: torch.dtype, seed: int
) -> None:
    case = case_of(Random(50 + seed), dtype, rows=70)
    found = case.run(TABLES[name, 2])
    for count in (1, 3):
        assert torch.equal(case.run(TABLES[name, count]), found)
    for first, stop in ((0, 1), (1, 2), (3, 9), (9, 40), (69, 70)):
        rows = slice(first, stop)
        assert torch.equal(case.run(TABLES[name, 2], rows), found[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
def test_stacks_of_int8_are_scaled_row_by_row(name: str, dtype: torch.dtype) -> None:
    case = case_of(Random(9), dtype, rows=12)
    stacks, scales = [], []
    for stack in (case.gate_up, case.down):
        scale = stack.float().abs().amax(-1) / 127
        stacks.append((stack.float() / scale[..., None]).round().to(torch.int8))
        scales.append(scale.contiguous())
    gate_up, down = (s.to(dtype) for s in stacks)
    out = torch.full(case.x.shape, torch.nan, dtype=dtype)
    op = structs.Experts(
        x=case.x.data_ptr(),
        weights=case.weights.data_ptr(),
        experts=case.experts.data_ptr(),
        gate_up=stacks[0].data_ptr(),
        down=stacks[1].data_ptr(),
        gate_up_scale=scales[0].data_ptr(),
        down_scale=scales[1].data_ptr(),
        out=out.data_ptr(),
        rows=12,
        size=case.x.shape[1],
        ffn=down.shape[2],
        num_experts=down.shape[0],
        chosen=case.experts.shape[1],
        x_row=case.x.stride(0),
        dtype=structs.F32 if dtype == torch.float32 else structs.BF16,
        weight_dtype=structs.I8,
    )
    TABLES[name, 2].threads.run([op])
    wanted = torch.zeros(case.x.shape)
    for row in range(12):
        for place in range(case.experts.shape[1]):
            x, expert = case.x[row].float(), int(case.experts[row, place])
            both = ((gate_up[expert].float() @ x) * scales[0][expert]).to(dtype)
            hidden = reference.swiglu(both)
            y = ((down[expert].float() @ hidden.float()) * scales[1][expert]).to(dtype)
            wanted[row] += y.float() * case.weights[row, place]
    # Products with int8 round activations to 15 bits below a power of two.
    bound = 2e-3 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out, wanted.to(dtype), rtol=bound, atol=bound)


@pytest.mark.parametrize("name", SETS)
def test_numbers_that_are_no_experts_add_nothing_and_a_row_that_is_no_number_stays_alone(name: str) -> None:
    case = case_of(Random(2), torch.float32, rows=30)
    clean = case.run(TABLES[name, 2])
    case.experts[3] = torch.tensor([-1, 1 << 40] * 4)[: case.experts.shape[1]]
    case.x[5] = torch.nan
    found = case.run(TABLES[name, 2])
    assert not found[3].any()
    assert found[5].isnan().all()
    others = [row for row in range(30) if row not in (3, 5)]
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_routes_are_the_reference_s_and_the_lowest_of_equals_first(
    name: str, normalise: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40, 12, generator=generator).to(dtype)[:, :9]
    weights, experts = TABLES[name, 2].route(logits, 4, normalise)
    wanted_weights, wanted_experts = reference.route(logits, 4, normalise)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)
    if dtype == torch.float32:  # in bf16 some are equal
        assert torch.equal(experts, wanted_experts)
    weights, experts = TABLES[name, 2].route(torch.zeros(3, 7, dtype=dtype), 3, normalise)
    assert torch.equal(experts, torch.arange(3).expand(3, 3))
    nothing = torch.zeros(2, 7, dtype=dtype)
    nothing[0, 2] = torch.nan
    weights, experts = TABLES[name, 2].route(nothing, 3, normalise)
    assert weights[0].isnan().all()
    assert weights[1].isfinite().all()
    assert ((experts >= 0) & (experts < 7)).all()
