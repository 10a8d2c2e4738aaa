"""Tensors that come bucket by bucket over HTTP make one update, whatever a client calls in between.

Other servers load each bucket into what serves.  Here all buckets of an update are staged, and nothing changes
before the last tensor is there; an update that stays incomplete, or of which a bucket was refused, changes nothing.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from gtp_serve.errors import EngineFault, GtpServeError, UpdateFailed, UpdateRefused
from gtp_serve.layout.huggingface import HEAD, logical_name, logical_tensors
from gtp_serve.layout.spans import Shape
from gtp_serve.layout.stacked import stacked_spans
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    EndFeed,
    FedOrder,
    Feed,
    InFlight,
    Piece,
    UpdateRecord,
    UpdateRequest,
)
from gtp_serve.refit.versions import next_label
from gtp_serve.server.state import Serving

_STOP_SECONDS = 10.0
"""For the engine to stop an update of which a bucket was refused."""


@dataclass(slots=True)
class _Open:
    """An update whose tensors are coming."""

    version: str
    missing: set[str]
    label_later: bool
    """Its end is told, and may bring its label; else it ends with its last tensor."""
    update: str = ""
    """The engine's id of it; empty: the engine has none now."""
    passing: bool = False
    """What comes is not needed."""
    failure: str = ""
    """Why it can no longer be taken.  What still comes is received, for its sender's sake, and refused."""
    told: set[str] = field(default_factory=set)
    """All that has come, taken or not."""


class FedSession:
    """The one update that comes bucket by bucket, or none."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._open: _Open | None = None
        self._committed = ""
        """Label of the last update that was taken here."""

    async def begin(self, serving: Serving, *, label_later: bool = False) -> None:
        """Tensors will come, and their end will be told; what came before and was not ended is dropped."""
        async with self._lock:
            await self._drop(serving, "another update began")
            self._open = _start(serving, None, label_later)

    async def take(
        self, serving: Serving, piece: Piece, version: str | None, in_flight: InFlight
    ) -> UpdateRecord | None:
        """The next tensors; the update's record if they were the last ones and it has been committed.

        :param version: label of the new weights; None: the one after the live one.
        :raises GtpServeError: why these tensors, or the update as a whole, are not taken.
        """
        async with self._lock:
            if self._open is not None and version not in (None, self._open.version):
                await self._drop(serving, f"tensors of version {version} began to come")
            if self._is_tied_head_again(serving, piece, version):
                await self._let_pass(serving, piece, in_flight)
                return None
            names = set(_logical_names(piece))
            if self._open is not None and self._open.failure and not names.isdisjoint(self._open.told):
                # Its trainer has begun again from the front, without a word of an end.
                label_later = self._open.label_later
                await self._drop(serving, "its tensors began to come again")
                self._open = _start(serving, version, label_later)
            now = self._open = self._open or _start(serving, version, False)
            _note_end(serving, now)
            now.told |= names
            if not now.update:
                await self._begin(serving, now, piece.group, in_flight)
            try:
                await serving.client.control(Feed(id=now.update, piece=piece))
            except GtpServeError as error:
                await self._note_failure(serving, now, error)
                raise
            if now.failure:
                raise _failed(now)
            now.missing -= names
            return None if now.missing or now.label_later else await self._end(serving, now, None)

    async def end(self, serving: Serving, version: str | None = None) -> UpdateRecord | None:
        """No more tensors come; None when none have come.

        :param version: label of the new weights, where it is told only now.
        :raises GtpServeError: why the update is not taken; it is dropped then.
        """
        async with self._lock:
            now = self._open
            if now is not None:
                _note_end(serving, now)
            if now is None or not (now.update or now.failure):
                self._open = None
                return None
            return await self._end(serving, now, version)

    async def drop(self, serving: Serving, reason: str) -> None:
        """Give up what has come."""
        async with self._lock:
            await self._drop(serving, reason)

    async def _begin(self, serving: Serving, now: _Open, group: str, in_flight: InFlight) -> None:
        update = f"fed-{uuid.uuid4().hex[:12]}"
        order = FedOrder(group=group, discard=bool(now.failure) or now.passing)
        request = UpdateRequest(order=order, version=now.version, in_flight=in_flight, any_order=True)
        try:
            await serving.client.control(Begin(request=request, id=update))
        except GtpServeError:
            self._open = None if not now.failure else now
            raise
        now.update = update

    async def _note_failure(self, serving: Serving, now: _Open, error: GtpServeError) -> None:
        now.failure = now.failure or str(error)
        if isinstance(error, EngineFault):
            return
        await self._stop(serving, now, "a bucket was refused")

    async def _stop(self, serving: Serving, now: _Open, reason: str) -> None:
        """Have the engine give its part up, and wait until it has."""
        update, now.update = now.update, ""
        with suppress(UpdateRefused, TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                await serving.client.control(AbortUpdate(id=update, reason=reason))
                await serving.client.wait_update(update)

    async def _drop(self, serving: Serving, reason: str) -> None:
        now, self._open = self._open, None
        if now is not None and now.update:
            await self._stop(serving, now, reason)

    async def _end(self, serving: Serving, now: _Open, version: str | None) -> UpdateRecord:
        if now.failure:
            await self._drop(serving, "one of its buckets was refused")
            raise _failed(now)
        self._open = None
        record = msgspec.convert(await serving.client.control(EndFeed(id=now.update, version=version)), UpdateRecord)
        record = await serving.client.wait_update(record.id)
        if record.state != "committed":
            raise UpdateFailed(record.message or "the update was not taken", record.details, code=record.code or None)
        self._committed = record.version
        return record

    # -- a tied head -----------------------------------------------------------------------------------------------

    def _is_tied_head_again(self, serving: Serving, piece: Piece, version: str | None) -> bool:
        """Some trainers send the embedding a second time, as the head, when all the rest is committed already."""
        if self._open is not None or not serving.engine.model.tied or set(piece.names) != {HEAD}:
            return False
        return bool(self._committed) and version in (None, self._committed)

    async def _let_pass(self, serving: Serving, piece: Piece, in_flight: InFlight) -> None:
        now = _start(serving, self._committed, False)
        now.passing = True
        await self._begin(serving, now, piece.group, in_flight)
        try:
            await serving.client.control(Feed(id=now.update, piece=piece))
        finally:
            await self._stop(serving, now, "the head is the embedding, which has come")


def _start(serving: Serving, version: str | None, label_later: bool) -> _Open:
    label = version if version is not None else next_label(serving.client.weights.version)
    return _Open(label, set(logical_tensors(serving.engine.model)), label_later)


def _note_end(serving: Serving, now: _Open) -> None:
    """The engine may have given its part up meanwhile: a deadline passed, or somebody aborted it."""
    record = next((one for one in serving.client.weights.history if one.id == now.update), None)
    if record is not None:
        now.update, now.failure = "", now.failure or record.message or "it was dropped"


def _failed(now: _Open) -> UpdateFailed:
    return UpdateFailed(
        f"the update to version {now.version} is not taken: {now.failure}",
        [("now", "the weights before it go on serving")],
        code="tensors-refused",
    )


def _logical_names(piece: Piece) -> Iterable[str]:
    for name, shape in zip(piece.names, piece.shapes, strict=False):  # of other lengths it is refused
        yield from _names_of(logical_name(name), shape)


def _names_of(name: str, shape: Shape) -> Iterable[str]:
    stacked = stacked_spans(name, shape)
    return (name,) if stacked is None else (span.name for span in stacked[1])
