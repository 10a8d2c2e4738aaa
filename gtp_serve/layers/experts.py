"""Routed experts, stored as two stacks; each rank holds a cut of every expert.

Legend: T tokens, D hidden, F inner features of this rank, X experts, C chosen experts.
"""

from __future__ import annotations

from torch import Tensor

from gtp_serve.config import MoeConfig
from gtp_serve.layers.parameter import Rows, columns, stacked
from gtp_serve.layers.placement import Placement
from gtp_serve.refit.apply import Target


class Experts:
    """SwiGLU experts ``{prefix}.{x}.gate_proj``, ``up_proj`` and ``down_proj``."""

    def __init__(self, prefix: str, hidden_size: int, moe: MoeConfig, placement: Placement) -> None:
        self.prefix, self.ops = prefix, placement.ops
        self.first, self.count = placement.cut(moe.ffn_size, f"rows of {prefix}.*.gate_proj")
        self.gate_up_XFD = placement.empty(moe.num_experts, 2 * self.count, hidden_size)
        self.down_XDF = placement.empty(moe.num_experts, hidden_size, self.count)

    def partial(self, x_TD: Tensor, weights_TC: Tensor, experts_TC: Tensor) -> Tensor:
        """This rank's summand, [T, D]."""
        return self.ops.experts(x_TD, weights_TC, experts_TC, self.gate_up_XFD, self.down_XDF)

    def targets(self) -> list[Target]:
        """Two for each expert: views of the stacks."""
        return [target for index in range(self.gate_up_XFD.shape[0]) for target in self._targets(index)]

    def _targets(self, index: int) -> list[Target]:
        name = f"{self.prefix}.{index}"
        parts = [Rows(f"{name}.{half}.weight", self.first, self.count) for half in ("gate_proj", "up_proj")]
        return [
            stacked(f"{name}.gate_up_proj.weight", self.gate_up_XFD[index], parts),
            columns(f"{name}.down_proj.weight", self.down_XDF[index], self.first),
        ]
