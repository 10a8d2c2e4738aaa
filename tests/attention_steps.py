"""Random steps of chunks and single tokens, and caches in which a wrong block shows."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from gtp_serve.ops.batch import Batch

BLOCKS = 60


def step_of(rng: random.Random, parts: list[tuple[int, int]], block: int) -> Batch:
    """Sequences with (new tokens, length after the step) in shuffled blocks; tables are wider than they must be."""
    width = max(-(-length // block) for _, length in parts) + 1
    free = rng.sample(range(BLOCKS), BLOCKS)
    tables = [[free.pop() for _ in range(-(-length // block))] for _, length in parts]
    positions = [list(range(length - count, length)) for count, length in parts]
    starts = [0]
    for count, _ in parts:
        starts.append(starts[-1] + count)
    slots = [t[p // block] * block + p % block for t, row in zip(tables, positions, strict=True) for p in row]
    return Batch(
        token_ids_T=torch.tensor([rng.randrange(50) for _ in slots]),
        positions_T=torch.tensor([p for row in positions for p in row]),
        slots_T=torch.tensor(slots),
        query_starts=tuple(starts),
        context_lens=tuple(length for _, length in parts),
        block_tables_SB=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        logit_rows_S=torch.tensor(starts[1:]) - 1,
    )


def random_step(rng: random.Random, block: int, *, decode: bool) -> Batch:
    parts: list[tuple[int, int]] = []
    for _ in range(rng.randint(1, 6)):
        count = 1 if decode or rng.random() < 0.4 else rng.randint(1, 2 * block)
        parts.append((count, count + rng.choice([0, 0, rng.randint(0, 4 * block), block - 1, block])))
    return step_of(rng, parts, block)


def cache_of(
    batch: Batch, block: int, kv_heads: int, size: int, seed: int, *, unowned: float = torch.nan
) -> tuple[Tensor, Tensor]:
    """Whatever no sequence owns is ``unowned``: a wrong block shows."""
    generator = torch.Generator().manual_seed(seed)
    caches = []
    for _ in range(2):
        cache = torch.full((BLOCKS, block, kv_heads, size), unowned)
        for table, length in zip(batch.block_tables_SB, batch.context_lens, strict=True):
            at = torch.arange(length)
            slots = table[at // block] * block + at % block
            cache.view(-1, kv_heads, size)[slots] = torch.randn(length, kv_heads, size, generator=generator)
        caches.append(cache)
    return caches[0], caches[1]
