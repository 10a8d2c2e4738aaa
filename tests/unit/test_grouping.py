"""Pairs of token and expert in blocks: nothing is lost, and nothing is asked of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from gtp_serve.ops import reference, triton_experts
from gtp_serve.ops.grouping import group_pairs, most_blocks


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_each_pair_is_in_one_block_of_its_expert_and_blocks_hold_no_more_than_they_may(data: st.DataObject) -> None:
    experts = data.draw(st.integers(1, 9))
    chosen = data.draw(st.integers(1, experts))
    tokens = data.draw(st.integers(1, 40))
    rows = data.draw(st.sampled_from([1, 2, 16]))
    seed = data.draw(st.integers(0, 1 << 16))
    generator = torch.Generator().manual_seed(seed)
    favoured = torch.rand(experts, generator=generator) ** 4 + 1e-6  # some experts get nearly all
    routes = torch.multinomial(favoured.expand(tokens, experts), chosen, generator=generator)

    groups = group_pairs(routes, experts, rows)

    seen: list[int] = []
    for expert, start, stop in zip(groups.experts_B, groups.starts_B, groups.stops_B, strict=True):
        pairs = groups.order_N[start:stop].tolist()
        assert len(pairs) == int(stop - start) <= rows
        assert (pairs == []) == (expert == experts)
        assert [routes.flatten()[pair] for pair in pairs] == [expert] * len(pairs)
        assert pairs == sorted(pairs)
        seen += pairs
    assert sorted(seen) == list(range(tokens * chosen))
    assert len(groups.experts_B) == most_blocks(tokens * chosen, experts, rows)


def test_the_most_blocks_are_needed_by_the_worst_spread_and_by_no_other() -> None:
    def needed(counts: list[int], rows: int) -> int:
        return sum(-(-count // rows) for count in counts)

    for pairs in range(1, 12):
        spreads = [[a, b, pairs - a - b] for a in range(pairs + 1) for b in range(pairs + 1 - a)]
        for rows in (1, 2, 3, 4):
            assert most_blocks(pairs, 3, rows) == max(needed(counts, rows) for counts in spreads)


class NoKernel:
    """In the place of a kernel: is called and computes nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(size, int) for size in grid)
        return lambda *arguments, **constants: None


def test_routed_experts_ask_the_host_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without values, whatever depends on a value is an error."""
    for name in ("_gate_and_up", "_down", "_combine"):
        monkeypatch.setattr(triton_experts, name, NoKernel())
    with FakeTensorMode():
        arguments = (
            torch.empty(7, 16), torch.empty(7, 2), torch.empty(7, 2, dtype=torch.int64),
            torch.empty(4, 24, 16), torch.empty(4, 16, 12),
        )  # fmt: skip
        routed = reference.route(torch.empty(7, 4), 2, True)
        assert [tuple(x.shape) for x in routed] == [(7, 2), (7, 2)]
        assert triton_experts.experts(*arguments).shape == (7, 16)
        with pytest.raises(DynamicOutputShapeException):
            reference.experts(*arguments)
