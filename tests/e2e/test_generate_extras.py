"""Log-probabilities, grammars, penalties and routed experts on the route, with a scripted engine behind it."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fakes_server import DATA, EOS, ROUTED_ROW, FakeClient, FakeServer, byte_ids, serving

from gtp_serve.config import MoeConfig
from gtp_serve.engine.limits import MAX_BIASED, MAX_GRAMMAR_CHARS, MAX_LISTED
from gtp_serve.request import FinishReason, Grammar, LogprobOptions
from gtp_serve.server.grammar_check import GrammarChecker, checker_argv

pytestmark = pytest.mark.e2e


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 90))


def says(text: str, **fields: Any) -> FakeClient:
    return FakeClient(script=lambda request: [*byte_ids(text.encode()), EOS], **fields)


async def stream(server: FakeServer, **body: Any) -> list[Any]:
    async with server.http.stream("POST", "/generate", json=body) as response:
        assert response.status_code == 200
        lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
        return [json.loads(line[6:]) for line in lines]


def parsed(response: httpx.Response) -> Any:
    """The body, as a strict parser takes it: no NaN, no Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(response.text, parse_constant=refuse)


ASKING = {
    "input_ids": [10, 11, 12, 13],
    "return_logprob": True,
    "logprob_start_len": 1,
    "top_logprobs_num": 2,
    "token_ids_logprob": [70, 71],
    "return_text_in_logprobs": True,
}


def test_log_probabilities_have_sglangs_shape() -> None:
    async def go() -> None:
        async with serving(says("hi")) as server:
            meta = parsed(await server.generate(**ASKING))["meta_info"]
            texts = [chr(token - 3) for token in (10, 11, 12, 13)]
            assert meta["input_token_logprobs"] == [
                [None, 11, texts[1]],
                [0.0, 12, texts[2]],
                [-1.0, 13, texts[3]],
            ]
            top = [[-0.5, 3, "\0"], [-0.5, 4, "\1"]]
            listed = [[-0.5, 70, "C"], [-0.5, 71, "D"]]
            assert meta["input_top_logprobs"] == [None, top, top]
            assert meta["input_token_ids_logprobs"] == [None, listed, listed]
            assert [triple[1] for triple in meta["output_token_logprobs"]] == [*byte_ids(b"hi"), EOS]
            assert meta["output_top_logprobs"] == [top] * 3
            assert meta["output_token_ids_logprobs"] == [listed] * 3
            (request,) = server.client.requests
            assert request.logprobs == LogprobOptions(top_n=2, token_ids=(70, 71), prompt_start=1)

    run(go())


def test_a_delta_stream_gives_each_value_once_and_a_cumulative_one_the_same_in_the_end() -> None:
    async def go() -> None:
        async with serving(says("hi", delay=0.02)) as server:
            whole = parsed(await server.generate(**ASKING))["meta_info"]
            deltas = [event["meta_info"] for event in await stream(server, stream="delta", **ASKING)]
            assert len(deltas) > 1
            for name in ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"):
                assert [one for meta in deltas for one in meta[name]] == whole[name]
            assert deltas[0]["input_top_logprobs"] == whole["input_top_logprobs"]
            assert not any("input_token_logprobs" in meta for meta in deltas[1:])
            last = (await stream(server, stream=True, **ASKING))[-1]["meta_info"]
            for name in (key for key in whole if key.endswith("logprobs")):
                assert last[name] == whole[name]

    run(go())


@pytest.mark.parametrize("value", [-math.inf, math.nan, math.inf])
def test_what_json_cannot_say_is_null(value: float) -> None:
    async def go() -> None:
        async with serving(says("a", logprob=value)) as server:
            reply = await server.generate(**ASKING)
            assert reply.status_code == 200
            meta = parsed(reply)["meta_info"]
            assert meta["output_token_logprobs"][0][0] is None
            assert meta["output_top_logprobs"][0][0][0] is None
            assert meta["input_token_ids_logprobs"][1][0][0] is None

    run(go())


def test_zero_alternatives_and_none_are_fine() -> None:
    async def go() -> None:
        async with serving(says("a")) as server:
            for top in (0, None):
                meta = parsed(await server.generate(input_ids=[9], return_logprob=True, top_logprobs_num=top))
                assert [triple[0] for triple in meta["meta_info"]["output_token_logprobs"]] == [-0.5, -0.5]
                assert "output_top_logprobs" not in meta["meta_info"]

    run(go())


def test_each_prompt_of_a_list_may_ask_for_its_own() -> None:
    async def go() -> None:
        async with serving(says("a")) as server:
            body = {
                "input_ids": [[9, 9], [8, 8, 8]],
                "return_logprob": [False, True],
                "logprob_start_len": [-1, 0],
                "top_logprobs_num": [0, 1],
                "token_ids_logprob": [None, [5]],
            }
            first, second = parsed(await server.generate(**body))
            assert "output_token_logprobs" not in first["meta_info"]
            assert len(second["meta_info"]["input_token_logprobs"]) == 3
            assert len(second["meta_info"]["output_top_logprobs"][0]) == 1

    run(go())


