"""A small server with the weight routes of the real one, in a thread: engine ranks are threads that really receive."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
from transfer_world import engine_ranks

from gtp_serve.config import ModelConfig
from gtp_serve.errors import GtpServeError
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.refit.apply import Target, apply_plan
from gtp_serve.refit.orders import GroupOrder, MemoryOrder, UpdateRecord
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.shared import MemorySource
from gtp_serve.refit.transports.group import GroupReceiver

KEY = "open sesame"


class RefitServer:
    """Answers layout, begin, show and abort; what it receives lies in ``engines``.

    :param refuse: an answer (status, body) to give instead of beginning an update.
    """

    def __init__(self, config: ModelConfig, tp: int = 1) -> None:
        self.config, self.shapes = config, logical_tensors(config)
        self.engines = engine_ranks(config, tp)
        self.receivers = [GroupReceiver(rank=rank, size=tp) for rank in range(tp)]
        self.records: dict[str, UpdateRecord] = {}
        self.requests: list[tuple[str, str, Any]] = []
        self.refuse: tuple[int, dict[str, Any]] | None = None
        self.dropped = threading.Event()
        self.tell: Callable[[], None] = lambda: None
        self._threads: list[threading.Thread] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def close(self) -> None:
        self.dropped.set()
        for thread in self._threads:
            thread.join(20)
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    # -- routes

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> tuple[int, Any]:
        parts = urlsplit(path)
        stream = headers.get("content-type") == "application/octet-stream"
        fields = dict(parse_qsl(parts.query)) if stream else json.loads(body) if body else {}
        self.requests.append((method, parts.path, fields))
        if headers.get("authorization") != f"Bearer {KEY}":
            return 401, {"error": {"code": "admin-key-needed", "message": "the admin key is wrong"}}
        if parts.path == "/weights/layout":
            ranks = [[target.shard for target in targets] for targets in self.engines]
            return 200, {"version": "0", "dtype": "bfloat16", "tensors": self.shapes, "ranks": ranks}
        if method == "POST" and parts.path == "/weights/updates":
            return self.refuse or (202, self.begin(fields, body))
        name = parts.path.split("/")[3]
        if name not in self.records:
            return 404, {"error": {"code": "unknown-update", "message": f"there is no update '{name}'"}}
        if parts.path.endswith("/abort"):
            self.dropped.set()
        return 200, self.records[name]

    def begin(self, fields: dict[str, Any], body: bytes) -> UpdateRecord:
        update = fields["id"]
        kind = fields["source"]["kind"] if "source" in fields else "safetensors"
        record = UpdateRecord(id=update, version=fields["version"], base="0", state="staging", kind=kind)
        self.dropped.clear()
        if kind == "distributed":
            source = {name: value for name, value in fields["source"].items() if name != "kind"}
            order = self.receivers[0].open(msgspec.convert(source, GroupOrder), "127.0.0.1", time.monotonic() + 30)
            record = msgspec.structs.replace(record, host=order.host, port=order.port)
            self.run(record, [partial(self.receive, order, update, rank) for rank in range(len(self.engines))])
        elif kind == "memory":
            memory = msgspec.convert(fields["source"], MemoryOrder)
            self.run(record, [partial(self.map, memory, targets) for targets in self.engines])
        else:
            self.body = body
            self.run(record, [lambda: len(body)])
        return self.records[update]

    def run(self, record: UpdateRecord, parts: list[Callable[[], int]]) -> None:
        self.records[record.id] = record
        counts: list[int] = []
        failures: list[GtpServeError] = []

        def keep(part: Callable[[], int]) -> None:
            try:
                counts.append(part())
            except GtpServeError as error:
                failures.append(error)

        def whole() -> None:
            threads = [threading.Thread(target=keep, args=(part,)) for part in parts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            ended = msgspec.structs.replace(record, state="committed", source_bytes=sum(counts), digest="d" * 32)
            if failures:
                first = failures[0]
                ended = msgspec.structs.replace(
                    record, state="aborted", code=first.code, message=first.message, details=tuple(first.details)
                )
            self.records[record.id] = ended

        self._threads.append(threading.Thread(target=whole))
        self._threads[-1].start()

    def receive(self, order: GroupOrder, update: str, rank: int) -> int:
        received = self.receivers[rank].receive(
            order, update=update, targets=self.engines[rank], shapes=self.shapes, deadline=time.monotonic() + 30,
            cancelled=self.dropped.is_set, progress=lambda done, total: self.tell(),
        )  # fmt: skip
        return received.source_bytes

    def map(self, order: MemoryOrder, targets: list[Target]) -> int:
        source = MemorySource(order)
        try:
            plan = build_plan(source.shards(), [target.shard for target in targets], self.shapes)
            return apply_plan(plan, source, targets)
        finally:
            source.close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._do("GET")

            def do_POST(self) -> None:
                self._do("POST")

            def _do(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                status, answer = server.answer(method, self.path, body, self.headers)
                raw = msgspec.json.encode(answer)
                self.send_response(status)
                self.send_header("content-length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler
