"""First values: the same bits on every grid, never a whole tensor in memory, no stream twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from training_model import SEED, Sizes, Small, choose, plain_weights, shapes_of, slices
from training_ranks import thread_groups

from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.training import init
from gtp_serve.training.init import (
    Constant,
    Init,
    Normal,
    Uniform,
    draw_blocks,
    initialise,
    initialise_on_device,
    load_master,
    slice_rows,
    stream,
    usual_init,
)
from gtp_serve.training.layer import targets_of
from gtp_serve.training.linear import ColumnParallelLinear
from gtp_serve.training.placement import TrainPlacement

SIZES = Sizes(experts=2, tied=False)


@pytest.mark.parametrize(
    "grid",
    [
        Grid(),
        Grid(gtp=2, egtp=2, alignment=1),
        Grid(gtp=3, egtp=3, alignment=4),
        Grid(tp=2, etp=2, gtp=2, egtp=2, alignment=4),
        Grid(gtp=8, egtp=8, alignment=16),
        Grid(tp=2, etp=1, gtp=2, ep=2, egtp=2, alignment=1),
    ],
    ids=str,
)
def test_every_grid_starts_from_the_same_bits(grid: Grid) -> None:
    """All ranks' rows together are the whole tensors, and what no span covers is zero."""
    wanted = plain_weights(SIZES, torch.float32)
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in wanted.items()}
    for groups in thread_groups(grid, max(grid.tp * grid.gtp, grid.etp * grid.egtp * grid.ep)):
        model = Small(SIZES, TrainPlacement(dtype=torch.float32, groups=groups, alignment=grid.alignment))
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        initialise(model, shapes_of(SIZES), seed=SEED, choose=choose)
        for target in targets_of(model):
            rest = target.tensor.clone()
            for span in target.shard.spans:
                assert torch.equal(target.tensor[slices(span.local)], wanted[span.name][slices(span.logical)])
                seen[span.name][slices(span.logical)] = True
                rest[slices(span.local)] = 0
            assert not rest.any()

    assert all(mask.all() for mask in seen.values())


@given(st.integers(1, 70), st.integers(1, 9), st.sampled_from([Normal(0.5), Uniform(0.5), Constant(2.0)]))
def test_blocks_are_what_one_draw_of_the_whole_gives(rows: int, columns: int, init_: Init) -> None:
    whole = torch.empty(rows, columns)
    init_.fill(whole, stream(3, "x"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(init, "BLOCK_ROWS", 16)
        blocks = [block for _, block in draw_blocks((rows, columns), init_, stream(3, "x"))]

    assert torch.equal(torch.cat(blocks), whole)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__
    """Elements of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.parametrize("gtp", [1, 4])
def test_no_tensor_larger_than_a_shard_is_made_at_allocation_and_first_values(gtp: int) -> None:
    """Blocks of 256 rows apart; without GTP the shard is the whole weight."""
    rows, columns = 8192, 4
    groups = thread_groups(Grid(gtp=gtp), gtp)[gtp - 1]
    with Largest() as largest:
        linear = ColumnParallelLinear("w", columns, rows, TrainPlacement(dtype=torch.float32, groups=groups))
        initialise(linear, {"w.weight": (rows, columns)}, seed=1)

    assert largest.elements == rows * columns // gtp
    assert linear.weight.local.std() > 0


def test_slice_of_a_master_weight_has_its_padding() -> None:
    """Five rows over four ranks of two: the third has one real row, the last has none."""
    master = torch.arange(1.0, 16.0).view(5, 3)
    found = []
    for groups in thread_groups(Grid(gtp=4), 4):
        linear = ColumnParallelLinear("w", 3, 5, TrainPlacement(dtype=torch.float32, groups=groups, alignment=2))
        linear.weight.local.fill_(torch.nan)
        load_master(linear.weight, master)
        assert torch.equal(linear.weight.local, slice_rows(master, linear.weight))
        found.append(linear.weight.local)

    assert torch.equal(torch.cat(found), torch.cat([master, torch.zeros(3, 3)]))
    with pytest.raises(LayoutMismatch, match="master"):
        slice_rows(torch.zeros(8, 3), linear.weight)


def test_streams_on_the_device_repeat_on_no_peer() -> None:
    """All shards of two weights on a TP 2 x GTP 4 grid: no row comes twice, and padding is zero."""
    rows: list[tuple[float, ...]] = []
    for groups in thread_groups(Grid(tp=2, gtp=4), 8):
        placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=4)
        for name in ("a", "b"):
            shard = ColumnParallelLinear(name, 5, 20, placement).weight
            shard.local.fill_(torch.nan)
            initialise_on_device(shard, Normal(1.0), seed=5)
            count = shard.row_range[1]
            rows += [tuple(row.tolist()) for row in shard.local[:count]]
            assert not shard.local[count:].any()

    assert len(rows) == len(set(rows)) == 40


def test_stored_high_precision_values_follow_the_weight() -> None:
    groups = thread_groups(Grid(gtp=2), 2)[1]
    placement = TrainPlacement(dtype=torch.bfloat16, groups=groups, alignment=4)
    linear = ColumnParallelLinear("w", 3, 6, placement)
    held: Any = linear.weight
    acts: list[Callable[[], None]] = [
        lambda: load_master(linear.weight, torch.rand(6, 3)),
        lambda: initialise_on_device(linear.weight, Normal(1.0), seed=1),
        lambda: initialise(linear, {"w.weight": (6, 3)}, seed=2),
    ]
    for act in acts:
        held._high_precision_init_val = torch.full((4, 3), 9.0)
        act()
        stored: torch.Tensor = held._high_precision_init_val
        assert stored.dtype == torch.float32
        assert not torch.equal(stored, stored.bfloat16().float())  # the value before rounding
        assert torch.equal(stored.bfloat16(), linear.weight.local)


def test_master_weights_keep_their_precision_in_the_stored_value() -> None:
    linear = ColumnParallelLinear("w", 3, 6, TrainPlacement(dtype=torch.bfloat16))
    held: Any = linear.weight
    held._high_precision_init_val = torch.zeros(6, 3)
    master = torch.rand(6, 3)
    load_master(linear.weight, master)

    assert torch.equal(held._high_precision_init_val, master)


def test_span_outside_the_model_is_refused() -> None:
    linear = ColumnParallelLinear("w", 3, 6, TrainPlacement(dtype=torch.float32))
    with pytest.raises(LayoutMismatch, match=r"w\.weight"):
        initialise(linear, {"w.weight": (5, 3)}, seed=1)


def test_parameter_without_spans_is_refused() -> None:
    with pytest.raises(UsageError, match="weight states no spans"):
        initialise(torch.nn.Linear(2, 2), {}, seed=1)


def test_usual_values_by_name() -> None:
    assert usual_init("model.layers.0.self_attn.q_proj.bias") == Constant(0.0)
    assert usual_init("model.layers.0.self_attn.q_norm.weight") == Constant(1.0)
    assert usual_init("model.layers.0.input_layernorm.weight") == Constant(1.0)
    assert usual_init("model.layers.0.self_attn.q_proj.weight") == Normal(0.02)
