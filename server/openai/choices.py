"""What the answers of both OpenAI routes share: the frame of a body or chunk, usage, and what vLLM adds to a choice."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gtp_serve.server.answer import event
from gtp_serve.server.openai.reading import Wanted
from gtp_serve.server.openai.tokens import TokenWriter, Top
from gtp_serve.server.prepare import Job
from gtp_serve.server.reply import Reply, Triple, abort_status
from gtp_serve.server.run import Run
from gtp_serve.server.state import Serving


class Frame:
    """One answer's name and date, and what is put around its choices.

    :param kind: ``object`` of a whole body.
    :param chunk: ``object`` of a chunk.
    """

    def __init__(self, serving: Serving, wanted: Wanted, rid: str, *, kind: str, chunk: str) -> None:
        self.wanted = wanted
        self.writer = TokenWriter(tokenizer=serving.tokenizer, as_ids=wanted.tokens_as_ids)
        self._ends = frozenset(serving.engine.model.eos_token_ids)
        self._kind = kind
        self._chunk = chunk
        self._head = {"id": rid, "created": int(time.time()), "model": serving.name}

    def whole(self, run: Run, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A body that comes in one piece."""
        body = {**self._head, "object": self._kind, "choices": choices, "usage": usage(run.jobs)}
        return body if self.wanted.warning is None else {**body, "gtp": {"warning": self.wanted.warning}}

    def chunk(self, run: Run, index: int, choice: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> bytes:
        """One event with news of one choice."""
        body = {**self._head, "object": self._chunk, "choices": [choice], **(extra or {})}
        if self.wanted.continuous_usage:
            body["usage"] = usage([run.jobs[index]])
        elif self.wanted.include_usage:
            body["usage"] = None
        return event(body)

    def tail(self, run: Run) -> bytes:
        """The last chunk, with the counts, where it is wanted."""
        if not self.wanted.include_usage:
            return b""
        return event({**self._head, "object": self._chunk, "choices": [], "usage": usage(run.jobs)})

    def reasons(self, job: Job) -> dict[str, Any]:
        """Why a choice ended: OpenAI's word, and the stop that was met unless it is the model's own end."""
        finish = job.reply.finish
        if finish is None:
            return {"finish_reason": None, "stop_reason": None}
        if finish.type == "abort" and abort_status(finish) >= 400:  # beside choices that are good
            fault = {"code": finish.code, "message": finish.message}
            return {"finish_reason": "abort", "stop_reason": None, "error": fault}
        own = finish.matched in self._ends and finish.matched not in job.reply.prompt.sampling.stop_token_ids
        return {"finish_reason": finish.type, "stop_reason": None if own else finish.matched}

    def extras(self, reply: Reply, since: int = 0) -> dict[str, Any]:
        """``token_ids`` of the tokens from ``since`` on and ``weight_versions``, where they are wanted."""
        found: dict[str, Any] = {}
        if self.wanted.token_ids:
            found["token_ids"] = reply.ids[since:]
        if self.wanted.weight_versions:
            found["weight_versions"] = reply.spans()
        return found

    def prompt_logprobs(self, reply: Reply) -> list[dict[str, Any] | None] | None:
        """Of the prompt's tokens, where they are wanted."""
        if self.wanted.prompt_logprobs is None:
            return None
        chosen, tops = of_prompt(reply)
        return self.writer.prompt(chosen, tops, self.wanted.prompt_logprobs)


def of_prompt(reply: Reply) -> tuple[list[Triple], list[Top]]:
    """(the prompt's tokens with their log-probabilities, the most probable ids at each)."""
    return reply.inputs.get("input_token_logprobs", []), reply.inputs.get("input_top_logprobs", [])


def usage(jobs: list[Job]) -> dict[str, Any]:
    """Counts; a prompt with several replies counts once."""
    firsts = [job.reply for job in jobs if job.reply.prompt.sample == 0] or [jobs[0].reply]
    prompt = sum(reply.num_prompt for reply in firsts)
    made = sum(len(job.reply.ids) for job in jobs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
        "prompt_tokens_details": {"cached_tokens": sum(reply.cached_tokens for reply in firsts)},
    }
