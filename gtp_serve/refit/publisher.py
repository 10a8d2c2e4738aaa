"""The trainer's side of an update: ``Publisher(url).push(weights, version)``, called by all of its ranks.

It depends on neither the engine nor the server: only on the shards' geometry, torch and the standard library.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from gtp_serve.errors import LayoutMismatch, UpdateFailed, UpdateRefused, UsageError
from gtp_serve.layout.spans import Shard
from gtp_serve.refit.client import ServedLayout, WeightsClient, has_ended, raise_failure
from gtp_serve.refit.offer import Offer, Offered, check_offers, offer
from gtp_serve.refit.orders import InFlight, Memory, Segment, StoredShard, UpdateRecord
from gtp_serve.refit.outgoing import Stream, fill_segment
from gtp_serve.refit.shared import num_bytes
from gtp_serve.refit.trainers import TrainerRanks
from gtp_serve.refit.transports.send import send
from gtp_serve.refit.transports.session import Kept
from gtp_serve.refit.transports.shares import sole_owners
from gtp_serve.refit.transports.stores import Terms

Transport = Literal["auto", "disk", "distributed", "memory", "http"]

DEADLINE_SECONDS = 120.0
ABORT_SECONDS = 5.0
_NOT_SHARED = "bad-segment"
"""The server's word for memory of this process that it cannot open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PushReport:
    """What came of a push that went well."""

    update: str
    version: str
    state: str
    """``committed``, or ``verified`` for a dry run."""
    transport: str
    sent_bytes: int
    """By this trainer rank, without padding and without digests; 0 if its connections broke when all was sent."""
    wire_bytes: int
    """By this trainer rank, counted where they were handed to the transport."""
    seconds: float
    """From the call to the committed update."""
    digest: str
    stall_seconds: float
    """During which the engine could run no step."""
    record: UpdateRecord
    """All that the server tells of it."""


