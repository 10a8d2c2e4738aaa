"""The serving process's life: HTTP up, engine brought up behind it, then wait for a signal or its death.

answer /ready with 503 -> bring up -> ready -> SIGTERM: drain -> exit 0
                                        engine dies: exit 6 at once
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import ssl
import sys
import time
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvloop
from starlette.types import ASGIApp

from gtp_serve.engine.messages import EngineStats, Phase
from gtp_serve.errors import EngineFault, GtpServeError
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.app import build_app
from gtp_serve.server.failures import EXIT_OK, EXIT_SIGNAL_BASE, as_known_error
from gtp_serve.server.front_door import front_door
from gtp_serve.server.http_server import HttpServer, build_server
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.porch import Porch
from gtp_serve.server.ports import display_address, url_of
from gtp_serve.server.startup import Lines, Reporter, ReporterHandler
from gtp_serve.server.state import ServerState
from gtp_serve.server.terminal import Terminal
from gtp_serve.server.tracing import open_tracer
from gtp_serve.server.weights_watch import watch_weights

if TYPE_CHECKING:
    from gtp_serve.server.bringup import Bringup
    from gtp_serve.server.state import Managed

    MakeBringup = Callable[[], Callable[..., Bringup]]
    """Imports what brings the server up, which takes long, and gives it."""

_TICK_SECONDS = 1.0
_STATUS_SECONDS = 10.0
_FLUSH_SECONDS = 3.0
"""From the last token until answers that are still being written are cut."""
_FORCE_SECONDS = 0.5


def run(
    options: ServeOptions,
    listener: socket.socket,
    porch: Porch,
    tls: ssl.SSLContext | None,
    started: float,
    make: MakeBringup | None = None,
) -> int:
    """Serve on a listening socket until told to stop; returns the exit code.

    :param porch: answers on the socket so far.
    :param tls: https instead of http.
    :param started: when the command began, monotonic.
    :param make: gives the start of something else than one engine on this machine.
    """
    reporter = _reporter(options)
    log = set_up_logging(reporter, options.verbosity)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Server(options, reporter, log, listener, porch, tls, started, make).run())
    except Exception as error:
        if options.verbosity > 0:
            log.error("stack", exc_info=error)
        return report(options, as_known_error(error))


def report(options: ServeOptions, error: GtpServeError) -> int:
    """Print the error that ends the command, in the form that the options ask for; returns the exit code."""
    _reporter(options).failure(error)
    return error.exit_code


def _reporter(options: ServeOptions) -> Reporter:
    quiet = options.verbosity < 0
    if options.log == "text" and sys.stderr.isatty():
        return Terminal(sys.stderr, quiet=quiet)
    return Lines(sys.stderr, as_json=options.log == "json", quiet=quiet)


def set_up_logging(reporter: Reporter, verbosity: int) -> logging.Logger:
    """Our log goes through the reporter; what other packages say does so only with ``-v``."""
    handler = ReporterHandler(reporter, stacks=verbosity > 0)
    log = logging.getLogger("gtp_serve")
    log.handlers, log.propagate = [handler], False
    log.setLevel({-1: logging.WARNING, 0: logging.INFO}.get(verbosity, logging.DEBUG))
    logging.captureWarnings(capture=True)
    others: list[logging.Handler] = [handler] if verbosity > 0 else [logging.NullHandler()]
    for name in ("py.warnings", "uvicorn", "uvicorn.error"):
        other = logging.getLogger(name)
        other.handlers, other.propagate = list(others), False
    if verbosity > 0:
        warnings.simplefilter("default")
    asyncio_log = logging.getLogger("asyncio")
    asyncio_log.handlers, asyncio_log.propagate = [handler], False
    asyncio_log.setLevel(logging.ERROR)
    return log


def _one_engine() -> Callable[..., Bringup]:
    make: Callable[..., Bringup] = importlib.import_module("gtp_serve.server.bringup").Bringup
    return make


class _Signals:
    """SIGTERM and SIGINT as events: the first asks to drain, the second to end at once."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.number = signal.SIGTERM
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._got, number)

    def _got(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
            return
        self.number = number
        self.first.set()


class _Server:
    """One run of the command."""

    def __init__(
        self,
        options: ServeOptions,
        reporter: Reporter,
        log: logging.Logger,
        listener: socket.socket,
        porch: Porch,
        tls: ssl.SSLContext | None,
        started: float,
        make: MakeBringup | None = None,
    ) -> None:
        self._options = options
        self._make = make
        self._reporter = reporter
        self._log = log
        self._listener = listener
        self._porch = porch
        self._tls = tls
        self._started = started
        self._address = display_address(*listener.getsockname()[:2])
        self._url = url_of(listener, tls=tls is not None)
        self._state = ServerState()
        self._metrics = Metrics(self._state, aliases=options.metrics_aliases)

    async def run(self) -> int:
        """Until a signal or the engine's death.

        :raises GtpServeError: what ended the server.
        """
        signals = _Signals()
        self._porch.close()
        http = build_server(self._build_app(), self._tls)
        serving = asyncio.create_task(http.serve(sockets=[self._listener]))
        ticking = asyncio.create_task(self._tick())
        try:
            return await self._live(signals, http)
        finally:
            ticking.cancel()
            http.should_exit = True
            http.force_exit = signals.second.is_set()
            await asyncio.wait([serving], timeout=_FLUSH_SECONDS)
            if self._state.tracer is not None and not signals.second.is_set():
                await asyncio.to_thread(self._state.tracer.close)

    def _build_app(self) -> ASGIApp:
        options = self._options
        guard = AdminGuard(options.admin_key)
        app = build_app(
            self._state,
            self._metrics,
            self._log,
            guard=guard,
            refit_seconds=options.refit_timeout,
            pages=options.page,
        )
        return front_door(app, api_key=options.api_key, admin_key=options.admin_key, cors=options.cors)

    async def _live(self, signals: _Signals, http: HttpServer) -> int:
        bringup: Bringup | None = None
        try:
            await http.up.wait()
            bringup = await self._load_bringup()
            self._state.tracer = await asyncio.to_thread(open_tracer, self._options.otlp, os.environ, self._log)
            client = await _unless(signals.first, bringup.run())
        except BaseException as error:
            self._state.fault = as_known_error(error)
            if bringup is not None and bringup.client is not None:
                await bringup.client.stop(0)
            raise
        if client is None:
            if bringup.client is not None:
                await bringup.client.stop(0)
            return EXIT_SIGNAL_BASE + signals.number
        return await self._serve(client, signals)

    async def _load_bringup(self) -> Bringup:
        """Imported now and in a thread, so that the port answers while that goes on."""
        port = Phase(name=f"port {self._address}", state="ok", seconds=time.monotonic() - self._started)
        made: Bringup = (await asyncio.to_thread(self._make or _one_engine))(
            self._options,
            self._reporter,
            self._state,
            self._metrics,
            port=port,
            url=self._url,
            started=self._started,
        )
        return made

    async def _serve(self, client: Managed, signals: _Signals) -> int:
        """Until a signal (then drain) or the engine's death.

        :raises GtpServeError: the engine's fault.
        """
        watching = asyncio.create_task(watch_weights(client, self._metrics, self._reporter))
        try:
            await _first_of(client.died.wait(), signals.first.wait())
        finally:
            watching.cancel()
        if client.died.is_set():
            raise self._fault(client)
        return await self._drain(client, signals)

    def _fault(self, client: Managed) -> GtpServeError:
        self._state.fault = client.fault or EngineFault("the engine process has ended")
        return self._state.fault

    async def _drain(self, client: Managed, signals: _Signals) -> int:
        """Refuse new requests, let running ones finish, end the engine; 0 when nothing was cut short."""
        self._state.stopping = True
        seconds = self._options.drain_timeout
        if self._state.num_calls:
            self._reporter.line("INFO", "stopping", {"running": self._state.num_calls, "seconds": seconds})
        stopping = asyncio.create_task(client.stop(seconds))
        idle = asyncio.create_task(self._state.wait_idle())
        forced = asyncio.create_task(signals.second.wait())
        try:
            await asyncio.wait({idle, forced}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            whole = idle.done() and not client.died.is_set()
            if not idle.done():
                await self._cut(client, idle, forced)
            elif not forced.done():
                await asyncio.wait({stopping, forced}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stopping, idle, forced):
                task.cancel()
            await asyncio.gather(stopping, idle, forced, return_exceptions=True)
        if client.died.is_set():
            raise self._fault(client)
        return EXIT_OK if whole else EXIT_SIGNAL_BASE + signals.number

    async def _cut(self, client: Managed, idle: asyncio.Task[None], forced: asyncio.Task[bool]) -> None:
        """Abort what still runs and let its clients be told."""
        self._reporter.line("WARNING", "cut", {"running": self._state.num_calls})
        ending = asyncio.create_task(client.stop(0))
        await asyncio.wait({idle}, timeout=_FORCE_SECONDS if forced.done() else _FLUSH_SECONDS)
        await asyncio.wait({ending}, timeout=_FORCE_SECONDS)
        ending.cancel()

    async def _tick(self) -> None:
        """Keeps the start-up from looking like a hang, and says every ten seconds what changed."""
        before = EngineStats()
        said = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._reporter.tick()
            serving, now = self._state.serving, time.monotonic()
            if serving is None:
                said = now
            if serving is None or now - said < _STATUS_SECONDS:
                continue
            stats = serving.client.stats()
            if stats.steps_total != before.steps_total:
                self._reporter.line("INFO", "status", _status(before, stats, now - said))
            before, said = stats, now


def _status(before: EngineStats, stats: EngineStats, seconds: float) -> dict[str, object]:
    used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
    return {
        "run": stats.running,
        "wait": stats.waiting,
        "kv": f"{used:.0%}",
        "in_tok_s": round((stats.prompt_tokens_total - before.prompt_tokens_total) / seconds, 1),
        "out_tok_s": round((stats.generation_tokens_total - before.generation_tokens_total) / seconds, 1),
    }


async def _first_of(*waits: object) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def _unless(stop: asyncio.Event, work: object) -> Managed | None:
    """The work's result, or None (and the work cancelled) when ``stop`` comes first."""
    task: asyncio.Task[Managed] = asyncio.ensure_future(work)  # type: ignore[call-overload]
    waiter = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    finally:
        waiter.cancel()
