"""What is kept of a request: one log line, a span when one is wanted, and never its text."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from fakes_server import FakeClient, byte_ids, byte_tokenizer, serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from serve_command import Command

from gtp_serve.errors import EnvironmentFault, RequestRejected, UsageError
from gtp_serve.server.startup import Lines, ReporterHandler
from gtp_serve.server.terminal import Terminal
from gtp_serve.server.tracing import RequestSpan, open_tracer, traces_url

pytestmark = pytest.mark.e2e

CANARY = "xylophone-canary-7319"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def says(text: str) -> FakeClient:
    ids = [*byte_ids(text.encode()), 2]
    return FakeClient(script=lambda request: ids)


@contextmanager
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """Something that takes spans over HTTP: its URL and what came."""
    came: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            came.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", came
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def plain(value: Any) -> Any:
    """An attribute's value."""
    kind = value.WhichOneof("value")
    return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def spans_of(came: list[ExportTraceServiceRequest]) -> list[Any]:
    return [
        span
        for request in came
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_o2_a_finished_request_is_one_line_with_its_name_counts_and_times() -> None:
    async def go() -> None:
        async with serving(says("abc")) as server:
            await server.generate(text="hi", rid="r-1")
            (line,) = server.log
            assert set(line) == {
                "message", "rid", "route", "reason", "prompt", "cached", "tokens", "seconds", "ttft", "queue",
                "weights",
            }  # fmt: skip
            prompt = len(byte_tokenizer().encode("hi"))
            kept = {key: line[key] for key in ("message", "rid", "route", "reason", "prompt", "tokens", "weights")}
            assert kept == {
                "message": "request", "rid": "r-1", "route": "/generate", "reason": "stop", "prompt": prompt,
                "tokens": 4, "weights": "0",
            }  # fmt: skip
            assert 0 <= line["ttft"] <= line["seconds"]

    run(go())


@pytest.mark.parametrize("make", [
    lambda stream: Lines(stream, as_json=True),
    lambda stream: Lines(stream, as_json=False),
    Terminal,
], ids=["json", "text", "terminal"])  # fmt: skip
def test_o3_nothing_that_a_client_wrote_is_in_the_log(make: Callable[[io.StringIO], Any]) -> None:
    """Answered, streamed, refused, failed, and met by a bug whose message quotes the prompt."""

    class Quoting(FakeClient):
        def submit(self, request: Any) -> Any:
            raise ValueError(f"cannot handle {CANARY!r}")

    async def ask(client: FakeClient, stream: io.StringIO) -> None:
        async with serving(client) as server:
            handler = ReporterHandler(make(stream), stacks=False)
            server.logger.addHandler(handler)
            await server.generate(text=CANARY)
            await server.generate(text=CANARY, stream=True)
            await server.generate(text=CANARY, sampling_params={"stop": CANARY, "regex": CANARY})
            await server.generate(text=CANARY, sampling_params={"temperature": CANARY})
            await server.generate(**{"text": CANARY, CANARY: 1})
            await server.http.post("/generate", content=f'{{"text": "{CANARY}", ]')
            await server.http.post("/generate", content=f'{{"text": "a", "{CANARY}": 1, "{CANARY}": 2}}')
            await server.http.post(f"/{CANARY}", json={"text": CANARY})
            for path, body in (
                ("completions", {"prompt": CANARY, "stop": [CANARY]}),
                ("chat/completions", {"messages": [{"role": "user", "content": CANARY}], "stream": True}),
                ("chat/completions", {"messages": [{"role": CANARY, "content": CANARY}]}),
                ("completions", {"prompt": CANARY, "model": CANARY, CANARY: 1}),
                ("completions", {"prompt": CANARY, "structured_outputs": {CANARY: CANARY}}),
                ("completions", {"prompt": CANARY, "logit_bias": {CANARY: 1}}),
                ("completions", {"prompt": CANARY, "max_tokens": CANARY}),
            ):
                await server.http.post(f"/v1/{path}", json=body)
            await server.http.post("/tokenize", json={"text": CANARY, CANARY: 1})
            await server.http.post("/generate?key=" + CANARY, json={"text": CANARY}, headers={"x-secret": CANARY})

    stream = io.StringIO()
    for client in (
        says(CANARY),
        FakeClient(reject=RequestRejected("no", code="queue-full")),
        FakeClient(die_after=1, script=lambda request: [5, 6, 7]),
        Quoting(),
    ):
        run(ask(client, stream))
    text = stream.getvalue()
    assert text.count("reason") > 20
    assert "a request met a bug" in text
    assert CANARY not in text


def test_a_request_becomes_a_span_below_the_callers() -> None:
    async def go(url: str) -> None:
        async with serving(says("abc")) as server:
            server.state.tracer = open_tracer(url, {}, logging.Logger("quiet"))
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            body = {"text": CANARY, "rid": "r-1", "sampling_params": {"temperature": 0.5, "sampling_seed": 3}}
            await server.http.post("/generate", json=body, headers=headers)
            await server.generate(text="alone")
            assert server.state.tracer is not None
            await asyncio.to_thread(server.state.tracer.close)

    with collector() as (url, came):
        run(go(url))
    first, second = spans_of(came)
    attributes = {one.key: plain(one.value) for one in first.attributes}
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, PARENT)
    assert (second.parent_span_id, second.trace_id.hex() != TRACE) == (b"", True)
    assert (first.name, first.kind, len(first.span_id)) == ("text_completion fake", 2, 8)
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "fake",
        "gen_ai.response.id": "r-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 3,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": len(byte_tokenizer().encode(CANARY)),
        "gen_ai.usage.output_tokens": 4,
        "gtp_serve.weight_versions": ["0"],
        "http.route": "/generate",
    }
    assert {key: attributes.get(key) for key in wanted} == wanted
    assert first.start_time_unix_nano <= first.events[0].time_unix_nano <= first.end_time_unix_nano
    assert first.events[0].name == "first token"
    resource = {one.key: plain(one.value) for one in came[0].resource_spans[0].resource.attributes}
    assert resource["service.name"] == "gtp-serve"
    assert CANARY.encode() not in b"".join(request.SerializeToString() for request in came)