class _Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What trainer ranks tell one another before an update."""

    machine: str
    shards: tuple[Shard, ...]


class _Part(msgspec.Struct, frozen=True, kw_only=True):
    """A trainer rank's part of a memory order."""

    segment: Segment | None
    shards: tuple[StoredShard, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Push:
    """One push under way on this rank."""

    version: str
    fields: dict[str, Any]
    deadline: float
    began: float


class Publisher:
    """Sends weights to a server.

    A trainer with several ranks makes one on each and calls ``push`` on all of them; they agree over ``group``,
    torch.distributed's default group unless told otherwise, which is used for nothing else.

    :param url: of the server.
    :param key: its admin key, if it has one.
    :param transport: ``auto`` takes ``disk`` for a path, ``memory`` for a server on this machine, else ``distributed``.
    :param bucket_bytes: most payload of one message; a rank holds two of them, from its first push on.
    :param backend: of the group that trainer and engine form for an update.
    :param silent_seconds: after which a silent peer is given up.
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        transport: Transport = "auto",
        *,
        group: Any = None,
        bucket_bytes: int = 32 << 20,
        backend: Literal["gloo", "nccl"] = "gloo",
        silent_seconds: float = 2.0,
    ) -> None:
        if transport not in ("auto", "disk", "distributed", "memory", "http"):
            raise UsageError(f"{transport!r} is no transport", [("possible", "auto, disk, distributed, memory, http")])
        self._client = WeightsClient(url, key)
        self._transport = transport
        self._ranks = TrainerRanks(group)
        self._kept = Kept()
        self._bucket_bytes, self._backend, self._silent_seconds = bucket_bytes, backend, silent_seconds

    def push(
        self,
        source: Offered | str | os.PathLike[str],
        version: str,
        base: str | None = None,
        in_flight: InFlight = "keep",
        *,
        memory: Memory | None = None,
        deadline_seconds: float = DEADLINE_SECONDS,
        dry_run: bool = False,
    ) -> PushReport:
        """Let the server serve these weights; returns when it does.

        :param source: see ``refit.offer.offer``; or a path that the server can read.
        :param version: label of the new weights.
        :param base: the version that must be serving now.
        :param in_flight: what becomes of running requests.
        :param deadline_seconds: for the transfer, and again for the commit.
        :raises UpdateRefused: when it does not fit or cannot begin; nothing was sent.
        :raises UpdateFailed: when it did not come about; the version before goes on serving.
        """
        now = time.monotonic()
        fields = {
            "version": version,
            "base": base,
            "in_flight": in_flight,
            "memory": memory,
            "deadline_seconds": deadline_seconds,
            "dry_run": dry_run,
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        push = _Push(version=version, fields=fields, deadline=now + 2 * deadline_seconds, began=now)
        if isinstance(source, str | os.PathLike):
            return self._push_path(push, source)
        if self._transport == "disk":
            raise UsageError("the transport disk takes the path of a checkpoint")
        offered, hellos, layout = self._prepare(push, source)
        transport = self._choose(hellos)
        if transport == "memory":
            try:
                return self._push_memory(push, offered, hellos, layout)
            except (UpdateFailed, UpdateRefused) as error:
                if self._transport != "auto" or error.code != _NOT_SHARED:
                    raise
        if transport == "http":
            return self._push_stream(push, offered, layout)
        return self._push_distributed(push, offered, len(layout.ranks))

    # -- before anything is sent -------------------------------------------------------------------

    def _prepare(self, push: _Push, source: Offered) -> tuple[Offer, list[_Hello], ServedLayout]:
        """This rank's shards, all ranks' and what the server wants; refused here unless they fit."""
        offers: list[Offer] = []

        def hello() -> _Hello:
            offers.append(offer(source))
            return _Hello(machine=_machine(), shards=tuple(offers[0].shards()))

        hellos = self._ranks.together(hello, _Hello, push.deadline)
        layout = self._ranks.from_first(self._client.layout, ServedLayout, push.deadline)
        check_offers([one.shards for one in hellos], layout.tensors, layout.dtypes())
        return offers[0], hellos, layout

    def _choose(self, hellos: Sequence[_Hello]) -> Transport:
        if self._transport != "auto":
            return self._transport
        here = len({one.machine for one in hellos}) == 1 and _is_loopback(self._client.host)
        return "memory" if here else "distributed"

    # -- ways --------------------------------------------------------------------------------------

    def _push_path(self, push: _Push, path: str | os.PathLike[str]) -> PushReport:
        if self._transport not in ("auto", "disk"):
            raise UsageError(f"the transport {self._transport} takes weights, not the path of a checkpoint")
        source = {"kind": "disk", "path": str(Path(path).absolute())}
        record = self._begin(push, source)
        return self._report(push, "disk", self._client.wait(record.id, push.deadline))

    def _push_distributed(self, push: _Push, offered: Offer, engines: int) -> PushReport:
        source = {
            "kind": "distributed",
            "trainers": self._ranks.size,
            "backend": self._backend,
            "bucket_bytes": self._bucket_bytes,
        }
        record = self._begin(push, source)
        if has_ended(record) or not record.port:
            raise_failure(record)
            raise UpdateFailed(
                "the server told no place to meet at", [("its state", record.state)], code="server-answer"
            )
        terms = Terms(
            host=record.host,
            port=record.port,
            update=record.id,
            trainers=self._ranks.size,
            engines=engines,
            backend=self._backend,
            bucket_bytes=self._bucket_bytes,
            silent_seconds=self._silent_seconds,
            deadline=push.deadline,
        )
        try:
            sent = send(terms, self._ranks.rank, offered, kept=self._kept)
        except UpdateFailed as error:
            return self._report(push, "distributed", self._in_spite_of(error, record.id))
        # Each rank asks by itself: a trainer rank that ends now keeps no other one waiting.
        ended = self._client.wait(record.id, push.deadline)
        return self._report(push, "distributed", ended, sent=sent.payload_bytes, wire=sent.wire_bytes)

    def _push_memory(self, push: _Push, offered: Offer, hellos: Sequence[_Hello], layout: ServedLayout) -> PushReport:
        try:
            mine = sole_owners([one.shards for one in hellos], layout.tensors)[self._ranks.rank]
        except LayoutMismatch as error:
            raise UpdateRefused(error.message, error.details, code="weights-mismatch") from None
        with ExitStack() as stack:

            def fill() -> _Part:
                memory, stored = fill_segment(offered, mine)
                if memory is None:
                    return _Part(segment=None, shards=())
                stack.enter_context(memory)
                return _Part(segment=memory.seal(), shards=tuple(stored))

            parts = self._ranks.together(fill, _Part, push.deadline)
            record = self._begin(push, _memory_source(parts))
            ended = self._client.wait(record.id, push.deadline)
        sent = parts[self._ranks.rank].segment
        size = sum(_bytes_of(shard) for shard in parts[self._ranks.rank].shards) if sent is not None else 0
        return self._report(push, "memory", ended, sent=size, wire=0)

    def _push_stream(self, push: _Push, offered: Offer, layout: ServedLayout) -> PushReport:
        if self._ranks.size > 1:
            raise UsageError(
                f"{self._ranks.size} trainer ranks cannot send one HTTP body",
                [("try", "the transport distributed, or memory on the server's machine")],
            )
        stream = Stream(offered, layout.tensors)
        fields = {name: _text(value) for name, value in push.fields.items()} | {"id": uuid.uuid4().hex}
        seconds = max(1.0, push.deadline - time.monotonic())
        record = self._client.begin_stream(fields, stream.pieces(), stream.size, seconds=seconds)
        ended = self._client.wait(record.id, push.deadline)
        return self._report(push, "http", ended, sent=stream.payload_bytes, wire=stream.size)

    # -- the server's word -------------------------------------------------------------------------

    def _begin(self, push: _Push, source: dict[str, Any]) -> UpdateRecord:
        """Begin on rank 0; every rank has the record."""
        fields = {**push.fields, "id": uuid.uuid4().hex, "source": source}
        return self._ranks.from_first(lambda: self._client.begin(fields), UpdateRecord, push.deadline)

    def _in_spite_of(self, error: UpdateFailed, update: str) -> UpdateRecord:
        """Drop an update whose transfer failed here; its record, if it serves all the same: all ranks had everything,
        and only this one did not hear of it.

        :raises UpdateFailed: the reason, with the server's word if it knows more.
        """
        if self._ranks.rank == 0:
            self._client.abort(update, error.message, seconds=ABORT_SECONDS)
        try:
            record = self._client.wait(update, time.monotonic() + ABORT_SECONDS)
        except (UpdateFailed, UpdateRefused) as unknown:
            details = [*error.details, ("the server", unknown.message)]
            raise UpdateFailed(error.message, details, code=error.code) from None
        if record.state not in ("aborted", "torn"):
            return record
        if not record.message or record.message in (error.message, error.message[:200]):
            raise error from None
        raise UpdateFailed(error.message, [*error.details, ("the server says", record.message)], code=error.code)

    def _report(self, push: _Push, transport: str, record: UpdateRecord, *, sent: int = 0, wire: int = 0) -> PushReport:
        raise_failure(record)
        return PushReport(
            update=record.id,
            version=record.version,
            state=record.state,
            transport=transport,
            sent_bytes=sent,
            wire_bytes=wire,
            seconds=time.monotonic() - push.began,
            digest=record.digest,
            stall_seconds=record.stall_seconds,
            record=record,
        )


def _memory_source(parts: Sequence[_Part]) -> dict[str, Any]:
    """The order of all ranks' segments; ranks without bytes have none."""
    segments: list[Segment] = []
    shards: list[StoredShard] = []
    for part in parts:
        if part.segment is not None:
            shards += [msgspec.structs.replace(stored, segment=len(segments)) for stored in part.shards]
            segments.append(part.segment)
    return {"kind": "memory", "segments": msgspec.to_builtins(segments), "shards": msgspec.to_builtins(shards)}


def _text(value: object) -> str:
    """A field's value in a query."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _bytes_of(stored: StoredShard) -> int:
    return num_bytes(stored.shard)


def _machine() -> str:
    """The same in all processes that see one another's ``/proc``, on this start of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {os.getpid()}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
