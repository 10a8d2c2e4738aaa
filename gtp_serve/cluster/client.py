"""The fleet as an engine: the same calls as ``engine.client.EngineClient``, so that every route works unchanged.

A request goes to one replica.  When that is lost before a token of the request was passed on, another takes it;
afterwards it ends with an error that says how far it came: nobody is given the rest of another replica's answer.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Literal

import msgspec
import ray

from gtp_serve.cluster.awake import SLICE_SECONDS, within
from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.front_weights import bundles_of
from gtp_serve.cluster.link import Link, is_retryable
from gtp_serve.cluster.member import ReplicaLost
from gtp_serve.cluster.ray_port import ask
from gtp_serve.cluster.routing import Candidate, Router
from gtp_serve.cluster.settings import NAMESPACE, FleetConfig
from gtp_serve.cluster.states import FleetStatus, FleetView, ReplicaView
from gtp_serve.engine.control_calls import ControlCalls
from gtp_serve.engine.messages import (
    ControlCall,
    ControlDone,
    ControlRefused,
    EngineStats,
    decode_from_worker,
    encode,
    refusal_of,
)
from gtp_serve.errors import EngineFault, GtpServeError, NotReady, QueueFull, RequestRejected, ShuttingDown
from gtp_serve.refit.orders import Begin, Control, UpdateRecord, WeightsStatus
from gtp_serve.request import Request, TokenEvent

HOLD_SECONDS = 60.0
"""A request waits so long for a replica that can take it."""
_VIEW_SECONDS = 5.0
_FLEET_SECONDS = 60.0
"""Without a word from the fleet's actor, which Ray starts again, before it counts as gone."""
_AGAIN_SECONDS = 0.2