def test_a_failed_request_is_a_failed_span() -> None:
    async def go(url: str) -> None:
        async with serving(FakeClient(die_after=1, script=lambda request: [5, 6, 7])) as server:
            server.state.tracer = open_tracer(url, {}, logging.Logger("quiet"))
            await server.generate(text="hello")
            assert server.state.tracer is not None
            await asyncio.to_thread(server.state.tracer.close)

    with collector() as (url, came):
        run(go(url))
    (span,) = spans_of(came)
    assert span.status.code == 2
    assert {one.key: plain(one.value) for one in span.attributes}["error.type"]


def test_a_caller_that_does_not_sample_gets_no_span() -> None:
    with collector() as (url, came):
        tracer = open_tracer(url, {}, logging.Logger("quiet"))
        assert tracer is not None
        tracer.ended(RequestSpan(name="x", start=1, end=2, parent={"traceparent": f"00-{TRACE}-{PARENT}-00"}))
        tracer.close()
    assert spans_of(came) == []


def test_nobody_asked_means_no_tracer_and_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert open_tracer(None, {}, logging.Logger("x")) is None
    variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "true"}
    assert open_tracer(None, variables, logging.Logger("x")) is None


def test_without_the_extra_one_sentence_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(EnvironmentFault, match="extra") as fault:
        open_tracer("http://localhost:4318", {}, logging.Logger("x"))
    assert "gtp-serve[otel]" in str(fault.value.details)
    stream = io.StringIO()
    log = logging.Logger("x")
    log.addHandler(ReporterHandler(Lines(stream, as_json=True), stacks=False))
    assert open_tracer(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, log) is None
    (line,) = map(json.loads, stream.getvalue().splitlines())
    assert (line["level"], line["variable"]) == ("WARNING", "OTEL_EXPORTER_OTLP_ENDPOINT")
    assert "gtp-serve[otel]" in line["needs"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the refused socket, theirs to close
def test_a_collector_that_is_gone_holds_nothing_up_and_says_so_in_our_log() -> None:
    stream = io.StringIO()
    log = logging.Logger("x")
    log.addHandler(ReporterHandler(Lines(stream, as_json=False), stacks=False))
    tracer = open_tracer("http://127.0.0.1:9", {**os.environ}, log)
    assert tracer is not None
    tracer.ended(RequestSpan(name="x", start=1, end=2))
    begun = time.monotonic()
    tracer.close()
    assert time.monotonic() - begun < 10
    assert " WARNING " in stream.getvalue() or " ERROR " in stream.getvalue()


def test_addresses_of_collectors_are_checked() -> None:
    assert traces_url("http://c:4318") == traces_url("http://c:4318/") == "http://c:4318/v1/traces"
    assert traces_url("https://c/intake/spans") == "https://c/intake/spans"
    for bad in ("c:4318", "grpc://c:4317", "http://", "http://c:99999", "http://c:x"):
        with pytest.raises(UsageError, match="OTLP"):
            traces_url(bad)


def test_the_command_sends_spans_and_foreign_names_when_it_is_asked_to() -> None:
    data = Path(__file__).parents[1] / "data"
    ckpt, tokenizer = data / "megatron" / "llama-tp1-pp2", data / "tokenizer251"
    with collector() as (url, came):
        command = Command(
            *("--ckpt", str(ckpt), "--tokenizer", str(tokenizer), "--port", "0"),
            *("--otlp", url, "--metrics-aliases", "vllm,sglang"),
        )
        try:
            with httpx.Client(base_url=command.url(), timeout=60, trust_env=False) as http:
                body = {"text": "2+2=", "rid": "r-1", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}}
                assert http.post("/generate", json=body).status_code == 200
                text = http.get("/metrics").text
            line = command.wait_for("request", rid="r-1")
            command.process.send_signal(signal.SIGTERM)
            assert command.end()[0] == 0
        finally:
            command.stop()
    assert "vllm:request_success_total" in text
    assert "sglang:num_requests_total" in text
    assert (line["level"], line["tokens"], line["weights"]) == ("INFO", 3, "0")
    assert line["queue"] >= 0
    (span,) = spans_of(came)
    attributes = {one.key: plain(one.value) for one in span.attributes}
    assert attributes["gen_ai.response.id"] == "r-1"
    assert 0 < attributes["gtp_serve.queue_seconds"] <= attributes["gtp_serve.ttft_seconds"]
