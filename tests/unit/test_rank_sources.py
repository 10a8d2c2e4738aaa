"""One rank takes weights from every kind of source; what it tells of its parameters, and how it sleeps."""

from __future__ import annotations

import gc
import threading
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from checkpoint_files import SMALL, random_tensors
from parity.model_harness import TensorSource
from refit_harness import (
    Gate,
    Rank,
    SourceWith,
    cold_digest,
    memory_order,
    resident,
    slowly,
    weight_memory,
)
from torch import Tensor

from gtp_serve.errors import UpdateFailed, UpdateRefused
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.orders import DiskOrder, FedOrder, GroupOrder, JoinGroup, MemoryOrder, Piece, StageOrder
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.staging import Sources
from gtp_serve.refit.transports.foreign import ForeignGroups, Patience
from gtp_serve.refit.transports.group import GroupReceiver, Received, replace_order
from gtp_serve.refit.verify import rank_digest


@pytest.fixture
def rank() -> Rank:
    rank = Rank()
    rank.load(1)
    return rank


# -- other sources ---------------------------------------------------------------------------------


def test_shared_memory_is_staged_and_its_flipped_bit_is_found(rank: Rank) -> None:
    order, memory = memory_order(random_tensors(SMALL, 2))
    rank.stage("u", order)
    assert rank.vote("u").error is None
    assert rank.weights.commit("u", "2") == cold_digest(SMALL, 2)
    memory.close()

    first = order.shards[0]
    wrong = MemoryOrder(
        segments=order.segments, shards=(msgspec.structs.replace(first, digest="0" * 32), *order.shards[1:])
    )
    again, memory = memory_order(random_tensors(SMALL, 2))
    rank.stage("bad", MemoryOrder(segments=again.segments, shards=wrong.shards))
    error = rank.vote("bad").error
    assert error is not None
    assert error[0] == "digest-mismatch"
    assert error[1].startswith(first.shard.key)
    memory.close()


@pytest.mark.parametrize("what", ["another digest", "another name"])
def test_memory_of_an_update_that_failed_is_let_go_of_without_the_collectors_help(rank: Rank, what: str) -> None:
    """It may be a whole model, and the collector comes late or, in a process that has frozen its objects, never."""
    order, memory = memory_order(random_tensors(SMALL, 2))
    first = order.shards[0]
    if what == "another digest":
        bad = msgspec.structs.replace(first, digest="0" * 32)
    else:
        span = replace(first.shard.spans[0], name="other")
        bad = msgspec.structs.replace(first, shard=replace(first.shard, spans=(span,)))
    gc.collect()
    gc.disable()
    try:
        before = weight_memory()
        rank.stage("bad", MemoryOrder(segments=order.segments, shards=(bad, *order.shards[1:])))
        assert rank.vote("bad").error is not None
        deadline = time.monotonic() + 20
        while weight_memory() != before and time.monotonic() < deadline:
            time.sleep(0.01)  # the thread that voted is about to end
        assert weight_memory() == before
    finally:
        gc.enable()
        memory.close()


def test_orders_that_need_a_transport_are_refused_without_one(rank: Rank) -> None:
    group = GroupOrder(trainers=1)
    with pytest.raises(UpdateRefused, match="no weights over torch"):
        rank.weights.prepare(group, 1.0)
    with pytest.raises(UpdateRefused, match="joins no other trainers' groups"):
        rank.weights.join_group(JoinGroup(name="g", host="h", port=1, rank_offset=1, world_size=2, backend="gloo"))
    for update, order in (("g", group), ("f", FedOrder(group="g"))):
        rank.stage(update, order)
        assert (rank.vote(update).error or ("",))[0] == "not-supported"
    disk = DiskOrder(path="x")
    assert rank.weights.prepare(disk, 1.0) is disk


