"""The engine process: connect, build, then messages and steps in turn until told to stop or left alone.

    Hello, Phase ..., Ready     { messages in -> next step started, Events of the last out } ...     Stopped | Fatal

It blocks for messages only when there is no work, ends with its parent whatever happens, and leaves signals
from the terminal to the parent, which decides when and how to stop.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol, assert_never

import zmq

from gtp_serve.engine.engine import Engine
from gtp_serve.engine.lifeline import end_with_parent, leave_signals_to_parent
from gtp_serve.engine.messages import (
    Abort,
    ControlCall,
    ControlDone,
    Events,
    FromWorker,
    Hello,
    Phase,
    Ready,
    Stats,
    Stop,
    Stopped,
    Submit,
    ToWorker,
    Weights,
    decode_to_worker,
    encode,
    fatal,
    refused,
    rejected,
)
from gtp_serve.engine.updates import Outcome
from gtp_serve.errors import EngineFault, GtpServeError, RequestRejected, ShuttingDown, UpdateRefused
from gtp_serve.refit.orders import Begin, WeightsStatus
from gtp_serve.request import Request

MESSAGES_IN_FLIGHT = 10_000
"""Bound of each direction's queue; a sender at the bound waits."""
_STATS_EVERY_SECONDS = 0.25
_BEAT_SECONDS = 5.0
"""The same without work: whoever hears nothing knows that this process stands still."""
_IDLE_CHECK_MS = 500
"""Between two looks at what the engine depends on, when nothing comes in."""
_UPDATE_CHECK_MS = 5
"""The same while an update is under way."""
_LAST_WORDS_MS = 2000

Build = Callable[[Callable[[Phase], None]], Engine]


def run_worker(endpoint: str, build: Build) -> int:
    """Serve one engine to the client that listens at ``endpoint``; returns the process's exit code.

    :param build: makes the engine, reporting each phase through the function it is given; a GtpServeError
        from it reaches the client as it is.
    """
    end_with_parent()
    leave_signals_to_parent()
    with _Link(endpoint) as link:
        link.send(Hello(pid=os.getpid()))
        try:
            engine = build(link.send)
            link.send(Ready(facts=_facts(engine)))
            Loop(engine, link).run()
        except GtpServeError as error:
            link.send(fatal(error))
            return error.exit_code
        except Exception as error:
            traceback.print_exc()
            fault = EngineFault(f"the engine failed with {type(error).__name__}: {error}", code="internal")
            link.send(fatal(fault))
            return fault.exit_code
        link.send(Stopped())
    return 0


class Wire(Protocol):
    """What the loop needs of its connection to the client."""

    def send(self, message: FromWorker) -> None:
        """Send one message."""
        ...

    def receive(self, wait_ms: int) -> list[ToWorker]:
        """What has come in; waits so long for the first message."""
        ...


