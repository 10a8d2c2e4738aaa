"""Attention of prompt chunks through torch's ``varlen_attn`` (FlashAttention).

Keys are read in place where FlashAttention 3 is active.  Version 2, torch's own, takes pages of 256 positions
at least and has been wrong with pages and split keys (pytorch#194167), so there keys are gathered first.
``num_splits`` is always 1: one order of summation, whatever the batch.
Legend: T tokens, Q query rows of chunks, S chunks, H query heads, K KV heads, E head size, N cache blocks of
P positions, B blocks per table, L keys of all chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn

from gtp_serve.ops.batch import Batch

_LARGEST_HEAD = 256
_FIRST_CAPABILITY = (8, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Varlen:
    """How chunks are attended to here."""

    function: Callable[..., Any]
    """``varlen_attn``."""
    paged: bool
    """Read keys in place, by block table."""
    takes_splits: bool
    """The function has ``num_splits``."""


def find_varlen(*, device: str, dtype: torch.dtype, head_dim: int) -> Varlen | None:
    """How ``varlen_attn`` can serve this model on this device; None where it cannot."""
    names = inspect.signature(varlen_attn).parameters.keys()
    if not names >= {"scale", "window_size", "enable_gqa"}:
        return None
    if not torch.backends.cuda.is_flash_attention_available():
        return None
    if dtype not in (torch.bfloat16, torch.float16) or head_dim > _LARGEST_HEAD or head_dim % 8:
        return None
    if torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return None
    paged = current_flash_attention_impl() == "FA3" and names >= {"seqused_k", "block_table"}
    return Varlen(function=varlen_attn, paged=paged, takes_splits="num_splits" in names)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkPlan:
    """Chunks of one step: which rows they own, and where their keys are."""

    varlen: Varlen
    rows_Q: Tensor
    """int64, of T; chunk after chunk."""
    query_starts_S: Tensor
    """int32, S + 1."""
    key_starts_S: Tensor
    """int32, S + 1."""
    contexts_S: Tensor
    """int32."""
    tables_SB: Tensor
    """int32; read when keys are read in place."""
    slots_L: Tensor
    """int64: cache slots of all keys; read when keys are gathered."""
    most_queries: int
    most_keys: int
    window: int | None

    def attend(self, q_QHE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """[Q, H, E] for the query rows ``rows_Q``."""
        options: dict[str, object] = {"scale": scale, "enable_gqa": True}
        # (left, 0) sees `left` keys before its own; (-1, 0) is causal without a window.
        options["window_size"] = (-1 if self.window is None else self.window - 1, 0)
        if self.varlen.takes_splits:
            options["num_splits"] = 1
        if self.varlen.paged:
            options |= {"seqused_k": self.contexts_S, "block_table": self.tables_SB}
        else:
            keys_NPKE, values_NPKE = (
                cache.flatten(0, 1).index_select(0, self.slots_L) for cache in (keys_NPKE, values_NPKE)
            )
        starts = (self.query_starts_S, self.key_starts_S)
        mixed_QHE: Tensor = self.varlen.function(
            q_QHE, keys_NPKE, values_NPKE, *starts, self.most_queries, self.most_keys, **options
        )
        return mixed_QHE


def plan_chunks(batch: Batch, chunks: Sequence[int], block_size: int, window: int | None, varlen: Varlen) -> ChunkPlan:
    """For these sequences of the batch, at least one."""
    device = batch.block_tables_SB.device
    starts = batch.query_starts
    queries = [starts[s + 1] - starts[s] for s in chunks]
    contexts = [batch.context_lens[s] for s in chunks]
    # The kernel aligns queries with the last keys, so keys that the window hides from all need not be there.
    hidden = [
        0 if window is None or varlen.paged else max(0, context - count - window + 1)
        for count, context in zip(queries, contexts, strict=True)
    ]
    keys = [context - skipped for context, skipped in zip(contexts, hidden, strict=True)]

    def int32(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tables_SB = batch.block_tables_SB.index_select(0, torch.tensor(chunks, device=device))
    positions = [torch.arange(a, b, device=device) for a, b in zip(hidden, contexts, strict=True)]
    return ChunkPlan(
        varlen=varlen,
        rows_Q=torch.cat([torch.arange(starts[s], starts[s + 1], device=device) for s in chunks]),
        query_starts_S=int32([0, *accumulate(queries)]),
        key_starts_S=int32([0, *accumulate(keys)]),
        contexts_S=int32(contexts),
        tables_SB=tables_SB.int(),
        slots_L=torch.cat(
            [
                table_B[at_L // block_size] * block_size + at_L % block_size
                for table_B, at_L in zip(tables_SB, positions, strict=True)
            ]
        ),
        most_queries=max(queries),
        most_keys=max(keys),
        window=window,
    )
