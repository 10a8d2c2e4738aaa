"""Small decoders of native ops, and batches for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from fakes import TINY_MODEL
from random_decoder import random_decoder

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.table import Ops

DENSE = replace(TINY_MODEL, num_layers=3, hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=8, ffn_size=80)
MODELS = {
    "dense": DENSE,
    "biased, with norms of heads": replace(DENSE, qkv_bias=True, qk_norm=True),
    "windowed": replace(DENSE, sliding_window=7),
    "wide": replace(DENSE, num_layers=2, hidden_size=1304),
    "mixture": replace(DENSE, moe=MoeConfig(num_experts=6, top_k=2, ffn_size=24)),
    "mixture with a shared expert": replace(
        DENSE, moe=MoeConfig(num_experts=6, top_k=2, ffn_size=24, shared_ffn_size=40, shared_gate=True)
    ),
}
BLOCK, BLOCKS = 4, 64


def make(model: ModelConfig, dtype: torch.dtype, ops: Ops, blocks: int = BLOCKS) -> tuple[Decoder, KVPool]:
    return random_decoder(model, dtype, ops, blocks=blocks, block_size=BLOCK)


def batch_of(parts: Sequence[tuple[int, int, int]], width: int = 8, blocks: int = BLOCKS) -> Batch:
    """Of each part: sequence (which owns ``width`` blocks), first position, tokens."""
    tables = [[(1 + sequence * width + b) % blocks for b in range(width)] for sequence, _, _ in parts]
    tokens, positions, slots, starts = [], [], [], [0]
    for (sequence, first, count), table in zip(parts, tables, strict=True):
        for at in range(first, first + count):
            tokens.append((sequence * 31 + at * 7) % DENSE.vocab_size)
            positions.append(at)
            slots.append(table[at // BLOCK] * BLOCK + at % BLOCK)
        starts.append(len(tokens))
    return Batch(
        token_ids_T=torch.tensor(tokens),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        query_starts=tuple(starts),
        context_lens=tuple(first + count for _, first, count in parts),
        block_tables_SB=torch.tensor(tables),
        logit_rows_S=torch.tensor(starts[1:]) - 1,
    )
