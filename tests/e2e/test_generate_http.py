"""The routes over a real socket, with a scripted engine behind them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fakes_server import EOS, FakeClient, FakeServer, byte_ids, byte_tokenizer, serving

from gtp_serve.errors import EngineFault, QueueFull
from gtp_serve.request import FinishReason
from gtp_serve.server.body import MAX_BODY_BYTES

pytestmark = pytest.mark.e2e

GREEDY = {"temperature": 0, "max_new_tokens": 64}


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def says(text: str | bytes) -> FakeClient:
    """An engine that writes this text, byte by byte, and ends."""
    data = text if isinstance(text, bytes) else text.encode()
    return FakeClient(script=lambda request: [*byte_ids(data), EOS])


async def events(response: httpx.Response) -> AsyncIterator[Any]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line[6:] if line == "data: [DONE]" else json.loads(line[6:])


async def stream(server: FakeServer, **body: Any) -> list[Any]:
    async with server.http.stream("POST", "/generate", json={"stream": True, **body}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return [event async for event in events(response)]


async def until(holds: Callable[[], bool], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not holds() and loop.time() < deadline:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)
    assert holds()


async def gone(server: FakeServer, count: int = 1) -> None:
    """Until the engine has been told that so many requests were abandoned; a second is allowed."""
    await until(lambda: len(server.client.aborted) >= count and not server.state.num_calls, 1)
    assert not server.client.running


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert set(body["error"]) == {"code", "message", "param", "did_you_mean", "type"}
    error: dict[str, Any] = body["error"]
    return error


def test_a_reply_has_sglangs_shape() -> None:
    async def go() -> None:
        async with serving(says("héllo")) as server:
            reply = await server.generate(
                text="ab", rid="me", sampling_params=GREEDY, return_logprob=True, return_prompt_token_ids=True
            )
            body = reply.json()
            ids = [*byte_ids("héllo".encode()), EOS]
            latency = body["meta_info"].pop("e2e_latency")
            assert 0 < latency < 10
            assert body == {
                "text": "héllo",
                "output_ids": ids,
                "prompt_token_ids": byte_tokenizer().encode("ab"),
                "meta_info": {
                    "id": "me",
                    "finish_reason": {"type": "stop", "matched": EOS},
                    "prompt_tokens": 2,
                    "completion_tokens": 7,
                    "reasoning_tokens": 0,
                    "cached_tokens": 0,
                    "weight_version": "0",
                    "weight_versions": [{"version": "0", "start": 0, "end": 7}],
                    "input_token_logprobs": [],
                    "output_token_logprobs": [[-0.5, token, None] for token in ids],
                    "output_token_logprobs_length": 7,
                },
            }
            put = await server.http.put("/generate", json={"text": "ab"})
            assert put.json()["text"] == "héllo"

    run(go())


def test_logprobs_carry_text_when_asked_and_never_a_non_finite_number() -> None:
    async def go() -> None:
        client = says("ab")
        async with serving(client) as server:
            body = {"text": "x", "return_logprob": True, "return_text_in_logprobs": True}
            reply = (await server.generate(**body)).json()
            assert [t[2] for t in reply["meta_info"]["output_token_logprobs"]] == ["a", "b", "<|im_end|>"]
            for value in (-math.inf, math.nan):
                client.logprob = value
                raw = (await server.generate(**body)).text
                assert json.loads(raw, parse_constant=pytest.fail)["meta_info"]["output_token_logprobs"][0][0] is None

    run(go())


@pytest.mark.parametrize("mode", [True, "delta"])
def test_a_stream_says_what_the_whole_reply_says(mode: bool | str) -> None:
    text = "naïve 漢字 🙂 end"

    async def go() -> None:
        async with serving(says(text)) as server:
            whole = (await server.generate(text="x", return_logprob=True)).json()
            *parts, done = await stream(server, text="x", stream=mode, return_logprob=True)
            assert done == "[DONE]"
            assert not any("\ufffd" in part["text"] for part in parts)
            finishes = [part["meta_info"]["finish_reason"] for part in parts]
            assert finishes == [None] * (len(parts) - 1) + [{"type": "stop", "matched": EOS}]
            if mode == "delta":
                assert "".join(part["text"] for part in parts) == text
                assert [i for part in parts for i in part["output_ids"]] == whole["output_ids"]
                triples = [t for part in parts for t in part["meta_info"]["output_token_logprobs"]]
                assert triples == whole["meta_info"]["output_token_logprobs"]
            else:
                for before, after in itertools.pairwise(parts):
                    assert after["text"].startswith(before["text"])
                for part in (parts[-1], whole):
                    part["meta_info"].pop("e2e_latency"), part["meta_info"].pop("id")
                assert parts[-1] == whole

    run(go())


@pytest.mark.parametrize(
    ("written", "params", "text", "matched", "tokens"),
    [
        ("abcd", {"stop": ["b c", "bc"]}, "a", "bc", 3),
        ("abcd", {"stop": "bc", "no_stop_trim": True}, "abc", "bc", 3),
        ("a..b", {"stop": [".."]}, "a", "..", 3),
        ("abcd", {"stop": "cx"}, "abcd", EOS, 5),
        ("abab", {"stop": "b", "min_new_tokens": 3}, "aba", "b", 4),
        ("ab", {"stop": "<|im_end|>", "ignore_eos": True}, "ab", "<|im_end|>", 3),
        ("ab", {"skip_special_tokens": False}, "ab", EOS, 3),
        ("ab", {"skip_special_tokens": False, "no_stop_trim": True}, "ab<|im_end|>", EOS, 3),
        ("abc", {"stop_token_ids": byte_ids(b"b")}, "a", byte_ids(b"b")[0], 2),
    ],
)
def test_stops_end_text_and_ids_by_the_documented_rule_streamed_or_not(
    written: str, params: dict[str, Any], text: str, matched: Any, tokens: int
) -> None:
    async def go() -> None:
        async with serving(says(written)) as server:
            whole = (await server.generate(text="x", sampling_params=params)).json()
            parts = await stream(server, text="x", stream="delta", sampling_params=params)
            assert whole["text"] == text
            assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
            assert whole["meta_info"]["completion_tokens"] == len(whole["output_ids"]) == tokens
            assert "".join(part["text"] for part in parts[:-1]) == text
            assert parts[-2]["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
            assert parts[-2]["meta_info"]["completion_tokens"] == tokens

    run(go())


def test_a_stop_string_aborts_the_sequence_in_the_engine() -> None:
    async def go() -> None:
        async with serving(says("abcd")) as server:
            await server.generate(text="x", rid="r", sampling_params={"stop": "b"})
            assert server.client.aborted == ["r"]

    run(go())


def test_the_length_ends_a_reply_and_held_text_is_given_out() -> None:
    async def go() -> None:
        async with serving(says("abcd")) as server:
            reply = await server.generate(text="x", sampling_params={"max_new_tokens": 3, "stop": "cx"})
            assert reply.json()["text"] == "abc"
            assert reply.json()["meta_info"]["finish_reason"] == {"type": "length", "length": 3}

    run(go())


def test_lists_and_samples_come_back_in_order_with_their_own_ends() -> None:
    async def go() -> None:
        client = FakeClient(script=lambda request: [*request.input_ids, *([EOS] if len(request.input_ids) < 3 else [])])
        async with serving(client) as server:
            reply = await server.generate(
                text=["ab", "cdef"],
                rid="r",
                sampling_params={"n": 2, "sampling_seed": 5, "max_new_tokens": 4},
            )
            bodies = reply.json()
            assert [body["text"] for body in bodies] == ["ab", "ab", "cdef", "cdef"]
            assert [body["meta_info"]["id"] for body in bodies] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]
            kinds = [body["meta_info"]["finish_reason"]["type"] for body in bodies]
            assert kinds == ["stop", "stop", "length", "length"]
            assert [request.sampling.seed for request in client.requests] == [5, 6, 5, 6]
            one = await server.generate(text=["ab"])
            assert [body["text"] for body in one.json()] == ["ab"]

    run(go())


def test_a_stream_of_several_tells_them_apart_by_index() -> None:
    async def go() -> None:
        async with serving(FakeClient()) as server:
            parts = await stream(server, text=["ab", "cd"], stream="delta", sampling_params={"max_new_tokens": 2})
            for index, text in ((0, "ab"), (1, "cd")):
                own = [part for part in parts[:-1] if part["index"] == index]
                assert "".join(part["text"] for part in own) == text
                assert [part["meta_info"]["finish_reason"] for part in own][-1] == {
                    "type": "length",
                    "length": 2,
                }

    run(go())


@pytest.mark.parametrize("streaming", [False, True])
def test_without_a_tokenizer_ids_work_and_text_is_refused(streaming: bool) -> None:
    async def go() -> None:
        async with serving(FakeClient(), tokenizer=None) as server:
            reply = (await server.generate(input_ids=[5, 6], sampling_params={"max_new_tokens": 2})).json()
            assert (reply["text"], reply["output_ids"]) == ("", [5, 6])
            for body in ({"text": "a"}, {"input_ids": [5], "sampling_params": {"stop": "x"}}):
                refused = await server.generate(**body, stream=streaming)
                assert refused.status_code == 400
                assert error_of(refused)["code"] == "no-tokenizer"

    run(go())


@pytest.mark.parametrize("streaming", [False, "delta"])
@pytest.mark.parametrize("hold", [True, False])
def test_a_client_that_leaves_frees_its_sequences(streaming: Any, hold: bool) -> None:
    async def go() -> None:
        client = FakeClient(script=lambda request: byte_ids(b"x") * 1000, delay=0.01, hold=hold)
        async with serving(client) as server:
            body = {"text": ["a", "b"], "stream": streaming, "sampling_params": {"max_new_tokens": 1000}}
            with contextlib.suppress(httpx.ReadTimeout):
                async with server.http.stream("POST", "/generate", json=body, timeout=0.3) as response:
                    async for _ in response.aiter_raw():
                        if not hold and streaming:
                            raise httpx.ReadTimeout("leave in the middle")
            await gone(server, 2)
            assert {line["reason"] for line in server.log} == {"client_gone"}
            assert 'requests_total{finish_reason="client_gone"} 2.0' in (await server.http.get("/metrics")).text

    run(go())


def test_a_client_that_leaves_before_its_body_is_complete_costs_nothing() -> None:
    async def go() -> None:
        async with serving(FakeClient()) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.1)
            assert (server.client.requests, server.state.num_calls) == ([], 0)
            assert (await server.generate(text="a")).status_code == 200

    run(go())


def test_a_silent_stream_is_kept_alive_by_comments() -> None:
    async def go() -> None:
        async with serving(FakeClient(hold=True), ping=0.1) as server:
            async with server.http.stream("POST", "/generate", json={"text": "a", "stream": True}) as response:
                lines = response.aiter_lines()
                assert [line for line in [await anext(lines) for _ in range(4)] if line] == [": ping"] * 2
            await gone(server)

    run(go())


def test_a_refusal_by_the_engine_is_an_http_error_also_for_a_stream() -> None:
    async def go() -> None:
        async with serving(FakeClient(reject=QueueFull("1024 requests wait already"))) as server:
            for streaming in (False, True):
                reply = await server.generate(text="a", stream=streaming)
                assert reply.status_code == 503
                assert error_of(reply)["code"] == "queue-full"
                assert reply.headers["retry-after"] == "1"

    run(go())


def test_an_engine_that_dies_fails_whole_replies_and_ends_streams_with_an_error() -> None:
    async def go() -> None:
        async with serving(FakeClient(die_after=2)) as server:
            *parts, error, done = await stream(server, text="abcd", stream="delta")
            assert "".join(part["text"] for part in parts) == "ab"
            assert error["error"]["code"] == "worker-died"
            assert "pid" not in error["error"]["message"]
            assert done == "[DONE]"
        async with serving(FakeClient(die_after=2)) as server:
            reply = await server.generate(text="abcd")
            assert reply.status_code == 503
            assert error_of(reply)["code"] == "worker-died"
            after = await server.generate(text="abcd")
            assert (after.status_code, error_of(after)["code"]) == (503, "worker-died")
            assert (await server.http.get("/health")).status_code == 503
            assert (await server.http.get("/ready")).status_code == 503

    run(go())


def test_a_sequence_that_the_engine_gives_up_is_an_error_and_its_neighbours_are_not() -> None:
    async def go() -> None:
        finish = FinishReason(type="abort", code="non-finite", message="the logits are not finite")
        async with serving(FakeClient(finish=finish)) as server:
            reply = await server.generate(text="ab")
            assert (reply.status_code, error_of(reply)["code"]) == (500, "non-finite")
            several = await server.generate(text=["ab", "cd"])
            assert several.status_code == 200
            assert several.json()[0]["meta_info"]["finish_reason"] == {
                "type": "abort",
                "message": "the logits are not finite",
                "status_code": 500,
                "err_type": "non-finite",
            }

    run(go())


def test_lengths_are_refused_with_both_numbers_exactly_at_the_border() -> None:
    async def go() -> None:
        async with serving(FakeClient(), context=32) as server:
            for prompt, new, status in (
                (31, 1, 200),
                (32, 1, 400),
                (30, 2, 200),
                (30, 3, 400),
                (10_000, 1, 400),
            ):
                reply = await server.generate(input_ids=[5] * prompt, sampling_params={"max_new_tokens": new})
                assert reply.status_code == status, (prompt, new)
                if status == 400:
                    error = error_of(reply)
                    assert error["code"] == "prompt-too-long"
                    assert str(prompt) in error["message"]
                    assert "32" in error["message"]
            shortened = (await server.generate(input_ids=[5] * 30)).json()
            assert shortened["meta_info"]["completion_tokens"] == 2
            huge = await server.generate(text="a" * 1_000_000)
            assert error_of(huge)["code"] == "prompt-too-long"
            assert (await server.generate(text="ab")).status_code == 200

    run(go())


@pytest.mark.parametrize(
    ("raw", "headers", "status", "code"),
    [
        (b"{", {}, 400, "invalid-json"),
        (b"", {}, 400, "invalid-json"),
        (b'{"text": "a", "sampling_params": {"temperature": NaN}}', {}, 400, "invalid-json"),
        (b'{"text": "\\ud83d"}', {}, 400, "invalid-json"),
        (b'{"text": ""}', {}, 400, "empty-prompt"),
        (b'{"text": "a", "text": "b"}', {}, 400, "duplicate-key"),
        (b'{"input_ids": [273]}', {}, 400, "bad-token-id"),
        (b'{"text": "a", "sampling_params": {"stop_token_ids": [273]}}', {}, 400, "bad-token-id"),
        (b'{"text": "a", "custom_logit_processor": "gASV"}', {}, 400, "not-supported"),
        (b'{"text": "a"}', {"content-type": "text/plain"}, 415, "wrong-media-type"),
    ],
)
def test_a_bad_request_is_refused_in_one_shape_and_the_next_one_works(
    raw: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    async def go() -> None:
        async with serving(FakeClient()) as server:
            given = {"content-type": "application/json", **headers}
            try:
                reply = await server.http.post("/generate", content=raw, headers=given)
            except httpx.RemoteProtocolError:
                pytest.fail("no answer")
            assert (reply.status_code, error_of(reply)["code"]) == (status, code)
            assert error_of(reply)["type"] == "invalid_request_error"
            assert (await server.generate(text="ab")).json()["text"] == "ab"
            assert server.log[0]["reason"] == "refused"

    run(go())


def test_h2_a_body_over_the_limit_is_refused_whether_or_not_it_says_its_size() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b'{"text": "'
        for _ in range(1 + (MAX_BODY_BYTES >> 20)):
            yield b"a" * (1 << 20)

    async def go() -> None:
        async with serving(FakeClient()) as server:
            for body in (chunks(), b"a" * (MAX_BODY_BYTES + 1)):
                reply = await server.http.post("/generate", content=body)
                assert (reply.status_code, error_of(reply)["code"]) == (413, "body-too-large")
            assert (await server.generate(text="ab")).status_code == 200

    run(go())


def test_a_body_that_announces_far_too_much_is_refused_unread() -> None:
    async def go() -> None:
        async with serving(FakeClient()) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
            answer = await reader.read()
            writer.close()
            assert answer.startswith(b"HTTP/1.1 413 ")

    run(go())


def test_heads_are_bounded_and_malformed_http_is_answered_in_our_shape() -> None:
    async def go() -> None:
        async with serving(FakeClient()) as server:
            port = int(server.url.rpartition(":")[2])
            for head in (b"GET /ready HTTP/1.1\r\nx: " + b"a" * 100_000 + b"\r\n\r\n", b"\x00\x01\r\n\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(head)
                answer = await reader.read()
                writer.close()
                assert answer.startswith(b"HTTP/1.1 400 ")
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad-http"
            assert (await server.http.get("/ready")).status_code == 200

    run(go())


def test_two_live_requests_may_not_share_a_name_and_the_name_is_free_again_afterwards() -> None:
    async def go() -> None:
        async with serving(FakeClient(delay=0.05)) as server:
            first = asyncio.create_task(server.generate(text="abcd", rid="r"))
            await asyncio.sleep(0.1)
            second = await server.generate(text="ab", rid="r")
            assert (second.status_code, error_of(second)["code"]) == (409, "duplicate-rid")
            assert (await first).json()["text"] == "abcd"
            assert (await server.generate(text="ab", rid="r")).json()["text"] == "ab"

    run(go())


def test_h4_every_route_answers_errors_in_one_shape_and_known_methods_only() -> None:
    async def go() -> None:
        async with serving(FakeClient()) as server:
            for method, path, status in (
                ("GET", "/nothing", 404),
                ("GET", "/generate", 405),
                ("POST", "/health", 405),
                ("DELETE", "/model_info", 405),
                ("GET", "/generate/", 404),
                ("GET", "/ready/", 404),
            ):
                reply = await server.http.request(method, path)
                assert reply.status_code == status, path
                error_of(reply)
            options = await server.http.request("OPTIONS", "/generate")
            assert (options.status_code, options.headers["allow"]) == (204, "POST, PUT")
            assert "access-control-allow-origin" not in options.headers
            head = await server.http.request("HEAD", "/ready")
            assert (head.status_code, head.content) == (200, b"")

    run(go())


def test_l4_the_probes_follow_the_servers_life() -> None:
    async def go() -> None:
        async with serving(FakeClient(), ready=False) as server:
            ready = await server.http.get("/ready")
            assert (ready.status_code, ready.json()["phase"]) == (503, "starting")
            for reply in (await server.http.get("/health"), await server.http.get("/model_info")):
                assert reply.status_code == 503
                error_of(reply)
            refused = await server.generate(text="a")
            assert (refused.status_code, error_of(refused)["code"]) == (503, "not-ready")
            assert (await server.http.get("/metrics")).status_code == 200
        async with serving(FakeClient()) as server:
            assert (await server.http.get("/ready")).json() == {"status": "ready"}
            assert (await server.http.get("/health")).json() == {"status": "healthy"}
            server.client.age = 61.0
            stuck = await server.http.get("/health")
            assert stuck.status_code == 503
            assert "61 s" in error_of(stuck)["message"]
            server.client.age = 0.0
            server.state.stopping = True
            assert (await server.http.get("/ready")).json()["status"] == "stopping"
            assert error_of(await server.generate(text="a"))["code"] == "shutting-down"
            assert (await server.http.get("/health")).status_code == 200

    run(go())


def test_model_info_says_what_is_served_under_both_names() -> None:
    async def go() -> None:
        async with serving(FakeClient()) as server:
            info = (await server.http.get("/model_info")).json()
            assert info == (await server.http.get("/get_model_info")).json()
            assert info["served_model_name"] == "fake"
            assert (info["weight_version"], info["max_context"], info["vocab_size"]) == ("0", 4096, 273)

    run(go())


def test_the_log_has_one_line_for_each_sequence_and_no_text() -> None:
    async def go() -> None:
        async with serving(says("secret answer")) as server:
            await server.generate(text="secret question", rid="r", sampling_params={"n": 2})
            await server.generate(text="quiet", no_logs=True)
            kept = [{k: line[k] for k in ("message", "rid", "reason", "prompt", "tokens")} for line in server.log]
            prompt = len(byte_tokenizer().encode("secret question"))
            assert kept == [
                {"message": "request", "rid": f"r_{i}", "reason": "stop", "prompt": prompt, "tokens": 14}
                for i in (0, 1)
            ]
            assert "secret" not in json.dumps(server.log)

    run(go())


def test_counters_count_what_was_answered() -> None:
    async def go() -> None:
        async with serving(says("abc")) as server:
            await server.generate(input_ids=[5, 6, 7])
            await server.generate(bad=1)
            text = (await server.http.get("/metrics")).text
            for line in (
                "gtp_serve_prompt_tokens_total 3.0",
                "gtp_serve_generation_tokens_total 4.0",
                'gtp_serve_requests_total{finish_reason="stop"} 1.0',
                'gtp_serve_requests_total{finish_reason="refused"} 1.0',
                "gtp_serve_ttft_seconds_count 1.0",
                "gtp_serve_itl_seconds_count 3.0",
                "gtp_serve_e2e_seconds_count 1.0",
                "gtp_serve_kv_usage_ratio 0.1",
                'gtp_serve_weight_version_info{source="checkpoint",version="0"} 1.0',
            ):
                assert line in text.splitlines()

    run(go())


def test_sixty_four_at_once_each_get_their_own_answer() -> None:
    async def go() -> None:
        async with serving(FakeClient(delay=0.001)) as server:

            async def one(number: int) -> None:
                prompt = f"number {number} " * (1 + number % 5)
                params = {"max_new_tokens": 200}
                if number % 2:
                    parts = await stream(server, text=prompt, stream="delta", sampling_params=params)
                    assert "".join(part["text"] for part in parts[:-1]) == prompt
                else:
                    assert (await server.generate(text=prompt, sampling_params=params)).json()["text"] == prompt

            await asyncio.gather(*(one(number) for number in range(64)))
            assert server.client.aborted == []

    run(go())


def test_h5_the_event_loop_stays_free_while_a_long_text_is_tokenised() -> None:
    async def go() -> None:
        async with serving(FakeClient(), context=1 << 20) as server:
            text = "word " * 60_000
            raw = json.dumps({"text": text, "sampling_params": {"max_new_tokens": 1}}).encode()
            loop = asyncio.get_running_loop()
            slow = asyncio.create_task(server.http.post("/generate", content=raw))
            ticks = 0
            while not slow.done():
                await asyncio.sleep(0.005)
                ticks += 1
            assert slow.result().status_code == 200
            started = loop.time()
            await asyncio.to_thread(byte_tokenizer().encode, text)
            assert ticks > (loop.time() - started) / 0.05  # tokenising alone would leave one or two

    run(go())


def test_a_reader_that_stops_reading_does_not_stop_the_others() -> None:
    async def go() -> None:
        client = FakeClient(script=lambda request: byte_ids(b"x") * 3000)
        async with serving(client, context=1 << 20) as server:
            body = json.dumps({"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 3000}}).encode()
            lazy = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
            lazy.sendall(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await asyncio.sleep(0.2)
            assert (await server.generate(text="b", sampling_params={"max_new_tokens": 2})).json()["text"] == "xx"
            lazy.close()
            await until(lambda: not server.state.num_calls, 5)

    run(go())


def test_a_bug_is_a_500_without_a_word_of_what_it_was() -> None:
    class Broken(FakeClient):
        def stats(self) -> Any:
            raise RuntimeError("/secret/path")

    async def go() -> None:
        async with serving(Broken()) as server:
            reply = await server.http.get("/metrics")
            assert reply.status_code == 500
            assert error_of(reply) == {
                "code": "internal",
                "message": "the server failed to answer; its log says why",
                "param": None,
                "did_you_mean": None,
                "type": "internal_error",
            }
            assert server.log[0]["message"] == "a request met a bug"

    run(go())


def test_an_engine_fault_while_idle_is_seen_by_the_next_request() -> None:
    async def go() -> None:
        async with serving(FakeClient()) as server:
            server.state.fault = EngineFault("the engine process (pid 1) got signal 9")
            reply = await server.generate(text="a")
            assert (reply.status_code, error_of(reply)["type"]) == (503, "unavailable_error")

    run(go())
