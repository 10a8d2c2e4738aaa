"""The engine process seen from the HTTP process: start it, stream requests through it, notice when it dies.

Each open stream has a queue of its own, bounded by the request's own length.  On the wire a request carries
a name that is never used twice, so an event of an abandoned request cannot reach a later one of the same
rid.  No torch and no numpy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Literal, assert_never

import msgspec
import zmq
import zmq.asyncio

from gtp_serve.engine.control_calls import ControlCalls
from gtp_serve.engine.messages import (
    Abort,
    ControlDone,
    ControlRefused,
    EngineStats,
    Events,
    Fatal,
    FromWorker,
    Hello,
    Phase,
    Ready,
    Rejected,
    Stats,
    Stop,
    Stopped,
    Submit,
    ToWorker,
    Weights,
    decode_from_worker,
    decode_to_worker,
    encode,
    fault_of,
    rejection_of,
)
from gtp_serve.engine.process import WorkerProcess
from gtp_serve.engine.socket_folder import SOCKET, SocketFolder
from gtp_serve.errors import (
    EngineFault,
    EnvironmentFault,
    GtpServeError,
    NotReady,
    QueueFull,
    RequestRejected,
    ShuttingDown,
)
from gtp_serve.refit.orders import Control, UpdateRecord, WeightsStatus
from gtp_serve.request import Request, TokenEvent

_MESSAGES_IN_FLIGHT = 10_000
_GRACE_SECONDS = 5.0
"""From the end of a drain (or a Fatal) to the kill."""
_QUIET_SECONDS = 0.05
"""After the process's death: with no message for this long, none is left in the socket."""

_SILENT_SECONDS = 20.0
"""An engine that has nothing to do says so every few seconds."""

_Item = TokenEvent | GtpServeError