class FleetClient:
    """One front's hold on the fleet; all calls belong to one event loop.

    :param fleet: handle of the fleet's actor.
    """

    def __init__(self, fleet: Any, config: FleetConfig) -> None:
        self.state: Literal["starting", "ready", "stopping", "dead"] = "starting"
        self.fault: GtpServeError | None = None
        self.died = asyncio.Event()
        self.front = f"front-{uuid.uuid4().hex[:12]}"
        self.retries_total = 0
        """Requests that another replica took over before their first token."""
        self._fleet, self._config = fleet, config
        self._calls = ControlCalls()
        self._links: dict[str, Link] = {}
        self._view = FleetView(serial=-1, status=FleetStatus(version=""))
        self._changed = asyncio.Event()
        self._taking = asyncio.Lock()
        self._router = Router(config.launch.engine.cache.block_size)
        self._rids: dict[str, Link | None] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._held = 0
        self._keepers: set[asyncio.Task[None]] = set()
        self._on_view: list[Callable[[FleetView], None]] = []
        self._awake = 0.0
        """Seconds that this front has run."""
        self._watcher = asyncio.create_task(self._watch())
        self._counter = asyncio.create_task(self._count())

    # -- the fleet -----------------------------------------------------------------------------------

    @property
    def weights(self) -> WeightsStatus:
        """The fleet's, as it last said; a ``FleetStatus`` once it has said anything."""
        return self._calls.status

    @property
    def view(self) -> FleetView:
        """All that the fleet last said."""
        return self._view

    def on_view(self, do: Callable[[FleetView], None]) -> None:
        """Have something told of each change."""
        self._on_view.append(do)

    async def wait_ready(self) -> dict[str, str | int | float]:
        """Until a replica takes requests; what it says of its engine.

        :raises EngineFault: no replica starts.
        """
        while not any(replica.state == "ready" for replica in self._view.status.replicas):
            if self._view.fault:
                raise EngineFault(self._view.fault, code="fleet-failed")
            if self.fault is not None:
                raise self.fault
            await self._next_change(None)
        self.state = "ready"
        return dict(self._view.facts)

    async def _watch(self) -> None:
        heard = self._awake
        while True:
            try:
                call = self._fleet.view.remote(self.front, self._view.serial, self._held, _VIEW_SECONDS)
                raw = await within(_VIEW_SECONDS + self._config.silent_seconds, ask("the fleet", call))
                view = msgspec.msgpack.decode(raw, type=FleetView)
                heard = self._awake
                await self._take(view)
            except (GtpServeError, TimeoutError):
                if self._awake - heard > _FLEET_SECONDS:
                    self._die(EngineFault("the fleet's actor is gone", code="fleet-failed"))
                    return
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(SLICE_SECONDS)
            self._awake += SLICE_SECONDS
            for link in list(self._links.values()):
                link.note_passed(SLICE_SECONDS)

    async def _take(self, view: FleetView) -> None:
        async with self._taking:  # an answer and a long poll bring one each
            await self._take_alone(view)

    async def _take_alone(self, view: FleetView) -> None:
        if view.life == self._view.life and view.serial < self._view.serial:
            return  # it was on its way while something newer overtook it
        there = {replica.name: replica for replica in view.status.replicas}
        for name, replica in there.items():
            link = self._links.get(name)
            if (link is None or link.has_been_lost(_AGAIN_SECONDS)) and replica.state in ("ready", "behind"):
                await self._connect(name)
        for name, link in list(self._links.items()):
            if name not in there:
                del self._links[name]
                link.give_up("the fleet has given it up")
            elif there[name].state == "draining":
                link.finish()
        self._view = view
        self._calls.note(view.status)
        self._note_change()
        for do in self._on_view:
            do(view)

    async def _connect(self, name: str) -> None:
        try:
            actor = await asyncio.to_thread(ray.get_actor, self._config.replica_actor(name), NAMESPACE)
        except ValueError:
            return  # gone already; the fleet will say so
        self._links[name] = Link(
            name, actor, self.front, silent_seconds=self._config.silent_seconds, on_lost=self._note_lost
        )

    def _note_lost(self, link: Link, reason: str) -> None:
        self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self, seconds: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    def _die(self, fault: GtpServeError) -> None:
        self.state, self.fault = "dead", fault
        self.died.set()
        self._calls.fail(lambda: EngineFault(fault.message, fault.details, code=fault.code))
        for link in self._links.values():
            link.give_up(fault.message)
        self._note_change()

    async def stop(self, drain_seconds: float, *, fleet: bool = True) -> None:
        """End this front's part, running requests first; with ``fleet``, all replicas too."""
        if self.state != "dead":
            self.state = "stopping"
        if fleet:
            with suppress(GtpServeError, TimeoutError):
                async with asyncio.timeout(drain_seconds + 15):
                    await ask("the fleet", self._fleet.close.remote(drain_seconds))
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(drain_seconds):
                    await self._idle.wait()
            with suppress(GtpServeError, TimeoutError):
                async with asyncio.timeout(5):
                    await ask("the fleet", self._fleet.leave.remote(self.front))
        self._watcher.cancel()
        self._counter.cancel()
        for link in self._links.values():
            link.give_up("the server was stopped")

    # -- requests ------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """The sums over all replicas; the age of the oldest step that is waited for."""
        each = [link.stats for link in self._links.values() if not link.lost]
        total = {field: sum(getattr(one, field) for one in each) for field in _SUMS}
        requests: dict[str, int] = {}
        for one in each:
            for name, count in one.requests_total.items():
                requests[name] = requests.get(name, 0) + count
        age = max((one.last_step_age_seconds for one in each), default=0.0)
        total["waiting"] += self._held
        version = self._view.status.version
        return EngineStats(**total, requests_total=requests, last_step_age_seconds=age, weight_version=version)

    def each(self) -> list[tuple[ReplicaView, EngineStats, int]]:
        """Every replica, its newest numbers, and this front's requests there."""
        found = []
        for replica in self._view.status.replicas:
            link = self._links.get(replica.name)
            found.append((replica, EngineStats() if link is None else link.stats, 0 if link is None else link.open))
        return found

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The request's events, up to and including the one with ``finish``; closing it aborts the request.

        :raises RequestRejected: it was refused (QueueFull, PromptTooLong, NotReady, ShuttingDown, ...).
        :raises EngineFault: the replica was lost after some of its tokens were passed on.
        """
        self._check_state()
        if request.rid in self._rids:
            raise RequestRejected(f"request id {request.rid!r} is in use", code="duplicate-rid", param="rid")
        if len(self._rids) >= max(self._view.max_open, 1):
            raise QueueFull(f"{len(self._rids)} requests are running or waiting, which is the limit")
        self._rids[request.rid] = None
        self._idle.clear()
        try:
            async with aclosing(self._follow(request)) as events:  # closed with this one, not when it is collected
                async for event in events:
                    yield event
        finally:
            self._rids.pop(request.rid, None)
            if not self._rids:
                self._idle.set()

    async def _follow(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        came, tried, sent = time.monotonic(), set[str](), 0
        until = came + min(HOLD_SECONDS, request.deadline_seconds or HOLD_SECONDS)
        full: QueueFull | None = None
        while True:
            link = await self._choose(request, tried, until, full)
            self._rids[request.rid] = link
            events = link.submit(_less_time(request, time.monotonic() - came))
            try:
                async for event in events:
                    sent += len(event.token_ids)
                    yield event
                return
            except QueueFull as error:
                full = error
            except ShuttingDown:
                pass  # that replica only: were it this front, nothing would be chosen
            except EngineFault as error:
                if sent or not is_retryable(error):
                    raise _broken(error, link, sent) from None
                self.retries_total += 1
            finally:
                await events.aclose()
                self._rids[request.rid] = None
            tried.add(link.name)

    async def _choose(self, request: Request, tried: set[str], until: float, full: QueueFull | None) -> Link:
        self._held += 1
        try:
            while True:
                self._check_state()
                found = self._router.choose(self._candidates(tried), request.input_ids, request.cache_salt)
                if found is not None:
                    self._router.note(found, request.input_ids, request.cache_salt)
                    return self._links[found.name]
                if full is not None:
                    raise full
                left = until - time.monotonic()
                if left <= 0:
                    raise NotReady("no replica could take the request in time", self._whose_fault())
                await self._next_change(min(left, _AGAIN_SECONDS * 5))
        finally:
            self._held -= 1

    def _candidates(self, tried: set[str]) -> list[Candidate]:
        """Replicas that serve the fleet's version (any, while a rolling update is under way)."""
        status = self._view.status
        found: list[Candidate] = []
        for replica in status.replicas:
            link = self._links.get(replica.name)
            if link is None or link.lost or replica.state != "ready" or replica.name in tried:
                continue
            if replica.version != status.version and not status.rolling:
                continue
            stats = link.stats
            total = stats.kv_blocks_total or replica.kv_blocks_total
            found.append(
                Candidate(
                    name=replica.name,
                    version=replica.version,
                    load=link.load,
                    kv_free=total - stats.kv_blocks_used,
                    kv_total=total,
                    waiting=stats.waiting,
                )
            )
        return found

    def _whose_fault(self) -> list[tuple[str, str]]:
        if self._view.fault:
            return [("fleet", self._view.fault)]
        states = ", ".join(f"{one.name} {one.state}" for one in self._view.status.replicas)
        return [("replicas", states or "none")]

    async def abort(self, rid: str) -> None:
        """End a request; unknown rids are ignored."""
        link = self._rids.get(rid)
        if link is not None:
            link.abort(rid)

    def _check_state(self) -> None:
        if self.state == "dead":
            raise EngineFault("the fleet is gone", code="fleet-failed")
        if self.state == "stopping":
            raise ShuttingDown("the server is ending and takes no new requests")

    # -- weights -------------------------------------------------------------------------------------

    async def control(self, command: Control) -> Any:
        """Ask something about the weights; the answer as plain JSON values.

        :raises GtpServeError: the fleet's own error, by its class.
        """
        self._check_state()
        bundles = await bundles_of(command)
        frame = encode(ControlCall(call=0, command=command))
        told = await self.ask_fleet(frame, bundles)
        if isinstance(told, ControlRefused):
            raise refusal_of(told)
        if isinstance(command, Begin) and bundles is not None:
            self._keep(command.id, bundles)
        return msgspec.json.decode(told.body)

    async def ask_fleet(self, frame: bytes, bundles: list[Bundle] | None) -> ControlDone | ControlRefused:
        """Again and again while the fleet's actor is being started again: each command may come twice."""
        until = time.monotonic() + _FLEET_SECONDS
        while True:
            try:
                told, view = await ask("the fleet", self._fleet.control.remote(frame, bundles))
                break
            except ReplicaLost:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)
        # First, so that whoever is answered sees what has changed.
        await self._take(msgspec.msgpack.decode(view, type=FleetView))
        message = decode_from_worker(told)
        assert isinstance(message, ControlDone | ControlRefused)  # what the fleet makes
        return message

    def _keep(self, update: str, bundles: Sequence[Bundle]) -> None:
        """An update's objects are this process's: they must be there until it has ended."""

        async def keep(_: Sequence[Bundle]) -> None:
            with suppress(GtpServeError):
                await self.wait_update(update)

        task = asyncio.create_task(keep(bundles))
        self._keepers.add(task)
        task.add_done_callback(self._keepers.discard)

    async def wait_weights(self, holds: Callable[[WeightsStatus], bool], seconds: float | None = None) -> WeightsStatus:
        """The first status for which something holds, the present one included.

        :raises TimeoutError: when it does not come about in so many seconds.
        """
        return await self._calls.wait(holds, seconds)

    async def wait_update(self, update: str, seconds: float | None = None) -> UpdateRecord:
        """An update's record once it has ended.

        :raises TimeoutError: when it has not in so many seconds.
        """
        status = await self.wait_weights(lambda now: any(record.id == update for record in now.history), seconds)
        return next(record for record in status.history if record.id == update)

    async def refresh(self) -> None:
        """Have the fleet say how things are now: another front may have begun an update a moment ago."""
        with suppress(GtpServeError, TimeoutError):
            async with asyncio.timeout(_VIEW_SECONDS):
                view = await ask("the fleet", self._fleet.view.remote(self.front, -1, self._held, 0.0))
                await self._take(msgspec.msgpack.decode(view, type=FleetView))


_SUMS = tuple(
    field for field in EngineStats.__struct_fields__
    if field not in ("requests_total", "last_step_age_seconds", "weight_version")
)  # fmt: skip


def _less_time(request: Request, passed: float) -> Request:
    """What is left of a request's deadline after it has waited."""
    if request.deadline_seconds is None:
        return request
    return msgspec.structs.replace(request, deadline_seconds=max(0.001, request.deadline_seconds - passed))


def _broken(error: EngineFault, link: Link, sent: int) -> EngineFault:
    if not sent:
        return error
    return EngineFault(
        f"{link.name} was lost after {sent} tokens of this answer",
        [("why", error.message), ("try", "the request again: another replica would begin it anew")],
        code="replica-lost",
    )
