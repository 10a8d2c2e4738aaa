"""Ranges of what a request may ask for, held at the engine's own door whoever calls it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from fakes import TINY_MODEL

from gtp_serve.engine.limits import (
    MAX_ALLOWED,
    MAX_BAD_WORDS,
    MAX_BIASED,
    MAX_DEADLINE_SECONDS,
    MAX_LISTED,
    MAX_TOP_LOGPROBS,
    check_options,
    check_sampling,
)
from gtp_serve.errors import RequestRejected
from gtp_serve.request import LogprobOptions, Request, SamplingParams

VOCAB = TINY_MODEL.vocab_size


def refusal(**fields: Any) -> str | None:
    with pytest.raises(RequestRejected) as caught:
        check_sampling(SamplingParams(**fields), VOCAB)
    return caught.value.param


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("max_new_tokens", [0, 1], [-1]),
        ("temperature", [0.0, 1e-7, 100.0], [-0.1, 100.1]),
        ("top_k", [-1, 1, 10**6], [0, -2]),
        ("top_p", [1e-9, 1.0], [0.0, 1.1, -1.0]),
        ("min_p", [0.0, 1.0], [-0.1, 1.1]),
        ("presence_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        ("frequency_penalty", [-2.0, 2.0], [-2.1, 2.1]),
        ("repetition_penalty", [0.01, 1.0, 10.0], [0.0, -1.0, 10.1]),
        ("logit_bias", [{}, {0: -100.0, VOCAB - 1: 100.0}], [{VOCAB: 1.0}, {-1: 1.0}, {1: 100.5}, {1: math.nan}]),
        ("allowed_token_ids", [(), (0, VOCAB - 1)], [(VOCAB,), (-1,), (0,) * (MAX_ALLOWED + 1)]),
        ("bad_words", [(), ((0,), (1, VOCAB - 1))], [((),), ((VOCAB,),), ((0, -1),), ((0,),) * (MAX_BAD_WORDS + 1)]),
    ],
)
def test_each_field_has_its_range(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check_sampling(SamplingParams(**{field: value}), VOCAB)
    not_numbers = [math.nan, math.inf, -math.inf] if isinstance(good[0], float) else []
    for value in (*bad, *not_numbers):
        assert refusal(**{field: value}) == f"sampling_params.{field}"


def test_a_minimum_above_the_maximum_and_too_much_bias_are_refused() -> None:
    assert refusal(max_new_tokens=2, min_new_tokens=3) == "sampling_params.min_new_tokens"
    assert refusal(logit_bias=dict.fromkeys(range(MAX_BIASED + 1), 1.0)) == "sampling_params.logit_bias"


def ask(prompt: int = 4, **fields: Any) -> Request:
    return Request(rid="r", input_ids=(1,) * prompt, sampling=SamplingParams(), **fields)


def test_what_is_asked_beside_tokens_has_its_range_too() -> None:
    check_options(ask(), VOCAB)
    listed = tuple(at % VOCAB for at in range(MAX_LISTED))
    check_options(ask(logprobs=LogprobOptions(top_n=MAX_TOP_LOGPROBS, token_ids=listed, prompt_start=3)), VOCAB)
    check_options(ask(cache_salt="x" * 256, deadline_seconds=MAX_DEADLINE_SECONDS), VOCAB)
    bad: list[tuple[Request, str]] = [
        (ask(logprobs=LogprobOptions(top_n=MAX_TOP_LOGPROBS + 1)), "top_logprobs_num"),
        (ask(logprobs=LogprobOptions(top_n=-1)), "top_logprobs_num"),
        (ask(logprobs=LogprobOptions(token_ids=(VOCAB,))), "token_ids_logprob"),
        (ask(logprobs=LogprobOptions(token_ids=(-1,))), "token_ids_logprob"),
        (ask(logprobs=LogprobOptions(token_ids=(1,) * (MAX_LISTED + 1))), "token_ids_logprob"),
        (ask(logprobs=LogprobOptions(prompt_start=4)), "logprob_start_len"),
        (ask(logprobs=LogprobOptions(prompt_start=-1)), "logprob_start_len"),
        (ask(10_000, logprobs=LogprobOptions(prompt_start=0, top_n=128)), "logprob_start_len"),
        (ask(cache_salt="x" * 2000), "cache_salt"),
        *((ask(deadline_seconds=value), "deadline_seconds") for value in (0.0, -1.0, math.nan, math.inf, 1e9)),
    ]
    for request, param in bad:
        with pytest.raises(RequestRejected) as caught:
            check_options(request, VOCAB)
        assert caught.value.param == param


def test_only_what_need_not_be_told_may_come_from_the_cache() -> None:
    assert ask(9).num_cacheable == 9
    assert ask(9, logprobs=LogprobOptions(top_n=1)).num_cacheable == 9
    assert ask(9, logprobs=LogprobOptions(prompt_start=5)).num_cacheable == 5
    assert ask(9, return_routed_experts=True).num_cacheable == 0
