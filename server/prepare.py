"""From a checked call to the engine's requests: text to ids, stop strings to ids, lengths checked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gtp_serve.engine.limits import MAX_SEED, check_allowed, check_bad_words, check_options
from gtp_serve.errors import PromptTooLong, RequestRejected
from gtp_serve.request import Grammar, Request, SamplingParams
from gtp_serve.server.calls import Call, Prompt
from gtp_serve.server.reply import Reply
from gtp_serve.server.sampling_fields import Sampling
from gtp_serve.server.state import Serving
from gtp_serve.text import TextTokenizer, special_stops

_LONG_TEXT = 128
"""Characters of a call from which tokenising leaves the event loop: about a tenth of a millisecond.  A trainer sends
hundreds of prompts at the same moment, and what they take together is what every stream would wait.
"""
CHARS_PER_TOKEN = 256
"""No token stands for more characters, so a longer text cannot fit the context and is not tokenised at
all.
"""


_FIELDS = {
    "json_schema": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "lark": "ebnf",
    "tool_calls": "tool_calls",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One sequence to run and the reply that it fills."""

    request: Request
    reply: Reply


async def prepare(call: Call, serving: Serving) -> list[Job]:
    """A job for each prompt of the call.

    :raises RequestRejected: for ids that do not exist, an empty or too long prompt, or text without a
    tokenizer.
    """
    _check_routing(call, serving)
    ids = await _encode_all(call.prompts, serving)
    grammars = await _check_grammars(call.prompts, serving)
    return [_job(call, prompt, ids[index], grammars, serving) for index, prompt in enumerate(call.prompts)]


def _check_routing(call: Call, serving: Serving) -> None:
    if call.return_routed_experts and serving.engine.model.moe is None:
        raise RequestRejected(
            "return_routed_experts: this model has no experts",
            code="not-supported",
            param="return_routed_experts",
        )


async def _check_grammars(prompts: Sequence[Prompt], serving: Serving) -> dict[Grammar, Grammar]:
    """Each grammar of the call in plain form, compiled once on trial."""
    given = {prompt.sampling.grammar for prompt in prompts if prompt.sampling.grammar is not None}
    if not given:
        return {}
    _require_tokenizer(serving, "a grammar")
    if serving.grammars is None:
        field = _FIELDS[next(iter(given)).kind]
        raise RequestRejected("this server takes no grammars", code="not-supported", param=f"sampling_params.{field}")
    plain: dict[Grammar, Grammar] = {}
    for grammar in given:
        try:
            plain[grammar] = await serving.grammars.check(grammar)
        except RequestRejected as error:
            error.param = f"sampling_params.{_FIELDS[grammar.kind]}"
            raise
    return plain


async def _encode_all(prompts: Sequence[Prompt], serving: Serving) -> list[tuple[int, ...]]:
    """Ids of each prompt; equal neighbours (the ``n`` samples of a prompt) are encoded once."""
    length = sum(len(prompt.text or "") for prompt in prompts)
    if length > _LONG_TEXT:
        return await asyncio.to_thread(_encode_each, prompts, serving)
    return _encode_each(prompts, serving)


def _encode_each(prompts: Sequence[Prompt], serving: Serving) -> list[tuple[int, ...]]:
    result: list[tuple[int, ...]] = []
    for prompt in prompts:
        if prompt.sample > 0:
            result.append(result[-1])
        else:
            result.append(_encode(prompt, serving))
    return result


def _encode(prompt: Prompt, serving: Serving) -> tuple[int, ...]:
    vocab, context = serving.engine.model.vocab_size, serving.engine.max_context
    least = min(1, prompt.sampling.max_new_tokens)  # 0: only the prompt is scored, and it may fill the context
    if prompt.input_ids is not None:
        if len(prompt.input_ids) + least > context:
            raise _too_long(len(prompt.input_ids), least, context, "input_ids")
        _check_ids(prompt.input_ids, vocab, "input_ids")
        return prompt.input_ids
    tokenizer = _require_tokenizer(serving, "text")
    text = prompt.text or ""
    if len(text) > context * CHARS_PER_TOKEN:
        raise PromptTooLong(
            f"a text of {len(text)} characters cannot fit the context of {context} tokens", param="text"
        )
    ids = tuple(tokenizer.encode(text))
    if not ids:
        raise RequestRejected("the text has no tokens", code="empty-prompt", param="text")
    if len(ids) + least > context:
        raise _too_long(len(ids), least, context, "text")
    _check_ids(ids, vocab, "text")
    return ids


def _require_tokenizer(serving: Serving, param: str) -> TextTokenizer:
    if serving.tokenizer is None:
        raise RequestRejected(
            f"{param} needs a tokenizer, and this server has none",
            [("send", "input_ids")],
            code="no-tokenizer",
            param=param,
        )
    return serving.tokenizer


