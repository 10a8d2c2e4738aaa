"""A trainer rank's end of a transfer over torch.distributed: only the rows that this rank is to send."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gtp_serve.layout.spans import Shard
from gtp_serve.refit.digest import digest_bytes
from gtp_serve.refit.offer import Offer
from gtp_serve.refit.transports.buckets import DIGEST_BYTES, Bucket, offsets
from gtp_serve.refit.transports.meeting import Terms, take_part
from gtp_serve.refit.transports.session import IN_FLIGHT, Kept, Session, Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What a trainer rank sent."""

    payload_bytes: int
    wire_bytes: int
    """Counted where it is handed to the transport; the payload with its digests."""
    seconds: float


def send(
    terms: Terms,
    rank: int,
    offer: Offer,
    *,
    kept: Kept | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[int, int], None] | None = None,
) -> Sent:
    """Send this trainer rank's part; returns when every engine rank has all of it, and everything has been let go of.

    :raises UpdateFailed: for whatever reason the transfer ended early; a peer that is to blame is named.
    """
    return take_part(
        terms,
        rank,
        _Outbox(rank, offer).run,
        kept=kept,
        device=own_device(terms),
        cancelled=cancelled,
        progress=progress,
    )


@dataclass(slots=True, eq=False)
class _Outbox:
    """What runs in the transfer's own thread on a trainer rank."""

    rank: int
    offer: Offer

    def run(self, session: Session) -> Sent:
        """Meet, decide, send."""
        exchange = session.agree(self.offer.shards(), {})
        session.form_group()
        began = time.monotonic()
        mine = [(number, one) for number, one in enumerate(exchange.buckets) if one.trainer == self.rank]
        self._send(session, exchange.have[self.rank], mine)
        session.wait_for_all()
        return Sent(payload_bytes=session.done, wire_bytes=session.sent_bytes, seconds=time.monotonic() - began)

    def _send(self, session: Session, shards: Sequence[Shard], mine: Sequence[tuple[int, Bucket]]) -> None:
        session.total = sum(bucket.size for _, bucket in mine)
        longest = max((bucket.size for _, bucket in mine), default=0)
        buffers = session.kept.take_buffers(min(IN_FLIGHT, len(mine)), DIGEST_BYTES + longest)
        under_way: list[tuple[Transfer, Bucket]] = []
        for at, (number, bucket) in enumerate(mine):
            session.check()
            if len(under_way) == IN_FLIGHT:
                _finish(session, under_way.pop(0))
            message = buffers[at % IN_FLIGHT][: DIGEST_BYTES + bucket.size]
            self._fill(message, bucket)
            place = session.engine_place(bucket.receivers[0])
            under_way.append((session.send(message, place, number), bucket))
        for one in under_way:
            _finish(session, one)
        session.kept.give_back(buffers)

    def _fill(self, message: npt.NDArray[np.uint8], bucket: Bucket) -> None:
        payload = message[DIGEST_BYTES:]
        for piece, start in zip(bucket.pieces, offsets(bucket), strict=True):
            self.offer.copy(piece.shard, piece.box, payload[start : start + piece.size])
        message[:DIGEST_BYTES] = np.frombuffer(bytes.fromhex(digest_bytes(payload.data)), np.uint8)


def own_device(terms: Terms) -> str:
    """The calling thread's GPU, where buckets must go through one: a new thread's is another."""
    return f"cuda:{torch.cuda.current_device()}" if terms.backend == "nccl" and torch.cuda.is_available() else "cpu"


def _finish(session: Session, one: tuple[Transfer, Bucket]) -> None:
    transfer, bucket = one
    transfer.wait()
    session.advance(bucket.size)
