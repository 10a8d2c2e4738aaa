"""Transfers among threads of one process: what leaves the trainer, what is refused, and how one is called off."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transfer_world import MODELS, Pair, engine_ranks, model_bytes, same, state_dict, trainer_ranks

from gtp_serve.errors import LayoutMismatch, UpdateFailed, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Box
from gtp_serve.refit.offer import Offer, TensorOffer
from gtp_serve.refit.orders import GroupOrder
from gtp_serve.refit.transports import group as group_module
from gtp_serve.refit.transports import session as session_module
from gtp_serve.refit.transports.buckets import Bucket, check_digests, plan_exchange
from gtp_serve.refit.transports.group import GroupReceiver
from gtp_serve.refit.transports.send import Sent, send
from gtp_serve.refit.transports.session import IN_FLIGHT, Kept
from gtp_serve.refit.transports.stores import Terms, open_store

SEED = 7


@dataclass
class Outcome:
    trainers: list[Any] = field(default_factory=list)
    engines: list[Any] = field(default_factory=list)
    wrong: list[list[str]] = field(default_factory=list)

    @property
    def sent(self) -> list[Sent]:
        assert all(isinstance(one, Sent) for one in self.trainers), self.trainers
        return self.trainers

    @property
    def errors(self) -> list[str]:
        return [one.message for one in [*self.trainers, *self.engines] if isinstance(one, UpdateFailed)]


def transfer(
    model: str,
    grid: Grid,
    tp: int,
    *,
    bucket_bytes: int = 1 << 20,
    offer: Callable[[Sequence[Pair]], Offer] = TensorOffer,
    change: Callable[[list[list[Pair]]], None] = lambda ranks: None,
    cancelled: Callable[[], bool] = lambda: False,
    seconds: float = 60,
    announce: int = 0,
    silent_seconds: float = 2.0,
    kept: Sequence[Kept | None] = (None,) * 8,
) -> Outcome:
    """All participants in threads.

    :param change: what is wrong with the trainers' shards.
    :param kept: of each trainer rank.
    :param announce: trainers that are waited for and never come.
    """
    config = MODELS[model]
    ranks = trainer_ranks(config, grid, state_dict(config, SEED))
    change(ranks)
    engines = engine_ranks(config, tp)
    receivers = [GroupReceiver(rank=rank, size=tp, silent_seconds=silent_seconds) for rank in range(tp)]
    deadline = time.monotonic() + seconds
    order = receivers[0].open(
        GroupOrder(trainers=len(ranks) + announce, bucket_bytes=bucket_bytes), "127.0.0.1", deadline
    )
    terms = Terms(
        host=order.host, port=order.port, update="u", trainers=order.trainers, engines=tp, backend="gloo",
        bucket_bytes=bucket_bytes, silent_seconds=silent_seconds, deadline=deadline,
    )  # fmt: skip

    def give(rank: int) -> object:
        return send(terms, rank, offer(ranks[rank]), kept=kept[rank])

    def receive(rank: int) -> object:
        return receivers[rank].receive(
            order, update="u", targets=engines[rank], shapes=logical_tensors(config), deadline=deadline,
            cancelled=cancelled,
        )  # fmt: skip

    outcome = Outcome([None] * len(ranks), [None] * tp)
    run_all(
        [
            *(keep(outcome.trainers, rank, partial(give, rank)) for rank in range(len(ranks))),
            *(keep(outcome.engines, rank, partial(receive, rank)) for rank in range(tp)),
        ]
    )
    outcome.wrong = [same(a, b) for a, b in zip(engines, engine_ranks(config, tp, seed=SEED), strict=True)]
    return outcome


def keep(results: list[Any], at: int, part: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        try:
            results[at] = part()
        except UpdateFailed as error:
            results[at] = error

    return run


def run_all(parts: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("gtp", [1, 2, 4, 8])
def test_bytes_that_leave_the_trainer_are_the_unpadded_models(gtp: int, tp: int) -> None:
    """Counted where they are handed to the transport, digests included; the tied head and replicated rows once."""
    outcome = transfer("wide, tied", Grid(gtp=gtp, alignment=128), tp)

    size = model_bytes(MODELS["wide, tied"])
    assert outcome.wrong == [[]] * tp
    assert sum(sent.payload_bytes for sent in outcome.sent) == size
    assert 1 < sum(sent.wire_bytes for sent in outcome.sent) / size <= 1.001


@pytest.mark.parametrize(
    ("model", "grid", "tp"),
    [
        ("moe", Grid(gtp=2, egtp=2, alignment=32), 2),
        ("moe", Grid(tp=2, etp=1, ep=1, egtp=2), 1),
        ("qwen2", Grid(tp=2, gtp=2, pp=2, alignment=16), 4),
        ("llama", Grid(gtp=3), 8),
    ],
)
def test_any_layout_arrives_as_a_cold_load_would_leave_it(model: str, grid: Grid, tp: int) -> None:
    # Eleven participants share one interpreter: none is silent for being slow.
    outcome = transfer(model, grid, tp, bucket_bytes=2048, silent_seconds=20.0)

    assert outcome.errors == []
    assert outcome.wrong == [[]] * tp


def test_a_flipped_bit_in_a_bucket_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    check, seen = group_module.check_bucket, []

    def flip(message: npt.NDArray[np.uint8], origin: str, number: int) -> None:
        if number == 3:
            seen.append(number)
            message[100] ^= 1
        check(message, origin, number)

    monkeypatch.setattr(group_module, "check_bucket", flip)
    outcome = transfer("llama", Grid(gtp=2), 1, bucket_bytes=2048)

    assert seen == [3]
    assert len(outcome.errors) == 3
    # Where the sender runs is part of the name once its first beat was heard.
    assert all(error.startswith("bucket 3 from trainer rank 1 ") for error in outcome.errors), outcome.errors
    assert {one.code for one in outcome.trainers} == {"digest-mismatch"}


def test_no_more_than_two_buckets_are_held_and_none_is_above_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    empty = np.empty

    def counted(shape: Any, dtype: Any = float) -> Any:
        if dtype is np.uint8:
            sizes.append(int(shape))
        return empty(shape, dtype)

    monkeypatch.setattr(np, "empty", counted)
    outcome = transfer("llama", Grid(), 1, bucket_bytes=2048)

    assert outcome.errors == []
    assert len(sizes) == 2 * IN_FLIGHT
    assert max(sizes) <= 2048 + 16


def test_buffers_are_used_again_after_a_transfer_that_went_well_and_after_no_other() -> None:
    """One that broke off may leave an operation behind that still reads or writes them."""
    kept = Kept()

    def held() -> list[int]:
        buffers = kept.take_buffers(2, 1)
        kept.give_back(buffers)
        return sorted(buffer.ctypes.data for buffer in buffers if buffer.size > 1)

    seen = []
    for _ in range(2):
        outcome = transfer("wide, tied", Grid(), 1, bucket_bytes=1 << 17, kept=[kept])
        assert outcome.wrong == [[]]
        seen.append(held())
    assert len(seen[0]) == IN_FLIGHT
    assert seen[0] == seen[1]

    broken = transfer("wide, tied", Grid(), 1, bucket_bytes=1 << 17, kept=[kept], offer=FailsLate)
    assert broken.errors
    assert held() == []


class FailsLate(TensorOffer):
    """After the first pieces."""

    def copy(self, *args: Any) -> None:
        self.copies = getattr(self, "copies", 0) + 1
        if self.copies > 3:
            raise UpdateFailed("gone", code="gone")
        super().copy(*args)


def test_a_smaller_buffer_is_not_taken_for_a_larger_one() -> None:
    kept = Kept()
    small = kept.take_buffers(2, 10)
    kept.give_back(small)
    assert all(new.size >= 11 for new in kept.take_buffers(2, 11))
    assert kept.take_buffers(1, 5)[0] is not small[0]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda ranks: ranks[0].pop(), "missing"),
        (lambda ranks: ranks[1].append(renamed(ranks[1][0])), "model.nowhere.weight"),
        (lambda ranks: ranks[0].append(retyped(ranks[0][0])), "float32"),
    ],
    ids=["missing", "unknown", "two types"],
)
def test_shards_that_do_not_fit_are_refused_on_all_sides_before_a_byte_is_sent(
    damage: Callable[[list[list[Pair]]], None], named: str
) -> None:
    outcome = transfer("llama", Grid(gtp=2), 1, change=damage, offer=Untouchable)

    assert len(outcome.errors) == 3
    assert all(named in error for error in outcome.errors)


class Untouchable(TensorOffer):
    def copy(self, index: int, box: Box, out: npt.NDArray[np.uint8]) -> None:
        raise AssertionError("nothing may be sent")


def renamed(pair: Pair) -> Pair:
    shard, tensor = pair
    return replace(shard, spans=tuple(replace(span, name="model.nowhere.weight") for span in shard.spans)), tensor


def retyped(pair: Pair) -> Pair:
    return replace(pair[0], dtype="float32"), pair[1].float()


def test_a_transfer_that_the_engine_drops_ends_on_both_sides_in_its_words() -> None:
    began = time.monotonic()
    outcome = transfer("llama", Grid(), 1, cancelled=lambda: time.monotonic() - began > 1, announce=1)

    assert outcome.errors == ["the update was dropped"] * 2
    assert time.monotonic() - began < 10


def test_a_trainer_that_never_comes_is_named_at_the_deadline() -> None:
    outcome = transfer("llama", Grid(), 1, announce=1, seconds=2)

    assert outcome.errors == ["trainer rank 1 did not come in time"] * 2
    assert {outcome.engines[0].code, outcome.trainers[0].code} == {"peer-late"}


def test_an_offer_that_fails_is_told_on_both_sides() -> None:
    class Broken(TensorOffer):
        def copy(self, index: int, box: Box, out: npt.NDArray[np.uint8]) -> None:
            raise UpdateFailed("the tensor has been freed", code="freed")

    outcome = transfer("llama", Grid(), 2, offer=Broken)

    assert outcome.errors == ["the tensor has been freed"] * 3
    assert {one.code for one in outcome.engines} == {"freed"}


def test_what_a_callback_raises_comes_out_and_ends_the_transfer_for_the_others() -> None:
    class Interrupted(Exception):
        pass

    def interrupt() -> bool:
        raise Interrupted

    receiver = GroupReceiver(rank=0, size=1)
    deadline = time.monotonic() + 20
    order = receiver.open(GroupOrder(trainers=1), "127.0.0.1", deadline)
    with pytest.raises(Interrupted):
        receiver.receive(order, update="u", targets=[], shapes={}, deadline=deadline, cancelled=interrupt)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("refit-")]


def test_n2_the_store_listens_on_the_one_interface_that_it_was_given() -> None:
    _store, port = open_store("127.0.0.1", time.monotonic() + 5)

    assert listeners(port) == ["0100007F"]


def test_a_store_at_an_address_that_this_machine_has_not_is_refused() -> None:
    with pytest.raises(UpdateFailed, match=r"no store could be opened at 192\.0\.2\.1"):
        open_store("192.0.2.1", time.monotonic() + 5)


def test_the_store_is_gone_when_the_receiver_is_closed() -> None:
    receiver = GroupReceiver(rank=0, size=1)
    order = receiver.open(GroupOrder(trainers=1), "127.0.0.1", time.monotonic() + 5)
    receiver.close()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", order.port), timeout=5).close()


def listeners(port: int) -> list[str]:
    """Addresses (hexadecimal) on which this machine listens at a port."""
    found = []
    for name in ("tcp", "tcp6"):
        with open(f"/proc/net/{name}") as table:
            rows = [line.split() for line in table][1:]
        found += [row[1].split(":")[0] for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port]
    return found


def test_what_is_exchanged_before_the_bytes_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bytes] = []
    exchange = session_module.Session._exchange

    def spy(self: Any, key: str, value: bytes) -> list[bytes]:
        if key == "manifest":
            told.append(value)
        return exchange(self, key, value)

    monkeypatch.setattr(session_module.Session, "_exchange", spy)
    transfer("llama", Grid(), 1)

    assert [sorted(json.loads(one)) for one in told] == [["shapes", "shards"]] * 2


def test_participants_that_decided_different_transfers_do_not_begin() -> None:
    with pytest.raises(LayoutMismatch, match="trainer rank 1 would transfer something else"):
        check_digests("a", {"trainer rank 0": "a", "trainer rank 1": "b"})


def test_buckets_that_are_too_small_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1024"):
        plan_exchange([[]], [[]], {}, 100)


def test_a_plan_for_many_shards_takes_seconds_at_most() -> None:
    config = replace(MODELS["llama"], num_layers=200)
    trainers = [[shard for shard, _ in rank] for rank in trainer_ranks_without_values(config)]
    shapes = logical_tensors(config)
    wanted = [target.shard for target in engine_ranks(config, 1)[0]]
    began = time.process_time()  # of this process: the machine may have much else to do
    exchange = plan_exchange(trainers, [wanted], shapes, 1 << 20)

    assert sum(len(rank) for rank in trainers) > 5000
    assert all(isinstance(bucket, Bucket) for bucket in exchange.buckets)
    assert time.process_time() - began < 5


def trainer_ranks_without_values(config: Any) -> list[list[Pair]]:
    zeros = {name: torch.zeros(()).expand(shape) for name, shape in logical_tensors(config).items()}
    return trainer_ranks(config, Grid(gtp=8), zeros)


def test_nothing_of_a_participant_lingers_that_comes_when_the_store_is_gone() -> None:
    store, port = open_store("127.0.0.1", time.monotonic() + 10)
    del store
    terms = Terms(
        host="127.0.0.1", port=port, update="u", trainers=1, engines=1, backend="gloo", bucket_bytes=1 << 20,
        silent_seconds=0.5, deadline=time.monotonic() + 30,
    )  # fmt: skip
    with pytest.raises(UpdateFailed, match="engine rank 0"):
        send(terms, 0, TensorOffer([]))
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("refit-")] == []
