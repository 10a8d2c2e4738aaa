"""The fleet: how many replicas there are, which of them take requests, which version they serve.

Starts replicas, gives up those that make no progress, replaces them, brings them to the committed version before they
take a request, drains those that are too many.  Knows nothing of Ray: a ``Launcher`` makes replicas.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from gtp_serve.cluster.autoscale import Autoscaler
from gtp_serve.cluster.awake import AwakeClock, within
from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.control import carry_out
from gtp_serve.cluster.fronts import Fronts
from gtp_serve.cluster.journal import Journal
from gtp_serve.cluster.member import Launcher, Member, Nowhere, ReplicaLost, ReplicaUnreachable
from gtp_serve.cluster.settings import FleetConfig
from gtp_serve.cluster.states import FleetStatus, FleetView, ReplicaStatus
from gtp_serve.cluster.summary import fleet_status
from gtp_serve.cluster.versions import Versions
from gtp_serve.errors import GtpServeError
from gtp_serve.refit.orders import Control, Pause, Resume

_STALLED_AGAIN_SECONDS = 5.0
_END_SECONDS = 12.0
"""Beside the drain: the engine's end, and what the fronts still have to hear."""


class Fleet:
    """All replicas of one model."""

    def __init__(
        self,
        config: FleetConfig,
        journal: Journal,
        launcher: Launcher,
        *,
        log: Callable[[str, dict[str, Any]], None],
        clock: Callable[[], float] | None = None,
    ) -> None:
        config.scale.check()
        self.over = asyncio.Event()
        """Set when nobody has asked for so long that the fleet has ended itself."""
        self._config, self._journal, self._launcher, self._log = config, journal, launcher, log
        self._clock = clock or AwakeClock()
        self._members: list[Member] = []
        self._scaler = Autoscaler(config.scale)
        self._fronts = Fronts(self._clock())
        self._serial = 0
        self._life = uuid.uuid4().hex
        self._changed = asyncio.Event()
        self._failures = 0
        self._failed_at = 0.0
        self._fault = ""
        self._paused: Pause | None = None
        self._closing = False
        self._loop: asyncio.Task[None] | None = None
        self._beside: set[asyncio.Task[None]] = set()
        self.versions = Versions(
            lambda: self._members,
            journal,
            deadline_seconds=config.launch.refit_seconds,
            rolling=config.rolling,
            on_change=self.note_change,
            log=log,
        )

    @property
    def members(self) -> Sequence[Member]:
        """All that have not been given up."""
        return tuple(self._members)

    # -- life ----------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Take over what an earlier life has left, then go on."""
        await asyncio.gather(*(self._adopt(name) for name in self._journal.memory.replicas))
        await self.versions.recover()
        if any(member.status.weights.paused for member in self._members):
            self._paused = Pause()
        # Whoever asks first is not told that nobody is ready, which would hardly be true.
        await asyncio.gather(*(self._look_again(member) for member in self._members))
        for member in self._members:
            self._mind(member)
        self._loop = asyncio.create_task(self._run())

    async def close(self, drain_seconds: float) -> None:
        """End all replicas, and forget that there was a fleet."""
        self._closing = True
        if self._loop is not None:
            self._loop.cancel()
        run = self.versions.current
        if run is not None and run.task is not None and not run.decided:
            run.task.cancel()
            await asyncio.wait([run.task], timeout=5)
        for member in self._members:
            self._drain(member, drain_seconds, "the fleet ends")
        ends = [member.task for member in self._members if member.task is not None]
        await asyncio.gather(*ends, return_exceptions=True)
        self._journal.forget()
        self.note_change()

    async def _adopt(self, name: str) -> None:
        with suppress(ReplicaLost, TimeoutError):
            port = await self._launcher.adopt(name)
            if port is None:
                self._forget(name)
                return
            status = await within(self._config.silent_seconds, port.status())
            member = Member(name=name, port=port, status=status, adopted=True, heard=self._clock())
            member.state = "behind" if status.engine == "ready" else "starting"
            self._members.append(member)
            return
        if port is not None:
            port.kill()
        self._forget(name)

    async def _look_again(self, member: Member) -> None:
        """At a replica that was taken over; what is the matter with one shows when it is minded."""
        with suppress(GtpServeError, TimeoutError):
            if member.alive and self.versions.late.is_current(member):
                await self._serve_on(member)

    async def _run(self) -> None:
        while True:
            try:
                self._look()
            except Exception as error:
                self._log("fleet", {"error": f"{type(error).__name__}: {error}"})
            await asyncio.sleep(self._config.poll_seconds)

    def _look(self) -> None:
        now = self._clock()
        self._look_at_fronts(now)
        requests = self._fronts.held
        requests += sum(one.status.stats.running + one.status.stats.waiting for one in self._members if one.alive)
        wanted = self._scaler.look(now, requests)
        here = [member for member in self._members if member.state != "draining" and not member.is_missing(now)]
        if len(here) < wanted and self._may_start(now):
            self._start_one()
        elif len(here) > wanted:
            # The last to have come, and before it one that takes no requests yet.
            leaving = max(here, key=lambda member: (member.state != "ready", self._members.index(member)))
            self._drain(leaving, self._config.drain_seconds, "there are more replicas than wanted")

    def _look_at_fronts(self, now: float) -> None:
        for front in self._fronts.drop_silent(now):
            self._forget_front(front)
        if self._fronts.alone_seconds(now) > self._config.lease_seconds and not self._closing:
            self._closing = True
            self._log("fleet", {"says": "nobody has asked for long enough: it ends"})
            self.over.set()

    def _forget_front(self, front: str) -> None:
        for member in self._members:
            if member.alive or member.state == "draining":
                self._aside(member.port.forget(front))

    def _aside(self, call: Coroutine[Any, Any, None]) -> None:
        """Do what nobody waits for, and what may fail."""
        task = asyncio.create_task(_quietly(call))
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    # -- replicas ------------------------------------------------------------------------------------

    def _may_start(self, now: float) -> bool:
        if self._failures >= self._config.restarts:
            return False
        pauses = self._config.backoff_seconds
        return now - self._failed_at >= pauses[min(self._failures, len(pauses) - 1)]

    def _start_one(self) -> None:
        memory = self._journal.memory
        name = f"replica-{memory.next_replica}"
        # Known before it exists: a fleet that starts again finds it.
        self._journal.write(replicas=(*memory.replicas, name), next_replica=memory.next_replica + 1)
        member = Member(name=name, port=Nowhere(), status=ReplicaStatus(name=name), heard=self._clock())
        self._members.append(member)
        self._mind(member)
        self._log("replica", {"replica": name, "state": "starting"})
        self.note_change()

    def _mind(self, member: Member) -> None:
        member.task = asyncio.create_task(self._live(member))

    async def _live(self, member: Member) -> None:
        """A replica's life, from its start to its loss."""
        served = False
        try:
            await self._bring_up(member)
            while True:
                await self._serve_on(member)
                served = served or member.state == "ready"
                if served and member.state == "ready":
                    self._failures, self._fault = 0, ""
                await asyncio.sleep(self._config.poll_seconds)
        except asyncio.CancelledError:
            raise
        except TimeoutError:
            self._lose(member, "it did not start in time" if not served else "it has been silent", served)
        except GtpServeError as error:
            self._lose(member, str(error), served)
        except Exception as error:
            self._lose(member, f"{type(error).__name__}: {error}", served)

    async def _bring_up(self, member: Member) -> None:
        async with asyncio.timeout(self._config.start_seconds):
            if isinstance(member.port, Nowhere):
                now = self._clock()
                avoid = {one.status.node for one in self._members if one.is_missing(now)}
                member.port = await self._launcher.launch(member.name, sorted(avoid))
            member.status = await member.port.start()
        self.versions.found_first(member.status.weights.version)
        member.state, member.heard = "behind", self._clock()
        self.note_change()

    async def _serve_on(self, member: Member) -> None:
        try:
            status = await within(self._config.silent_seconds, member.port.status())
        except ReplicaUnreachable:
            now = self._clock()
            if now - member.heard > self._config.silent_seconds:
                raise
            member.unreachable = now if member.unreachable is None else member.unreachable
            if member.state == "ready" and member.is_missing(now):  # updates go on without it
                member.state, member.reason = "behind", "it cannot be reached"
                self.note_change()
            return  # a break in the network must not cost a replica that takes minutes to load
        changed = status != member.status
        member.status, member.heard = status, self._clock()
        self._check(member)
        if member.state == "ready" and self._is_behind(member):
            member.state, member.reason, changed = "behind", "it does not serve the committed version", True
        if member.state == "behind" and await self.versions.late.bring(member):
            if self._paused is not None and not member.status.weights.paused:
                await member.port.control(self._paused)
            # A decision may have been made since.
            if member.version == self.versions.committed:
                member.state, member.reason, changed = "ready", "", True
                self._log("replica", {"replica": member.name, "state": "ready", "version": member.version})
        member.unreachable = None  # only now: it is not one too many before it is known to be good
        if changed:
            self.note_change()

    def _is_behind(self, member: Member) -> bool:
        if self._journal.memory.deciding is not None:
            return False  # who has not committed when that is over is told so
        return not self.versions.late.is_current(member)

    def _check(self, member: Member) -> None:
        """Whether it makes progress.

        :raises ReplicaLost: it does not.
        """
        status = member.status
        if status.engine == "dead":
            raise ReplicaLost(status.fault or "its engine has ended")
        weights = status.weights
        held = weights.paused or weights.torn or (weights.update is not None and weights.update.memory == "inplace")
        age = status.stats.last_step_age_seconds
        if age <= self._config.stalled_seconds or held:
            member.stalled = None
            return
        # Looked at again after a while: one whose machine was paused has made no step either, and goes on now.
        member.stalled = self._clock() if member.stalled is None else member.stalled
        if self._clock() - member.stalled >= _STALLED_AGAIN_SECONDS:
            raise ReplicaLost(f"its engine has made no step for {age:.0f} s though it has work", code="stalled")

    def _lose(self, member: Member, reason: str, served: bool) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        member.state, member.reason = "lost", reason
        self._failures = 0 if served else self._failures + 1
        self._failed_at = self._clock()
        if self._failures >= self._config.restarts:
            self._fault = f"the last {self._failures} starts of a replica have failed: {reason}"
        self._log("replica-lost", {"replica": member.name, "reason": reason})
        member.port.kill()
        self._forget(member.name)
        for waiting in self._members:
            # Its node, which a stand-in was to avoid, may be as good as any other now.
            if waiting.state == "starting" and isinstance(waiting.port, Nowhere) and waiting.task is not None:
                waiting.task.cancel()
                self._mind(waiting)
        self.note_change()

    def _drain(self, member: Member, seconds: float, reason: str) -> None:
        """Also one that is being drained already, to give it less time than before."""
        if member.task is not None and member.state != "draining":
            member.task.cancel()
        member.state, member.reason = "draining", reason
        self._log("replica", {"replica": member.name, "state": "draining", "reason": reason})
        member.task = asyncio.create_task(self._drained(member, seconds))
        self.note_change()

    async def _drained(self, member: Member, seconds: float) -> None:
        await self._stop(member, seconds)
        if member in self._members:
            self._members.remove(member)
        self._forget(member.name)
        self.note_change()

    async def _stop(self, member: Member, drain_seconds: float) -> None:
        try:
            await within(drain_seconds + _END_SECONDS, member.port.stop(drain_seconds))
        except (GtpServeError, TimeoutError):
            pass
        finally:
            member.port.kill()

    def _forget(self, name: str) -> None:
        if not self._closing:
            self._journal.write(replicas=tuple(one for one in self._journal.memory.replicas if one != name))

    # -- what is told and asked ----------------------------------------------------------------------

    def note_change(self) -> None:
        """Something that fronts are told has changed."""
        self._serial += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def view(self, front: str, since: int, held: int, seconds: float) -> FleetView:
        """How things are, as soon as that is something else than what ``since`` stands for.

        :param front: who asks.
        :param held: its requests that wait for a replica.
        """
        self._fronts.note(front, held, self._clock())
        if since == self._serial:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._changed.wait()
        return self.now()

    def leave(self, front: str) -> None:
        """A front ends in good order."""
        self._fronts.leave(front)
        self._forget_front(front)

    def now(self) -> FleetView:
        """How things are."""
        ready = [member for member in self._members if member.state == "ready"]
        known = next((member.status for member in self._members if member.status.facts), None)
        engine = self._config.launch.engine
        return FleetView(
            serial=self._serial,
            life=self._life,
            status=self.status(),
            fault=self._fault,
            facts={} if known is None else known.facts,
            max_open=max(1, len(ready)) * (engine.max_running + engine.max_waiting),
        )

    def status(self) -> FleetStatus:
        """The weights of all replicas together."""
        return fleet_status(
            self._members,
            self.versions,
            self._journal.memory,
            wanted=self._scaler.wanted,
            paused=self._paused is not None,
            rolling=self._config.rolling,
        )

    async def control(self, command: Control, bundles: Sequence[Bundle] | None) -> Any:
        """Carry a command out for all replicas; plain JSON values or structs.

        :raises GtpServeError: why it was not.
        """
        answer = await carry_out(command, bundles, self.versions, self._members)
        if isinstance(command, Pause):
            self._paused = command
        elif isinstance(command, Resume):
            self._paused = None
        self.note_change()
        return answer


async def _quietly(call: Coroutine[Any, Any, None]) -> None:
    with suppress(Exception):
        await call
