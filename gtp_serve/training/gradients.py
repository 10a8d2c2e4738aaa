"""The norm of all gradients, and clipping by it.

Each element of each logical tensor counts once, on the rank that owns it: copies along data-parallel axes, vectors
that GTP ranks or tensor-parallel ranks hold whole, and padding do not add to it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gtp_serve.errors import UsageError
from gtp_serve.training.exchange import slices
from gtp_serve.training.shard_map import ShardMap, as_map


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """``main_grad`` where there is one, else ``grad``.

    :raises UsageError: for a shard whose gradient is still being reduced.
    """
    held: Any = parameter
    main_grad: Tensor | None = getattr(held, "main_grad", None)
    return held.grad if main_grad is None else main_grad


def gradient_norm(model: nn.Module | ShardMap) -> float:
    """The 2-norm of the gradient of the whole model.  Collective; gradients must be finished.

    The squares are added in float64, so that the grid hardly shows.

    :raises UsageError: for a shard whose gradient is still being reduced.
    """
    shards = as_map(model)
    total = torch.zeros((), dtype=torch.float64, device=shards.device)
    for index, boxes in shards.owned_boxes.items():
        grad = gradient_of(shards.parameters[index])
        if grad is not None:
            for box in boxes:
                total += torch.linalg.vector_norm(grad[slices(box)], dtype=torch.float64).square()
    return math.sqrt(shards.mesh.total(total.view(1)).item())


def clip_gradients(model: nn.Module | ShardMap, max_norm: float) -> float:
    """Scale all gradients in place so that their norm is at most ``max_norm``; returns the norm before.  Collective.

    A norm that is not finite changes nothing: the caller decides whether to skip the step.

    :raises UsageError: for a ``max_norm`` that is not positive, and as ``gradient_norm`` does.
    """
    if not max_norm > 0:
        raise UsageError(f"max_norm is {max_norm}", [("needed", "a positive number")])
    shards = as_map(model)
    norm = gradient_norm(shards)
    if math.isfinite(norm) and norm > max_norm:
        for parameter in shards.parameters:
            grad = gradient_of(parameter)
            if grad is not None:
                grad.mul_(max_norm / norm)
    return norm
