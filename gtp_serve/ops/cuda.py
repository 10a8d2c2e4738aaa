"""The table of ops for NVIDIA GPUs: Triton kernels, and torch's FlashAttention for prompt chunks.

A sequence with one new token always goes through the paged kernel, whatever shares its step: its attention
has the same bits in a mixed step, in a decode step, and in a captured one.
Imported only where Triton is installed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gtp_serve.ops.batch import AttentionPlan, Batch
from gtp_serve.ops.paged import PagedPlan, plan_paged
from gtp_serve.ops.table import REFERENCE, Ops
from gtp_serve.ops.triton_attention import paged_attention
from gtp_serve.ops.triton_experts import experts
from gtp_serve.ops.triton_greedy import greedy
from gtp_serve.ops.triton_heads import rotate_and_cache
from gtp_serve.ops.triton_norm import add_rms_norm, rms_norm
from gtp_serve.ops.triton_swiglu import swiglu
from gtp_serve.ops.varlen import ChunkPlan, Varlen, find_varlen, plan_chunks


def cuda_ops(*, device: str, dtype: torch.dtype, head_dim: int) -> Ops:
    """The table for one model on one GPU."""
    return triton_ops(find_varlen(device=device, dtype=dtype, head_dim=head_dim))


def triton_ops(varlen: Varlen | None) -> Ops:
    """Triton's kernels; without ``varlen`` each token of a prompt goes through the paged kernel too."""
    prompts = "the paged kernel" if varlen is None else "varlen_attn"
    return replace(
        REFERENCE,
        name=f"Triton kernels, prompts through {prompts}",
        capturable=True,
        captures_experts=True,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        rotate_and_cache=rotate_and_cache,
        plan_attention=partial(plan_attention, varlen),
        swiglu=swiglu,
        experts=experts,
        greedy=greedy,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixedPlan:
    """A step with prompt chunks: their rows, and the rows of sequences with one new token."""

    chunks: ChunkPlan
    rows_R: Tensor
    singles: PagedPlan

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """[T, H, E]."""
        cache = keys_NPKE, values_NPKE
        out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
        for rows, plan in ((self.chunks.rows_Q, self.chunks), (self.rows_R, self.singles)):
            if len(rows):
                out_THE.index_copy_(0, rows, plan.attend(q_THE.index_select(0, rows), *cache, scale))
        return out_THE


def plan_attention(varlen: Varlen | None, batch: Batch, block_size: int, window: int | None) -> AttentionPlan:
    """Single tokens through the paged kernel, chunks through ``varlen`` where there is one."""
    if batch.decode_only or varlen is None:
        return plan_paged(batch, window, paged_attention)
    sizes = [stop - start for start, stop in zip(batch.query_starts, batch.query_starts[1:], strict=False)]
    singles, chunks = ([s for s, size in enumerate(sizes) if (size == 1) is one] for one in (True, False))
    device = batch.positions_T.device
    rows_R = torch.tensor([batch.query_starts[s] for s in singles], dtype=torch.int64, device=device)
    tables_RB = batch.block_tables_SB[torch.tensor(singles, dtype=torch.int64, device=device)]
    return MixedPlan(
        chunks=plan_chunks(batch, chunks, block_size, window, varlen),
        rows_R=rows_R,
        singles=PagedPlan(
            kernel=paged_attention,
            tables_TB=tables_RB,
            lengths_T=batch.positions_T[rows_R] + 1,
            window=window,
        ),
    )
