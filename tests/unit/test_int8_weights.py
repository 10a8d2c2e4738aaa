"""The int8 form of weights: its arithmetic, and that it follows the parameters through every kind of update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoint_files import SMALL, SMALL_MOE, random_tensors
from hypothesis import given
from hypothesis import strategies as st
from native_library import THREADS
from parity.model_harness import fill
from refit_harness import Rank, logits_of, new_decoder
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.layers.int8 import Int8Weights, quantise, quantise_natively
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.cpu.native import native_ops
from gtp_serve.refit.store import WeightStore

TIED = replace(SMALL, tied=True)


def make(config: ModelConfig) -> tuple[Decoder, WeightStore]:
    decoder = build_decoder(config, dtype=torch.float32, device="cpu", ops=native_ops(THREADS))
    store = WeightStore(decoder.targets())
    table = decoder.placement.ops.int8
    assert table is not None
    store.attach(Int8Weights(decoder.matrices(), table))
    return decoder, store


def loaded(config: ModelConfig, seed: int) -> tuple[Decoder, WeightStore]:
    decoder, store = make(config)
    fill(decoder, random_tensors(config, seed))
    store.derive(staged=False)
    return decoder, store


@given(st.integers(1, 6), st.integers(1, 70), st.integers(0, 2**31))
def test_a_row_s_form_is_at_most_half_a_step_away(rows: int, size: int, seed: int) -> None:
    matrix = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed))
    matrix[0] = 0
    form, scales = torch.empty(rows, size, dtype=torch.int8), torch.empty(rows)
    quantise(matrix, form, scales)
    assert torch.equal(scales, matrix.abs().amax(1) * (1 / 127))
    assert scales[0] == 0
    assert not form[0].any()
    steps = (matrix - form * scales[:, None]).abs() / torch.where(scales > 0, scales, 1.0)[:, None]
    assert steps.max() <= 0.5 + 1e-4
    for row in range(1, rows):
        assert form[row].abs().max() == 127


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_library_makes_the_same_form_to_the_last_bit(dtype: torch.dtype) -> None:
    """THREADS: the library is there."""
    generator = torch.Generator().manual_seed(0)
    for count, size in ((1, 1), (3, 7), (5, 61), (40, 576), (9, 1537)):
        around = torch.randn(count, size + 3, generator=generator) * 10.0 ** torch.randint(-30, 30, (count, 1))
        matrix = around.to(dtype)[:, :size]  # rows lie apart
        matrix[0, :: 2 if size > 2 else 1] = 0
        matrix[-1] *= 1e-20 if count > 3 else 1
        matrix[count // 2, -1] = matrix[count // 2].abs().max() * -127 / 127  # halves beside the largest
        matrix[count // 2, 0] = matrix[count // 2, -1] * 0.5 / 127
        if count == 9:
            matrix[0], matrix[1], matrix[2] = 0, 1e-41, torch.finfo(dtype).max
        theirs = torch.empty(count, size, dtype=torch.int8), torch.empty(count)
        ours = torch.full((count, size), 55, dtype=torch.int8), torch.full((count,), 55.0)
        quantise(matrix, *theirs)

        assert quantise_natively(matrix, *ours)
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        assert ours[1].isfinite().all()
    assert not quantise_natively(matrix.half(), *ours)
    assert not quantise_natively(matrix.t(), *ours)


@pytest.mark.parametrize("rows", [1, 3, 9, 40])
def test_a_product_is_that_of_the_rows_as_the_form_says_them(rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    x, weight = torch.randn(rows, 61, generator=generator), torch.randn(37, 61, generator=generator)
    bias = torch.randn(37, generator=generator)
    ops = native_ops(THREADS)
    assert ops.int8 is not None
    form, scales = torch.empty(37, 61, dtype=torch.int8), torch.empty(37)
    quantise(weight, form, scales)
    exact = ops.linear(x, weight, bias)
    ops.int8[weight.data_ptr()] = form, scales
    told = (form * scales[:, None]).double()
    expected = x.double() @ told.T + bias
    # Activations have 15 bits below a power of two that is at most twice their largest.
    bound = x.abs().amax(1).double()[:, None] * told.abs().sum(1) * 2.0**-15 + 1e-5
    off = (ops.linear(x, weight, bias).double() - expected).abs()
    assert (off <= bound).all()
    assert ((exact.double() - expected).abs() > bound).any()


@pytest.mark.parametrize("config", [SMALL, SMALL_MOE, TIED], ids=["dense", "moe", "tied"])
def test_logits_are_near_the_unquantised_ones_and_are_not_them(config: ModelConfig) -> None:
    decoder, _ = loaded(config, 1)
    plain = new_decoder(config)
    fill(plain, random_tensors(config, 1))
    near, exact = logits_of(decoder), logits_of(plain)
    assert not torch.equal(near, exact)
    assert (near - exact).norm() / exact.norm() < 0.03


def same(one: Decoder, other: Decoder) -> bool:
    return torch.equal(logits_of(one), logits_of(other))


@pytest.mark.parametrize("config", [SMALL, SMALL_MOE, TIED], ids=["dense", "moe", "tied"])
def test_the_form_is_exchanged_with_the_parameters_and_back(config: ModelConfig) -> None:
    decoder, store = loaded(config, 1)
    first, second = loaded(config, 1)[0], loaded(config, 2)[0]
    for target, new in zip(store.staged, second.targets(), strict=True):
        target.tensor.copy_(new.tensor)
    store.derive(staged=True)
    assert same(decoder, first)
    store.swap()
    assert same(decoder, second)
    store.swap()
    assert same(decoder, first)


def rank_with_int8(config: ModelConfig = SMALL) -> Rank:
    decoder, store = make(config)
    rank = Rank(config, decoder=decoder, store=store)
    rank.load(1)
    store.derive(staged=False)
    return rank


@pytest.mark.parametrize("memory", ["staged", "inplace"])
def test_an_update_serves_the_form_of_its_own_weights(memory: str) -> None:
    rank = rank_with_int8()
    expected = logits_of(loaded(SMALL, 2)[0])
    rank.push("u", 2, memory=memory)
    assert torch.equal(rank.logits(), expected)


def test_a_rollback_serves_the_form_of_before() -> None:
    rank = rank_with_int8()
    before = rank.logits()
    rank.push("u", 2)
    assert not torch.equal(rank.logits(), before)
    rank.weights.roll_back()
    assert torch.equal(rank.logits(), before)


def test_released_weights_come_back_with_the_next_update() -> None:
    rank = rank_with_int8()
    rank.weights.release(["weights"])
    rank.push("u", 2, memory="inplace")
    assert torch.equal(rank.logits(), logits_of(loaded(SMALL, 2)[0]))


def test_a_deadline_is_looked_at_while_the_form_is_made() -> None:
    _, store = loaded(SMALL, 1)

    def over() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        store.derive(staged=True, keep_on=over)


def test_routers_keep_their_precision() -> None:
    decoder, _ = make(SMALL_MOE)
    quantised: set[int] = {matrix.data_ptr() for matrix in decoder.matrices()}
    routers: list[Tensor] = [t.tensor for t in decoder.targets() if t.shard.key.endswith("mlp.gate.weight")]
    assert routers
    assert not any(router.data_ptr() in quantised for router in routers)
