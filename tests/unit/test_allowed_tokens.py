"""``allowed_token_ids`` and ``bad_words``: what cannot be chosen is not, alone, beside a grammar, and at the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from fakes import engine_config
from fakes_server import FakeClient, byte_ids, byte_tokenizer, serving
from hypothesis import given
from hypothesis import strategies as st
from noise_engine import EOS, VOCAB, finish_all, noise_engine

from gtp_serve.engine.bad_words import BadWords
from gtp_serve.engine.grammar import GrammarCompiler
from gtp_serve.engine.limits import MAX_BAD_WORD_IDS, MAX_BAD_WORDS
from gtp_serve.engine.scheduler import Scheduler
from gtp_serve.engine.step import StepPlan
from gtp_serve.errors import RequestRejected
from gtp_serve.request import Grammar, Request, SamplingParams

IDS = st.integers(0, 3)
WORDS = st.lists(st.lists(IDS, min_size=1, max_size=4), max_size=5)


def request(rid: str, **fields: Any) -> Request:
    fields = {"max_new_tokens": 60, "seed": 7} | fields
    return Request(rid=rid, input_ids=(5, 6), sampling=SamplingParams(**fields))


def holds(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return any(list(tokens[at : at + len(word)]) == list(word) for at in range(len(tokens)))


@given(WORDS, st.lists(IDS, max_size=6), st.lists(IDS, max_size=6))
def test_an_id_is_forbidden_exactly_where_it_would_complete_a_word_of_the_output(
    words: list[list[int]], prompt: list[int], output: list[int]
) -> None:
    found = set(BadWords(words).after([*prompt, *output], len(prompt)))

    ends = {word[-1] for word in words if output[len(output) - len(word) + 1 :] == word[:-1]}
    possible = {word[-1] for word in words if len(word) - 1 <= len(output)}
    assert found == ends & possible


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outputs_hold_no_bad_word_and_only_allowed_ids(temperature: float) -> None:
    rng = random.Random(3)
    words = [tuple(rng.choices(range(60, 64), k=rng.randrange(1, 4))) for _ in range(6)] + [(63, 62, 61)]
    allowed = (60, 61, 62, 63, EOS)
    words = [word for word in words if word not in {(60,), (61,), (62,)}]
    asked = [
        request("both", temperature=temperature, allowed_token_ids=allowed, bad_words=tuple(words)),
        request("allowed", temperature=temperature, allowed_token_ids=allowed, min_new_tokens=50),
        request("plain", temperature=temperature, min_new_tokens=60),
        request("no end", temperature=1.0, allowed_token_ids=(70, 71)),
    ]

    found = finish_all(noise_engine(None), asked)

    assert not any(holds(found["both"][0], word) for word in words)
    assert {*found["both"][0], *found["allowed"][0]} <= {*allowed}
    assert len(found["allowed"][0]) >= 50
    assert not {*found["plain"][0]} <= {*allowed}
    assert (len(found["no end"][0]), found["no end"][1].type) == (60, "length")
    assert {*found["no end"][0]} == {70, 71}


def test_a_choice_among_the_allowed_is_that_of_a_vocabulary_without_the_others() -> None:
    """The same seed draws the same ids whether the others are out of reach by list or by bias."""
    allowed = tuple(range(60, 90))
    away = {token: -100.0 for token in range(VOCAB) if token not in allowed}
    one = finish_all(noise_engine(None), [request("r", allowed_token_ids=allowed)])
    other = finish_all(noise_engine(None), [request("r", logit_bias=away)])
    assert one == other


def test_when_nothing_is_left_the_request_ends_by_name_and_no_other_does() -> None:
    asked = [
        request("dead", allowed_token_ids=(60,), bad_words=((60, 60),)),
        request("drawn", allowed_token_ids=(60,), bad_words=((60, 60, 60),), temperature=0.0),
        request("other"),
    ]
    found = finish_all(noise_engine(None), asked)
    for rid, made in (("dead", 1), ("drawn", 2)):
        tokens, end = found[rid]
        assert (tokens, end.type, end.code) == ([60] * made, "abort", "no-token-allowed")
        assert f"after token {made}" in end.message
    assert found["other"][1].type in ("stop", "length")


def test_a_grammar_chooses_among_the_allowed() -> None:
    grammars = GrammarCompiler(byte_tokenizer().to_json, vocab_size=VOCAB, eos_token_ids=(EOS,))
    grammar = Grammar(kind="regex", text="(a|b|c|d){8}")
    a, b, c, d = byte_ids(b"abcd")
    asked = [
        request("some", grammar=grammar, allowed_token_ids=(a, b, c, EOS), bad_words=((a, a), (c,))),
        request("no end", grammar=grammar, allowed_token_ids=(a, b)),
        request("dead", grammar=grammar, allowed_token_ids=(EOS,)),
        request("banned", grammar=grammar, allowed_token_ids=(d,), bad_words=((d, d, d),)),
    ]
    for temperature in (0.0, 1.0):
        changed = [
            Request(
                rid=one.rid,
                input_ids=one.input_ids,
                sampling=SamplingParams(
                    **{name: getattr(one.sampling, name) for name in one.sampling.__struct_fields__}
                    | {"temperature": temperature}
                ),
            )
            for one in asked
        ]
        found = finish_all(noise_engine(grammars), changed)
        tokens, end = found["some"]
        assert ({*tokens[:-1]} <= {a, b}, tokens[-1], end.type, len(tokens)) == (True, EOS, "stop", 9)
        assert not holds(tokens, (a, a))
        assert (len(found["no end"][0]), found["no end"][1].type) == (8, "stop")
        assert (found["dead"][0], found["dead"][1].code) == ([], "grammar-dead-end")
        assert (found["banned"][0], found["banned"][1].code) == ([d, d], "grammar-dead-end")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((1,) * (MAX_BAD_WORD_IDS + 1),)}, "bad_words"),
        ({"bad_words": ((1, VOCAB),)}, "bad_words"),
        ({"bad_words": ((1, 2),) * (MAX_BAD_WORDS + 1)}, "bad_words"),
        ({"bad_words": tuple((token,) for token in range(VOCAB))}, "bad_words"),
        ({"bad_words": ((60,), (61,)), "allowed_token_ids": (60, 61)}, "bad_words"),
        ({"min_new_tokens": 1, "allowed_token_ids": (EOS,)}, "min_new_tokens"),
    ],
)
def test_what_can_never_be_answered_is_refused_by_the_engine(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        noise_engine(None).add(request("r", **fields))
    assert caught.value.param == f"sampling_params.{param}"


def test_plans_stay_plain_data() -> None:
    scheduler = Scheduler(engine_config())
    scheduler.add(request("r", bad_words=((40,), (41, 42)), allowed_token_ids=(40, 41, 42, 43)))
    plan = scheduler.schedule()
    assert isinstance(plan, StepPlan)
    assert plan.items[0].sample is not None
    assert plan.items[0].sample.banned == (40,)
    assert "banned=(40,)" in repr(plan)
    assert "(40, 41, 42, 43)" not in repr(plan)
    assert hash(plan.for_followers()) == hash(plan.for_followers())


def sent(path: str, body: dict[str, Any]) -> Any:
    """The engine's request for a body, or the error's (param, did_you_mean)."""

    async def run() -> Any:
        async with serving(client=FakeClient()) as server:
            reply = await server.http.post(path, json=body)
            if reply.status_code != 200:
                error = reply.json()["error"]
                return error["param"], error["did_you_mean"]
            return server.client.requests[0].sampling

    return asyncio.run(run())


def test_a_text_is_forbidden_as_it_is_spelled_and_as_it_is_spelled_after_a_space() -> None:
    tokenizer = byte_tokenizer()
    for path, body in (
        (
            "/generate",
            {"text": "a", "sampling_params": {"bad_words": [" the", [7, 8]], "allowed_token_ids": [9, 7, 9]}},
        ),
        ("/v1/completions", {"prompt": "a", "bad_words": [" the", [7, 8]], "allowed_token_ids": [9, 7, 9]}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "bad_words": [" the", [7, 8]],
                "allowed_token_ids": [9, 7, 9],
            },
        ),
    ):
        sampling = sent(path, body)
        plain = tuple(tokenizer.encode("the", add_special_tokens=False))
        spaced = tuple(tokenizer.encode(" the", add_special_tokens=False))
        expected = (plain, spaced) if len(spaced) == len(plain) and spaced[0] != plain[0] else (plain,)
        assert sampling.bad_words == (*expected, (7, 8))
        assert sampling.allowed_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("more", "param", "right"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", None),
        ({"allowed_token_ids": "a"}, "allowed_token_ids", None),
        ({"allowed_token_ids": [1.5]}, "allowed_token_ids", None),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", None),
        ({"bad_words": "a"}, "bad_words", None),
        ({"bad_words": [" "]}, "bad_words[0]", None),
        ({"bad_words": ["a", []]}, "bad_words[1]", None),
        ({"bad_words": ["a", [1, "b"]]}, "bad_words[1]", None),
        ({"bad_words": [[99999]]}, "bad_words", None),
        ({"bad_words": [1]}, "bad_words[0]", None),
        ({"bad_word": ["a"]}, "bad_word", "bad_words"),
    ],
)
def test_wrong_values_are_named(more: dict[str, Any], param: str, right: str | None) -> None:
    assert sent("/v1/completions", {"prompt": "a", **more}) == (param, right)
    ours = None if right is None else right
    assert sent("/generate", {"text": "a", "sampling_params": more}) == (f"sampling_params.{param}", ours)
