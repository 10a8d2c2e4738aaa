"""Attention of single tokens over the paged cache, asking the host nothing: lengths and tables are tensors.

The plain twin of ``ops.triton_attention``, and what a captured step runs where Triton is not.
Legend: R query rows, H query heads, K KV heads, G = H / K, E head size, N cache blocks of P positions,
B blocks per table, L = B x P positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gtp_serve.ops.batch import Batch

PagedAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None], Tensor]
"""``paged_attention`` or one of its equals."""


def paged_attention(
    q_RHE: Tensor,
    keys_NPKE: Tensor,
    values_NPKE: Tensor,
    tables_RB: Tensor,
    lengths_R: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """Each row over its sequence's first ``lengths_R`` positions, or the last ``window`` of them, in float32.

    :param tables_RB: int64, the cache blocks of each row's sequence.
    :param lengths_R: int64, at least 1: positions that the row sees, its own included.
    :return: [R, H, E] in the query's dtype.
    """
    rows, heads, size = q_RHE.shape
    block_size, kv_heads = keys_NPKE.shape[1:3]
    positions_L = torch.arange(tables_RB.shape[1] * block_size, device=q_RHE.device)
    last_R1 = lengths_R[:, None] - 1
    # A position past the end stands for the last one: nothing is read that the sequence does not own.
    seen_RL = positions_L.minimum(last_R1)
    slots_RL = tables_RB.gather(1, seen_RL // block_size) * block_size + seen_RL % block_size
    hidden_RL = positions_L > last_R1
    if window is not None:
        hidden_RL |= positions_L <= last_R1 - window
    k_RLKE, v_RLKE = (cache.flatten(0, 1)[slots_RL].float() for cache in (keys_NPKE, values_NPKE))
    q_RKGE = q_RHE.float().view(rows, kv_heads, heads // kv_heads, size)
    scores_RKGL = torch.einsum("rkge,rlke->rkgl", q_RKGE, k_RLKE) * scale
    weights_RKGL = scores_RKGL.masked_fill(hidden_RL[:, None, None], -torch.inf).softmax(-1)
    mixed_RKGE = torch.einsum("rkgl,rlke->rkge", weights_RKGL, v_RLKE)
    return mixed_RKGE.reshape(rows, heads, size).to(q_RHE.dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PagedPlan:
    """Every token of a step on its own."""

    kernel: PagedAttention
    tables_TB: Tensor
    lengths_T: Tensor
    window: int | None

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """[T, H, E]."""
        return self.kernel(q_THE, keys_NPKE, values_NPKE, self.tables_TB, self.lengths_T, scale, self.window)


def plan_paged(batch: Batch, window: int | None, kernel: PagedAttention = paged_attention) -> PagedPlan:
    """A plan for any batch; one of single tokens takes nothing from the host, so it can be captured."""
    tables_TB = batch.block_tables_SB
    if not batch.decode_only:
        sequences_T = torch.tensor(batch.sequence_of_rows(), device=tables_TB.device)
        tables_TB = tables_TB.index_select(0, sequences_T)
    return PagedPlan(kernel=kernel, tables_TB=tables_TB, lengths_T=batch.positions_T + 1, window=window)