class EngineClient:
    """One engine process.  Make one with ``start``; all calls belong to that event loop."""

    def __init__(
        self,
        process: WorkerProcess,
        socket: zmq.asyncio.Socket,
        context: zmq.asyncio.Context,
        folder: SocketFolder,
        on_phase: Callable[[Phase], None] | None,
    ) -> None:
        self.state: Literal["starting", "ready", "stopping", "dead"] = "starting"
        self.fault: GtpServeError | None = None
        """Why the engine died; None after a stop that was asked for."""
        self.died = asyncio.Event()
        """Set when the engine is gone without having been asked to stop."""
        self._process = process
        self._socket = socket
        self._context = context
        self._folder = folder
        self._on_phase = on_phase
        self._doing = "starting"
        self._ready: Ready | None = None
        self._stopped = False
        self._settled = asyncio.Event()
        self._ended = asyncio.Event()
        self._streams: dict[str, asyncio.Queue[_Item]] = {}
        self._wire_names: dict[str, str] = {}
        self._serial = count()
        self._max_open = 0
        self._stats = EngineStats()
        self._last_progress = self._last_heard = time.monotonic()
        self._received = 0
        self._calls = ControlCalls()
        self._reader = asyncio.create_task(self._read())
        self._watcher = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, argv: Sequence[str], *, on_phase: Callable[[Phase], None] | None = None) -> EngineClient:
        """Run ``argv`` with ``--endpoint URL`` added as the engine process; returns while it is still
        starting.

        :raises EnvironmentFault: when there is no place for the socket or the command cannot be run.
        """
        return await cls.open(lambda endpoint: WorkerProcess.spawn([*argv, "--endpoint", endpoint]), on_phase=on_phase)

    @classmethod
    async def open(
        cls, connect: Callable[[str], Awaitable[WorkerProcess]], *, on_phase: Callable[[Phase], None] | None = None
    ) -> EngineClient:
        """The same with a process of the caller's.

        :param connect: gives the process, having told it the endpoint.
        :raises EnvironmentFault: when there is no place for the socket or the command cannot be run.
        """
        folder = SocketFolder()
        context: zmq.asyncio.Context | None = None
        try:
            endpoint = f"ipc://{folder.path}/{SOCKET}"
            context, socket = _listen(endpoint)
            process = await connect(endpoint)
        except BaseException:
            if context is not None:
                context.destroy(linger=0)
            folder.remove()
            raise
        return cls(process, socket, context, folder, on_phase)

    @property
    def pid(self) -> int:
        """Of the engine process."""
        return self._process.pid

    async def wait_ready(self) -> Ready:
        """Until the engine serves.

        :raises GtpServeError: what the engine failed with, or EngineFault when it died or was stopped before.
        """
        await self._settled.wait()
        if self.state == "dead" or self._ready is None:
            raise self.fault or EngineFault("the engine was stopped", code="stopped")
        return self._ready

    def stats(self) -> EngineStats:
        """The engine's last numbers, with ``last_step_age_seconds`` by this process's clock."""
        now = time.monotonic()
        age = now - self._last_progress if self._streams else 0.0
        silent = now - self._last_heard
        if self.state == "ready" and silent > _SILENT_SECONDS:  # it stands still, though nobody waits for it yet
            age = max(age, silent)
        return msgspec.structs.replace(self._stats, last_step_age_seconds=age)

    # -- requests ----------------------------------------------------------------------------------

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The request's events, up to and including the one with ``finish``.

        Closing the generator (or cancelling the task in it) before that aborts the request.

        :raises RequestRejected: it was refused (QueueFull, PromptTooLong, NotReady, ShuttingDown, ...).
        :raises EngineFault: the engine died.
        """
        self._check_state()
        if request.rid in self._wire_names:
            raise RequestRejected(f"request id {request.rid!r} is in use", code="duplicate-rid", param="rid")
        self._check_room()
        name = f"{request.rid}#{next(self._serial)}"
        frame = _checked_frame(msgspec.structs.replace(request, rid=name))
        queue = self._open(request.rid, name)
        ended = False
        try:
            await self._send_now(frame)
            while not ended:
                item = await queue.get()
                ended = isinstance(item, GtpServeError) or item.finish is not None
                if ended:
                    self._close(request.rid, name)
                if isinstance(item, GtpServeError):
                    raise item
                yield msgspec.structs.replace(item, rid=request.rid)
        finally:
            if not ended:
                self._close(request.rid, name)
                self._post(Abort(rids=(name,)))

    async def abort(self, rid: str) -> None:
        """End a request; its stream gets a last event of finish type ``abort``.  Unknown rids are ignored."""
        if rid in self._wire_names:
            self._post(Abort(rids=(self._wire_names[rid],)))

    # -- weights -----------------------------------------------------------------------------------

    @property
    def weights(self) -> WeightsStatus:
        """What serves and what is on its way, as the engine last said."""
        return self._calls.status

    async def control(self, command: Control) -> Any:
        """Ask something about the weights; the answer as plain JSON values.

        Giving up waiting for it does not take the command back.

        :raises GtpServeError: the engine's own error, by its class; EngineFault when the engine died.
        """
        self._check_state()
        return await self._calls.ask(command, self._send_now)

    async def wait_weights(self, holds: Callable[[WeightsStatus], bool], seconds: float | None = None) -> WeightsStatus:
        """The first status for which something holds, the present one included.

        :raises TimeoutError: when it does not come about in so many seconds.
        :raises EngineFault: the engine died.
        """
        return await self._calls.wait(holds, seconds)

    async def wait_update(self, update: str, seconds: float | None = None) -> UpdateRecord:
        """An update's record once it has ended.

        :raises TimeoutError: when it has not in so many seconds.
        :raises EngineFault: the engine died.
        """
        status = await self.wait_weights(lambda now: any(record.id == update for record in now.history), seconds)
        return next(record for record in status.history if record.id == update)

    async def refresh(self) -> None:
        """Nothing: nobody else speaks to this engine."""

    def _check_state(self) -> None:
        if self.state == "dead":
            raise _for_stream(self.fault)
        if self.state == "stopping":
            raise ShuttingDown("the server is ending and takes no new requests")
        if self.state == "starting":
            raise NotReady("the engine is still starting", [("now", self._doing)])

    def _check_room(self) -> None:
        if len(self._streams) >= self._max_open:
            raise QueueFull(
                f"{len(self._streams)} requests are running or waiting, which is the limit",
                [("try", "again in a while, or raise the limit")],
            )

    async def _send_now(self, frame: bytes) -> None:
        try:
            await self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise QueueFull("the engine takes no messages now", [("try", "again in a while")]) from None

    def _open(self, rid: str, name: str) -> asyncio.Queue[_Item]:
        if not self._streams:
            self._last_progress = time.monotonic()
        self._wire_names[rid] = name
        self._streams[name] = asyncio.Queue()
        return self._streams[name]

    def _close(self, rid: str, name: str) -> None:
        self._streams.pop(name, None)
        if self._wire_names.get(rid) == name:
            del self._wire_names[rid]

    def _post(self, message: ToWorker) -> None:
        """Send without waiting; nothing to do for a dead engine."""
        if self.state != "dead" and not self._socket.closed:
            asyncio.ensure_future(self._socket.send(encode(message))).add_done_callback(_forget)

    # -- the end -----------------------------------------------------------------------------------

    async def stop(self, drain_seconds: float) -> None:
        """Take no new requests, let the running ones finish for this long, end the process; returns when it
        is gone.

        May be called again, to shorten the drain.  An engine that is still starting is killed: it has
        nothing to lose.
        """
        if self.state == "starting":
            self._process.kill()
        if self.state != "dead":
            self._post(Stop(drain_seconds=drain_seconds))
            self.state = "stopping"
        try:
            async with asyncio.timeout(drain_seconds + _GRACE_SECONDS):
                await self._ended.wait()
        except TimeoutError:
            self._process.kill()
            await self._ended.wait()

    async def _watch(self) -> None:
        """Wait for the process's end and clear up behind it."""
        code = await self._process.wait()
        await self._until_quiet()
        expected = self._process.killed or (self._stopped and code == 0)
        self._die(None if expected else self._process.fault(code, self._doing))
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader
        self._context.destroy(linger=0)
        self._folder.remove()
        self._ended.set()

    async def _until_quiet(self) -> None:
        seen = -1
        while seen != self._received:
            seen = self._received
            await asyncio.sleep(_QUIET_SECONDS)

    def _die(self, fault: GtpServeError | None) -> None:
        """The engine is gone (or as good as gone); the first reason counts."""
        if self.state == "dead":
            return
        self.state = "dead"
        self.fault = fault
        if fault is not None:
            self.died.set()
        self._settled.set()
        for queue in self._streams.values():
            queue.put_nowait(_for_stream(fault))
        self._calls.fail(lambda: _for_stream(fault))

    # -- messages ----------------------------------------------------------------------------------

    async def _read(self) -> None:
        try:
            while True:
                frame = await self._socket.recv()
                self._received += 1
                self._last_heard = time.monotonic()
                self._handle(decode_from_worker(frame))
        except Exception as error:
            self._give_up(EngineFault(f"the engine's messages cannot be handled: {error!r}", code="internal"))

    def _give_up(self, fault: GtpServeError) -> None:
        self._die(fault)
        asyncio.get_running_loop().call_later(_GRACE_SECONDS, self._process.kill)

    def _handle(self, message: FromWorker) -> None:
        match message:
            case Hello():
                self._folder.remove()  # connected: a kill -9 can leave nothing behind now
            case Phase():
                self._note_phase(message)
            case Ready():
                self._note_ready(message)
            case Events(events=events):
                self._last_progress = time.monotonic()
                for event in events:
                    self._deliver(event.rid, event)
            case Rejected(rid=rid):
                self._deliver(rid, rejection_of(message))
            case Stats(stats=stats):
                self._note_stats(stats)
            case ControlDone() | ControlRefused():
                self._calls.answer(message)
            case Weights(status=status):
                self._calls.note(status)
            case Fatal():
                self._give_up(fault_of(message))
            case Stopped():
                self._stopped = True
            case _:
                assert_never(message)

    def _deliver(self, name: str, item: _Item) -> None:
        queue = self._streams.get(name)
        if queue is not None:  # None: abandoned in the meantime
            queue.put_nowait(item)

    def _note_phase(self, phase: Phase) -> None:
        if phase.state == "running":
            self._doing = phase.name
        if self._on_phase is not None:
            self._on_phase(phase)

    def _note_ready(self, ready: Ready) -> None:
        self._ready = ready
        self._max_open = int(ready.facts["max_running"]) + int(ready.facts["max_waiting"])
        self._doing = "serving"
        if not self.weights.version:
            self._calls.note(WeightsStatus(version=str(ready.facts.get("weight_version", ""))))
        if self.state == "starting":
            self.state = "ready"
        self._settled.set()

    def _note_stats(self, stats: EngineStats) -> None:
        if stats.steps_total != self._stats.steps_total:
            self._last_progress = time.monotonic()
        self._stats = stats


