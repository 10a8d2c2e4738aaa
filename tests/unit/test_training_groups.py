"""Groups of a trainer and the axis that a layer takes from the collection it was given."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from training_model import linear_of
from training_ranks import thread_groups

from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.training.groups import (
    AXES,
    ParallelGroups,
    axis,
    build_inference_groups,
    build_training_groups,
    dense_sizes,
    expert_sizes,
    rank_of,
    ranks_along,
    set_default_groups,
    size_of,
)


@pytest.fixture
def trainer() -> Iterator[ParallelGroups]:
    """A GTP trainer's collection, which is also the process-wide one."""
    groups = thread_groups(Grid(gtp=4, egtp=2), 4)[1]
    before = set_default_groups(groups)
    yield groups
    set_default_groups(before)


def test_field_that_is_present_decides_also_when_it_is_none(trainer: ParallelGroups) -> None:
    assert axis(ParallelGroups(), "gtp_remat") is None
    assert axis(SimpleNamespace(gtp_remat=None), "gtp_remat") is None
    assert axis(SimpleNamespace(gtp_remat=trainer.expt_gtp_remat), "gtp_remat") is trainer.expt_gtp_remat


def test_absent_field_falls_back_to_the_process_wide_collection(trainer: ParallelGroups) -> None:
    """Megatron's collection has only the fields that were set."""
    partly = SimpleNamespace(tp=None)

    assert axis(partly, "gtp_remat") is trainer.gtp_remat
    assert axis(partly, "expt_gtp_remat") is trainer.expt_gtp_remat
    assert axis(None, "gtp_remat") is trainer.gtp_remat


def test_inference_collection_has_both_gtp_axes_and_they_are_none(trainer: ParallelGroups) -> None:
    groups = build_inference_groups()

    assert [getattr(groups, name) for name in ("gtp_remat", "expt_gtp_remat")] == [None, None]
    assert axis(groups, "gtp_remat") is axis(groups, "expt_gtp_remat") is None
    assert tuple(linear_of(groups, 32, 1).weight.shape) == (32, 8)
    assert tuple(linear_of(trainer, 32, 1).weight.shape) == (8, 8)


def test_inference_groups_can_use_a_tp_group_again(trainer: ParallelGroups) -> None:
    groups = build_inference_groups(tp_group=trainer.gtp_remat)

    assert groups.tp is groups.expt_tp is trainer.gtp_remat


def test_unknown_axis_is_refused() -> None:
    with pytest.raises(UsageError, match="gtp_remad"):
        axis(ParallelGroups(), "gtp_remad")


def test_collections_are_frozen_and_have_every_axis() -> None:
    assert AXES == ("tp", "gtp_remat", "cp", "dp", "pp", "ep", "expt_tp", "expt_gtp_remat", "expt_dp")
    with pytest.raises(AttributeError):
        ParallelGroups().tp = None  # type: ignore[misc]


def test_ranks_are_numbered_as_megatron_numbers_them() -> None:
    """World 16, TP 2, GTP 2, PP 2: tp fastest, then gtp_remat, then dp; pp slowest.  Experts: ep before their GTP."""
    grid = Grid(tp=2, gtp=2, pp=2, ep=2, etp=1, egtp=2)
    dense, experts = dense_sizes(grid, 16), expert_sizes(grid, 16)

    assert dict(dense) == {"tp": 2, "gtp_remat": 2, "cp": 1, "dp": 2, "pp": 2}
    assert dict(experts) == {"expt_tp": 1, "ep": 2, "expt_gtp_remat": 2, "expt_dp": 2, "pp": 2}
    assert ranks_along(dense, "tp")[:2] == [[0, 1], [2, 3]]
    assert ranks_along(dense, "gtp_remat")[:2] == [[0, 2], [1, 3]]
    assert ranks_along(dense, "dp")[:4] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert ranks_along(dense, "pp")[0] == [0, 8]
    assert ranks_along(experts, "ep")[:2] == [[0, 1], [2, 3]]
    assert ranks_along(experts, "expt_gtp_remat")[:2] == [[0, 2], [1, 3]]


@pytest.mark.parametrize("name", ["tp", "gtp_remat", "cp", "dp", "pp"])
def test_groups_along_an_axis_share_out_the_world(name: str) -> None:
    groups = ranks_along(dense_sizes(Grid(tp=2, gtp=3, pp=2), 48, cp=2), name)

    assert sorted(rank for ranks in groups for rank in ranks) == list(range(48))


def test_world_that_the_grid_does_not_divide_is_refused() -> None:
    with pytest.raises(UsageError, match="10 ranks are no multiple of tp 2 x gtp_remat 2"):
        dense_sizes(Grid(tp=2, gtp=2), 10)


def test_without_torch_distributed_only_a_grid_of_one_rank_has_groups() -> None:
    assert build_training_groups(Grid()) == ParallelGroups()
    with pytest.raises(UsageError, match="gtp_remat 2 needs several ranks"):
        build_training_groups(Grid(gtp=2))
    with pytest.raises(UsageError, match="tp 2"):
        build_inference_groups(tp=2)


def test_axis_without_a_group_has_one_rank() -> None:
    assert (size_of(None), rank_of(None)) == (1, 0)
