"""Random lives of a block allocator against a counting model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from gtp_serve.kv.blocks import BlockAllocator


class BlockMachine(RuleBasedStateMachine):
    """Holders are lists of blocks; the model is a count for each block."""

    holdings = Bundle("holdings")

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.allocator = BlockAllocator(num_blocks)
        self.model: Counter[int] = Counter()

    @rule(target=holdings, count=st.integers(0, 13))
    def allocate(self, count: int) -> object:
        if count > self.allocator.num_free:
            with pytest.raises(ValueError, match="asked for"):
                self.allocator.allocate(count)
            return multiple()
        blocks = self.allocator.allocate(count)
        assert len(set(blocks)) == count
        assert not any(self.model[block] for block in blocks)
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

    @rule(block=st.integers(-2, 14))
    def release_what_is_not_held(self, block: int) -> None:
        times = self.model[block] + 1
        with pytest.raises(ValueError, match="not held"):
            self.allocator.release([block] * times)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.allocator.check_invariants()
        for block in range(self.allocator.num_blocks):
            assert self.allocator.holders(block) == self.model[block]
        assert self.allocator.num_used == sum(1 for count in self.model.values() if count > 0)


BlockMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
test_any_life_of_an_allocator_agrees_with_counting = BlockMachine.TestCase
