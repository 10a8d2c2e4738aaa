"""An engine rank's end of a transfer over torch.distributed: received, checked and written into its parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from gtp_serve.errors import UpdateFailed
from gtp_serve.layout.spans import Shape, Shard
from gtp_serve.refit.apply import Target, apply_plan
from gtp_serve.refit.digest import digest_bytes
from gtp_serve.refit.orders import GroupOrder
from gtp_serve.refit.transports.buckets import DIGEST_BYTES, Bucket, Exchange, offsets
from gtp_serve.refit.transports.meeting import Terms, open_store, take_part
from gtp_serve.refit.transports.session import IN_FLIGHT, Kept, Session

__all__ = ["GroupReceiver", "Received", "open_store", "receive"]


JOIN_SECONDS = 15.0
"""For trainer ranks, which begin to join together, once they have been told where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What an engine rank got."""

    source_bytes: int
    """Payload, from trainers and passed on by other engine ranks."""
    seconds: dict[str, float] = field(default_factory=dict)
    """``open``, ``plan``, ``transfer``."""
    trainers: tuple[str, ...] = ()
    """Who took part, as errors name them."""


def receive(
    order: GroupOrder,
    *,
    update: str,
    rank: int,
    size: int,
    targets: Sequence[Target],
    shapes: Mapping[str, Shape],
    deadline: float,
    cancelled: Callable[[], bool],
    writing: Callable[[], None] = lambda: None,
    progress: Callable[[int, int], None] | None = None,
    silent_seconds: float = 2.0,
    kept: Kept | None = None,
) -> Received:
    """Fill ``targets`` from the trainer ranks; returns, or raises, when everything has been let go of.

    :param order: with host and port of the store that rank 0 opened.
    :param update: the update's id; all participants know it.
    :param rank: of ``size`` engine ranks.
    :param shapes: every logical tensor of the model, also those that this rank has no part of.
    :param deadline: instant of ``time.monotonic``.
    :param cancelled: asked often, from the calling thread.
    :param writing: called once, from another thread, before the first byte of a target is written.
    :param kept: of this rank's transfer before.
    :param progress: told bytes so far and in all, from the calling thread.
    :raises UpdateFailed: for whatever reason the transfer ended early; a peer that is to blame is named.
    """
    terms = Terms(
        host=order.host,
        port=order.port,
        update=update,
        trainers=order.trainers,
        engines=size,
        backend=order.backend,
        bucket_bytes=order.bucket_bytes,
        silent_seconds=silent_seconds,
        deadline=deadline,
        join_seconds=JOIN_SECONDS,
    )
    inbox = _Inbox(rank, targets, shapes, writing)
    return take_part(
        terms,
        order.trainers + rank,
        inbox.run,
        kept=kept,
        device=_device_of(targets),
        cancelled=cancelled,
        progress=progress,
    )


def _device_of(targets: Sequence[Target]) -> str:
    return str(targets[0].tensor.device) if targets else "cpu"


class GroupReceiver:
    """One engine rank's receiving end, with the store that rank 0 holds open while an update lasts."""

    def __init__(self, *, rank: int, size: int, silent_seconds: float = 2.0) -> None:
        self.rank, self.size, self.silent_seconds = rank, size, silent_seconds
        self._store: Any = None
        self._kept = Kept()

    def open(self, order: GroupOrder, host: str, deadline: float) -> GroupOrder:
        """Rank 0: open the store on one interface; the order with its place filled in.

        :param deadline: instant of ``time.monotonic``.
        :raises UpdateFailed: when it cannot be opened.
        """
        self.close()
        self._store, port = open_store(host, deadline)
        return replace_order(order, host, port)

    def receive(
        self,
        order: GroupOrder,
        *,
        update: str,
        targets: Sequence[Target],
        shapes: Mapping[str, Shape],
        deadline: float,
        cancelled: Callable[[], bool],
        writing: Callable[[], None] = lambda: None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Received:
        """As the function ``receive``; the store is closed at the end, whichever it is."""
        try:
            return receive(
                order,
                update=update,
                rank=self.rank,
                size=self.size,
                targets=targets,
                shapes=shapes,
                deadline=deadline,
                cancelled=cancelled,
                writing=writing,
                progress=progress,
                silent_seconds=self.silent_seconds,
                kept=self._kept,
            )
        finally:
            self.close()

    def close(self) -> None:
        """Close the store, if this rank holds one; may be called again."""
        self._store = None


def replace_order(order: GroupOrder, host: str, port: int) -> GroupOrder:
    """The order with its meeting place."""
    return msgspec.structs.replace(order, host=host, port=port)


@dataclass(slots=True)
class _Bucketful:
    """A WeightSource over a received bucket: one flat shard for each piece."""

    parts: tuple[Shard, ...]
    payload: memoryview
    bucket: Bucket

    def shards(self) -> Sequence[Shard]:
        return self.parts

    def read(self, index: int) -> memoryview:
        start = offsets(self.bucket)[index]
        return self.payload[start : start + self.bucket.pieces[index].size]

    def close(self) -> None:
        pass


@dataclass(slots=True, eq=False)
class _Inbox:
    """What runs in the transfer's own thread on an engine rank."""

    rank: int
    targets: Sequence[Target]
    shapes: Mapping[str, Shape]
    writing: Callable[[], None] = lambda: None
    received: int = 0
    waits: dict[str, float] = field(default_factory=dict)

    def run(self, session: Session) -> Received:
        """Meet, decide, receive."""
        marks = [time.monotonic()]
        exchange = session.agree([target.shard for target in self.targets], self.shapes)
        marks.append(time.monotonic())
        session.form_group()
        marks.append(time.monotonic())
        self.writing()
        apply_plan(exchange.padding_plan(self.rank), _EMPTY, self.targets, threads=1)
        self._drain(session, exchange)
        session.wait_for_all()
        marks.append(time.monotonic())
        return Received(
            source_bytes=self.received,
            seconds={
                "open": session.open_seconds + marks[2] - marks[1],
                "plan": marks[1] - marks[0] - session.open_seconds,
                "transfer": marks[3] - marks[2],
            },
            trainers=tuple(str(member) for member in session.trainers()),
        )

    def _drain(self, session: Session, exchange: Exchange) -> None:
        mine = [(number, one) for number, one in enumerate(exchange.buckets) if self.rank in one.receivers]
        session.total = sum(bucket.size for _, bucket in mine)
        longest = max((bucket.size for _, bucket in mine), default=0)
        buffers = session.kept.take_buffers(min(IN_FLIGHT, len(mine)), DIGEST_BYTES + longest)
        waiting = [self._expect(session, buffers[at % IN_FLIGHT], mine, at) for at in range(min(IN_FLIGHT, len(mine)))]
        for at, (number, bucket) in enumerate(mine):
            session.check()
            waiting.pop(0).wait()
            message = buffers[at % IN_FLIGHT][: DIGEST_BYTES + bucket.size]
            check_bucket(message, session.who(self._origin(session, bucket)), number)
            passed = []
            if bucket.receivers[0] == self.rank:
                passed = [session.send(message, session.engine_place(rank), number) for rank in bucket.receivers[1:]]
            plan = exchange.bucket_plan(bucket, self.rank)
            source = _Bucketful(plan.have, message[DIGEST_BYTES:].data, bucket)
            apply_plan(plan, source, self.targets, threads=1)
            for sending in passed:
                sending.wait()
            self.received += bucket.size
            session.advance(bucket.size)
            if at + IN_FLIGHT < len(mine):
                waiting.append(self._expect(session, buffers[at % IN_FLIGHT], mine, at + IN_FLIGHT))
        session.kept.give_back(buffers)

    def _origin(self, session: Session, bucket: Bucket) -> int:
        """Who hands this bucket to this rank."""
        first = bucket.receivers[0]
        return bucket.trainer if first == self.rank else session.engine_place(first)

    def _expect(
        self, session: Session, buffer: npt.NDArray[np.uint8], mine: Sequence[tuple[int, Bucket]], at: int
    ) -> Any:
        number, bucket = mine[at]
        return session.receive(buffer[: DIGEST_BYTES + bucket.size], self._origin(session, bucket), number)


class _Nothing:
    """A WeightSource without shards."""

    def shards(self) -> Sequence[Shard]:
        return ()

    def read(self, index: int) -> memoryview:
        raise IndexError(index)

    def close(self) -> None:
        pass


_EMPTY = _Nothing()


def check_bucket(message: npt.NDArray[np.uint8], origin: str, number: int) -> None:
    """Compare a bucket's payload with the digest in front of it.

    :raises UpdateFailed: naming who handed it over.
    """
    found = digest_bytes(message[DIGEST_BYTES:].data)
    if bytes.fromhex(found) != message[:DIGEST_BYTES].tobytes():
        raise UpdateFailed(
            f"bucket {number} from {origin} does not have the digest that came with it",
            [("needed", "the bytes as they were sent; memory or the network in between is at fault")],
            code="digest-mismatch",
        )
