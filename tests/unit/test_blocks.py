"""Block accounting and the pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import TINY_MODEL

from gtp_serve.budget import BLOCK_SIZE, block_bytes
from gtp_serve.errors import DoesNotFit
from gtp_serve.kv.blocks import BlockAllocator, blocks_for
from gtp_serve.kv.pool import KVPool


def make_pool(num_blocks: int) -> KVPool:
    return KVPool(
        num_layers=3,
        num_blocks=num_blocks,
        block_size=4,
        num_kv_heads=1,
        head_dim=8,
        dtype=torch.bfloat16,
        device="cpu",
    )


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_a_started_block_counts_whole(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


def test_blocks_come_lowest_first_and_can_be_used_again() -> None:
    allocator = BlockAllocator(4)

    first = allocator.allocate(3)
    allocator.release(first)
    second = allocator.allocate(2)

    assert first == [0, 1, 2]
    assert second == [0, 1]
    assert (allocator.num_free, allocator.num_used) == (2, 2)


def test_a_shared_block_is_free_when_the_last_holder_lets_go() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(1)
    allocator.retain(blocks)

    allocator.release(blocks)
    held_once = allocator.holders(0)
    allocator.release(blocks)

    assert held_once == 1
    assert allocator.num_used == 0
    allocator.check_invariants()


def test_asking_for_too_many_blocks_changes_nothing() -> None:
    allocator = BlockAllocator(2)

    with pytest.raises(ValueError, match="3 blocks asked for, 2 blank"):
        allocator.allocate(3)

    assert allocator.num_free == 2


@pytest.mark.parametrize("blocks", [[0, 0], [1], [-1], [2]])
def test_letting_go_of_what_is_not_held_changes_nothing(blocks: list[int]) -> None:
    allocator = BlockAllocator(2)
    allocator.allocate(1)

    with pytest.raises(ValueError, match="is not held"):
        allocator.release(blocks)

    assert allocator.num_used == 1
    allocator.check_invariants()


def test_a_damaged_allocator_says_so() -> None:
    allocator = BlockAllocator(2)
    allocator._blank.append(0)

    with pytest.raises(AssertionError, match="blank twice"):
        allocator.check_invariants()


def test_the_pool_takes_what_the_budget_says() -> None:
    pool = make_pool(num_blocks=10 * BLOCK_SIZE // 4)

    model = replace(TINY_MODEL, num_layers=3, head_dim=8)
    assert pool.num_bytes == 10 * block_bytes(model, "bfloat16")
    assert pool.num_bytes == sum(t.nbytes for t in (*pool.keys, *pool.values))


def test_the_pool_has_a_zeroed_tensor_of_keys_and_of_values_for_each_layer() -> None:
    pool = make_pool(num_blocks=10)

    assert [t.shape for t in (*pool.keys, *pool.values)] == [(10, 4, 1, 8)] * 6
    assert len({t.data_ptr() for t in (*pool.keys, *pool.values)}) == 6
    assert all(t.is_contiguous() and not t.any() for t in (*pool.keys, *pool.values))


def test_a_pool_that_does_not_fit_says_how_much_it_needs() -> None:
    with pytest.raises(DoesNotFit, match=r"GiB on cpu"):
        make_pool(num_blocks=1 << 48)
