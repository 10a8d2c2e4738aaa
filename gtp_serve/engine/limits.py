"""Ranges of what a request may ask for, and the check that holds any request to them.  No torch, no HTTP.

The HTTP table (``server.schemas``) takes its numbers from here; whoever calls the engine in-process is held to the
same ones when a request is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from gtp_serve.errors import RequestRejected
from gtp_serve.request import LogprobOptions, Request, SamplingParams

MAX_TEMPERATURE = 100.0
MAX_SEED = (1 << 63) - 1
MAX_PENALTY = 2.0
"""Presence and frequency penalties reach from minus this to this."""
MIN_REPETITION, MAX_REPETITION = 0.01, 10.0
MAX_BIAS = 100.0
MAX_BIASED = 1024
MAX_TOP_LOGPROBS = 128
MAX_LISTED = 256
MAX_PROMPT_LOGPROBS = 1 << 20
"""Numbers that a request may get about its prompt: tokens times (1 + top + listed)."""
MAX_SALT_CHARS = 256
MAX_DEADLINE_SECONDS = 86400.0
MAX_GRAMMAR_CHARS = 64 << 10
MAX_CHOICES = 1024
MAX_ALLOWED = 1 << 18
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_IDS = 256
"""Of one of them."""


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Refuse values out of range.

    :raises RequestRejected: naming the field (``sampling_params.top_p``) and what is possible.
    """
    new, least = sampling.max_new_tokens, sampling.min_new_tokens
    _require(new >= 0, "max_new_tokens", new, "0 or more")
    _require(0 <= least <= new, "min_new_tokens", least, f"0 to max_new_tokens ({new})")
    _within("temperature", sampling.temperature, 0, MAX_TEMPERATURE)
    _require(sampling.top_k == -1 or sampling.top_k >= 1, "top_k", sampling.top_k, "-1 (all) or at least 1")
    _require(0 < sampling.top_p <= 1, "top_p", sampling.top_p, "above 0, at most 1")
    _within("min_p", sampling.min_p, 0, 1)
    _within("presence_penalty", sampling.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("frequency_penalty", sampling.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    _within("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION, MAX_REPETITION)
    seed = sampling.seed
    _require(seed is None or 0 <= seed <= MAX_SEED, "seed", seed or 0, f"0 to {MAX_SEED}, or none")
    _check_bias(sampling.logit_bias, vocab_size)
    check_allowed(sampling.allowed_token_ids, vocab_size)
    check_bad_words(sampling.bad_words, vocab_size)


def check_allowed(ids: Sequence[int], vocab_size: int) -> None:
    """Hold ``allowed_token_ids`` to its range."""
    param = "sampling_params.allowed_token_ids"
    if len(ids) > MAX_ALLOWED:
        raise RequestRejected(f"{param} has {len(ids)} ids", [("possible", f"up to {MAX_ALLOWED}")], param=param)
    _check_exist(ids, vocab_size, param)


def check_bad_words(words: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Hold ``bad_words``, as ids, to its range."""
    param = "sampling_params.bad_words"
    if len(words) > MAX_BAD_WORDS:
        raise RequestRejected(f"{param} has {len(words)} words", [("possible", f"up to {MAX_BAD_WORDS}")], param=param)
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_IDS:
            raise RequestRejected(
                f"{param} has a word of {len(word)} tokens", [("possible", f"1 to {MAX_BAD_WORD_IDS}")], param=param
            )
        _check_exist(word, vocab_size, param)


def _check_exist(ids: Sequence[int], vocab_size: int, param: str) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        token = next(token for token in ids if not 0 <= token < vocab_size)
        raise RequestRejected(
            f"{param} has {token}, which is no token id of this model",
            [("possible", f"0 to {vocab_size - 1}")],
            code="bad-token-id",
            param=param,
        )


def _check_bias(bias: dict[int, float], vocab_size: int) -> None:
    param = "sampling_params.logit_bias"
    if len(bias) > MAX_BIASED:
        raise RequestRejected(f"{param} has {len(bias)} ids", [("possible", f"up to {MAX_BIASED}")], param=param)
    for token, value in bias.items():
        if not 0 <= token < vocab_size:
            raise RequestRejected(
                f"{param} has {token}, which is no token id of this model",
                [("possible", f"0 to {vocab_size - 1}")],
                code="bad-token-id",
                param=param,
            )
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise RequestRejected(
                f"{param} of {token} is {value}",
                [("possible", f"{-MAX_BIAS:g} to {MAX_BIAS:g}")],
                param=param,
            )


def check_options(request: Request, vocab_size: int) -> None:
    """The same for what a request asks for beside tokens.

    :raises RequestRejected: naming the field as ``POST /generate`` does.
    """
    if request.logprobs is not None:
        _check_logprobs(request.logprobs, len(request.input_ids), vocab_size)
    if len(request.cache_salt) > 2 * MAX_SALT_CHARS + 8:
        raise RequestRejected(f"cache_salt has more than {MAX_SALT_CHARS} characters", param="cache_salt")
    limit = request.deadline_seconds
    if limit is not None and not (isfinite(limit) and 0 < limit <= MAX_DEADLINE_SECONDS):
        raise RequestRejected(
            f"deadline_seconds is {limit}",
            [("possible", f"above 0, at most {MAX_DEADLINE_SECONDS:g}")],
            param="deadline_seconds",
        )


def _check_logprobs(options: LogprobOptions, prompt: int, vocab_size: int) -> None:
    if not (type(options.top_n) is int and 0 <= options.top_n <= MAX_TOP_LOGPROBS):
        raise RequestRejected(
            f"top_logprobs_num is {options.top_n!r}",
            [("possible", f"0 to {MAX_TOP_LOGPROBS}")],
            param="top_logprobs_num",
        )
    if len(options.token_ids) > MAX_LISTED:
        raise RequestRejected(
            f"token_ids_logprob has {len(options.token_ids)} ids",
            [("possible", f"up to {MAX_LISTED}")],
            param="token_ids_logprob",
        )
    for token in options.token_ids:
        if not 0 <= token < vocab_size:
            raise RequestRejected(
                f"token_ids_logprob has {token}, which is no token id of this model",
                [("possible", f"0 to {vocab_size - 1}")],
                code="bad-token-id",
                param="token_ids_logprob",
            )
    start = options.prompt_start
    if start is None:
        return
    if not (type(start) is int and 0 <= start < prompt):
        raise RequestRejected(
            f"logprob_start_len is {start!r} and the prompt has {prompt} tokens",
            [("possible", f"0 to {prompt - 1}, or -1 for output tokens only")],
            param="logprob_start_len",
        )
    count = (prompt - start) * (1 + options.top_n + len(options.token_ids))
    if count > MAX_PROMPT_LOGPROBS:
        raise RequestRejected(
            f"{count} log-probabilities of the prompt are too many",
            [("possible", f"up to {MAX_PROMPT_LOGPROBS}"), ("try", "a larger logprob_start_len, or fewer ids")],
            param="logprob_start_len",
        )


def _within(name: str, value: float, low: float, high: float) -> None:
    _require(low <= value <= high, name, value, f"{low:g} to {high:g}")


def _require(holds: bool, name: str, value: float, needed: str) -> None:
    if not holds:
        param = f"sampling_params.{name}"
        raise RequestRejected(f"{param} is {value}", [("needed", needed)], param=param)
