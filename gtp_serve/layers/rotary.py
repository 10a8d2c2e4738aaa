"""Rotary embedding: the angles of a step's tokens, computed once for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from gtp_serve.config import RopeConfig
from gtp_serve.ops.rope import inverse_frequencies, rotary_tables


class Rotary:
    """Frequencies of one model."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: str) -> None:
        self.rope = rope
        self.inv_freq_R = inverse_frequencies(rope, head_dim).to(device)

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, R] each."""
        return rotary_tables(self.rope, self.inv_freq_R, positions_T, dtype)
