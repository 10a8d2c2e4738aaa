"""An HTTP route that generates: reads a call, runs its sequences, answers whole or as a stream, stops when the client
leaves.  Which fields there are and how an answer looks is its ``Api``'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import orjson
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from gtp_serve.errors import RequestRejected
from gtp_serve.server.account import account
from gtp_serve.server.body import read_json_object
from gtp_serve.server.calls import Call
from gtp_serve.server.http_errors import JsonResponse, error_object, error_response
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.prepare import Job
from gtp_serve.server.run import Run
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


class Answer(Protocol):
    """How one API tells what a call's sequences have made."""

    def whole(self, run: Run) -> Any:
        """The body of an answer that comes in one piece."""
        ...

    def news(self, run: Run, index: int) -> bytes:
        """Server-sent events with what is new in one sequence."""
        ...

    def tail(self, run: Run) -> bytes:
        """Server-sent events after the last news of a call without errors."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A request that was read: what runs for it and how it is answered."""

    call: Call
    jobs: list[Job]
    answer: Answer


class Api(Protocol):
    """What a route's body means."""

    async def open(self, body: dict[str, Any], serving: Serving) -> Opened:
        """Hold a body to the API's fields and prepare its sequences.

        :raises RequestRejected: naming the field at fault.
        """
        ...

    def explain(self, error: BaseException) -> BaseException:
        """What went wrong, in the API's own names of fields."""
        ...


def new_rid() -> str:
    """A name that no other request has."""
    return uuid.uuid4().hex


def event(body: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


class Generating:
    """The route, as an ASGI application: it owns ``receive`` while it answers, and so notices a client
    that leaves.
    """

    def __init__(
        self, api: Api, state: ServerState, metrics: Metrics, log: logging.Logger, *, ping: float = PING_SECONDS
    ) -> None:
        self._api = api
        self._state = state
        self._metrics = metrics
        self._log = log
        self._ping = ping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        started = time.perf_counter()
        try:
            serving = self._state.require_whole()
            opened = await self._api.open(await read_json_object(HttpRequest(scope, receive)), serving)
            with self._state.call([job.request.rid for job in opened.jobs]):
                run = Run(opened.call, opened.jobs, serving, self._metrics, started)
                try:
                    await self._answer(opened.answer, run, scope, receive, send)
                finally:
                    account(run, self._state, self._metrics, self._log, scope)
        except ClientDisconnect:
            self._metrics.ended("client_gone")
            self._log.info("request", extra={"fields": {"reason": "client_gone", "detail": "before its body was read"}})
        except RequestRejected as error:
            self._metrics.ended("refused")
            # The name of a field that does not exist, or comes twice, is the client's word: none of theirs is logged.
            theirs = error.code in ("unknown-field", "duplicate-key", "invalid-json")
            param = None if theirs else error.param
            fields = {"route": scope["path"], "reason": "refused", "code": error.code, "param": param}
            self._log.info("request", extra={"fields": fields})
            await error_response(self._api.explain(error))(scope, receive, send)

    async def _answer(self, answer: Answer, run: Run, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watch(receive) as gone, run.started(gone):
            respond = self._stream if run.call.stream else self._whole
            await respond(answer, run, gone, scope, receive, send)

    async def _whole(
        self, answer: Answer, run: Run, gone: asyncio.Task[None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        while not run.over:
            await run.wait(None)
            if gone.done():
                return
        if run.error is not None:
            await error_response(self._api.explain(run.error))(scope, receive, send)
            return
        await JsonResponse(answer.whole(run))(scope, receive, send)

    async def _stream(
        self, answer: Answer, run: Run, gone: asyncio.Task[None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        # The status waits for the first news, so that a request the engine refuses still gets its 4xx.
        await run.wait(self._ping)
        if gone.done():
            return
        if run.error is not None and not run.has_tokens:
            await error_response(self._api.explain(run.error))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        while run.dirty or not run.over:
            news = b"".join([answer.news(run, index) for index in run.take()])
            if not await _send_chunk(send, news or _PING, more=True):
                return
            await run.wait(self._ping)
            if gone.done():
                return
        tail = event(error_object(self._api.explain(run.error))) if run.error is not None else answer.tail(run)
        await _send_chunk(send, tail + _DONE, more=False)


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