def test_sampling_fields_reach_the_engine() -> None:
    async def go() -> None:
        async with serving() as server:
            sampling = {
                "presence_penalty": -2,
                "frequency_penalty": 1.5,
                "repetition_penalty": 1.1,
                "logit_bias": {"5": -100, "7": 2.5},
                "max_new_tokens": 1,
            }
            reply = await server.generate(
                input_ids=[9],
                sampling_params=sampling,
                cache_salt="s",
                extra_key="k",
                deadline_seconds=2.5,
                sampling_logprobs_mode="processed",
                return_logprob=True,
            )
            assert reply.status_code == 200
            (request,) = server.client.requests
            assert request.sampling.presence_penalty == -2
            assert request.sampling.frequency_penalty == 1.5
            assert request.sampling.repetition_penalty == 1.1
            assert request.sampling.logit_bias == {5: -100.0, 7: 2.5}
            assert request.sampling.max_new_tokens == 1
            assert (request.cache_salt, request.deadline_seconds) == ("1:ks", 2.5)
            assert request.logprobs == LogprobOptions(processed=True)

    run(go())


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"sampling_params": {"presence_penalty": 2.1}}, "sampling_params.presence_penalty"),
        ({"sampling_params": {"frequency_penalty": -2.1}}, "sampling_params.frequency_penalty"),
        ({"sampling_params": {"repetition_penalty": 0}}, "sampling_params.repetition_penalty"),
        ({"sampling_params": {"repetition_penalty": -1}}, "sampling_params.repetition_penalty"),
        ({"sampling_params": {"repetition_penalty": "1"}}, "sampling_params.repetition_penalty"),
        ({"sampling_params": {"logit_bias": {"191222": -100}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"logit_bias": {"-1": 5}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"logit_bias": {"abc": 1}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"logit_bias": {"²": 1}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"logit_bias": {"3": None}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"logit_bias": {"3": 101}}}, "sampling_params.logit_bias"),
        ({"sampling_params": {"logit_bias": [[1, 2]]}}, "sampling_params.logit_bias"),
        (
            {"sampling_params": {"logit_bias": {str(at): 1 for at in range(MAX_BIASED + 1)}}},
            "sampling_params.logit_bias",
        ),
        ({"return_logprob": True, "top_logprobs_num": 10**9}, "top_logprobs_num"),
        ({"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"return_logprob": True, "top_logprobs_num": [1]}, "top_logprobs_num"),
        ({"top_logprobs_num": 1}, "top_logprobs_num"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len"),
        ({"return_logprob": True, "token_ids_logprob": [273]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [-1]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": 3}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [1] * (MAX_LISTED + 1)}, "token_ids_logprob"),
        ({"return_logprob": True, "sampling_logprobs_mode": "cooked"}, "sampling_logprobs_mode"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"cache_salt": 3}, "cache_salt"),
        ({"extra_key": "x" * 257}, "extra_key"),
        ({"deadline_seconds": 0}, "deadline_seconds"),
        ({"deadline_seconds": 1e9}, "deadline_seconds"),
        ({"sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"sampling_params": {"json_schema": {}, "regex": "b"}}, "sampling_params.regex"),
        ({"sampling_params": {"json_schema": [1]}}, "sampling_params.json_schema"),
        ({"sampling_params": {"regex": ""}}, "sampling_params.regex"),
        ({"sampling_params": {"regex": "a" * (MAX_GRAMMAR_CHARS + 1)}}, "sampling_params.regex"),
        ({"sampling_params": {"choice": []}}, "sampling_params.choice"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name_and_the_next_request_works(body: dict[str, Any], param: str) -> None:
    async def go() -> None:
        async with serving() as server:
            reply = await server.generate(input_ids=[9, 9], **body)
            assert reply.status_code == 400
            assert parsed(reply)["error"]["param"] == param
            assert (await server.generate(input_ids=[9])).status_code == 200
            assert len(server.client.requests) == 1

    run(go())


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"nan"'])
def test_h3_a_number_that_is_none_is_refused(field: str, value: str) -> None:
    async def go() -> None:
        async with serving() as server:
            raw = f'{{"input_ids": [9], "sampling_params": {{"{field}": {value}}}}}'
            reply = await server.http.post("/generate", content=raw, headers={"content-type": "application/json"})
            assert reply.status_code == 400
            parsed(reply)
            assert not server.client.requests

    run(go())


def test_routed_experts_come_with_the_end_also_when_a_stop_string_ends_it() -> None:
    async def go() -> None:
        moe = MoeConfig(num_experts=4, top_k=2, ffn_size=8)
        async with serving(says("abcd"), moe=moe) as server:
            for stop, tokens in ((None, 5), ("c", 3)):
                body = {"input_ids": [9, 9, 9], "return_routed_experts": True, "sampling_params": {"stop": stop}}
                meta = parsed(await server.generate(**body))["meta_info"]
                assert base64.b64decode(meta["routed_experts"]) == ROUTED_ROW * (3 + tokens - 1)
                part = parsed(await server.generate(**body, routed_experts_start_len=2))["meta_info"]
                assert base64.b64decode(part["routed_experts"]) == ROUTED_ROW * (3 + tokens - 1 - 2)

    run(go())


@pytest.mark.parametrize("code", ["grammar-dead-end", "no-token-allowed"])
def test_a_request_whose_own_fields_leave_it_no_token_is_the_clients_error_and_not_the_servers(code: str) -> None:
    async def go() -> None:
        finish = FinishReason(type="abort", code=code, message="nothing is left")
        async with serving(says("ab", finish=finish)) as server:
            for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
                reply = await server.http.post(path, json=body)
                assert (reply.status_code, parsed(reply)["error"]["code"]) == (400, code), reply.text
            both = parsed(await server.generate(text=["a", "b"]))
            ends = [one["meta_info"]["finish_reason"] for one in both]
            assert [(end["type"], end["status_code"], end["err_type"]) for end in ends] == [("abort", 400, code)] * 2

    run(go())


@asynccontextmanager
async def checker(seconds: float = 20.0) -> AsyncIterator[GrammarChecker]:
    made = GrammarChecker(checker_argv(str(DATA / "tokenizer"), 273, (EOS,)), seconds=seconds)
    try:
        yield made
    finally:
        made.close()


def test_a_grammar_is_tried_before_it_reaches_the_engine() -> None:
    async def go() -> None:
        async with checker() as grammars, serving(grammars=grammars) as server:
            good = {
                "json_schema": {"type": "object"},
                "regex": "a+",
                "ebnf": 'root ::= "a" | "b"',
                "choice": ["a", "b"],
            }
            for name, value in good.items():
                reply = await server.generate(input_ids=[9], sampling_params={name: value})
                assert reply.status_code == 200, reply.text
            kinds = [r.sampling.grammar.kind for r in server.client.requests if r.sampling.grammar is not None]
            assert kinds == ["json_schema", "regex", "lark", "choice"]
            ebnf = server.client.requests[2].sampling.grammar
            assert ebnf is not None
            assert "::=" not in ebnf.text
            bad = {
                "json_schema": {"type": "array", "uniqueItems": True},
                "regex": "(",
                "ebnf": "start: nothing",
            }
            for name, value in bad.items():
                reply = await server.generate(input_ids=[9], sampling_params={name: value})
                assert reply.status_code == 400
                error = parsed(reply)["error"]
                assert (error["code"], error["param"]) == ("bad-grammar", f"sampling_params.{name}")
            assert len(server.client.requests) == len(good)

    run(go())


def test_a_grammar_without_a_tokenizer_is_refused() -> None:
    async def go() -> None:
        async with serving(tokenizer=None) as server:
            reply = await server.generate(input_ids=[9], sampling_params={"regex": "a"})
            assert (reply.status_code, parsed(reply)["error"]["code"]) == (400, "no-tokenizer")

    run(go())


def test_a_grammar_that_takes_too_long_is_refused_in_time_and_others_go_on() -> None:
    async def go() -> None:
        slow = Grammar(kind="json_schema", text=json.dumps({"enum": [f"{at}" for at in range(6000)]}))
        async with checker() as grammars, serving(says("a", delay=0.01), grammars=grammars) as server:
            await grammars.check(Grammar(kind="regex", text="a"))  # the child is up
            grammars._seconds = 0.002
            started = time.monotonic()
            asked = asyncio.create_task(server.generate(input_ids=[9], sampling_params={"json_schema": slow.text}))
            assert (await server.generate(input_ids=[9])).status_code == 200
            reply = await asked
            assert time.monotonic() - started < 10
            assert reply.status_code == 400
            assert "longer than" in parsed(reply)["error"]["message"]
            grammars._seconds = 20.0
            again = await server.generate(input_ids=[9], sampling_params={"regex": "b"})
            assert again.status_code == 200  # in a new child

    run(go())


def test_a_verdict_is_remembered() -> None:
    async def go() -> None:
        async with checker() as grammars:
            grammar = Grammar(kind="regex", text="a{1,9}")
            assert await grammars.check(grammar) == grammar
            grammars._argv = ["/nonexistent"]
            for child in grammars._children:
                child.end()
            assert await grammars.check(grammar) == grammar

    run(go())