def _check_ids(ids: Sequence[int], vocab: int, param: str) -> None:
    if ids and max(ids) >= vocab:
        at = next(index for index, token in enumerate(ids) if token >= vocab)
        raise RequestRejected(
            f"{param}[{at}] is {ids[at]}, which is no token id of this model",
            [("possible", f"0 to {vocab - 1}")],
            code="bad-token-id",
            param=param,
        )


def _too_long(prompt: int, new: int, context: int, param: str) -> PromptTooLong:
    room = context - prompt
    most = context - min(1, new)
    advice = f"max_new_tokens of at most {room}" if room > 0 else f"a prompt of at most {most} tokens"
    return PromptTooLong(
        f"{prompt} prompt tokens and {new} new ones are more than the context of {context} tokens",
        [("try", advice)],
        param=param,
    )


def _job(
    call: Call,
    prompt: Prompt,
    ids: tuple[int, ...],
    grammars: Mapping[Grammar, Grammar],
    serving: Serving,
) -> Job:
    sampling, context = prompt.sampling, serving.engine.max_context
    new = sampling.max_new_tokens
    if sampling.max_is_default:
        new = max(min(new, context - len(ids)), sampling.min_new_tokens, 1)
    if len(ids) + new > context:
        raise _too_long(len(ids), new, context, "sampling_params.max_new_tokens")
    vocab = serving.engine.model.vocab_size
    _check_ids(sampling.stop_token_ids, vocab, "sampling_params.stop_token_ids")
    hidden = _hidden_stops(sampling, serving)
    _check_ids([token for token, _ in sampling.logit_bias], vocab, "sampling_params.logit_bias")
    check_allowed(sampling.allowed_token_ids, vocab)
    request = Request(
        rid=prompt.rid,
        input_ids=ids,
        sampling=_engine_sampling(prompt, new, tuple(hidden), grammars, _bad_words(sampling, serving)),
        logprobs=prompt.logprobs,
        cache_salt=call.cache_salt,
        deadline_seconds=call.deadline_seconds,
        return_routed_experts=call.return_routed_experts,
    )
    check_options(request, vocab)
    reply = Reply(
        prompt,
        ids,
        serving.tokenizer,
        hidden_stops=hidden,
        text_in_logprobs=call.return_text_in_logprobs,
        with_prompt_ids=call.return_prompt_token_ids,
        routed_start=call.routed_experts_start_len if call.return_routed_experts else None,
        weight_version=serving.client.weights.version or serving.engine.weight_version,
    )
    return Job(request=request, reply=reply)


def _hidden_stops(sampling: Sampling, serving: Serving) -> dict[int, str]:
    """Stop strings that are one special token: the text never shows them, so the engine must stop at their
    ids.
    """
    if not sampling.stop:
        return {}
    tokenizer = _require_tokenizer(serving, "sampling_params.stop")
    return special_stops(sampling.stop, tokenizer, serving.engine.model.vocab_size)


def _bad_words(sampling: Sampling, serving: Serving) -> tuple[tuple[int, ...], ...]:
    """Each text as its ids, and once more as it is spelled after a space where that is another word of as many."""
    found: list[tuple[int, ...]] = []
    for word in sampling.bad_words:
        if isinstance(word, str):
            tokenizer = _require_tokenizer(serving, "sampling_params.bad_words")
            plain, spaced = (
                tuple(tokenizer.encode(f"{space}{word.lstrip()}", add_special_tokens=False)) for space in ("", " ")
            )
            found.append(plain)
            if plain and spaced[:1] != plain[:1] and len(spaced) == len(plain):
                found.append(spaced)
        else:
            found.append(word)
    check_bad_words(found, serving.engine.model.vocab_size)
    return tuple(found)


def _engine_sampling(
    prompt: Prompt,
    new: int,
    hidden: tuple[int, ...],
    grammars: Mapping[Grammar, Grammar],
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    sampling = prompt.sampling
    return SamplingParams(
        max_new_tokens=new,
        min_new_tokens=sampling.min_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=_seed(sampling.sampling_seed, prompt.sample),
        stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, *hidden))),
        ignore_eos=sampling.ignore_eos,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        grammar=None if sampling.grammar is None else grammars[sampling.grammar],
        allowed_token_ids=sampling.allowed_token_ids,
        bad_words=bad_words,
    )


def _seed(seed: int | None, sample: int) -> int:
    """The n replies of one seeded prompt use consecutive seeds, so that they differ and each can be asked
    for alone.
    """
    if seed is None:
        return int.from_bytes(os.urandom(8), "little") >> 1
    return (seed + sample) % (MAX_SEED + 1)
