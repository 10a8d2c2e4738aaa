"""Process groups of a trainer, one field an axis, and where a layer finds the axis that it is cut over.

Ranks are numbered as Megatron numbers them: dense weights by tp, gtp_remat, cp, dp, pp and experts by expt_tp, ep,
expt_gtp_remat, expt_dp, pp, the first changing fastest.  An axis of one rank is None.  Peers on gtp_remat hold
different rows *and* different data, so ``dp`` leaves that axis out, as Megatron's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from math import prod
from typing import Any, Protocol

import torch.distributed

from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import Grid

_DIST: Any = torch.distributed
_ABSENT = object()


class AxisGroup(Protocol):
    """The ranks along one axis; torch's ProcessGroup is one."""

    def size(self) -> int:
        """Number of ranks."""
        ...

    def rank(self) -> int:
        """This rank among them, from 0."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """One rank's groups.  None is an axis of one rank; experts have a tensor and a GTP axis of their own."""

    tp: AxisGroup | None = None
    gtp_remat: AxisGroup | None = None
    cp: AxisGroup | None = None
    dp: AxisGroup | None = None
    pp: AxisGroup | None = None
    ep: AxisGroup | None = None
    expt_tp: AxisGroup | None = None
    expt_gtp_remat: AxisGroup | None = None
    expt_dp: AxisGroup | None = None


AXES = tuple(f.name for f in fields(ParallelGroups))


@dataclass(slots=True)
class _Default:
    """The collection for layers whose own collection says nothing about an axis."""

    groups: object = field(default_factory=ParallelGroups)


_DEFAULT = _Default()


def set_default_groups(groups: object) -> object:
    """Make a collection the process-wide one; returns the one before."""
    before, _DEFAULT.groups = _DEFAULT.groups, groups
    return before


def axis(groups: object, name: str) -> AxisGroup | None:
    """The group of one axis.  A field that is present decides, also when it is None; only where it is absent the
    process-wide collection is asked.

    :param groups: a ``ParallelGroups``, or any object with such attributes (Megatron's ProcessGroupCollection, which
        has only those that were set); None has no fields.
    """
    if name not in AXES:
        raise UsageError(f"there is no axis {name!r}", [("known", ", ".join(AXES))])
    found = getattr(groups, name, _ABSENT)
    if found is _ABSENT:
        found = getattr(_DEFAULT.groups, name, None)
    group: AxisGroup | None = found  # type: ignore[assignment]  # read by name
    return group


def size_of(group: AxisGroup | None) -> int:
    """Ranks of an axis; 1 where there is no group."""
    return 1 if group is None else group.size()


def rank_of(group: AxisGroup | None) -> int:
    """This rank on an axis; 0 where there is no group."""
    return 0 if group is None else group.rank()


def ranks_along(sizes: Sequence[tuple[str, int]], name: str) -> list[list[int]]:
    """Global ranks of every group along one axis, in the order of their first ranks.

    :param sizes: (axis, size), the axis that changes fastest first.
    """
    names = [axis_name for axis_name, _ in sizes]
    at = names.index(name)
    inner, count = prod(size for _, size in sizes[:at]), sizes[at][1]
    outer = prod(size for _, size in sizes[at + 1 :])
    return [
        [(block * count + step) * inner + offset for step in range(count)]
        for block in range(outer)
        for offset in range(inner)
    ]


def dense_sizes(grid: Grid, world: int, cp: int = 1) -> list[tuple[str, int]]:
    """(axis, size) of dense weights, fastest first; data parallelism takes what is left of the world.

    :raises UsageError: when the world is no multiple of the rest.
    """
    rest = [("tp", grid.tp), ("gtp_remat", grid.gtp), ("cp", cp)]
    return [*rest, ("dp", _left(world, [*rest, ("pp", grid.pp)])), ("pp", grid.pp)]


def expert_sizes(grid: Grid, world: int) -> list[tuple[str, int]]:
    """(axis, size) of experts, fastest first; expert data parallelism takes what is left of the world.

    :raises UsageError: when the world is no multiple of the rest.
    """
    rest = [("expt_tp", grid.etp), ("ep", grid.ep), ("expt_gtp_remat", grid.egtp)]
    return [*rest, ("expt_dp", _left(world, [*rest, ("pp", grid.pp)])), ("pp", grid.pp)]


def _left(world: int, sizes: Sequence[tuple[str, int]]) -> int:
    used = prod(size for _, size in sizes)
    if world % used:
        product = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "1"
        raise UsageError(f"{world} ranks are no multiple of {product}", [("needed", f"a multiple of {used} ranks")])
    return world // used


def build_training_groups(
    grid: Grid, *, cp: int = 1, backend: str | None = None, timeout: timedelta | None = None
) -> ParallelGroups:
    """This rank's groups on a trainer's grid.  Collective: every rank of the world calls it with the same arguments.

    :param backend: of the groups; torch's default group's own when None.
    :raises UsageError: when the world is no multiple of the grid, or the grid has several ranks and
        ``torch.distributed`` has not been initialised.
    """
    if not _DIST.is_initialized():
        sizes = {"tp": grid.tp, "gtp_remat": grid.gtp, "cp": cp, "pp": grid.pp, "ep": grid.ep}
        sizes |= {"expt_tp": grid.etp, "expt_gtp_remat": grid.egtp}
        many = [f"{name} {size}" for name, size in sizes.items() if size > 1]
        if many:
            raise UsageError(
                f"{', '.join(many)} needs several ranks", [("try", "torch.distributed.init_process_group first")]
            )
        return ParallelGroups()
    world = _DIST.get_world_size()
    dense, experts = dense_sizes(grid, world, cp), expert_sizes(grid, world)
    made = {name: _make(ranks_along(dense, name), backend, timeout) for name, _ in dense}
    made |= {name: _make(ranks_along(experts, name), backend, timeout) for name, _ in experts if name != "pp"}
    return ParallelGroups(**made)


def build_inference_groups(
    *, tp: int = 1, tp_group: AxisGroup | None = None, backend: str | None = None
) -> ParallelGroups:
    """Groups of an inference model beside a trainer: tensor parallelism only.

    Both GTP axes are there and None, so its layers hold whole weights whatever the process-wide collection says.
    Collective where ``tp`` is more than 1 and no group is given.

    :param tp_group: a group to use again; then ``tp`` is not looked at.
    """
    if tp_group is None and tp > 1:
        if not _DIST.is_initialized() or _DIST.get_world_size() % tp:
            raise UsageError(f"tp {tp} needs a world that is a multiple of {tp} ranks")
        tp_group = _make(ranks_along([("tp", tp), ("dp", _DIST.get_world_size() // tp)], "tp"), backend, None)
    return ParallelGroups(tp=tp_group, expt_tp=tp_group)


def _make(all_ranks: list[list[int]], backend: str | None, timeout: timedelta | None) -> AxisGroup | None:
    """This rank's group of those given.  Every rank makes all of them in one order, as torch wants it."""
    mine: AxisGroup | None = None
    me = _DIST.get_rank()
    for ranks in all_ranks:
        if len(ranks) == 1:
            continue
        group = _DIST.new_group(ranks, backend=backend, timeout=timeout)
        if me in ranks:
            mine = group
    return mine
