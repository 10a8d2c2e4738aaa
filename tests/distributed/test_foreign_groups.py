"""Groups of other people's trainers, joined by ranks that only receive: real processes, real gloo."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
from foreign_trainer import free_port, obey
from msgspec.structs import replace
from torch import Tensor

from gtp_serve.errors import GtpServeError, UpdateFailed, UpdateRefused
from gtp_serve.refit.orders import JoinGroup, Piece
from gtp_serve.refit.transports.foreign import ForeignGroup, ForeignGroups, Patience

pytestmark = pytest.mark.distributed

TENSORS = {
    "first": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "second": torch.arange(3, dtype=torch.bfloat16),
    "third": torch.arange(8, dtype=torch.int64).reshape(2, 2, 2),
    "odd": torch.arange(5, dtype=torch.uint8),
    "after it": torch.arange(6, dtype=torch.float32),
}


def patience(seconds: float = 30.0, cancelled: Callable[[], bool] = lambda: False) -> Patience:
    end = time.monotonic() + seconds
    return Patience(left=lambda: end - time.monotonic(), cancelled=cancelled)


def piece(form: Literal["", "flattened_bucket", "vllm_packed"] = "", bucket_bytes: int = 1 << 30) -> Piece:
    return Piece(
        names=tuple(TENSORS),
        dtypes=tuple(str(tensor.dtype).removeprefix("torch.") for tensor in TENSORS.values()),
        shapes=tuple(tuple(tensor.shape) for tensor in TENSORS.values()),
        packed=form,
        bucket_bytes=bucket_bytes,
    )


class Trainer:
    def __init__(self, kind: str, world_size: int = 2, only: tuple[str, ...] = tuple(TENSORS)) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["foreign_trainer"])
        self.port, self.kind, self.world_size = free_port(), kind, world_size
        self.orders, theirs = context.Pipe()
        tensors = {name: TENSORS[name].tolist() for name in only}
        types = {name: str(TENSORS[name].dtype).removeprefix("torch.") for name in only}
        args = (kind, self.port, world_size, theirs, tensors, types)
        self.process = context.Process(target=obey, args=args)
        self.process.start()
        theirs.close()

    def order(self, rank_offset: int = 1, **more: Any) -> JoinGroup:
        kind: Any = self.kind
        return JoinGroup(
            name="weights",
            host="127.0.0.1",
            port=self.port,
            rank_offset=rank_offset,
            world_size=self.world_size,
            backend="gloo",
            kind=kind,
            **{"seconds": 60.0, **more},
        )

    def send(self, what: str | int) -> None:
        self.orders.send(what)


@contextmanager
def group_of(kind: str) -> Iterator[tuple[Trainer, ForeignGroups, ForeignGroup]]:
    source = Trainer(kind)
    groups = ForeignGroups(0, "cpu")
    try:
        groups.join(source.order())
        assert source.orders.recv() == "open"
        yield source, groups, groups.get("weights")
    finally:
        groups.close()
        if source.process.is_alive() and source.process.exitcode is None:
            source.process.kill()
        source.process.join(10)


def received(group: ForeignGroup, what: Piece, wait: Patience | None = None) -> list[Tensor]:
    found: list[Tensor] = []

    def take(index: int, tensor: Tensor) -> None:
        assert index == len(found)
        found.append(tensor.clone())

    assert group.receive(what, take, wait or patience()) == sum(tensor.nbytes for tensor in TENSORS.values())
    return found


def check_tensors(found: list[Tensor]) -> None:
    assert len(found) == len(TENSORS)
    for tensor, expected in zip(found, TENSORS.values(), strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("kind", ["torch", "stateless"])
def test_tensors_come_one_by_one_as_one_bucket_and_packed(kind: str) -> None:
    with group_of(kind) as (source, groups, group):
        source.send("each")
        check_tensors(received(group, piece()))
        source.send("bucket")
        check_tensors(received(group, piece("flattened_bucket")))
        for size in (10, 55, 1 << 20):
            source.send(size)
            check_tensors(received(group, piece("vllm_packed", size)))
        groups.leave("weights")
        assert [source.orders.recv() for _ in range(5)] == ["sent"] * 5
        source.send("end")
        source.process.join(30)
        assert source.process.exitcode == 0


def test_several_ranks_of_an_engine_get_the_same() -> None:
    source = Trainer("torch", world_size=3)
    ranks = [ForeignGroups(rank, "cpu") for rank in range(2)]
    joins = [threading.Thread(target=one.join, args=(source.order(),)) for one in ranks]
    for join in joins:
        join.start()
    for join in joins:
        join.join(60)
    source.send("each")
    found: list[list[Tensor]] = [[], []]
    readers = [
        threading.Thread(target=lambda at=at: found[at].extend(received(ranks[at].get("weights"), piece())))
        for at in range(2)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    source.send("end")
    source.process.join(30)
    for one in ranks:
        one.close()
    check_tensors(found[0])
    check_tensors(found[1])


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"shapes": ((1, 1), (3,))}, "more bytes came for first than"),
        ({"dtypes": ("float32", "float32")}, "fewer bytes came for second than"),
        ({"dtypes": ("bfloat16", "bfloat16")}, "more bytes came for first than"),
        ({"shapes": ((4096, 4096), (3,))}, "fewer bytes came for first than"),
        ({"shapes": ((1, 1), (2,)), "packed": "flattened_bucket"}, "more bytes came for first and 1 more than"),
        ({"shapes": ((3, 4), (4,)), "packed": "flattened_bucket"}, "fewer bytes came for first and 1 more than"),
    ],
)
@pytest.mark.parametrize("world_size", [2, 5])  # of five, ranks pass on what has come
def test_other_bytes_than_were_told_are_refused_by_name_and_the_group_goes_on(
    told: dict[str, Any], words: str, world_size: int
) -> None:
    """gloo itself ends the process when more bytes come, and leaves what lay there when fewer do."""
    form: dict[str, Any] = {"dtypes": ("float32", "bfloat16"), "shapes": ((3, 4), (3,)), "packed": "", **told}
    crooked = Piece(names=("first", "second"), **form)
    source = Trainer("torch", world_size, only=("first", "second"))
    ranks = [ForeignGroups(rank, "cpu") for rank in range(world_size - 1)]
    refusals: list[GtpServeError] = []

    def obey_the_trainer(groups: ForeignGroups) -> None:
        groups.join(source.order())
        for piece_told in (crooked, replace(crooked, **good)):
            try:
                groups.get("weights").receive(piece_told, lambda index, tensor: None, patience())
            except GtpServeError as error:
                refusals.append(error)

    good: dict[str, Any] = {"dtypes": ("float32", "bfloat16"), "shapes": ((3, 4), (3,))}
    threads = [threading.Thread(target=obey_the_trainer, args=(groups,)) for groups in ranks]
    for thread in threads:
        thread.start()
    assert source.orders.recv() == "open"
    for _ in range(2):
        source.send("each" if not crooked.packed else "bucket")
    for thread in threads:
        thread.join(60)
    source.send("end")
    source.process.join(30)
    for groups in ranks:
        groups.close()
    assert [error.code for error in refusals] == ["tensors-refused"] * len(ranks)
    assert all(str(error).startswith(words) for error in refusals), [str(error) for error in refusals]


def test_a_trainer_that_dies_breaks_the_group_at_once_and_it_can_be_joined_again() -> None:
    with group_of("torch") as (source, groups, group):
        killer = threading.Timer(0.5, lambda: os.kill(source.process.pid or 0, signal.SIGKILL))
        killer.start()
        began = time.monotonic()
        with pytest.raises(UpdateFailed, match="broadcast in group 'weights' failed") as caught:
            received(group, piece())
        assert caught.value.code == "peer-lost"
        assert time.monotonic() - began < 5
        with pytest.raises(UpdateRefused, match="is of no use any more"):
            received(group, piece())
        again = Trainer("torch")
        groups.join(again.order())
        again.send("each")
        check_tensors(received(groups.get("weights"), piece()))
        again.send("end")
        groups.leave("weights")
        again.process.join(30)


@pytest.mark.parametrize("how", ["deadline", "dropped"])
def test_a_wait_for_a_silent_trainer_ends_by_its_deadline_or_when_it_is_called_off(how: str) -> None:
    with group_of("torch") as (source, _, group):
        os.kill(source.process.pid or 0, signal.SIGSTOP)
        began = time.monotonic()
        wait = patience(0.5) if how == "deadline" else patience(30, lambda: time.monotonic() - began > 0.5)
        with pytest.raises(UpdateFailed, match="waiting for first in group 'weights'") as caught:
            received(group, piece(), wait)
        assert caught.value.code == {"deadline": "update-deadline", "dropped": "dropped"}[how]
        assert time.monotonic() - began < 2
        source.process.kill()
        ended = time.monotonic() + 10
        while any(thread.name == "group-end" for thread in threading.enumerate()):
            assert time.monotonic() < ended
            time.sleep(0.05)


def test_a_group_whose_trainer_never_comes_is_given_up() -> None:
    order = JoinGroup(
        name="none", host="127.0.0.1", port=free_port(), rank_offset=1, world_size=2, backend="gloo", seconds=1.0
    )
    began = time.monotonic()
    with pytest.raises(UpdateFailed, match="could not join group 'none' within 1 s"):
        ForeignGroups(0, "cpu").join(order)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank_offset": 2}, "has no place"),
        ({"rank_offset": 0}, "has no place"),
        ({"backend": "nccl"}, "on a CPU"),
    ],
)
def test_a_place_or_backend_that_cannot_be_is_refused_at_once(change: dict[str, Any], words: str) -> None:
    fields: dict[str, Any] = {"name": "g", "host": "127.0.0.1", "port": 1, "rank_offset": 1, "world_size": 2}
    with pytest.raises(UpdateRefused, match=words):
        ForeignGroups(0, "cpu").join(JoinGroup(**{**fields, "backend": "gloo", **change}))


def test_an_unknown_group_is_refused_by_name() -> None:
    groups = ForeignGroups(0, "cpu")
    groups.leave("weights")
    with pytest.raises(GtpServeError, match="there is no group 'weights'"):
        groups.get("weights")
