"""RMSNorm whose weight every GTP rank holds."""

from __future__ import annotations

from torch import Tensor, nn

from gtp_serve.training.layer import ShardedLayer, whole_vector
from gtp_serve.training.placement import TrainPlacement


class RMSNorm(ShardedLayer):
    """Root-mean-square norm over the last axis, alone or after a residual addition.

    :param name: of the module; the logical tensor is ``{name}.weight``.
    """

    weight: nn.Parameter

    def __init__(self, name: str, size: int, placement: TrainPlacement, *, eps: float) -> None:
        super().__init__(placement)
        self.eps = eps
        self.add_vector("weight", whole_vector(f"{name}.weight", size), fill=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.placement.ops.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(norm(x + delta), x + delta)``; without a delta ``(norm(x), x)``."""
        if delta is None:
            return self(x), x
        return self.placement.ops.add_rms_norm(x, delta, self.weight, self.eps)
