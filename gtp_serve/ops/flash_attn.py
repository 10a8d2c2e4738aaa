"""Attention through the package flash-attn (an extra; FlashAttention 2), which reads the paged cache in place.

Its pages are of 256 positions or a multiple, so the engine's blocks must be.  It takes lengths and tables from the
device, so a step of single tokens can be recorded as it is.  How far keys are split is the kernel's choice, by the
size of the batch: a token's last bits depend on what is computed beside it.
Legend: S sequences, B blocks per table, T tokens, H query heads, K KV heads, E head size,
N cache blocks of P positions.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.ops.batch import AttentionPlan, Batch
from gtp_serve.ops.table import Ops

PAGE = 256
"""What flash-attn's pages must be a multiple of."""
_LARGEST_HEAD = 256
_DTYPES = (torch.bfloat16, torch.float16)


def flash_attn_ops(base: Ops, *, dtype: torch.dtype, head_dim: int, block_size: int) -> Ops:
    """``base`` with its attention replaced.

    :raises EnvironmentFault: flash-attn is not installed, or cannot be imported.
    :raises UsageError: it does not serve this model or this size of blocks.
    """
    try:
        library = importlib.import_module("flash_attn")
        functions = library.flash_attn_with_kvcache, library.flash_attn_varlen_func
    except (ImportError, AttributeError) as error:
        raise EnvironmentFault(
            f"--attention-backend flash-attn needs flash-attn, which cannot be imported ({error})",
            [("try", "pip install 'gtp-serve[flash-attn]', or another --attention-backend")],
        ) from error
    if dtype not in _DTYPES or head_dim > _LARGEST_HEAD or head_dim % 8:
        raise UsageError(
            f"flash-attn does not serve heads of {head_dim} elements in {dtype}".replace("torch.", ""),
            [("serves", f"multiples of 8 up to {_LARGEST_HEAD} in bfloat16 and float16"),
             ("try", "--attention-backend auto")],
        )  # fmt: skip
    if block_size % PAGE:
        raise UsageError(
            f"flash-attn does not serve a KV cache in blocks of {block_size} positions",
            [("needed", f"a block size that {PAGE} divides"), ("try", "--attention-backend auto")],
        )
    return FlashAttn(*functions).table(base, getattr(library, "__version__", ""))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Step:
    """What both functions take."""

    function: Any
    tables_SB: Tensor
    """int32."""
    window: int | None

    def options(self, scale: float) -> dict[str, Any]:
        # Causal is aligned with the last keys; a window counts the token itself, flash-attn what is to its left.
        size = (-1, -1) if self.window is None else (self.window - 1, 0)
        return {"softmax_scale": scale, "causal": True, "window_size": size, "block_table": self.tables_SB}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SingleTokens(_Step):
    """A step in which each sequence brings one token."""

    lengths_S: Tensor
    """int32."""

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """See ``AttentionPlan``."""
        mixed_T1HE: Tensor = self.function(
            q_THE[:, None], keys_NPKE, values_NPKE, cache_seqlens=self.lengths_S, **self.options(scale)
        )
        return mixed_T1HE[:, 0]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Chunks(_Step):
    """Any other step."""

    query_starts_S: Tensor
    """int32, S + 1."""
    key_starts_S: Tensor
    """int32, S + 1: where keys would start if they lay one after another."""
    most_queries: int
    most_keys: int

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """See ``AttentionPlan``."""
        mixed_THE: Tensor = self.function(
            q_THE,
            keys_NPKE,
            values_NPKE,
            self.query_starts_S,
            self.key_starts_S,
            self.most_queries,
            self.most_keys,
            **self.options(scale),
        )
        return mixed_THE


@dataclass(frozen=True, slots=True, eq=False)
class FlashAttn:
    """flash-attn's two functions over pages."""

    with_kvcache: Any
    """``flash_attn_with_kvcache``."""
    varlen: Any
    """``flash_attn_varlen_func``."""

    def table(self, base: Ops, version: str = "") -> Ops:
        """``base`` with this attention."""
        name = f"{base.name.split(',')[0]}, attention by flash-attn {version}".rstrip()
        return replace(base, name=name, capturable=True, plan_attention=self.plan_attention, fix_attention=None)

    def plan_attention(self, batch: Batch, block_size: int, window: int | None) -> AttentionPlan:
        """Of any step; of one of single tokens nothing is taken from the host."""
        tables_SB, device = batch.block_tables_SB.int(), batch.block_tables_SB.device
        if batch.decode_only:
            lengths_S = (batch.positions_T + 1).int()
            return SingleTokens(function=self.with_kvcache, tables_SB=tables_SB, window=window, lengths_S=lengths_S)
        starts = torch.tensor(batch.query_starts, dtype=torch.int32)
        lengths = torch.tensor(batch.context_lens, dtype=torch.int32)
        return Chunks(
            function=self.varlen,
            tables_SB=tables_SB,
            window=window,
            query_starts_S=starts.to(device),
            key_starts_S=torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device),
            most_queries=int(starts.diff().max()),
            most_keys=max(batch.context_lens),
        )
