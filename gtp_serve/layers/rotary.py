"""Rotary embedding: the angles of a step's tokens, once for all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from gtp_serve.config import RopeConfig
from gtp_serve.layers.placement import Placement
from gtp_serve.ops.rope import inverse_frequencies, rotary_tables

#: Positions whose angles are computed together, always all of them: an angle's bits do not depend on what was asked.
_PIECE = 1024


class Rotary:
    """Frequencies of one model, and tables of angles for ops that take them from there.

    Legend: T tokens, R = head size / 2, P positions of the tables.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, placement: Placement) -> None:
        self.rope, self.ops, self.dtype = rope, placement.ops, placement.dtype
        self.inv_freq_R = inverse_frequencies(rope, head_dim).to(placement.device)
        self._cos_PR = self._sin_PR = self.inv_freq_R.new_empty((0, head_dim // 2), dtype=placement.dtype)

    def __call__(self, positions_T: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """cos and sin, [T, R] each.

        :param context: is more than each of the positions.
        """
        if not self.ops.tabulates_angles:
            return rotary_tables(self.rope, self.inv_freq_R, positions_T, self.dtype)
        self.prepare(context)
        return self.ops.embedding(positions_T, self._cos_PR), self.ops.embedding(positions_T, self._sin_PR)

    def prepare(self, context: int) -> None:
        """Make tables that reach this far; those that were there before stay as they are for who still reads them."""
        have = self._cos_PR.shape[0]
        if not self.ops.tabulates_angles or context <= have:
            return
        device = self.inv_freq_R.device
        pieces = [torch.arange(at, at + _PIECE, device=device) for at in range(have, max(context, 2 * have), _PIECE)]
        made = [rotary_tables(self.rope, self.inv_freq_R, piece, self.dtype) for piece in pieces]
        self._cos_PR = torch.cat([self._cos_PR, *(cos for cos, _ in made)])
        self._sin_PR = torch.cat([self._sin_PR, *(sin for _, sin in made)])
