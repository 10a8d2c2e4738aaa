"""Which KV blocks are free, and how often each other one is held.  No torch.

A block is ``block_size`` consecutive token positions in every layer's K and V.  It may be held by several
sequences (shared prefixes).  When the last holder lets go it is free again: blank, or idle if its content is
kept for whoever comes with the same prefix (``kv.prefix``).  The tensors live in ``kv.pool``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from gtp_serve.config import CacheConfig

SCRATCH_BLOCKS = 1
"""Blocks that a pool under captured steps has beyond those that are handed out: the last ones."""


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold this many tokens."""
    return -(-num_tokens // block_size)


def cache_tokens(cache: CacheConfig) -> int:
    """Tokens that the whole cache holds."""
    return cache.num_blocks * cache.block_size


class BlockAllocator:
    """Reference counts of ``num_blocks`` blocks, ids 0 to ``num_blocks - 1``.

    Asking for more than is there, or letting go of what is not held, is a bug of the caller: ValueError, and
    nothing has changed.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"{num_blocks} KV blocks")
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._kept = [False] * num_blocks
        # A stack with the lowest id on top: a lightly used cache stays in few memory pages.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Longest idle first."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, blank or idle."""
        return len(self._blank) + len(self._idle)

    @property
    def num_blank(self) -> int:
        """Blocks that nobody holds and whose content nobody will ask for."""
        return len(self._blank)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    def holders(self, block: int) -> int:
        """How many hold this block."""
        return self._holders[block]

    def is_idle(self, block: int) -> bool:
        """Whether nobody holds this block and its content is kept."""
        return block in self._idle

    def allocate(self, count: int) -> list[int]:
        """``count`` blank blocks, held once each."""
        if not 0 <= count <= len(self._blank):
            raise ValueError(f"{count} blocks asked for, {len(self._blank)} blank")
        blocks = [self._blank.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def retain(self, blocks: Iterable[int]) -> None:
        """Hold blocks that are held or idle once more each."""
        blocks = list(blocks)
        for block in blocks:
            if not 0 <= block < self.num_blocks or not (self._holders[block] or block in self._idle):
                raise ValueError(f"block {block} is not held and its content is not kept")
        for block in blocks:
            self._holders[block] += 1
            self._idle.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Let go of each block once (a block may be listed as often as it is held).

        Of those that become idle together the last one listed is evicted first: with blocks in the order of
        their positions, a prefix outlives what follows it.
        """
        blocks = list(blocks)
        self._require_held(blocks)
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._put_back(block)

    def keep(self, block: int) -> None:
        """Keep a held block's content after its last holder."""
        self._require_held([block])
        self._kept[block] = True

    def evict(self, count: int) -> list[int]:
        """Make the ``count`` blocks that have been idle for longest blank; returns which."""
        if not 0 <= count <= len(self._idle):
            raise ValueError(f"{count} blocks to evict, {len(self._idle)} idle")
        blocks = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._kept[block] = False
            self._blank.append(block)
        return blocks

    def forget(self, blocks: Iterable[int]) -> None:
        """Do not keep these blocks' content (any longer)."""
        for block in blocks:
            self._kept[block] = False
            if block in self._idle:
                del self._idle[block]
                self._blank.append(block)

    def _put_back(self, block: int) -> None:
        if self._kept[block]:
            self._idle[block] = None
        else:
            self._blank.append(block)

    def _require_held(self, blocks: list[int]) -> None:
        left = dict.fromkeys(blocks, 0)
        for block in blocks:
            left[block] += 1
            if not 0 <= block < self.num_blocks or self._holders[block] < left[block]:
                raise ValueError(f"block {block} is not held {left[block]} times")

    def check_invariants(self) -> None:
        """Blank, idle and held blocks are disjoint and complete.

        :raises AssertionError: when they are not (also under ``python -O``).
        """
        blank = set(self._blank)
        if len(blank) != len(self._blank):
            raise AssertionError("a block is blank twice")
        for block, holders in enumerate(self._holders):
            places = (holders > 0) + (block in blank) + (block in self._idle)
            if holders < 0 or places != 1:
                raise AssertionError(f"block {block} with {holders} holders is in {places} places")
            if holders == 0 and self._kept[block] != (block in self._idle):
                raise AssertionError(f"block {block} is kept: {self._kept[block]}, and not where it belongs")
