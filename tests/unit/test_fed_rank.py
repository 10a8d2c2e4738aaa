"""A rank that is fed: which group brings a piece, how long it may take, and what is only thrown away."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from checkpoint_files import SMALL, random_tensors
from refit_harness import Rank, cold_digest
from torch import Tensor

from gtp_serve.errors import UpdateRefused
from gtp_serve.refit.fed import Take
from gtp_serve.refit.orders import FedOrder, Piece
from gtp_serve.refit.staging import Sources
from gtp_serve.refit.transports.foreign import ForeignGroups, Patience

TENSORS = random_tensors(SMALL, 2)


class Groups(ForeignGroups):
    """Groups ``a`` and ``b``, whose trainers have every tensor."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(0, "cpu")
        self.tensors, self.asked, self.left = tensors, list[str](), list[float]()

    def get(self, name: str) -> Groups:  # type: ignore[override]
        if name not in ("a", "b"):
            raise UpdateRefused(f"there is no group '{name}'", code="group-unknown")
        self.asked.append(name)
        return self

    def receive(self, piece: Piece, take: Take, patience: Patience) -> int:
        self.left.append(patience.left())
        for index, name in enumerate(piece.names):
            take(index, self.tensors[name])
        return sum(self.tensors[name].nbytes for name in piece.names)


@pytest.fixture
def groups() -> Groups:
    return Groups(TENSORS)


@pytest.fixture
def rank(groups: Groups) -> Iterator[Rank]:
    rank = Rank(sources=Sources(disk=None, stream=None, foreign=groups))  # type: ignore[arg-type]
    rank.load(1)
    yield rank
    rank.weights.close()


def pieces(*names: str) -> list[Piece]:
    """One half of the tensors for each group."""
    known = list(TENSORS)
    return [
        Piece(
            names=tuple(known[at :: len(names)]),
            dtypes=("bfloat16",) * len(known[at :: len(names)]),
            shapes=tuple(tuple(TENSORS[one].shape) for one in known[at :: len(names)]),
            group=name,
        )
        for at, name in enumerate(names)
    ]


def test_each_piece_comes_through_its_own_group_or_the_orders(rank: Rank, groups: Groups) -> None:
    rank.stage("u", FedOrder(group="a"))
    for piece in pieces("", "b", "a"):
        rank.weights.feed("u", piece)
    rank.weights.end_feed("u")
    assert rank.vote("u").error is None
    assert groups.asked == ["a", "b", "a"]
    assert rank.weights.commit("u", "2") == cold_digest(SMALL, 2)


def test_a_group_that_was_not_joined_is_told_by_name(rank: Rank) -> None:
    rank.stage("u", FedOrder(group="c"))
    rank.weights.feed("u", pieces("")[0])
    vote = rank.vote("u")
    assert vote.error is not None
    assert vote.error[:2] == ("group-unknown", "there is no group 'c'")
    assert not vote.touched


def test_each_piece_gives_the_update_its_full_time_again(rank: Rank, groups: Groups) -> None:
    rank.stage("u", FedOrder(group="a"), seconds=5.0)
    for number, piece in enumerate(pieces("a", "b"), 1):
        time.sleep(0.4)
        rank.weights.feed("u", piece)
        rank.fed("u", number)
    rank.weights.end_feed("u")
    assert rank.vote("u").error is None
    assert min(groups.left) > 4.7


def test_what_is_thrown_away_touches_nothing_and_can_never_be_committed(rank: Rank) -> None:
    before = rank.weights.checksum()
    rank.stage("u", FedOrder(group="a", discard=True), memory="inplace")
    rank.weights.feed("u", pieces("a")[0])
    rank.fed("u", 1)
    rank.weights.end_feed("u")
    vote = rank.vote("u")
    assert vote.error is not None
    assert not vote.touched
    with pytest.raises(UpdateRefused):
        rank.weights.commit("u", "2")
    assert rank.weights.checksum() == before
