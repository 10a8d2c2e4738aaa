"""Grammars, penalties and log-probabilities through the whole command: a fixture model, and SmolLM2 (slow)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from serve_command import Command

pytestmark = pytest.mark.e2e

DATA = Path(__file__).parents[1] / "data"
CKPT = DATA / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
SMALL = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "k": {"enum": ["a", "b"]}},
    "required": ["n", "k"],
    "additionalProperties": False,
}
"""Fits the fixture's context of 64 tokens."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def served(*words: str) -> Iterator[httpx.Client]:
    command = Command("--port", "0", "--max-running", "16", "--dtype", "float32", *words)
    try:
        with httpx.Client(base_url=command.url(), timeout=300, trust_env=False, verify=False) as http:
            yield http
    finally:
        command.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    yield from served("--ckpt", str(CKPT), "--tokenizer", str(DATA / "tokenizer251"))


@pytest.fixture(scope="module")
def smollm(demo_dir: Path) -> Iterator[httpx.Client]:
    yield from served("--ckpt", str(demo_dir / "hf"))


def post(http: httpx.Client, **body: Any) -> Any:
    reply = http.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_output_matches_its_schema_also_beside_others(server: httpx.Client) -> None:
    def one(seed: int) -> Any:
        sampling = {"temperature": 1.0, "sampling_seed": seed, "max_new_tokens": 55}
        plain = {**sampling, "ignore_eos": True, "max_new_tokens": 30}
        if seed % 2:
            return post(server, text="hello", sampling_params=plain)
        return post(server, text="hello", sampling_params={**sampling, "json_schema": SMALL})

    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(one, range(8)))
    for seed, reply in enumerate(replies):
        finish = reply["meta_info"]["finish_reason"]
        if seed % 2:
            assert finish == {"type": "length", "length": 30}
        elif finish["type"] == "stop":
            jsonschema.validate(json.loads(reply["text"]), SMALL)
    assert any(reply["meta_info"]["finish_reason"]["type"] == "stop" for reply in replies[::2])


def test_a_choice_ends_with_stop_and_is_one_of_them(server: httpx.Client) -> None:
    for seed in range(3):
        sampling = {"choice": ["yes", "no", "maybe"], "sampling_seed": seed}
        reply = post(server, text="hello", sampling_params=sampling)
        assert reply["text"] in ("yes", "no", "maybe")
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"


def test_hostile_grammars_are_refused_while_decoding_goes_on(server: httpx.Client) -> None:
    hostile = [
        {"json_schema": {"type": "array", "uniqueItems": True}},
        {"json_schema": {"type": "integer", "multipleOf": 999983}},
        {"json_schema": json.dumps({"enum": list(range(20_000))})},
        {"json_schema": '{"items":' * 100 + "{}" + "}" * 100},
        {"regex": "(" * 5000},
        {"ebnf": 'start: %json {"type": "integer", "multipleOf": 999983}'},
    ]

    def refused(params: dict[str, Any]) -> float:
        started = time.monotonic()
        reply = server.post("/generate", json={"text": "x", "sampling_params": params})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "bad-grammar"), params
        return time.monotonic() - started

    with ThreadPoolExecutor(8) as pool:
        long = pool.submit(post, server, text="hello", sampling_params={"max_new_tokens": 55, "ignore_eos": True})
        seconds = list(pool.map(refused, hostile))
        assert len(long.result()["output_ids"]) == 55
    assert max(seconds) < 30  # the child's start is in it


def test_prompt_values_and_penalties_reach_the_model(server: httpx.Client) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    plain = post(
        server,
        text="hello there",
        sampling_params=greedy,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_prompt_token_ids=True,
    )
    meta, prompt = plain["meta_info"], plain["prompt_token_ids"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == prompt
    assert meta["input_token_logprobs"][0][0] is None
    # Greedy: what was chosen is the most probable one.
    assert [top[0][:2] for top in meta["output_top_logprobs"]] == [
        triple[:2] for triple in meta["output_token_logprobs"]
    ]
    again = post(
        server,
        input_ids=[*prompt, *plain["output_ids"]],
        sampling_params={"max_new_tokens": 0},
        return_logprob=True,
        logprob_start_len=len(prompt) - 1,
    )
    assert again["output_ids"] == []
    assert again["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    scored = [value for value, _, _ in again["meta_info"]["input_token_logprobs"][1:]]
    assert scored == pytest.approx([value for value, _, _ in meta["output_token_logprobs"]], abs=1e-3)
    bias = {str(plain["output_ids"][0]): -100}
    other = post(server, text="hello there", sampling_params={**greedy, "logit_bias": bias})
    assert plain["output_ids"][0] not in other["output_ids"]
    varied = post(server, text="hello there", sampling_params={**greedy, "presence_penalty": 2, "frequency_penalty": 2})
    assert len(set(varied["output_ids"])) >= len(set(plain["output_ids"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}, "why": {"type": "null"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
        {"type": "array", "items": {"type": "integer", "minimum": 1, "maximum": 9}, "minItems": 2, "maxItems": 4},
    ],
)
def test_smollm_writes_what_its_schema_says(smollm: httpx.Client, schema: dict[str, Any]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 120, "json_schema": schema}
    reply = post(smollm, text="Describe a person as JSON:\n", sampling_params=sampling)
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"
    jsonschema.validate(json.loads(reply["text"]), schema)
