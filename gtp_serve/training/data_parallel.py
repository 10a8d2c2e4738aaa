"""Gradients over data-parallel ranks, which hold the same shards and see other data.

The GTP axis, whose ranks see other data too, is the gather chain's; this is for what lies beyond it: ``dp`` for dense
weights and ``expt_dp`` for experts.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from gtp_serve.training.gradients import gradient_of
from gtp_serve.training.groups import AxisGroup, axis, size_of
from gtp_serve.training.layer import ShardedLayer
from gtp_serve.training.shards import GTPShard
from gtp_serve.training.wire import wire_of


def reduce_over_data(model: nn.Module) -> None:
    """Sum every gradient over its data-parallel ranks, or average it as the chain averages.  Collective; once a step,
    after ``GatherChain.finish_gradients``: a second call would count what the first has summed again.

    A parameter without a gradient must have none on any of the ranks.

    :raises UsageError: for a shard whose gradient is still being reduced over its GTP group.
    """
    for grad, group, average in list(_gradients(model)):
        flat = grad if grad.is_contiguous() else grad.contiguous()
        wire_of(group).all_reduce(flat).wait()
        if average:
            flat.div_(group.size())
        if flat is not grad:
            grad.copy_(flat)


def _gradients(model: nn.Module) -> Iterator[tuple[Tensor, AxisGroup, bool]]:
    """Each gradient once, with the ranks that hold the same parameter."""
    seen: set[int] = set()
    for layer in model.modules():
        if not isinstance(layer, ShardedLayer):
            continue
        placement = layer.placement
        average = placement.chain.reducer.reduction == "mean"
        for name, parameter in layer._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            expert = parameter.is_routed_expert if isinstance(parameter, GTPShard) else layer._vectors[name][1]
            group = axis(placement.groups, "expt_dp" if expert else "dp")
            grad = gradient_of(parameter)
            if group is not None and size_of(group) > 1 and grad is not None:
                yield grad, group, average
