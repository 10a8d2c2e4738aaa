"""The mixture-of-experts feed-forward of Mixtral and Qwen3-MoE, under Qwen3-MoE's names."""

from __future__ import annotations

from torch import Tensor

from gtp_serve.config import MoeConfig
from gtp_serve.layers.experts import Experts
from gtp_serve.layers.linear import replicated_linear
from gtp_serve.layers.mlp import Mlp
from gtp_serve.layers.parameter import targets_of
from gtp_serve.layers.placement import Placement
from gtp_serve.refit.apply import Target


class MoeBlock:
    """Router, routed experts and, where the model has one, the shared expert; one all-reduce for all."""

    def __init__(self, prefix: str, hidden_size: int, moe: MoeConfig, placement: Placement) -> None:
        self.moe, self.tp, self.ops = moe, placement.tp, placement.ops
        self.router = replicated_linear(f"{prefix}.gate", moe.num_experts, hidden_size, placement)
        self.experts = Experts(f"{prefix}.experts", hidden_size, moe, placement)
        self.shared = (
            Mlp(f"{prefix}.shared_expert", hidden_size, moe.shared_ffn_size, bias=False, placement=placement)
            if moe.shared_ffn_size
            else None
        )
        self.shared_gate = (
            replicated_linear(f"{prefix}.shared_expert_gate", 1, hidden_size, placement)
            if moe.shared_ffn_size and moe.shared_gate
            else None
        )

    def __call__(self, x_TD: Tensor, routes: list[Tensor] | None = None) -> Tensor:
        """[T, D]; the chosen experts are appended to ``routes``."""
        weights_TC, experts_TC = self.ops.route(self.router(x_TD), self.moe.top_k, self.moe.normalise_top_k)
        if routes is not None:
            routes.append(experts_TC)
        out_TD = self.experts.partial(x_TD, weights_TC, experts_TC)
        if self.shared is not None:
            out_TD = self._add_shared(out_TD, self.shared.partial(x_TD), x_TD)
        return self.tp.all_reduce(out_TD)

    def _add_shared(self, out_TD: Tensor, shared_TD: Tensor, x_TD: Tensor) -> Tensor:
        gate_T1 = None if self.shared_gate is None else self.shared_gate(x_TD)
        if self.ops.add_shared is not None:
            return self.ops.add_shared(out_TD, shared_TD, gate_T1)
        return out_TD + (shared_TD if gate_T1 is None else self.ops.sigmoid(gate_T1) * shared_TD)

    def matrices(self) -> list[Tensor]:
        """See ``Decoder.matrices``."""
        shared = [] if self.shared is None else self.shared.matrices()
        return [self.experts.gate_up_XFD, self.experts.down_XDF, *shared]

    def targets(self) -> list[Target]:
        """All parameters."""
        return targets_of(self.router, self.experts, self.shared, self.shared_gate)
