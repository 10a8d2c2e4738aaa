"""Random lives of a block allocator against a counting model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gtp_serve.kv.blocks import BlockAllocator


class BlockMachine(RuleBasedStateMachine):
    """Holders are lists of blocks; the model is a count for each block, and the order in which kept ones fell idle."""

    holdings = Bundle("holdings")

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.model: Counter[int] = Counter()
        self.kept: set[int] = set()
        self.idle: list[int] = []

    @rule(target=holdings, count=st.integers(0, 13))
    def allocate(self, count: int) -> object:
        if count > self.allocator.num_blank:
            with pytest.raises(ValueError, match="asked for"):
                self.allocator.allocate(count)
            return multiple()
        blocks = self.allocator.allocate(count)
        assert len(set(blocks)) == count
        assert not any(self.model[block] or block in self.kept for block in blocks)
        self.model.update(blocks)
        return blocks

    @rule(target=holdings, blocks=holdings, keep=st.integers(0, 12))
    def share_a_prefix(self, blocks: list[int], keep: int) -> list[int]:
        shared = blocks[:keep]
        self.allocator.retain(shared)
        self.model.update(shared)
        return list(shared)

    @rule(blocks=consumes(holdings))
    def release(self, blocks: list[int]) -> None:
        self.allocator.release(blocks)
        self.model.subtract(blocks)
        fell = [block for block in reversed(blocks) if not self.model[block] and block in self.kept]
        self.idle += dict.fromkeys(fell)

    @rule(blocks=holdings, at=st.integers(0, 12))
    def keep(self, blocks: list[int], at: int) -> None:
        for block in blocks[at : at + 1]:
            self.allocator.keep(block)
            self.kept.add(block)

    @rule(target=holdings, count=st.integers(1, 12))
    def come_back_for_idle_blocks(self, count: int) -> list[int]:
        blocks = self.idle[:count]
        self.allocator.retain(blocks)
        self.model.update(blocks)
        self.idle = self.idle[count:]
        return blocks

    @rule(count=st.integers(0, 13))
    def evict(self, count: int) -> None:
        if count > len(self.idle):
            with pytest.raises(ValueError, match="to evict"):
                self.allocator.evict(count)
            return
        assert self.allocator.evict(count) == self.idle[:count]
        self.kept -= set(self.idle[:count])
        self.idle = self.idle[count:]

    @rule(block=st.integers(0, 12))
    def forget(self, block: int) -> None:
        if block < self.allocator.num_blocks:
            self.allocator.forget([block])
            self.kept.discard(block)
            self.idle = [other for other in self.idle if other != block]

    @rule(block=st.integers(-2, 14))
    def release_what_is_not_held(self, block: int) -> None:
        times = self.model[block] + 1
        with pytest.raises(ValueError, match="not held"):
            self.allocator.release([block] * times)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.allocator.check_invariants()
        assert set(filter(self.allocator.is_idle, range(self.allocator.num_blocks))) == set(self.idle)
        assert self.allocator.num_free == self.allocator.num_blank + len(self.idle)
        for block in range(self.allocator.num_blocks):
            assert self.allocator.holders(block) == self.model[block]
        assert self.allocator.num_used == sum(1 for count in self.model.values() if count > 0)


BlockMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_any_life_of_an_allocator_agrees_with_counting = BlockMachine.TestCase