def _listen(endpoint: str) -> tuple[zmq.asyncio.Context, zmq.asyncio.Socket]:
    context: zmq.asyncio.Context | None = None
    try:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, _MESSAGES_IN_FLIGHT)
        socket.setsockopt(zmq.RCVHWM, _MESSAGES_IN_FLIGHT)
        socket.bind(endpoint)
        return context, socket
    except zmq.ZMQError as error:
        if context is not None:
            context.destroy(linger=0)
        raise EnvironmentFault(
            f"no socket for the engine can be made at {endpoint}: {error}",
            [("try", "TMPDIR set to a folder with a short name")],
        ) from error


def _checked_frame(request: Request) -> bytes:
    """Encode a request so that the worker is certain to decode it: one bad value must not cost the engine."""
    try:
        frame = encode(Submit(requests=(request,)))
        decode_to_worker(frame)
    except (msgspec.DecodeError, OverflowError, TypeError, ValueError) as error:
        raise RequestRejected(f"the request has a value that cannot be passed on: {error}") from error
    return frame


def _for_stream(fault: GtpServeError | None) -> EngineFault:
    """A fresh exception for each stream."""
    if fault is None:
        return EngineFault("the engine was stopped", code="stopped")
    return EngineFault(fault.message, fault.details, code=fault.code)


def _forget(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
