"""``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gtp_serve.errors import RequestRejected
from gtp_serve.server.answer import Opened
from gtp_serve.server.openai.choices import Frame, of_prompt
from gtp_serve.server.openai.fields import COMPLETION_AT_DEFAULT, COMPLETION_NAMES, COMPLETION_NUMBERS, NUMBERS
from gtp_serve.server.openai.reading import (
    Wanted,
    grammar_field,
    make_call,
    names_here,
    read_fields,
    read_wanted,
)
from gtp_serve.server.prepare import Job, prepare
from gtp_serve.server.run import Run
from gtp_serve.server.schemas import describe
from gtp_serve.server.state import Serving

DEFAULT_TOKENS = 16
_NAMES = names_here("prompt", "logprobs")


class CompletionsApi:
    """Bodies of the route."""

    async def open(self, body: dict[str, Any], serving: Serving) -> Opened:
        """Hold a body to the table of ``server.openai.fields``.

        :raises RequestRejected: naming the field at fault.
        """
        given, numbers = read_fields(body, COMPLETION_NAMES, COMPLETION_AT_DEFAULT, {**NUMBERS, **COMPLETION_NUMBERS})
        wanted = read_wanted(given, numbers, logprobs=numbers["logprobs"], echo=bool(numbers["echo"]))
        if "max_tokens" not in given:
            wanted = replace(wanted, warning=f"max_tokens defaulted to {DEFAULT_TOKENS}")
        try:
            call = make_call(given, _read_prompt(given), wanted, most=DEFAULT_TOKENS, scored=False)
            jobs = await prepare(call, serving)
        except RequestRejected as error:
            names_here("prompt", "logprobs", grammar_field(given)).explain(error)
            raise
        return Opened(call=call, jobs=jobs, answer=_Answer(serving, wanted, call.prompts[0].rid))

    def explain(self, error: BaseException) -> BaseException:
        """The same error in this route's names."""
        return _NAMES.explain(error)


def _read_prompt(given: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt as a field of ``/generate``."""
    prompt = given.get("prompt")
    if prompt is None:
        raise RequestRejected("prompt is missing", code="missing-field", param="prompt")
    if isinstance(prompt, str):
        return {"text": prompt}
    if not isinstance(prompt, list):
        raise RequestRejected(
            f"prompt must be a string, token ids, or a list of either, not {describe(prompt)}", param="prompt"
        )
    return {"text": prompt} if not prompt or isinstance(prompt[0], str) else {"input_ids": prompt}


class _Answer:
    """A text and its tokens for each choice."""

    def __init__(self, serving: Serving, wanted: Wanted, rid: str) -> None:
        self._tokenizer = serving.tokenizer
        self._wanted = wanted
        self._frame = Frame(serving, wanted, f"cmpl-{rid}", kind="text_completion", chunk="text_completion")
        self._offsets: dict[int, int] = {}
        """Characters of each choice's tokens so far; a choice that is not there has not begun."""

    def whole(self, run: Run) -> dict[str, Any]:
        choices = [self._choice(index, job, job.reply.text, 0, first=True) for index, job in enumerate(run.jobs)]
        return self._frame.whole(run, choices)

    def news(self, run: Run, index: int) -> bytes:
        job = run.jobs[index]
        text, since = job.reply.take()
        choice = self._choice(index, job, text, since, first=index not in self._offsets)
        return self._frame.chunk(run, index, choice)

    def tail(self, run: Run) -> bytes:
        return self._frame.tail(run)

    def _choice(self, index: int, job: Job, text: str, since: int, *, first: bool) -> dict[str, Any]:
        if first and self._wanted.echo:
            text = self._prompt_text(job) + text
        choice: dict[str, Any] = {"index": index, "text": text, "logprobs": self._logprobs(index, job, since, first)}
        choice |= self._frame.reasons(job) | self._frame.extras(job.reply, since)
        if first and self._wanted.token_ids:
            choice["prompt_token_ids"] = list(job.reply.input_ids)
        if first and self._wanted.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._frame.prompt_logprobs(job.reply)
        return choice

    def _prompt_text(self, job: Job) -> str:
        prompt = job.reply.prompt
        if prompt.text is not None or self._tokenizer is None:
            return prompt.text or ""
        return self._tokenizer.decode(job.reply.input_ids, skip_special_tokens=prompt.sampling.skip_special_tokens)

    def _logprobs(self, index: int, job: Job, since: int, first: bool) -> dict[str, Any] | None:
        begun = self._offsets.setdefault(index, 0)
        others = self._wanted.logprobs
        if others is None:
            return None
        reply = job.reply
        chosen, tops = list(reply.triples[since:]), list(reply.top[since:])
        lists = self._frame.writer.completion(chosen, tops, others, begun)
        if first and self._wanted.echo:
            before, its_tops = of_prompt(reply)
            prompt = self._frame.writer.completion(before, its_tops or [None, *[[]] * (len(before) - 1)], others, begun)
            if prompt["token_logprobs"]:
                prompt["token_logprobs"][0] = None
            shift = sum(map(len, prompt["tokens"]))
            lists["text_offset"] = [offset + shift for offset in lists["text_offset"]]
            lists = {name: prompt[name] + values for name, values in lists.items()}
        self._offsets[index] = begun + sum(map(len, lists["tokens"]))
        return lists