class OneTrainer(GroupReceiver):
    """A trainer whose transfer goes well, or ends with an error before or after the first byte."""

    def __init__(self, tensors: dict[str, Tensor], fails: str = "") -> None:
        super().__init__(rank=0, size=1)
        self.tensors, self.fails, self.closed = tensors, fails, 0

    def open(self, order: GroupOrder, host: str, deadline: float) -> GroupOrder:
        return replace_order(order, host, 4242)

    def receive(self, order: GroupOrder, **given: Any) -> Received:
        if self.fails == "before":
            raise UpdateFailed("trainer rank 0 is gone", code="peer-lost")
        given["writing"]()
        if self.fails == "after":
            raise UpdateFailed("trainer rank 0 is gone", code="peer-lost")
        source = TensorSource(self.tensors)
        plan = build_plan(source.shards(), [t.shard for t in given["targets"]], given["shapes"])
        received = apply_plan(plan, source, given["targets"])
        return Received(source_bytes=received, seconds={"open": 1.0, "plan": 2.0, "transfer": 3.0})

    def close(self) -> None:
        self.closed += 1


def rank_with(trainer: OneTrainer) -> Rank:
    rank = Rank(sources=Sources(disk=None, stream=None, group=trainer, meeting_host="10.0.0.7"))  # type: ignore[arg-type]
    rank.load(1)
    return rank


def test_store_of_a_transfer_is_opened_on_the_one_address_and_closed_when_it_is_not_used() -> None:
    trainer = OneTrainer({})
    rank = rank_with(trainer)

    opened = rank.weights.prepare(GroupOrder(trainers=2), 5.0)
    rank.weights.drop("u")

    assert opened == GroupOrder(trainers=2, host="10.0.0.7", port=4242)
    assert trainer.closed == 1


def test_transfer_from_a_trainer_is_staged_with_its_own_times() -> None:
    rank = rank_with(OneTrainer(random_tensors(SMALL, 2)))

    rank.stage("u", GroupOrder(trainers=1, host="h", port=1))

    vote = rank.vote("u")
    assert {name: vote.seconds[name] for name in ("open", "plan", "transfer")} == {
        "open": 1.0,
        "plan": 2.0,
        "transfer": 3.0,
    }
    assert rank.weights.commit("u", "2") == cold_digest(SMALL, 2)


@pytest.mark.parametrize(("fails", "touched"), [("before", False), ("after", True)])
def test_trainer_that_is_lost_touches_weights_only_once_bytes_have_come(fails: str, touched: bool) -> None:
    rank = rank_with(OneTrainer({}, fails))

    rank.stage("u", GroupOrder(trainers=1, host="h", port=1), memory="inplace")

    vote = rank.vote("u")
    assert vote.error == ("peer-lost", "trainer rank 0 is gone", ())
    assert vote.touched == touched


