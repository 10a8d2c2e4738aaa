"""Whoever holds a ticket has its memory alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_model import Sizes, run_small
from training_ranks import on_threads, thread_groups

from gtp_serve.layout.gtp import Grid
from gtp_serve.training.gather import GatherChain
from gtp_serve.training.pool import BufferPool, Ticket

CPU = torch.device("cpu")
ASKED = st.tuples(st.sampled_from([(4, 3), (3, 4), (2, 5), (10,)]), st.sampled_from([torch.float32, torch.bfloat16]))
#: Ask for memory, or give back the n-th of what is held.
MOVES = st.lists(st.one_of(ASKED, st.integers(0, 5)), max_size=60)


@given(MOVES)
def test_no_two_tickets_share_memory_and_memory_is_used_again(moves: list[object]) -> None:
    pool, held = BufferPool(), dict[int, Ticket]()
    most = 0
    for number, move in enumerate(moves):
        if isinstance(move, tuple):
            ticket = pool.take(move[0], move[1], CPU)
            ticket.tensor.fill_(number % 100)
            held[number] = ticket
        elif held:
            pool.give_back(held.pop(list(held)[int(str(move)) % len(held)]))
        for key, ticket in held.items():
            assert (ticket.tensor == key % 100).all(), "somebody else wrote into it"
        most = max(most, len(held))
        assert pool.lent == len(held)
    kinds = 2 * 2  # sizes 12 and 10, two dtypes
    assert pool.nbytes <= most * kinds * 12 * 4


def test_ticket_cannot_be_used_or_given_back_after_it_was_given_back() -> None:
    pool = BufferPool()
    ticket = pool.take((2, 2), torch.float32, CPU)
    pool.give_back(ticket)

    with pytest.raises(ValueError, match="given back"):
        pool.give_back(ticket)
    with pytest.raises(ValueError, match="given back"):
        _ = ticket.tensor


def test_memory_of_the_same_size_is_used_again_for_another_shape() -> None:
    pool = BufferPool()
    first = pool.take((4, 3), torch.float32, CPU)
    address = first.tensor.data_ptr()
    pool.give_back(first)

    assert pool.take((3, 4), torch.float32, CPU).tensor.data_ptr() == address
    assert pool.take((3, 4), torch.float32, CPU).tensor.data_ptr() != address


class Watched(BufferPool):
    """Notes the memory of each ticket while it is out."""

    def __init__(self) -> None:
        super().__init__()
        self.out: dict[int, Ticket] = {}
        self.most = 0

    def take(self, *asked: object) -> Ticket:
        ticket = super().take(*asked)  # type: ignore[arg-type]
        address = ticket.tensor.data_ptr()
        assert address not in self.out, "memory in flight was lent again"
        self.out[address] = ticket
        self.most = max(self.most, len(self.out))
        return ticket

    def give_back(self, ticket: Ticket) -> None:
        del self.out[ticket.tensor.data_ptr()]
        super().give_back(ticket)


@pytest.mark.parametrize("recompute", [None, True, False])
def test_a_training_step_holds_few_buffers_and_gives_all_of_them_back(recompute: bool | None) -> None:
    """A weight in use, the next one, and the gradients of two steps of reduction with what they receive."""
    groups = thread_groups(Grid(gtp=2), 2)
    chains = [GatherChain() for _ in range(2)]
    for chain in chains:
        chain.pool = chain.reducer.pool = Watched()

    on_threads(
        2,
        lambda rank: run_small(
            groups[rank], rank, sizes=Sizes(), alignment=1, steps=3, chain=chains[rank], recompute=recompute
        ),
    )

    for chain in chains:
        assert isinstance(chain.pool, Watched)
        assert chain.pool.lent == len(chain.pool.out) == 0
        assert chain.pool.most <= 6
        before = chain.pool.nbytes
        chain.pool.clear()
        assert chain.pool.nbytes == 0 < before
