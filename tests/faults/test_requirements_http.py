"""HTTP as nobody should send it, and ten thousand clients that each say something else."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fakes_server import FakeClient, FakeServer, serving

from gtp_serve.server import http_server
from gtp_serve.server.body import MAX_BODY_STRINGS
from gtp_serve.server.openai.fields import MAX_MESSAGES, MAX_TOOLS
from gtp_serve.server.schemas import MAX_N, MAX_SEQUENCES, MAX_STOPS
from gtp_serve.server.version_counts import VersionCounts

#: Of each kind; the whole number of the requirement takes minutes.
DISTINCT = 100_000 if os.environ.get("GTP_SERVE_LONG_TESTS") == "1" else 30


def run(check: Callable[[FakeServer], Awaitable[None]], client: FakeClient | None = None, **options: Any) -> None:
    async def go() -> None:
        async with serving(client, **options) as server:
            await check(server)

    asyncio.run(go())


async def raw(server: FakeServer, *pieces: bytes, seconds: float = 30, ends: bool = True) -> bytes:
    """What comes back on a connection that sends these pieces.

    :param ends: says that nothing more will come; else the server is to close.
    """
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if ends:
            writer.write_eof()
        async with asyncio.timeout(seconds):
            return await reader.read()
    finally:
        writer.close()


BODY = b'{"text": "a", "sampling_params": {"max_new_tokens": 1}}'
HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


HIDDEN = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
SMUGGLED = {
    "both lengths": b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n" + chunked(BODY) + HIDDEN,
    "both lengths, turned": b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n" + chunked(BODY) + HIDDEN,
    "two lengths": b"content-length: 4\r\ncontent-length: 55\r\n\r\n" + BODY + HIDDEN,
    "length with a sign": b"content-length: +55\r\n\r\n" + BODY,
    "negative length": b"content-length: -1\r\n\r\n" + BODY,
    "hexadecimal length": b"content-length: 0x37\r\n\r\n" + BODY,
    "length beyond 64 bits": b"content-length: 99999999999999999999999\r\n\r\n" + BODY,
    "unknown coding": b"transfer-encoding: chunked, identity\r\n\r\n" + chunked(BODY) + HIDDEN,
    "space before the colon": b"content-length : 55\r\n\r\n" + BODY,
    "zero byte in a name": b"x\0y: 1\r\ncontent-length: 55\r\n\r\n" + BODY,
    "chunk beyond 64 bits": b"transfer-encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\n" + BODY,
    "negative chunk": b"transfer-encoding: chunked\r\n\r\n-5\r\n" + BODY,
    "chunk without an end": b"transfer-encoding: chunked\r\n\r\n5\r\nhello0\r\n\r\n",
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_h8_a_request_that_two_readers_would_cut_differently_is_not_answered_as_one_of_them(name: str) -> None:
    async def check(server: FakeServer) -> None:
        told = await raw(server, HEAD + SMUGGLED[name])
        statuses = re.findall(rb"^HTTP/1\.1 (\d+)", told, re.MULTILINE)
        assert b"gtp_serve_requests" not in told, "the hidden request was answered"
        assert statuses in ([b"400"], []), told[:300]
        assert server.client.requests == []
        assert (await server.generate(text="ok")).json()["text"] == "ok"

    run(check)


def test_h8_a_body_of_single_bytes_is_one_body() -> None:
    async def check(server: FakeServer) -> None:
        told = await raw(server, HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n", *[
            b"1\r\n" + BODY[at : at + 1] + b"\r\n" for at in range(len(BODY))
        ], b"0\r\n\r\n", ends=False)  # fmt: skip
        assert told.startswith(b"HTTP/1.1 200"), told[:200]

    run(check)


def test_h8_many_tiny_chunks_cost_what_their_bytes_cost() -> None:
    async def check(server: FakeServer) -> None:
        text = "a" * 50_000
        body = json.dumps({"text": text[:10], "rid": "x", "sampling_params": {"max_new_tokens": 1}}).encode()
        padded = body[:-1] + b" " * 50_000 + b"}"
        tiny = b"".join(b"1\r\n" + padded[at : at + 1] + b"\r\n" for at in range(len(padded))) + b"0\r\n\r\n"
        cost = []
        for sent in (chunked(padded), tiny):
            started = time.process_time()
            told = await raw(
                server,
                HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n" + sent,
                seconds=200,
                ends=False,
            )
            cost.append(time.process_time() - started)
            assert told.startswith(b"HTTP/1.1 200"), told[:200]
        assert cost[1] < 10, "50,000 chunks of a byte each"

    run(check)


def test_h8_requests_in_one_breath_are_answered_in_their_order() -> None:
    async def check(server: FakeServer) -> None:
        requests = []
        for number in range(50):
            body = json.dumps({"text": f"n{number:02}", "sampling_params": {"max_new_tokens": 9}}).encode()
            requests.append(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        told = await raw(server, b"".join(requests), seconds=120)
        texts = re.findall(rb'"text":"(n\d\d)"', told)
        # A client that has closed its side may be taken for gone; those that were answered were so in order.
        assert texts == [b"n%02d" % number for number in range(len(texts))]
        assert (await server.generate(text="ok")).json()["text"] == "ok"

    run(check)


def test_h8_connections_that_say_nothing_keep_nobody_out() -> None:
    async def check(server: FakeServer) -> None:
        host, _, port = server.url.removeprefix("http://").partition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(200)]
        for number, (_, writer) in enumerate(silent):
            writer.write(HEAD[: number % len(HEAD)])
        async with asyncio.timeout(60):
            assert (await server.generate(text="ok")).json()["text"] == "ok"
        for _, writer in silent:
            writer.close()

    run(check)


@pytest.mark.parametrize("said", [b"", b"P", HEAD, b"\r\n"])
def test_h8_a_head_that_does_not_come_ends_its_connection(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.5)

    async def check(server: FakeServer) -> None:
        assert await raw(server, said, ends=False) == b""  # returns when the server closes

    run(check)


def test_h8_a_byte_after_an_answer_does_not_keep_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.5)

    async def check(server: FakeServer) -> None:
        host, _, port = server.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
        writer.write(b"\r\n")  # which ends the wait for the next request, and is no request
        async with asyncio.timeout(30):
            assert await reader.read() == b""
        writer.close()

    run(check)


def test_h8_a_slow_answer_is_not_taken_for_a_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)

    async def check(server: FakeServer) -> None:
        for _ in range(3):  # on one connection
            assert (await server.generate(text="abcd")).json()["text"] == "abcd"
            await asyncio.sleep(0.5)

    run(check, FakeClient(delay=0.2))


#: What a client may choose, each in a request of its own with every value another.
CHOSEN: dict[str, Callable[[int], dict[str, Any]]] = {
    "names of requests": lambda n: {"json": {"text": "a", "rid": f"r-{n}"}},
    "salts": lambda n: {"json": {"text": "a", "cache_salt": f"s-{n}"}},
    "stop strings": lambda n: {"json": {"text": "a", "sampling_params": {"stop": f"stop {n}"}}},
    "seeds": lambda n: {"json": {"text": "a", "sampling_params": {"sampling_seed": n}}},
    "unknown fields": lambda n: {"json": {"text": "a", f"field{n}": 1}},
    "request ids": lambda n: {"json": {"text": "a"}, "headers": {"x-request-id": f"id-{n}"}},
    "traces": lambda n: {"json": {"text": "a"}, "headers": {"traceparent": f"00-{n:032x}-{n:016x}-01"}},
    "keys": lambda n: {"json": {"text": "a"}, "headers": {"authorization": f"Bearer {n}"}},
    "hosts": lambda n: {"json": {"text": "a"}, "headers": {"host": f"h{n}.example"}},
    "paths": lambda n: {"path": f"/nothing/{n}", "json": {}},
    "models": lambda n: {"path": "/v1/completions", "json": {"model": f"m-{n}", "prompt": "a", "max_tokens": 1}},
    "templates' arguments": lambda n: {
        "path": "/v1/chat/completions",
        "json": {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {f"a{n}": n}},
    },
    "roles": lambda n: {"path": "/v1/chat/completions", "json": {"messages": [{"role": f"r{n}", "content": "a"}]}},
}


def test_h6_what_clients_choose_leaves_nothing_behind() -> None:
    async def check(server: FakeServer) -> None:
        async def round_of(first: int, count: int) -> None:
            for make in CHOSEN.values():
                for number in range(first, first + count):
                    asked = make(number)
                    await server.http.post(asked.pop("path", "/generate"), **asked)
            # What the test's own parts keep, and two histories of bounded length that are filled once.
            server.client.requests.clear()
            server.client.aborted.clear()
            server.log.clear()
            server.state.by_version = VersionCounts()
            re.purge()
            gc.collect()

        most = 64 * len(CHOSEN) * DISTINCT
        await round_of(0, 10)
        series = len((await server.http.get("/metrics")).text.splitlines())
        await round_of(1_000_000, 10)
        tracemalloc.start()
        try:
            await round_of(2_000_000, 10)
            held = [tracemalloc.get_traced_memory()[0]]
            # What is kept is there after each round.  Timers that were cancelled come and go, and a cache of bounded
            # size grows until all that is in it has been traced.
            while len(held) < 10 and (len(held) == 1 or held[-1] - held[-2] > most):
                await round_of((2 + len(held)) * 1_000_000, DISTINCT)
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert held[-1] - held[-2] <= most, "more than 64 bytes kept for each request"
        assert len((await server.http.get("/metrics")).text.splitlines()) == series
        assert server.state.rids == frozenset()
        assert server.state.num_calls == 0

    run(check)


INNARDS = re.compile(
    r"Traceback|\.py\b|line \d+, in|/(home|root|usr|tmp|work|proc)/|0x[0-9a-f]{6,}|<class|object at|errno"
)


def test_a3_no_error_tells_of_the_servers_insides() -> None:
    wrong = [
        ("POST", "/generate", {"text": "a", "sampling_params": {"temperature": "hot"}}),
        ("POST", "/generate", {"input_ids": [10**9]}),
        ("POST", "/generate", {"input_ids": [-1]}),
        ("POST", "/generate", {"text": 5}),
        ("POST", "/generate", {"text": "a", "sampling_params": {"json_schema": "{"}}),
        ("POST", "/v1/completions", {"prompt": {"a": 1}}),
        ("POST", "/v1/chat/completions", {"messages": [5]}),
        ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("POST", "/detokenize", {"tokens": [2**70]}),
        ("POST", "/tokenize", {"prompt": None}),
        ("POST", "/weights/updates", {"source": {"kind": "disk", "path": "/nowhere"}}),
        ("POST", "/weights/updates", {"source": 5}),
        ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["gASVAAAA"]}),
        ("POST", "/nothing", {}),
        ("DELETE", "/generate", {}),
    ]

    async def check(server: FakeServer) -> None:
        for method, path, body in wrong:
            reply = await server.http.request(method, path, json=body)
            assert reply.status_code >= 400, (path, body)
            assert INNARDS.search(reply.text) is None, (path, reply.text)
        for sent in (b"\xff\xfe", b"{", b"[" * 5000, b'{"a":NaN}'):
            reply = await server.http.post("/generate", content=sent)
            assert reply.status_code == 400
            assert INNARDS.search(reply.text) is None, reply.text

    run(check)

    class Breaks(FakeClient):
        def submit(self, request: Any) -> Any:
            raise OSError(2, "No such file or directory: '/root/secret'")

    async def bug(server: FakeServer) -> None:
        for path, body in (("/generate", {"text": "a"}), ("/v1/completions", {"prompt": "a"})):
            reply = await server.http.post(path, json=body)
            assert reply.status_code == 500
            assert "secret" not in reply.text
            assert INNARDS.search(reply.text) is None

    run(bug, Breaks())


MESSAGE = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
TOO_MANY = {
    "strings": ("/generate", {"text": ["a"] * (MAX_BODY_STRINGS - 1)}, "invalid-value", "prompts in one call"),
    "strings and one": ("/generate", {"text": ["a"] * MAX_BODY_STRINGS}, "body-too-large", "strings"),
    "messages": ("/v1/chat/completions", {"messages": [MESSAGE] * (MAX_MESSAGES + 1)}, "invalid-value", "4097 of them"),
    "tools": (
        "/v1/chat/completions",
        {"messages": [MESSAGE], "tools": [TOOL] * (MAX_TOOLS + 1)},
        "invalid-value",
        f"at most {MAX_TOOLS} tools",
    ),
    "prompts": ("/v1/completions", {"prompt": ["a"] * (MAX_SEQUENCES + 1)}, "invalid-value", "prompts in one call"),
    "prompts times n": ("/v1/completions", {"prompt": ["a"] * 9, "n": MAX_N}, "invalid-value", "1152 replies"),
    "n": ("/v1/chat/completions", {"messages": [MESSAGE], "n": MAX_N + 1}, "invalid-value", f"1 to {MAX_N}"),
    "stops": ("/v1/completions", {"prompt": "a", "stop": ["x"] * (MAX_STOPS + 1)}, "invalid-value", "stop"),
}


@pytest.mark.parametrize("name", TOO_MANY)
def test_h2_what_a_body_may_hold_is_counted_before_any_of_it_is_worked_on(name: str) -> None:
    path, body, code, words = TOO_MANY[name]

    async def check(server: FakeServer) -> None:
        started = time.process_time()
        reply = await server.http.post(path, json=body)
        assert time.process_time() - started < 3
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (413 if code == "body-too-large" else 400, code), error
        assert words in error["message"]
        assert server.client.requests == []
        assert (await server.generate(text="ok")).json()["text"] == "ok"

    run(check)
