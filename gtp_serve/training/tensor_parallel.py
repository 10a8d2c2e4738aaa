"""What is the same on all tensor-parallel ranks and used by each for its own part: its gradients are summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gtp_serve.training.groups import size_of
from gtp_serve.training.placement import TrainPlacement


def same_on_tp(placement: TrainPlacement, x: Tensor) -> Tensor:
    """``x`` itself, of which each rank computes another part of the result: the gradient is the sum of all parts'."""
    if size_of(placement.tp()) == 1:
        return x
    y: Tensor = _SameOnTp.apply(x, placement)  # type: ignore[no-untyped-call]
    return y


class _SameOnTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, placement: TrainPlacement) -> Tensor:
        ctx.placement = placement
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.placement.sum_over_tp(dy.clone(memory_format=torch.contiguous_format)), None
