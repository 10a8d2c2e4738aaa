"""Which KV blocks are free, and how often each other one is held.  No torch.

A block is ``block_size`` consecutive token positions in every layer's K and V.  A block may be held by
several sequences (shared prefixes); it is free again when the last holder releases it.  The tensors live in
``kv.pool``.
"""

from __future__ import annotations

from collections.abc import Iterable

from gtp_serve.config import DTYPE_BYTES, CacheConfig, DType, ModelConfig


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_size)


def bytes_per_block(model: ModelConfig, *, block_size: int, dtype: DType, tp: int = 1) -> int:
    """Bytes of one block over all layers, K and V together, on one of ``tp`` ranks."""
    kv_heads = max(1, model.num_kv_heads // tp)
    return 2 * model.num_layers * block_size * kv_heads * model.head_dim * DTYPE_BYTES[dtype]


def cache_tokens(cache: CacheConfig) -> int:
    """Tokens that the whole cache holds."""
    return cache.num_blocks * cache.block_size


class BlockAllocator:
    """Reference counts of ``num_blocks`` blocks, ids 0 to ``num_blocks - 1``.

    Asking for more than is free, or letting go of what is not held, is a bug of the caller: ValueError, and
    nothing has changed.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"{num_blocks} KV blocks")
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        # A stack with the lowest id on top: a lightly used cache stays in few memory pages.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - len(self._free)

    def holders(self, block: int) -> int:
        """How many hold this block."""
        return self._holders[block]

    def allocate(self, count: int) -> list[int]:
        """``count`` free blocks, held once each."""
        if not 0 <= count <= len(self._free):
            raise ValueError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are held already once more each."""
        blocks = list(blocks)
        self._require_held(blocks)
        for block in blocks:
            self._holders[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of each block once (a block may be listed as often as it is held)."""
        blocks = list(blocks)
        self._require_held(blocks)
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free.append(block)

    def _require_held(self, blocks: list[int]) -> None:
        left = dict.fromkeys(blocks, 0)
        for block in blocks:
            left[block] += 1
            if not 0 <= block < self.num_blocks or self._holders[block] < left[block]:
                raise ValueError(f"block {block} is not held {left[block]} times")

    def check_invariants(self) -> None:
        """Free and held blocks are disjoint and complete.

        :raises AssertionError: when they are not (also under ``python -O``).
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is free twice")
        for block, holders in enumerate(self._holders):
            if holders < 0 or (holders == 0) != (block in free):
                raise AssertionError(f"block {block} has {holders} holders and free is {block in free}")
