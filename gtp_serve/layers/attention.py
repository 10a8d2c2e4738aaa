"""Self-attention over the paged cache.

Legend: T tokens, D hidden, H query and K KV heads of this rank, E head size, R = E / 2,
N cache blocks of P positions, W rows that are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.layers.linear import RowLinear, kv_share, qkv_linear
from gtp_serve.layers.norm import RMSNorm
from gtp_serve.layers.parameter import targets_of
from gtp_serve.layers.placement import Placement
from gtp_serve.ops.batch import AttentionPlan
from gtp_serve.refit.apply import Target


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Step:
    """What all layers of one forward pass share."""

    slots_T: Tensor
    cos_TR: Tensor
    sin_TR: Tensor
    attention: AttentionPlan


class Attention:
    """Projections, optional norms of queries and keys, rotary embedding, attention."""

    def __init__(self, prefix: str, config: ModelConfig, placement: Placement) -> None:
        self.head_dim, self.ops = config.head_dim, placement.ops
        self.heads = placement.cut(config.num_heads, "attention heads")[1]
        self.kv_heads = kv_share(config.num_kv_heads, placement)[1]
        self.qkv = qkv_linear(prefix, config, placement)
        self.out = RowLinear(
            f"{prefix}.o_proj", config.hidden_size, config.q_rows, bias=config.proj_bias, placement=placement
        )
        self.q_norm, self.k_norm = (
            RMSNorm(f"{prefix}.{name}", config.head_dim, config.norm_eps, placement) if config.qk_norm else None
            for name in ("q_norm", "k_norm")
        )

    def __call__(
        self, x_TD: Tensor, step: Step, keys_NPKE: Tensor, values_NPKE: Tensor, wanted_W: Tensor | None = None
    ) -> Tensor:
        """[T, D]; writes this step's keys and values into the cache first.

        :param wanted_W: give these rows alone, [W, D].
        """
        q_THE, k_TKE, v_TKE = self._heads(x_TD)
        q_THE = self.ops.rotate_and_cache(
            q_THE, k_TKE, v_TKE, step.cos_TR, step.sin_TR, keys_NPKE, values_NPKE, step.slots_T
        )
        mixed_THE = step.attention.attend(q_THE, keys_NPKE, values_NPKE, self.head_dim**-0.5)
        mixed = mixed_THE.flatten(1)
        return self.out(mixed if wanted_W is None else self.ops.embedding(wanted_W, mixed))

    def _heads(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = self.qkv(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        q_THE, k_TKE, v_TKE = torch.tensor_split(split, (self.heads, self.heads + self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            return self.q_norm(q_THE), self.k_norm(k_TKE), v_TKE
        return q_THE, k_TKE, v_TKE

    def targets(self) -> list[Target]:
        """All parameters."""
        return targets_of(self.qkv, self.out, self.q_norm, self.k_norm)
