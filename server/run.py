"""The sequences of one call while they run, whatever API asked for them: a task each, and one signal for whoever
sends the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

from gtp_serve.errors import EngineFault, GtpServeError, RequestRejected
from gtp_serve.request import FinishReason, TokenEvent
from gtp_serve.server.calls import Call
from gtp_serve.server.metrics import Metrics, Outcome
from gtp_serve.server.prepare import Job
from gtp_serve.server.reply import abort_status
from gtp_serve.server.state import Serving


class Run:
    """From the first token to the last of every sequence of a call."""

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
        self._first_at: dict[str, float] = {}
        self._queued: dict[str, float] = {}
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
            if event.queue_seconds:
                self._queued[event.rid] = event.queue_seconds
            if reply.ids:
                self._first_at.setdefault(event.rid, now)
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
            self._metrics.queue.observe(event.queue_seconds)
        else:
            for _ in range(new):
                self._metrics.itl.observe(seconds / new)

    def _require_complete(self, job: Job) -> None:
        finish = job.reply.finish
        if finish is None:
            raise EngineFault("the engine ended a request without saying why")
        if not self.call.as_list and self._none_is_good():
            raise _aborted(finish)

    def _none_is_good(self) -> bool:
        """Whether a fault has ended every sequence of the call: it is answered with the fault then."""
        ends = [job.reply.finish for job in self.jobs]
        return all(end is not None and end.type == "abort" and abort_status(end) >= 400 for end in ends)

    async def wait(self, seconds: float | None) -> None:
        """Until there is something to send, a sequence is over, the client is gone or the time has passed."""
        if self.dirty or self.over:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._signal.wait()
        self._signal.clear()

    def take(self) -> list[int]:
        """Indices of the sequences with news, oldest news first."""
        indices, self.dirty = list(self.dirty), {}
        return [index for index in indices if self.jobs[index].reply.has_news()]

    def seconds(self, job: Job) -> float:
        """From the call's arrival to the sequence's end, or until now."""
        return self._ended_at.get(job.request.rid, time.perf_counter()) - self._started_at

    @property
    def age(self) -> float:
        """Seconds since the call came."""
        return time.perf_counter() - self._started_at

    def first_token_seconds(self, job: Job) -> float | None:
        """From the call's arrival to the sequence's first token, if it had one."""
        at = self._first_at.get(job.request.rid)
        return None if at is None else at - self._started_at

    def queue_seconds(self, job: Job) -> float | None:
        """In the engine until its first step, if it had one."""
        return self._queued.get(job.request.rid)

    def outcome(self, job: Job) -> Outcome:
        """How a sequence ended, for the log and the counter."""
        finish = job.reply.finish
        if finish is not None:
            status = abort_status(finish) if finish.type == "abort" else 200
            return "error" if status >= 500 else "refused" if status >= 400 else finish.type
        if self.error is not None:
            return "refused" if isinstance(self.error, RequestRejected) else "error"
        return "client_gone"

    def error_code(self, job: Job) -> str:
        """The short name of what a sequence failed of."""
        if job.reply.finish is not None and job.reply.finish.code:
            return job.reply.finish.code
        return self.error.code if isinstance(self.error, GtpServeError) else "internal"


def _aborted(finish: FinishReason) -> GtpServeError:
    error = RequestRejected(finish.message or "the engine gave the request up", code=finish.code)
    error.http_status = abort_status(finish)
    return error
