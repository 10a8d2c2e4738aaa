"""``POST /generate``: runs a call's sequences, answers whole or as a stream, stops when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from gtp_serve.errors import EngineFault, GtpServeError, RequestRejected
from gtp_serve.request import FinishReason, TokenEvent
from gtp_serve.server.body import read_json_object
from gtp_serve.server.calls import Call, parse_call
from gtp_serve.server.http_errors import JsonResponse, error_object, error_response
from gtp_serve.server.metrics import Metrics, Outcome
from gtp_serve.server.prepare import Job, prepare
from gtp_serve.server.reply import abort_status
from gtp_serve.server.state import ServerState, Serving

PING_SECONDS = 15.0
STALL_SECONDS = 60.0
"""A stream client that takes nothing for so long is dropped."""

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_PING = b": ping\n\n"

Clock = Callable[[], float]


def new_rid() -> str:
    """A name that no other request has."""
    return uuid.uuid4().hex


class Generate:
    """The route, as an ASGI application: it owns ``receive`` while it answers, and so notices a client
    that leaves.
    """

    def __init__(
        self, state: ServerState, metrics: Metrics, log: logging.Logger, *, ping: float = PING_SECONDS
    ) -> None:
        self._state = state
        self._metrics = metrics
        self._log = log
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started = time.perf_counter()
        try:
            serving = self._state.require_whole()
            call = parse_call(await read_json_object(HttpRequest(scope, receive)), new_rid)
            jobs = await prepare(call, serving)
            with self._state.call([job.request.rid for job in jobs]):
                run = _Run(call, jobs, serving, self._metrics, started)
                try:
                    await self._answer(run, scope, receive, send)
                finally:
                    self._account(run, call)
        except ClientDisconnect:
            self._metrics.ended("client_gone")
            self._log.info("request", extra={"fields": {"reason": "client_gone", "detail": "before its body was read"}})
        except RequestRejected as error:
            self._metrics.ended("refused")
            self._log.info("request", extra={"fields": {"reason": "refused", "code": error.code, "param": error.param}})
            await error_response(error)(scope, receive, send)

    async def _answer(self, run: _Run, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watch(receive) as gone, run.started(gone):
            if run.call.stream:
                await self._stream(run, gone, scope, receive, send)
            else:
                await self._whole(run, gone, scope, receive, send)

    async def _whole(self, run: _Run, gone: asyncio.Task[None], scope: Scope, receive: Receive, send: Send) -> None:
        while not run.over:
            await run.wait(None)
            if gone.done():
                return
        if run.error is not None:
            await error_response(run.error)(scope, receive, send)
            return
        bodies = [run.body(index) for index in range(len(run.jobs))]
        await JsonResponse(bodies if run.call.as_list else bodies[0])(scope, receive, send)

    async def _stream(self, run: _Run, gone: asyncio.Task[None], scope: Scope, receive: Receive, send: Send) -> None:
        # The status waits for the first news, so that a request the engine refuses still gets its 4xx.
        await run.wait(self._ping)
        if gone.done():
            return
        if run.error is not None and not run.has_tokens:
            await error_response(run.error)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        while run.dirty or not run.over:
            if not await _send_chunk(send, run.take_chunk() or _PING, more=True):
                return
            await run.wait(self._ping)
            if gone.done():
                return
        tail = _event(error_object(run.error)) if run.error is not None else b""
        await _send_chunk(send, tail + _DONE, more=False)

    def _account(self, run: _Run, call: Call) -> None:
        """One log line for each sequence, without a word of its text."""
        for job in run.jobs:
            outcome = run.outcome(job)
            seconds = run.seconds(job)
            self._metrics.ended(outcome, seconds if outcome in ("stop", "length") else None)
            if call.no_logs:
                continue
            reply = job.reply
            fields: dict[str, Any] = {
                "rid": job.request.rid,
                "reason": outcome,
                "prompt": reply.num_prompt,
                "cached": reply.cached_tokens,
                "tokens": len(reply.ids),
                "seconds": round(seconds, 3),
            }
            if outcome == "error":
                fields["code"] = run.error_code(job)
            self._log.info("request", extra={"fields": fields})
        if run.error is not None and not isinstance(run.error, GtpServeError):
            self._log.error("a request met a bug", exc_info=run.error)


class _Run:
    """The sequences of one call while they run: a task each, and one signal for whoever sends the answer."""

    def __init__(self, call: Call, jobs: list[Job], serving: Serving, metrics: Metrics, started: float) -> None:
        self.call = call
        self.jobs = jobs
        self.error: BaseException | None = None
        self.dirty: dict[int, None] = {}
        """Indices of replies with news, oldest first."""
        self._serving = serving
        self._metrics = metrics
        self._started_at = started
        self._ended_at: dict[str, float] = {}
        self._running = len(jobs)
        self._signal = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self._running == 0 or self.error is not None

    @property
    def has_tokens(self) -> bool:
        """Whether any sequence has made a token."""
        return any(job.reply.ids for job in self.jobs)

    @asynccontextmanager
    async def started(self, gone: asyncio.Task[None]) -> AsyncIterator[None]:
        """Run the sequences; on the way out those that are not over are aborted.

        :param gone: its end wakes whoever waits.
        """
        gone.add_done_callback(lambda _: self._signal.set())
        tasks = [asyncio.create_task(self._drive(index)) for index in range(len(self.jobs))]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _drive(self, index: int) -> None:
        job = self.jobs[index]
        try:
            # Closing the generator is what aborts the sequence in the engine.
            async with aclosing(self._serving.client.submit(job.request)) as events:
                await self._follow(index, events)
            self._require_complete(job)
        except Exception as error:
            self.error = self.error or error
        finally:
            self._ended_at[job.request.rid] = time.perf_counter()
            self._running -= 1
            self._signal.set()

    async def _follow(self, index: int, events: AsyncIterator[TokenEvent]) -> None:
        reply = self.jobs[index].reply
        last = self._started_at
        async for event in events:
            now = time.perf_counter()
            before = len(reply.ids)
            over = reply.add(event)
            self._count(reply.num_prompt, event, len(reply.ids) - before, first=before == 0, seconds=now - last)
            last = now
            if self.call.stream:
                self.dirty[index] = None
                self._signal.set()
            if over:
                return

    def _count(self, prompt: int, event: TokenEvent, new: int, *, first: bool, seconds: float) -> None:
        if new == 0:
            return
        self._metrics.generation_tokens.inc(new)
        if first:
            self._metrics.prompt_tokens.inc(prompt)
            self._metrics.cached_prompt_tokens.inc(event.cached_tokens)
            self._metrics.ttft.observe(seconds)
        else:
            for _ in range(new):
                self._metrics.itl.observe(seconds / new)

    def _require_complete(self, job: Job) -> None:
        finish = job.reply.finish
        if finish is None:
            raise EngineFault("the engine ended a request without saying why")
        if finish.type == "abort" and abort_status(finish) >= 500 and not self.call.as_list:
            raise _aborted(finish)

    async def wait(self, seconds: float | None) -> None:
        """Until there is something to send, a sequence is over, the client is gone or the time has passed."""
        if self.dirty or self.over:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._signal.wait()
        self._signal.clear()

    def take_chunk(self) -> bytes:
        """Every reply with news, as server-sent events."""
        indices, self.dirty = list(self.dirty), {}
        return b"".join([_event(self._event_body(index)) for index in indices if self._has_news(index)])

    def _has_news(self, index: int) -> bool:
        return self.jobs[index].reply.has_news()

    def _event_body(self, index: int) -> dict[str, Any]:
        body = self.body(index)
        return {**body, "index": index} if self.call.as_list else body

    def body(self, index: int) -> dict[str, Any]:
        """A reply's response object, whole or the news."""
        job = self.jobs[index]
        seconds = self.seconds(job)
        return job.reply.news(seconds=seconds) if self.call.stream == "delta" else job.reply.whole(seconds=seconds)

    def seconds(self, job: Job) -> float:
        """From the call's arrival to the sequence's end, or until now."""
        return self._ended_at.get(job.request.rid, time.perf_counter()) - self._started_at

    def outcome(self, job: Job) -> Outcome:
        """How a sequence ended, for the log and the counter."""
        finish = job.reply.finish
        if self.error is not None and (finish is None or finish.type == "abort"):
            return "refused" if isinstance(self.error, RequestRejected) else "error"
        if finish is None:
            return "client_gone"
        return "error" if finish.type == "abort" and abort_status(finish) >= 500 else finish.type

    def error_code(self, job: Job) -> str:
        """The short name of what a sequence failed of."""
        if job.reply.finish is not None and job.reply.finish.code:
            return job.reply.finish.code
        return self.error.code if isinstance(self.error, GtpServeError) else "internal"


def _aborted(finish: FinishReason) -> GtpServeError:
    error = RequestRejected(finish.message or "the engine gave the request up", code=finish.code)
    error.http_status = abort_status(finish)
    return error


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


async def _send_chunk(send: Send, chunk: bytes, *, more: bool) -> bool:
    """Send, or give up on a client that takes nothing; False then."""
    try:
        async with asyncio.timeout(STALL_SECONDS):
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
    except (TimeoutError, OSError):
        return False
    return True


@asynccontextmanager
async def _watch(receive: Callable[[], Awaitable[Any]]) -> AsyncIterator[asyncio.Task[None]]:
    """A task that ends when the client is gone."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(until_gone())
    try:
        yield task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
