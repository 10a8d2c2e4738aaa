"""Products in tiles: which sizes may be mixed is found out, and what cannot be kept is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gtp_serve.errors import EnvironmentFault
from gtp_serve.layers.placement import InRankOrder
from gtp_serve.ops import tiles as module
from gtp_serve.ops.deterministic import ordered_sum, route, sigmoid, swiglu
from gtp_serve.ops.tiles import Tiles, cut, find_sizes

torch.set_num_threads(1)
SHAPES = [(576, 960), (1536, 576), (64, 96), (33, 70), (24, 40), (64, 4)]
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.integers(0, 300), st.sampled_from([(1,), (4,), (16,), (4, 16, 64), (1, 4, 16, 64)]))
def test_tiles_cover_every_row_once_and_stick_out_by_half_a_tile_at_most(rows: int, sizes: tuple[int, ...]) -> None:
    parts = list(cut(rows, sizes))

    assert [first for first, _ in parts] == [sum(size for _, size in parts[:index]) for index in range(len(parts))]
    beyond = sum(size for _, size in parts) - rows
    assert beyond >= 0
    assert beyond <= max(parts[-1][1] // 2, sizes[0] - 1) if parts else rows == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_a_row_of_linear_has_the_same_bits_among_1_to_70_rows(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    tiles = Tiles()
    x, weight, bias = (random(*shape, dtype=dtype) for shape in ((70, inputs), (outputs, inputs), (outputs,)))

    alone = torch.cat([tiles.linear(row[None], weight, bias) for row in x])

    for rows in range(1, 71):
        assert torch.equal(tiles.linear(x[:rows], weight, bias), alone[:rows])
    for rows in (2, 3, 13, 50):
        assert torch.equal(tiles.linear(x[70 - rows :], weight, bias), alone[70 - rows :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_the_plain_product_within_rounding(dtype: torch.dtype) -> None:
    x, weight = random(37, 256, dtype=dtype), random(96, 256, dtype=dtype, seed=1)

    got = Tiles().linear(x, weight)

    assert got.dtype == dtype
    atol = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got.double(), x.double() @ weight.double().T, rtol=1e-2, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(576, 96), (64, 4), (24, 40), (9, 3)])
def test_the_probe_sees_another_order_of_summation(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = module._cancelling(torch.empty(outputs, inputs, dtype=dtype), 64)
    wide_x, wide_weight = x.float(), weight.float()
    half = inputs // 2

    straight = (wide_x @ wide_weight.T).to(dtype)
    in_halves = (wide_x[:, :half] @ wide_weight[:, :half].T + wide_x[:, half:] @ wide_weight[:, half:].T).to(dtype)

    assert not torch.equal(straight, in_halves)


def test_sizes_that_a_library_computes_in_another_order_are_not_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "linear", by_size(lambda rows: rows >= 16))

    assert find_sizes(torch.empty(40, 64), with_bias=False) == (16, 64)

    monkeypatch.setattr(F, "linear", by_size(lambda rows: rows <= 4 or rows == 64))

    assert find_sizes(torch.empty(40, 64), with_bias=False) == (1, 4, 64)


def test_a_library_whose_rows_depend_on_their_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        place = torch.arange(x.shape[0])[:, None]
        # One row alone has no place; there the library is one that answers differently each time.
        return x @ weight.T + place * 1e-3 + (next(calls) if x.shape[0] == 1 else 0)

    monkeypatch.setattr(F, "linear", linear)

    with pytest.raises(EnvironmentFault, match="deterministic cannot be kept"):
        Tiles().linear(torch.ones(1, 8), torch.ones(3, 8))


def test_pairs_of_matrices_are_multiplied_one_by_one_where_a_batch_changes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: plain(a, b) + 1e-3 * (a.shape[0] - 1))
    a, b = random(5, 4, 16), random(5, 16, 8)

    got = Tiles().bmm(a, b)

    assert torch.equal(got, torch.cat([plain(a[i : i + 1], b[i : i + 1]) for i in range(5)]))


@pytest.mark.parametrize("width", [1, 2, 3, 7, 24, 128, 576])
def test_an_ordered_sum_is_the_sum_and_does_not_depend_on_other_rows(width: int) -> None:
    x = random(70, width)

    total = ordered_sum(x)

    torch.testing.assert_close(total.double(), x.double().sum(-1, keepdim=True), rtol=1e-5, atol=1e-4)
    for rows in (1, 2, 3, 8, 33):
        assert torch.equal(ordered_sum(x[:rows].clone()), total[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 24, 90, 1536, 1538])
def test_elementwise_functions_give_a_row_the_same_bits_among_1_to_70_rows(width: int, dtype: torch.dtype) -> None:
    x = random(70, width, dtype=dtype) * 4
    for function in (swiglu, sigmoid, torch.exp, torch.cos, torch.sin, lambda y: y.float().log_softmax(-1)):
        alone = torch.cat([function(row[None].clone()) for row in x])
        for rows in range(2, 71):
            assert torch.equal(function(x[:rows].clone()), alone[:rows])


def test_routing_takes_the_lowest_of_equal_experts() -> None:
    weights, experts = route(torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]]), 2, True)

    assert experts.tolist() == [[1, 2], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_sums_over_ranks_are_taken_in_their_order() -> None:
    class Gathered:
        rank, size, capturable = 1, 3, False

        def all_reduce(self, x: Tensor) -> Tensor:
            raise AssertionError("the ring must not be asked")

        def all_gather(self, x: Tensor) -> Tensor:
            return torch.cat([x, torch.full_like(x, 1e8), torch.full_like(x, -1e8)], dim=-1)

    total = InRankOrder(Gathered()).all_reduce(torch.tensor([[3.0, 40.0]]))

    assert total.tolist() == [[0.0, 40.0]]


def by_size(straight: Callable[[int], bool]) -> Callable[..., Tensor]:
    """A library that sums products of some numbers of rows forwards, and of the others backwards."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        step = 1 if straight(x.shape[0]) else -1
        terms = x[:, None, :] * weight[None]
        total = torch.zeros(x.shape[0], weight.shape[0])
        for column in range(x.shape[1])[::step]:
            total = total + terms[..., column]
        return total

    return linear