class OneGroup(ForeignGroups):
    """A group whose trainer broadcasts what it is asked for."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(0, "cpu")
        self.tensors = tensors

    def get(self, name: str) -> OneGroup:  # type: ignore[override]
        return self

    def receive(self, piece: Piece, take: object, patience: Patience) -> int:
        for index, name in enumerate(piece.names):
            take(index, self.tensors[name])  # type: ignore[operator]
        return sum(self.tensors[name].nbytes for name in piece.names)


def fed_rank(seed: int) -> tuple[Rank, list[Piece]]:
    tensors = random_tensors(SMALL, seed)
    rank = Rank(sources=Sources(disk=None, stream=None, foreign=OneGroup(tensors)))  # type: ignore[arg-type]
    rank.load(1)
    names = list(tensors)
    groups = [names[:3], names[3:10], names[10:]]
    pieces = [
        Piece(
            names=tuple(group),
            dtypes=("bfloat16",) * len(group),
            shapes=tuple(tuple(tensors[name].shape) for name in group),
        )
        for group in groups
    ]
    return rank, pieces


def test_fed_update_is_told_piece_by_piece_and_committed_when_all_have_come() -> None:
    rank, pieces = fed_rank(2)
    rank.stage("u", FedOrder(group="g"))
    for number, piece in enumerate(pieces, 1):
        rank.weights.feed("u", piece)
        rank.fed("u", number)
    assert rank.votes("u") == []

    rank.weights.end_feed("u")

    assert rank.vote("u").error is None
    assert rank.weights.commit("u", "2") == cold_digest(SMALL, 2)


def test_fed_update_that_ends_early_names_what_never_came() -> None:
    rank, pieces = fed_rank(2)
    rank.stage("u", FedOrder(group="g"))
    rank.weights.feed("u", pieces[0])
    rank.weights.end_feed("u")

    error = rank.vote("u").error
    assert error is not None
    assert error[0] == "tensors-missing"
    assert pieces[1].names[0] in error[1]
    with pytest.raises(UpdateRefused, match="not staging update u"):
        rank.weights.feed("u", pieces[1])


def test_fed_update_can_be_dropped_while_it_waits() -> None:
    rank, _ = fed_rank(2)
    rank.stage("u", FedOrder(group="g"))
    time.sleep(0.1)

    rank.weights.drop("u")

    assert (rank.vote("u").error or ("",))[0] == "dropped"


# -- looking and sleeping --------------------------------------------------------------------------


def test_tensor_is_read_as_boxes_with_their_values(rank: Rank) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    expected = random_tensors(SMALL, 1)[name].float()

    (part,) = rank.weights.read_tensor(name, 3)

    assert (part.start, part.shape) == ((0, 0), (3, SMALL.hidden_size))
    assert torch.equal(torch.tensor(part.values).reshape(part.shape), expected[:3])
    assert rank.weights.read_tensor(name, 0) == []
    (whole,) = rank.weights.read_tensor(name, 10**9)
    assert whole.shape == tuple(expected.shape)
    with pytest.raises(UpdateRefused, match="no tensor nonsense"):
        rank.weights.read_tensor("nonsense", 1)


def test_released_weights_are_zero_until_an_update_fills_them(rank: Rank) -> None:
    rank.push("a", 2)

    rank.weights.release(["weights"])

    assert all(int(target.tensor.count_nonzero()) == 0 for target in rank.store.live)
    with pytest.raises(UpdateRefused):
        rank.weights.roll_back()
    rank.weights.restore(["weights"])
    assert rank.push("b", 3) == cold_digest(SMALL, 3)


def test_released_cache_gives_its_memory_back_and_keeps_its_address() -> None:
    cache = torch.ones(8 << 20)
    rank = Rank(caches=[cache])
    rank.load(1)
    digest, address, before = rank.weights.checksum(), cache.data_ptr(), resident()

    rank.weights.release(["kv_cache"])

    assert before - resident() > 30 << 20
    assert rank.weights.checksum() == digest
    rank.weights.restore(["kv_cache"])
    cache.fill_(2.0)
    assert (cache.data_ptr(), float(cache.sum())) == (address, 2.0 * (8 << 20))


def test_nothing_is_released_while_an_update_is_staged(rank: Rank) -> None:
    gate = Gate(3)
    rank.disk["u"] = lambda: SourceWith(random_tensors(SMALL, 2), gate)
    rank.stage("u", DiskOrder(path="u"))
    assert gate.reached.wait(10)

    with pytest.raises(UpdateRefused, match="still staging update u"):
        rank.weights.release(["weights"])
    gate.open()
    assert rank.vote("u").error is None


def test_close_ends_what_is_under_way(rank: Rank) -> None:
    rank.disk["u"] = lambda: SourceWith(random_tensors(SMALL, 2), slowly(0.05))
    rank.stage("u", DiskOrder(path="u"))

    rank.weights.close()

    assert not any(thread.name == "stage-weights" for thread in threading.enumerate())


def test_reader_that_has_gone_does_not_stop_the_staging(rank: Rank) -> None:
    rank.push("warm", 2)
    rank.weights._report = lambda report: (_ for _ in ()).throw(BrokenPipeError())
    rank.disk["u"] = lambda: TensorSource(random_tensors(SMALL, 3))

    rank.weights.stage(
        StageOrder(update="u", version="3", order=DiskOrder(path="u"), memory="staged", deadline_seconds=10)
    )
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            digest = rank.weights.commit("u", "3")
            break
        except UpdateRefused:
            time.sleep(0.01)

    assert digest == cold_digest(SMALL, 3) == rank_digest(rank.store.live)
