"""Pairs of token and chosen expert, put into blocks of one expert each, asking the host nothing.

How many pairs an expert has is known on the device alone.  So the number of blocks is the most that it could be,
and those that are not needed belong to no expert.
Legend: T tokens, C chosen experts of a token, N = T x C pairs, X experts, M rows of a block, B blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Groups:
    """Block b holds pairs ``order_N[starts_B[b]]`` to ``order_N[stops_B[b] - 1]``, all of one expert; at most M."""

    order_N: Tensor
    """int64: pairs (token x C + place), expert after expert, tokens ascending."""
    experts_B: Tensor
    """int64; X where a block belongs to no expert."""
    starts_B: Tensor
    """int64."""
    stops_B: Tensor
    """int64; ``starts_B`` where a block belongs to no expert."""


def most_blocks(pairs: int, num_experts: int, rows: int) -> int:
    """Blocks of ``rows`` that suffice however the pairs are spread: all but one row of each expert's last block may
    be empty.
    """
    return (pairs + min(pairs, num_experts) * (rows - 1)) // rows


def group_pairs(experts_TC: Tensor, num_experts: int, rows: int) -> Groups:
    """Blocks of at most ``rows`` pairs.  Shapes depend on the shape of ``experts_TC`` alone."""
    experts_N, device = experts_TC.flatten(), experts_TC.device
    blocks = most_blocks(len(experts_N), num_experts, rows)
    counts_X = torch.zeros(num_experts, dtype=torch.int64, device=device)
    counts_X.scatter_add_(0, experts_N, torch.ones_like(experts_N))
    pair_stops_X = counts_X.cumsum(0)
    blocks_X = (counts_X + rows - 1) // rows
    block_stops_X = blocks_X.cumsum(0)
    block_B = torch.arange(blocks, device=device)
    experts_B = torch.searchsorted(block_stops_X, block_B, right=True)
    # A block of no expert is looked up as one of the last expert, and found to begin behind its pairs.
    owner_B = experts_B.clamp(max=num_experts - 1)
    place_B = block_B - (block_stops_X - blocks_X)[owner_B]
    stops_B = pair_stops_X[owner_B]
    starts_B = ((pair_stops_X - counts_X)[owner_B] + place_B * rows).minimum(stops_B)
    return Groups(
        order_N=experts_N.argsort(stable=True),
        experts_B=experts_B,
        starts_B=starts_B,
        stops_B=stops_B.minimum(starts_B + rows),
    )
