"""One replica as a front sees it: requests out, events in, over two calls of Ray's that carry many messages each.

A replica is given up when Ray says that it is gone, or when it has said nothing for too long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
from ray.exceptions import RayError

from gtp_serve.cluster.member import ReplicaLost
from gtp_serve.cluster.wire import Beat, Down, Failed, Up, fault_in, pack, unpack_down, unpack_up
from gtp_serve.engine.messages import Abort, EngineStats, Events, Rejected, Stats, Submit, rejection_of
from gtp_serve.errors import EngineFault, GtpServeError, RequestRejected
from gtp_serve.request import Request, TokenEvent

_Item = TokenEvent | GtpServeError


class Link:
    """Requests of one front on one replica.

    :param on_lost: told once, when the replica is given up.
    """

    def __init__(
        self, name: str, actor: Any, front: str, *, silent_seconds: float, on_lost: Callable[[Link, str], None]
    ) -> None:
        self.name = name
        self.stats = EngineStats()
        self.lost = ""
        """Why it was given up."""
        self._actor, self._front, self._silent, self._on_lost = actor, front, silent_seconds, on_lost
        self._streams: dict[str, asyncio.Queue[_Item]] = {}
        self._lost_at = 0.0
        self._outgoing: list[Down] = []
        self._quiet = 0.0
        self._finishing = False
        self._listener = asyncio.create_task(self._listen())

    @property
    def open(self) -> int:
        """Requests of this front that are there."""
        return len(self._streams)

    @property
    def load(self) -> int:
        """Requests that are there, of whichever front."""
        return max(self.open, self.stats.running + self.stats.waiting)

    def has_been_lost(self, seconds: float) -> bool:
        """For so long: whoever knows better may try it again."""
        return bool(self.lost) and time.monotonic() - self._lost_at > seconds

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The request's events, up to and including the one with ``finish``; closing it aborts the request.

        :raises ReplicaLost: the replica was given up.
        :raises EngineFault: its engine cannot go on with the request.
        :raises RequestRejected: it was refused.
        """
        if self.lost:
            raise ReplicaLost(self.lost)
        _check(request)
        queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._streams[request.rid] = queue
        ended = False
        try:
            self._send(Submit(requests=(request,)))
            while not ended:
                item = await queue.get()
                if isinstance(item, GtpServeError):
                    ended = True
                    raise item
                ended = item.finish is not None
                yield item
        finally:
            self._streams.pop(request.rid, None)
            if not ended:
                self._send(Abort(rids=(request.rid,)))
            if self._finishing:
                self.finish()

    def abort(self, rid: str) -> None:
        """End a request, if it is here."""
        if rid in self._streams:
            self._send(Abort(rids=(rid,)))

    def note_passed(self, seconds: float) -> None:
        """This front has run for so many seconds more; a replica that was silent for too many of them is given up."""
        self._quiet += seconds
        if self._quiet > self._silent:
            self.give_up(f"it has said nothing for {self._silent:g} s")

    def give_up(self, reason: str) -> None:
        """It is of no use any more; may be called again."""
        if self.lost:
            return
        self.lost, self._lost_at = reason or "it is gone", time.monotonic()
        self._listener.cancel()
        for queue in self._streams.values():
            queue.put_nowait(ReplicaLost(f"{self.name} was lost: {self.lost}"))
        self._on_lost(self, self.lost)

    def finish(self) -> None:
        """The replica takes no more requests: this ends with the last that is there, and says so.  May be called again.

        Without that word the replica could end while what it has said is still on its way.
        """
        self._finishing = True
        if self._streams or self.lost:
            return
        self._flush()
        self.lost = "it was drained"
        self._listener.cancel()
        self._actor.forget.remote(self._front)

    def _send(self, message: Down) -> None:
        if self.lost:
            return
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if messages and not self.lost:
            # Nobody waits for it: what goes wrong with the replica is heard of by listening.
            self._actor.send.remote(self._front, pack(messages))

    async def _listen(self) -> None:
        try:
            frames = self._actor.listen.options(num_returns="streaming").remote(self._front)
            while True:
                frame = await (await anext(frames))
                self._quiet = 0.0
                for message in unpack_up(frame):
                    self._handle(message)
        except asyncio.CancelledError:
            raise
        except StopAsyncIteration:
            self.give_up("it listens to this front no more")
        except RayError as error:
            self.give_up((str(error).strip().splitlines() or [type(error).__name__])[0][:300])
        except Exception as error:
            self.give_up(f"{type(error).__name__}: {error}")

    def _handle(self, message: Up) -> None:
        match message:
            case Events(events=events):
                for event in events:
                    self._deliver(event.rid, event)
            case Rejected(rid=rid):
                self._deliver(rid, rejection_of(message))
            case Failed(rid=rid):
                self._deliver(rid, fault_in(message))
            case Stats(stats=stats):
                self.stats = stats
            case Beat():
                pass

    def _deliver(self, rid: str, item: _Item) -> None:
        queue = self._streams.get(rid)
        if queue is not None:  # None: abandoned in the meantime
            queue.put_nowait(item)


def is_retryable(error: EngineFault) -> bool:
    """Whether another replica may do what this one could not."""
    return isinstance(error, ReplicaLost) or error.code not in ("non-finite",)


def _check(request: Request) -> None:
    """One bad value must not cost the replica.

    :raises RequestRejected: the request has a value that cannot be passed on.
    """
    try:
        unpack_down(pack([Submit(requests=(request,))]))
    except (msgspec.DecodeError, OverflowError, TypeError, ValueError) as error:
        raise RequestRejected(f"the request has a value that cannot be passed on: {error}") from error
