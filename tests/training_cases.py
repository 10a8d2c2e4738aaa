"""What the gloo processes of tests/distributed run; each function returns plain values for the test to judge."""

from __future__ import annotations

import resource
from typing import Any

import torch
import torch.distributed as dist
from training_model import Sizes, largest_error, linear_of, plain_outcome, run_small

from gtp_serve.training.gather import GatherChain
from gtp_serve.training.groups import ParallelGroups, axis, build_inference_groups, rank_of, set_default_groups, size_of
from gtp_serve.training.layer import targets_of
from gtp_serve.training.linear import ColumnParallelLinear
from gtp_serve.training.placement import TrainPlacement


def small(
    groups: ParallelGroups,
    rank: int,
    *,
    sizes: Sizes,
    alignment: int,
    dtype: str,
    accumulation: Any,
    steps: int = 2,
    recompute: bool | None = None,
) -> float:
    """Largest error of losses and gradients against the unsharded model on the same data, in one process."""
    gtp = size_of(groups.gtp_remat)
    first = rank // (gtp * size_of(groups.tp)) * gtp
    outcome = run_small(
        groups,
        first + rank_of(groups.gtp_remat),
        sizes=sizes,
        alignment=alignment,
        steps=steps,
        dtype=getattr(torch, dtype),
        recompute=recompute,
        chain=GatherChain(accumulation=accumulation),
    )
    wanted = plain_outcome(
        sizes,
        gtp,
        steps=steps,
        dtype=getattr(torch, dtype),
        wide=gtp > 1 and accumulation == "float32",
        first_data_rank=first,
    )
    return largest_error(outcome, wanted[rank_of(groups.gtp_remat)])


def small_on_three(groups: ParallelGroups, rank: int, *, sizes: Sizes, alignment: int) -> float:
    """The same on the first three ranks; the fourth only helps to make the group."""
    three: Any = dist.new_group([0, 1, 2])
    if rank == 3:
        return 0.0
    named = ParallelGroups(gtp_remat=three)
    return small(named, rank, sizes=sizes, alignment=alignment, dtype="float32", accumulation="float32")


def bias_of_100(groups: ParallelGroups, rank: int, *, out: int) -> tuple[list[int], float, float]:
    """(shape of the bias, smallest and largest output) of a linear whose weights are zero."""
    linear = linear_of(groups, out, 16)
    assert linear.bias is not None
    torch.nn.init.constant_(linear.bias, 100.0)
    y = linear(torch.randn(3, 8))
    return list(linear.bias.shape), y.min().item(), y.max().item()


def inference_beside(groups: ParallelGroups, rank: int) -> dict[str, Any]:
    """A trainer's linear and an inference model's, while the process-wide collection is the trainer's."""
    before = set_default_groups(groups)
    try:
        trainer = linear_of(groups, 32, 1)
        served = linear_of(build_inference_groups(), 32, 1)
        unsaid = linear_of(object(), 32, 1)  # type: ignore[arg-type]  # a collection without any field
        with torch.no_grad():
            served.weight.fill_(1.0)
            rows = served(torch.ones(1, 8)).shape[-1]
    finally:
        set_default_groups(before)
    return {
        "trainer": list(trainer.weight.shape),
        "served": list(served.weight.shape),
        "unsaid": list(unsaid.weight.shape),
        "rows": rows,
        "axes": [axis(build_inference_groups(), name) for name in ("gtp_remat", "expt_gtp_remat")],
    }


def growth(groups: ParallelGroups, rank: int, *, mebibytes: int) -> float:
    """MiB by which the peak of this process grows when a weight of so many MiB over all ranks is made."""
    rows = mebibytes << 10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1)
    linear = ColumnParallelLinear("big", 256, rows, placement)
    torch.nn.init.uniform_(linear.weight)
    (target,) = targets_of(linear)
    assert sum(span.local.volume for span in target.shard.spans) == rows * 256 // size_of(groups.gtp_remat)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
