"""``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from gtp_serve.errors import RequestRejected
from gtp_serve.request import Grammar
from gtp_serve.server.answer import Opened
from gtp_serve.server.openai.choices import Frame
from gtp_serve.server.openai.fields import CHAT_AT_DEFAULT, CHAT_NAMES, CHAT_NUMBERS, NUMBERS
from gtp_serve.server.openai.prompt import Conversation, conversation_ids, read_conversation
from gtp_serve.server.openai.reading import (
    Wanted,
    grammar_field,
    make_call,
    names_here,
    read_fields,
    read_grammar,
    read_wanted,
)
from gtp_serve.server.openai.tools import ToolText, split_calls
from gtp_serve.server.prepare import Job, prepare
from gtp_serve.server.reply import Reply
from gtp_serve.server.run import Run
from gtp_serve.server.state import Serving

_NAMES = names_here("messages", "top_logprobs")


class ChatApi:
    """Bodies of the route."""

    async def open(self, body: dict[str, Any], serving: Serving) -> Opened:
        """Hold a body to the table of ``server.openai.fields`` and render its messages.

        :raises RequestRejected: naming the field at fault.
        """
        given, numbers = read_fields(body, CHAT_NAMES, CHAT_AT_DEFAULT, {**NUMBERS, **CHAT_NUMBERS})
        given = _one_max_tokens(given)
        if numbers["top_logprobs"] and not numbers["logprobs"]:
            raise RequestRejected("top_logprobs needs logprobs", [("send", "logprobs: true")], param="top_logprobs")
        wanted = read_wanted(given, numbers, logprobs=int(numbers["top_logprobs"]) if numbers["logprobs"] else None)
        conversation = read_conversation(given)
        bare = conversation.carried is not None or wanted.token_ids or wanted.tokens_as_ids
        try:
            ids = await conversation_ids(conversation, serving)
            most = serving.engine.max_context
            grammar = _call_grammar(conversation, given, serving, one_call=not numbers["parallel_tool_calls"])
            call = make_call(given, {"input_ids": ids}, wanted, most=most, scored=bare, grammar=grammar)
            jobs = await prepare(call, serving)
        except RequestRejected as error:
            field = "tools" if conversation.offer.must else grammar_field(given)
            newer = body.get("max_tokens") is None and body.get("max_completion_tokens") is not None
            limit = "max_completion_tokens" if newer else "max_tokens"
            names_here("messages", "top_logprobs", field, limit).explain(error)
            raise
        answer = _Answer(
            serving, wanted, conversation, call.prompts[0].rid, one_call=not numbers["parallel_tool_calls"], bare=bare
        )
        return Opened(call=call, jobs=jobs, answer=answer)

    def explain(self, error: BaseException) -> BaseException:
        """The same error in this route's names."""
        return _NAMES.explain(error)


def _call_grammar(
    conversation: Conversation, given: dict[str, Any], serving: Serving, *, one_call: bool
) -> Grammar | None:
    """What a reply that must call a tool has to match."""
    template = "" if serving.tokenizer is None else serving.tokenizer.chat_source
    grammar = conversation.offer.grammar(template, one_call=one_call)
    if grammar is not None and read_grammar(given):
        field = grammar_field(given)
        raise RequestRejected(
            f"tool_choice decides what the reply looks like, and so does {field}",
            [("send", "only one of them")],
            param=field,
        )
    return grammar


def _one_max_tokens(given: dict[str, Any]) -> dict[str, Any]:
    """``max_completion_tokens`` is taken for ``max_tokens``."""
    if "max_completion_tokens" not in given:
        return given
    newer = given["max_completion_tokens"]
    if given.get("max_tokens", newer) != newer:
        raise RequestRejected(
            "max_tokens and max_completion_tokens are two names of one field and differ", param="max_tokens"
        )
    return {**given, "max_tokens": newer}


class _Answer:
    """A message for each choice.

    :param bare: the message also tells its token ids and log-probabilities.
    :param one_call: of several tool calls only the first is told.
    """

    def __init__(
        self, serving: Serving, wanted: Wanted, conversation: Conversation, rid: str, *, one_call: bool, bare: bool
    ) -> None:
        self._wanted = wanted
        self._tools = conversation.offer.names
        self._one_call = one_call
        self._bare = bare
        self._frame = Frame(serving, wanted, f"chatcmpl-{rid}", kind="chat.completion", chunk="chat.completion.chunk")
        self._texts: dict[int, ToolText] = {}
        """What each choice that has begun holds back."""

    def whole(self, run: Run) -> dict[str, Any]:
        choices = [self._choice(index, job) for index, job in enumerate(run.jobs)]
        return self._frame.whole(run, choices) | self._of_prompt(run.jobs[0].reply)

    def news(self, run: Run, index: int) -> bytes:
        first, job = index not in self._texts, run.jobs[index]
        held = self._texts.setdefault(index, ToolText(self._tools))
        opening = b""
        if first:
            head = self._delta(index, {"role": "assistant", "content": ""})
            opening = self._frame.chunk(run, index, head, self._of_prompt(job.reply))
        text, since = job.reply.take()
        told = held.push(text) if self._tools else text
        choice = self._delta(index, {"content": told} if told else {})
        if job.reply.finish is not None:
            choice |= self._last(index, job, told)
        if self._wanted.logprobs is not None:
            choice["logprobs"] = self._logprobs(job.reply, since)
        return opening + self._frame.chunk(run, index, choice | self._frame.extras(job.reply, since))

    def tail(self, run: Run) -> bytes:
        return self._frame.tail(run)

    def _of_prompt(self, reply: Reply) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._wanted.token_ids:
            found["prompt_token_ids"] = list(reply.input_ids)
        if self._wanted.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._frame.prompt_logprobs(reply)
        return found

    def _choice(self, index: int, job: Job) -> dict[str, Any]:
        reply = job.reply
        message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
        reasons = self._frame.reasons(job)
        content, calls = split_calls(reply.text, self._tools) if self._tools else (reply.text, [])
        if calls:
            message |= {"content": content or None, "tool_calls": self._kept(calls), "raw_content": reply.text}
            reasons = _called(reasons)
        if self._bare:
            message |= self._carried(reply)
        logprobs = None if self._wanted.logprobs is None else self._logprobs(reply, 0)
        return {"index": index, "message": message, "logprobs": logprobs, **reasons, **self._frame.extras(reply)}

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _last(self, index: int, job: Job, told: str) -> dict[str, Any]:
        """The end of a choice, with what was held back."""
        rest, calls = self._texts[index].finish()
        delta: dict[str, Any] = {"content": told + rest} if told + rest else {}
        reasons = self._frame.reasons(job)
        if calls:
            delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(self._kept(calls))]
            reasons = _called(reasons)
        if self._bare:
            delta |= self._carried(job.reply)
        return {"delta": delta, **reasons}

    def _kept(self, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return calls[:1] if self._one_call else calls

    def _carried(self, reply: Reply) -> dict[str, Any]:
        return {
            "prompt_token_ids": list(reply.input_ids),
            "generation_token_ids": list(reply.ids),
            "generation_log_probs": [value for value, _, _ in reply.triples],
        }

    def _logprobs(self, reply: Reply, since: int) -> dict[str, Any]:
        entries = self._frame.writer.chat(reply.triples[since:], reply.top[since:], self._wanted.logprobs or 0)
        return {"content": entries, "refusal": None}


def _called(reasons: dict[str, Any]) -> dict[str, Any]:
    return {**reasons, "finish_reason": "tool_calls"} if reasons["finish_reason"] == "stop" else reasons
