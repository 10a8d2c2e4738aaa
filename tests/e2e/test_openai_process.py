"""The real client against the real command with a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from serve_command import Command

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FRANCE: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(demo_dir: Path) -> Iterator[openai.OpenAI]:
    command = Command("--ckpt", str(demo_dir / "hf"), "--port", "0")
    try:
        http = openai.DefaultHttpxClient(trust_env=False)
        with openai.OpenAI(base_url=f"{command.url()}/v1", api_key="x", http_client=http, max_retries=0) as found:
            yield found
    finally:
        command.stop()


def test_chat_answers_and_a_stream_says_the_same(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="m", messages=FRANCE, max_tokens=12, temperature=0)
    assert whole.choices[0].message.content == "The capital of France is Paris."
    assert whole.choices[0].finish_reason == "stop"

    stream = client.chat.completions.create(model="m", messages=FRANCE, max_tokens=12, temperature=0, stream=True)

    assert "".join(part.choices[0].delta.content or "" for part in stream) == whole.choices[0].message.content


def test_scores_of_an_echoed_prompt_are_those_of_generating_it(client: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    made = client.completions.create(
        model="m", prompt=prompt, max_tokens=4, temperature=0, logprobs=1, extra_body={"return_token_ids": True}
    ).choices[0]
    ids = made.model_dump()["prompt_token_ids"] + made.model_dump()["token_ids"]

    scored = client.completions.create(model="m", prompt=ids, max_tokens=0, echo=True, logprobs=1).choices[0]

    assert made.logprobs is not None
    assert scored.logprobs is not None
    assert (scored.logprobs.token_logprobs or [])[-4:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    assert "".join(scored.logprobs.tokens or []) == scored.text == prompt + made.text


def test_schema_is_kept_to(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    reply = client.chat.completions.create(
        model="m",
        messages=FRANCE,
        max_tokens=30,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    )

    assert json.loads(reply.choices[0].message.content or "")["n"] in (1, 2)


def test_ids_of_a_reply_carry_over_to_the_next_turn(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    first = client.chat.completions.create(model="m", messages=FRANCE, max_tokens=12, temperature=0, extra_body=extra)
    message = first.choices[0].message.model_dump(exclude_none=True)
    messages = [*FRANCE, message, {"role": "user", "content": "And of Spain?"}]

    second = client.chat.completions.create(model="m", messages=messages, max_tokens=2, extra_body=extra)

    known = message["prompt_token_ids"] + message["generation_token_ids"]
    again = second.choices[0].message.model_dump()["prompt_token_ids"]
    assert again[: len(known)] == known
    # The reply was what the tokenizer would have made of its text, so nothing else differs either.
    plain = [*FRANCE, {"role": "assistant", "content": message["content"]}, messages[2]]
    told: Any = client.post("tokenize", cast_to=object, body={"messages": plain})
    assert again == told["tokens"]
