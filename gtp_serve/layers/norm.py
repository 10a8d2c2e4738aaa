"""RMSNorm, alone or after a residual addition."""

from __future__ import annotations

from torch import Tensor

from gtp_serve.layers.parameter import whole
from gtp_serve.layers.placement import Placement
from gtp_serve.refit.apply import Target


class RMSNorm:
    """Root-mean-square norm over the last axis; every rank holds the weight."""

    def __init__(self, name: str, size: int, eps: float, placement: Placement) -> None:
        self.name, self.eps, self.ops = name, eps, placement.ops
        self.weight = placement.empty(size)

    def __call__(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x_TD: Tensor, delta_TD: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(norm(x + delta), x + delta)``; without a delta ``(norm(x), x)``."""
        if delta_TD is None:
            return self(x_TD), x_TD
        return self.ops.add_rms_norm(x_TD, delta_TD, self.weight, self.eps)

    def targets(self) -> list[Target]:
        """The weight."""
        return [whole(f"{self.name}.weight", self.weight)]
