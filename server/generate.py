"""``POST /generate``: SGLang's request and reply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gtp_serve.server.answer import Opened, event, new_rid
from gtp_serve.server.calls import Call, parse_call
from gtp_serve.server.prepare import Job, prepare
from gtp_serve.server.run import Run
from gtp_serve.server.state import Serving


class GenerateApi:
    """Bodies of ``/generate``."""

    async def open(self, body: dict[str, Any], serving: Serving) -> Opened:
        """Hold a body to the table of ``server.schemas``.

        :raises RequestRejected: naming the field at fault.
        """
        call = parse_call(body, new_rid)
        return Opened(call=call, jobs=await prepare(call, serving), answer=_Replies(call=call))

    def explain(self, error: BaseException) -> BaseException:
        """As it is: all names are this API's."""
        return error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Replies:
    """One object for each sequence."""

    call: Call

    def whole(self, run: Run) -> Any:
        bodies = [self._body(run, job) for job in run.jobs]
        return bodies if self.call.as_list else bodies[0]

    def news(self, run: Run, index: int) -> bytes:
        body = self._body(run, run.jobs[index])
        return event({**body, "index": index} if self.call.as_list else body)

    def tail(self, run: Run) -> bytes:
        return b""

    def _body(self, run: Run, job: Job) -> dict[str, Any]:
        """A reply's response object, whole or the news."""
        seconds = run.seconds(job)
        return job.reply.news(seconds=seconds) if self.call.stream == "delta" else job.reply.whole(seconds=seconds)
