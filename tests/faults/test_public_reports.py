"""Faults of other servers, as their users have reported them, in the forms in which this server once had them."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes_server import EOS, FakeClient, FakeServer, byte_ids, serving
from markov_model import MarkovModel

from gtp_serve import LLM
from gtp_serve.errors import RequestRejected
from gtp_serve.request import FinishReason, Request

NOT_FINITE = FinishReason(type="abort", code="non-finite-logits", message="the model gave logits that are not finite")


def run(test: Callable[[FakeServer], Awaitable[None]], client: FakeClient | None = None, **options: Any) -> None:
    async def go() -> None:
        async with serving(client, **options) as server:
            await test(server)

    asyncio.run(asyncio.wait_for(go(), 60))


async def refused(server: FakeServer, path: str, raw: str | bytes, **headers: str) -> dict[str, Any]:
    """The error of a body that is refused; afterwards an ordinary request has its usual text."""
    reply = await server.http.post(path, content=raw, headers={"content-type": "application/json", **headers})
    error: dict[str, Any] = reply.json()["error"]
    good = await server.generate(text="ab", sampling_params={"temperature": 0})
    assert good.json()["text"] == "ab"
    return {**error, "status": reply.status_code}


# -- numbers and characters that are none: 400 with the name of the field ----------------------------------------------


NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "1" * 400)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", '{"text": "a", "sampling_params": {"temperature": %s}}', "sampling_params.temperature"),
        ("/generate", '{"text": "a", "deadline_seconds": %s}', "deadline_seconds"),
        ("/v1/completions", '{"prompt": "a", "logit_bias": {"3": %s}}', "logit_bias.3"),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": "a"}], "top_p": %s}', "top_p"),
    ],
)
def test_a_number_that_is_none_is_told_with_its_field(path: str, body: str, field: str) -> None:
    async def test(server: FakeServer) -> None:
        for value, tail in itertools.product(NO_NUMBERS, ("}", ', "stream": true}')):
            error = await refused(server, path, (body % value).removesuffix("}") + tail)
            assert (error["status"], error["param"]) == (400, field)
            assert f" at {field}: " in error["message"]

    run(test)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/generate", '{"text": ["a", %s]}', "text[1]"),
        ("/generate", '{"text": "a", "sampling_params": {"stop": [%s]}}', "sampling_params.stop[0]"),
        ("/v1/completions", '{"prompt": "a", "model": %s}', "model"),
        ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}', "messages[0].content"),
    ],
)
def test_half_an_emoji_is_told_with_its_field(path: str, body: str, field: str) -> None:
    async def test(server: FakeServer) -> None:
        for half in (r'"\ud83d"', r'"a\ude00"'):
            error = await refused(server, path, body % half)
            assert (error["status"], error["param"]) == (400, field)
            assert "half of a surrogate pair" in error["message"]

    run(test)


def test_a_field_of_the_clients_own_naming_is_not_logged_though_its_value_is_none() -> None:
    async def test(server: FakeServer) -> None:
        await refused(server, "/generate", '{"text": "a", "my_secret": NaN}')
        assert "my_secret" not in json.dumps(server.log)

    run(test)


def test_a_packed_body_is_refused_for_that() -> None:
    async def test(server: FakeServer) -> None:
        body = b'{"text": "a"}'
        for name, raw in (("gzip", gzip.compress(body)), ("br", body), ("x, identity", body)):
            error = await refused(server, "/generate", raw, **{"content-encoding": name})
            assert (error["status"], error["code"]) == (415, "wrong-media-type")
            assert name in error["message"]
        plain = await server.http.post("/generate", content=body, headers={"content-encoding": "identity"})
        assert plain.status_code == 200

    run(test)


# -- a refusal names what the client sent ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"), [("max_completion_tokens", -1), ("max_completion_tokens", "7"), ("min_tokens", 1 << 62)]
)
def test_a_refusal_names_the_field_that_was_sent_and_not_its_other_name(field: str, value: object) -> None:
    async def test(server: FakeServer) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], field: value}
        error = await refused(server, "/v1/chat/completions", json.dumps(body))
        assert (error["status"], error["param"]) == (400, field)
        assert error["message"].startswith(f"{field} must be a whole number from 0 to ")

    run(test)


def test_a_conversation_that_is_too_long_by_its_characters_is_told_as_every_prompt_that_is_too_long() -> None:
    async def test(server: FakeServer) -> None:
        body = {"messages": [{"role": "user", "content": "the " * 3000}]}
        error = await refused(server, "/v1/chat/completions", json.dumps(body))
        assert (error["status"], error["code"]) == (400, "prompt-too-long")
        assert error["message"].startswith("This model's maximum context length was exceeded: a conversation of 12")
        assert "possible: up to 8192 characters" in error["message"]

    run(test, context=32)


@pytest.mark.parametrize("form", ["text", "input_ids"])
def test_a_prompt_may_fill_the_context_when_nothing_is_to_be_made(form: str) -> None:
    async def test(server: FakeServer) -> None:
        for count, new, status in ((32, 0, 200), (33, 0, 400), (31, 1, 200), (32, 1, 400)):
            prompt = "a" * count if form == "text" else byte_ids(b"a" * count)
            reply = await server.generate(**{form: prompt}, sampling_params={"max_new_tokens": new})
            assert reply.status_code == status, (count, new, reply.text)
            if status == 400:
                assert f"{count} prompt tokens and {new} new ones" in reply.text
                assert f"a prompt of at most {32 - new} tokens" in reply.text

    run(test, context=32)


# -- logits that are not finite ----------------------------------------------------------------------------------------


def count(text: str, end: str) -> float:
    """How many requests have ended so."""
    name = f'gtp_serve_requests_total{{finish_reason="{end}"}}'
    return sum(float(line.split(" ")[1]) for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "ab", "n": 2}),
        ("/v1/completions", {"prompt": ["ab", "cd"]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 2}),
        ("/generate", {"text": "ab"}),
    ],
)
def test_a_call_of_which_nothing_is_good_is_an_error_and_counted_as_one(path: str, body: dict[str, Any]) -> None:
    async def test(server: FakeServer) -> None:
        reply: httpx.Response = await server.http.post(path, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "non-finite-logits")
        async with server.http.stream("POST", path, json={**body, "stream": True}) as stream:
            lines = [line[6:] async for line in stream.aiter_lines() if line.startswith("data: ")]
        assert json.loads(lines[-2])["error"]["code"] == "non-finite-logits"
        assert lines[-1] == "[DONE]"
        metrics = (await server.http.get("/metrics")).text
        jobs = 1 if path == "/generate" else 2
        assert (count(metrics, "error"), count(metrics, "refused")) == (2 * jobs, 0)

    run(test, FakeClient(script=lambda request: byte_ids(b"xy"), finish=NOT_FINITE))


def test_of_several_choices_the_one_that_failed_says_so_beside_the_good_one() -> None:
    class OneFails(FakeClient):
        def _finish(self, request: Request, index: int, stops: bool, last: bool) -> FinishReason | None:
            good = super()._finish(request, index, stops, last)
            return NOT_FINITE if good is not None and request.rid.endswith("_1") else good

    async def test(server: FakeServer) -> None:
        reply = await server.http.post("/v1/completions", json={"prompt": "ab", "n": 2})
        good, bad = reply.json()["choices"]
        assert (reply.status_code, good["finish_reason"]) == (200, "stop")
        assert "error" not in good
        assert bad["finish_reason"] == "abort"
        assert bad["error"] == {"code": "non-finite-logits", "message": NOT_FINITE.message}

    run(test, OneFails(script=lambda request: [*request.input_ids, EOS]))


def test_log_probabilities_of_a_prompt_that_are_no_numbers_are_an_error_and_not_a_probability_of_zero(
    tmp_path: Path,
) -> None:
    model = MarkovModel()
    model.follow("a", "b", "c", "d")
    model.overflow_after("!")
    with LLM(model.write(tmp_path), kv_memory="1MiB", dtype="float32", progress=False) as llm:
        for text in ("ab!c", "!a"):
            with pytest.raises(RequestRejected, match="not finite for a token of the prompt") as caught:
                llm.score([text], progress=False)
            assert caught.value.code == "non-finite-logits"
        assert llm.stats().non_finite_total == 2
        (alone,) = llm.score(["abcd"], progress=False)
        assert max(abs(value) for value in alone.logprobs) < 0.1
        bad, good = llm.generate(["b!", "a"], max_new_tokens=3, temperature=0, progress=False)
        assert (bad.finish_reason.code, good.text) == ("non-finite-logits", "bcd")
        assert llm.generate("a!b", max_new_tokens=1, temperature=0, progress=False)[0].text == "c"  # its row is good
        assert llm.stats().kv_blocks_used == 0