class _Link:
    """The worker's end of the socket."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, MESSAGES_IN_FLIGHT)
        self._socket.setsockopt(zmq.RCVHWM, MESSAGES_IN_FLIGHT)
        self._socket.connect(endpoint)

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=_LAST_WORDS_MS)
        self._context.term()

    def send(self, message: FromWorker) -> None:
        self._socket.send(encode(message))

    def receive(self, wait_ms: int) -> list[ToWorker]:
        """What has come in; waits so long for the first message."""
        messages: list[ToWorker] = []
        if self._socket.poll(wait_ms) == 0:
            return messages
        while len(messages) < MESSAGES_IN_FLIGHT:
            try:
                messages.append(decode_to_worker(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                break
        return messages


class Loop:
    """Messages and steps in turn."""

    def __init__(self, engine: Engine, link: Wire) -> None:
        self._engine = engine
        self._link = link
        self._deadline: float | None = None
        self._stats_sent = -1.0
        self._idle = True
        """At the last look there was no work; what is told then says so."""
        self._updates = engine.updates

    def run(self) -> None:
        """Until a Stop has been carried out.

        :raises EngineFault: when the engine cannot go on.
        """
        self.begin()
        while not self.finished():
            self.turn()
        self.end()

    def begin(self) -> None:
        """Say how things are."""
        self._send_stats()
        self._send_weights()

    def turn(self) -> None:
        """Take messages and go one step on."""
        self._handle_messages()  # while a step computes
        if self._engine.has_work():
            self._engine.wait()
            self._handle_messages()  # what came in the meantime takes part in the next step
        self._engine.check()
        self._poll_updates()
        self._enforce_deadline()
        if self._engine.has_work():
            self._step()

    def end(self) -> None:
        """Answer whoever still waits."""
        if self._updates is not None:
            self._answer(self._updates.close())

    def finished(self) -> bool:
        """Whether a Stop has been carried out."""
        return self._deadline is not None and not self._engine.has_requests()

    def _handle_messages(self) -> None:
        messages = self._link.receive(self._wait_ms())
        for message in messages:
            self._handle(message)
        if self._engine.has_work():
            return
        if messages or time.monotonic() - self._stats_sent >= _BEAT_SECONDS:
            self._send_stats()  # refusals change the numbers too

    def _wait_ms(self) -> int:
        if self._engine.has_work():
            return 0
        return _UPDATE_CHECK_MS if self._updates is not None and self._updates.busy else _IDLE_CHECK_MS

    def _handle(self, message: ToWorker) -> None:
        match message:
            case Submit(requests=requests):
                for request in requests:
                    self._add(request)
            case Abort(rids=rids):
                for rid in rids:
                    self._engine.abort(rid)
            case ControlCall():
                self._control(message)
            case Stop(drain_seconds=seconds):
                deadline = time.monotonic() + seconds
                self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
            case _:
                assert_never(message)

    def _add(self, request: Request) -> None:
        try:
            if self._deadline is not None:
                raise ShuttingDown("the server is ending and takes no new requests")
            self._engine.add(request)
        except RequestRejected as error:
            self._link.send(rejected(request.rid, error))

    def _control(self, message: ControlCall) -> None:
        try:
            if self._updates is None:
                raise UpdateRefused("this engine was built without a way to change its weights", code="no-updates")
            if self._deadline is not None and isinstance(message.command, Begin):
                raise ShuttingDown("the server is ending and takes no new weights")
        except RequestRejected as error:
            self._link.send(refused(message.call, error))
        else:
            self._updates.control(message.call, message.command)

    def _poll_updates(self) -> None:
        if self._updates is not None:
            outcomes = self._updates.poll()
            if self._updates.take_change():
                self._send_weights()  # first, so that whoever is answered sees what has changed
            self._answer(outcomes)

    def _answer(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.error is None:
                self._link.send(ControlDone(call=outcome.call, body=outcome.body))
            else:
                self._link.send(refused(outcome.call, outcome.error))

    def _send_weights(self) -> None:
        updates = self._updates
        status = WeightsStatus(version=self._engine.weight_version) if updates is None else updates.status()
        self._link.send(Weights(status=status))

    def _enforce_deadline(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._engine.abort_all("the server ended before this request was done", "shutting-down")

    def _step(self) -> None:
        events = self._engine.step()
        if events:
            self._link.send(Events(events=tuple(events)))
        due = time.monotonic() - self._stats_sent >= _STATS_EVERY_SECONDS
        idle = not self._engine.has_work()
        if due or idle or self._idle:  # work that has begun is seen at once, however short it is
            self._send_stats()
        self._idle = idle

    def _send_stats(self) -> None:
        self._stats_sent = time.monotonic()
        self._link.send(Stats(stats=self._engine.stats()))


def _facts(engine: Engine) -> dict[str, str | int | float]:
    config = engine.config
    return {
        "pid": os.getpid(),
        "family": config.model.family,
        "dtype": config.dtype,
        "device": config.device,
        "tp": config.tp,
        "vocab_size": config.model.vocab_size,
        "max_context": config.max_context,
        "max_running": config.max_running,
        "max_waiting": config.max_waiting,
        "kv_blocks": config.cache.num_blocks,
        "kv_block_size": config.cache.block_size,
        "weight_version": config.weight_version,
    }
