"""What is fuzzed of everything that comes over a wire: requests, token streams, frames of the engine and of refit.

Bytes go in; an exception that comes out is a fault of the product.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from fakes_server import FakeClient, byte_tokenizer, engine_config
from fuzz_files import Check, Seeds, check_error
from safetensors_bytes import entries, file_bytes

from gtp_serve.engine.messages import (
    Abort,
    Events,
    Hello,
    Phase,
    Submit,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from gtp_serve.engine.rank_messages import Arrived, Link, Report, frame_of
from gtp_serve.errors import LayoutMismatch, RequestRejected, UpdateFailed, UsageError
from gtp_serve.layout.spans import Box, Shape, Shard, Span
from gtp_serve.refit.digest import digest_bytes
from gtp_serve.refit.orders import MemoryOrder
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.shared import MemorySource, SealedMemory
from gtp_serve.refit.transports.buckets import plan_exchange
from gtp_serve.refit.transports.liveness import Beat, Member, Roll
from gtp_serve.refit.transports.session import Manifest
from gtp_serve.request import FinishReason, Request, SamplingParams, TokenEvent
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.app import build_app
from gtp_serve.server.body import parse_json_object
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.spool import spool
from gtp_serve.server.state import ServerState, Serving
from gtp_serve.server.update_fields import read_update
from gtp_serve.text import IncrementalDecoder, StopMatcher

SHAPES: dict[str, Shape] = {"model.embed_tokens.weight": (7, 4), "model.norm.weight": (4,)}
ROUTES = (
    "/generate",
    "/v1/chat/completions",
    "/v1/completions",
    "/tokenize",
    "/detokenize",
    "/weights/updates",
    "/update_weights_from_distributed",
    "/update_weights",
    "/pause",
    "/init_weights_update_group",
    "/abort_request",
)
"""Chosen by the first byte of an input."""

_CHUNK = 97


class Requests:
    """The whole application over an engine that answers by script; a reply of 500 is a fault."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)
        self._client = FakeClient()
        self._state = ServerState()
        self._state.set_serving(
            Serving(client=self._client, engine=engine_config(), tokenizer=byte_tokenizer(), name="fake")
        )
        log = logging.Logger("fuzz", logging.CRITICAL + 1)
        self._app = build_app(self._state, Metrics(self._state), log, guard=AdminGuard())

    def check(self, data: bytes) -> None:
        """The first byte chooses the route, the rest is the body."""
        route = ROUTES[data[0] % len(ROUTES)] if data else ROUTES[0]
        self._client.set_weights(update=None, history=())
        self._client.body = {}
        status, body = self._loop.run_until_complete(self._post(route, data[1:]))
        assert status < 500 or status == 503, f"{route}: {status} {body[:300]!r}"
        if status >= 400:
            error = json.loads(body)
            assert len(body) < 20_000, f"{route}: an error of {len(body)} bytes"
            assert error, route

    async def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        sent: list[Any] = []
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.sleep(3600)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [*headers, (b"content-length", str(len(body)).encode())],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        await asyncio.wait_for(self._app(scope, receive, send), 30)
        reply = b"".join(one.get("body", b"") for one in sent if one["type"] == "http.response.body")
        return next(one["status"] for one in sent if one["type"] == "http.response.start"), reply


def request_seeds() -> Seeds:
    """One good body for each route, and edges."""
    chat: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    sampling = {"max_new_tokens": 3, "temperature": 0.5, "stop": ["a"], "n": 2, "logit_bias": {"3": 1.0}}
    shards = [{"shard": _shard("x", (2,)), "segment": 0, "offset": 0, "digest": "0" * 32}]
    bodies: list[tuple[int, Any]] = [
        (0, {"text": ["a", "b"], "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}),
        (0, {"input_ids": [1, 2, 3], "stream": "delta", "rid": "x", "sampling_params": [{"stop_token_ids": [2]}]}),
        (1, chat | {"tools": [tool], "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3}),
        (1, chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}}),
        (1, chat | {"chat_template_kwargs": {"a": [1, {"b": None}]}, "documents": [{}], "logprobs": True}),
        (2, {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 2, "max_tokens": 2, "n": 2}),
        (2, {"prompt": "a", "structured_outputs": {"regex": "a+"}, "suffix": None, "stop": "b"}),
        (3, {"prompt": "a b", "add_special_tokens": False}),
        (4, {"tokens": [3, 4, 5]}),
        (5, {"source": {"kind": "disk", "path": "/x"}, "version": "1", "commit": "manual", "deadline_seconds": 5}),
        (5, {"source": {"kind": "memory", "segments": [{"pid": 1, "fd": 1, "size": 1}], "shards": shards}}),
        (5, {"source": {"kind": "distributed", "trainers": 2, "bucket_bytes": 65536}, "version": "1"}),
        (6, {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[1, 2]], "group_name": "g"}),
        (7, {"update_info": {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]], "packed": True}}),
        (8, {"mode": "keep"}),
        (9, {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "group_name": "g"}),
        (10, {"rid": "x", "abort_all": True}),
    ]
    found = {f"body{at}": bytes([route]) + json.dumps(body).encode() for at, (route, body) in enumerate(bodies)}
    found["deep"] = b'\0{"x":' + b"[" * 1010 + b"]" * 1010 + b"}"
    found["surrogate"] = b'\0{"text":"\\ud800"}'
    found["large"] = b'\0{"text":"a","sampling_params":{"max_new_tokens":1' + b"0" * 400 + b"}}"
    return found


# -- tokens ------------------------------------------------------------------------------------------------------


class Tokens:
    """Ids to text piece by piece: joined they are the text of all, and the first stop string that is completed ends
    them.
    """

    def __init__(self) -> None:
        self._tokenizer = byte_tokenizer()

    def check(self, data: bytes) -> None:
        """The first byte holds flags, the second a number of stop characters; the rest are ids."""
        flags, stops, rest = (data[:1] or b"\0")[0], (data[1:2] or b"\0")[0] % 5, data[2:]
        size = self._tokenizer.vocab_size
        ids = [3 + byte if flags & 1 else byte * size // 256 for byte in rest]
        skip = bool(flags & 2)
        decoder = IncrementalDecoder(self._tokenizer, skip_special_tokens=skip)
        step = 1 + (flags >> 2) % 4
        pieces = [decoder.push(ids[at : at + step]) for at in range(0, len(ids), step)]
        pieces.append(decoder.flush())
        whole = self._tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(pieces) == whole
        self._check_stops([whole[at : at + at + 1] for at in range(stops)], pieces)

    def _check_stops(self, stops: Sequence[str], pieces: Sequence[str]) -> None:
        matcher, shown, matched = StopMatcher(stops), "", None
        for piece in pieces:
            safe, matched = matcher.push(piece)
            shown += safe
            if matched is not None:
                break
        else:
            shown += matcher.flush()
        text = "".join(pieces)
        ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop and stop in text]
        if ends:
            end, _, stop = min(ends)
            assert (shown, matched) == (text[: end - len(stop)], stop)
        else:
            assert (shown, matched) == (text, None)


def token_seeds() -> Seeds:
    """Text of one to four bytes a character, whole and broken."""
    text = "a\u00e9\u6f22\U0001f600 b".encode()
    return {"text": b"\1\3" + text, "broken": b"\1\0" + text[1:-3] + b"\xf0\x9f" * 9, "ids": b"\2\2" + bytes(range(40))}


# -- frames ------------------------------------------------------------------------------------------------------


def check_frame(data: bytes) -> None:
    """A message between HTTP process and engine, or between ranks: what is none is refused as a DecodeError."""
    for decode in (decode_to_worker, decode_from_worker):
        try:
            message: Any = decode(data)
        except msgspec.DecodeError:
            continue
        assert decode(encode(message)) == message or "nan" in repr(message)
    near, far = socket.socketpair()
    link: Link[Report] = Link(far, Report, patience=5.0)
    try:
        near.sendall(data[: 1 << 16])
        near.close()
        for _ in range(len(data) + 1):
            if link.receive() is None:
                break
    except ValueError:
        pass  # msgspec.DecodeError is one
    finally:
        link.close()


def frame_seeds() -> Seeds:
    """One message of several kinds."""
    asked = Request(rid="a", input_ids=(1, 2), sampling=SamplingParams(temperature=0.5, max_new_tokens=4))
    end = FinishReason(type="stop", matched=2)
    made = TokenEvent(rid="a", token_ids=(1,), logprobs=(-0.5,), weight_version="0", finish=end)
    messages: list[Any] = [Submit((asked,)), Abort(("a",)), Events((made,)), Hello(1), Phase("load", "ok")]
    return {f"message{at}": encode(one) for at, one in enumerate(messages)} | {"rank": frame_of(Arrived())}


def _shard(name: str, shape: Shape, start: Shape | None = None) -> dict[str, Any]:
    box = Box(start or (0,) * len(shape), shape)
    return msgspec.to_builtins(Shard(name, shape, "float32", (Span(name, Box.whole(shape), box),)))  # type: ignore[no-any-return]


def _engine() -> list[Shard]:
    return [Shard(name, shape, "bfloat16", (Span(name, *[Box.whole(shape)] * 2),)) for name, shape in SHAPES.items()]


def check_manifest(data: bytes) -> None:
    """A trainer's offer: whatever plan is made of it fills each element of the engine once, from inside the offer."""
    try:
        told = msgspec.json.decode(data, type=Manifest)
        exchange = plan_exchange([told.shards], [_engine()], SHAPES, 1024)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # how a peer that speaks otherwise is told of it is the meeting's matter
    except (LayoutMismatch, UsageError) as error:
        check_error(error)
        return
    filled: dict[tuple[int, Shape], int] = {}
    for bucket in exchange.buckets:
        assert bucket.size == sum(piece.size for piece in bucket.pieces) <= 1024
        for piece in bucket.pieces:
            assert piece.box.inside(exchange.have[0][piece.shard].shape)
            for _, index, box in piece.places:
                for at in _elements(box):
                    filled[index, at] = filled.get((index, at), 0) + 1
    wanted = {(n, at): 1 for n, shape in enumerate(SHAPES.values()) for at in _elements(Box.whole(shape))}
    assert filled == wanted


def _elements(box: Box) -> list[Shape]:
    found: list[Shape] = [()]
    for start, count in zip(box.start, box.shape, strict=True):
        found = [(*one, at) for one in found for at in range(start, start + count)]
    return found


def manifest_seeds() -> Seeds:
    """A whole offer, one in two rows, and an empty one."""
    whole = [_shard(name, shape) for name, shape in SHAPES.items()]
    embedding = "model.embed_tokens.weight"
    halves = [_shard(embedding, (3, 4)), _shard(embedding, (4, 4), (3, 0)), whole[1]]
    return {f"offer{n}": json.dumps({"shards": one}).encode() for n, one in enumerate((whole, halves, []))}


def check_beats(data: bytes) -> None:
    """What peers say of themselves, one JSON text a line."""
    roll = Roll({place: Member(side="trainer", rank=place) for place in range(3)})
    for at, line in enumerate(data.split(b"\n")[:50]):
        try:
            beat = msgspec.json.decode(line, type=Beat)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        verdict = roll.round(float(at), {at % 3: beat})
        assert verdict is None or isinstance(verdict.message, str)
        assert [str(one) for one in roll.missing()] == [f"trainer rank {place}" for place in range(at + 1, 3)] or at
        roll.all_know(float(at))


def beat_seeds() -> Seeds:
    """A working and a failed peer."""
    beats = [
        Beat(count=1, who=Member(side="trainer", rank=0, pid=5, host="h")),
        Beat(count=2, who=Member(side="engine", rank=1), state="failed", code="c", message="m", details=(("a", "b"),)),
    ]
    return {"beats": b"\n".join(map(msgspec.json.encode, beats))}


# -- orders that come as HTTP bodies -------------------------------------------------------------------------------


class Memory:
    """An order of shared memory as JSON; its segments are this process's own, its shards are as they come."""

    def __init__(self) -> None:
        self._memory = SealedMemory(256)
        self._memory.append(bytes(range(256)))
        self._segment = self._memory.seal()

    def check(self, data: bytes) -> None:
        """Shards are refused by name, or have bytes inside their segment and fit a plan."""
        try:
            asked = read_update({"version": "1", "source": parse_json_object(data)})
        except RequestRejected as error:
            check_error(error)
            return
        order = asked.request.order
        if not isinstance(order, MemoryOrder):
            return
        try:
            shared = MemorySource(
                msgspec.structs.replace(order, segments=(self._segment,) * min(3, len(order.segments)))
            )
        except RequestRejected as error:
            check_error(error)
            return
        try:
            for index, shard in enumerate(shared.shards()):
                assert len(shared.read(index)) <= 256, shard
            build_plan(shared.shards(), _engine(), SHAPES)
        except (UpdateFailed, LayoutMismatch) as error:
            check_error(error)
        finally:
            shared.close()

    def seeds(self) -> Seeds:
        """A good order, and one that leaves its segment."""
        data = bytes(range(256))
        stored, start = [], 0
        for name, shape in SHAPES.items():
            end = start + 4 * len(_elements(Box.whole(shape)))
            digest = digest_bytes(data[start:end])
            stored.append({"shard": _shard(name, shape), "segment": 0, "offset": start, "digest": digest})
            start = end
        order: dict[str, Any] = {"kind": "memory", "segments": [{"pid": 1, "fd": 3, "size": 256}], "shards": stored}
        outside = order | {"shards": [stored[0] | {"offset": 250}]}
        return {"good": json.dumps(order).encode(), "outside": json.dumps(outside).encode()}


class Stream:
    """A streamed body of weights, in small pieces: kept byte for byte, or refused."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        weakref.finalize(self, self._loop.close)

    def check(self, data: bytes) -> None:
        """The whole body."""

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(data), _CHUNK):
                yield data[start : start + _CHUNK]

        try:
            kept = self._loop.run_until_complete(
                spool(pieces(), SHAPES, length=None, digest="", seconds=20.0, available=1 << 30)
            )
        except RequestRejected as error:
            check_error(error)
            return
        with kept:
            assert kept.size == len(data)

    def seeds(self) -> Seeds:
        """A good file and a cut one."""
        good = file_bytes(entries(SHAPES))
        return {"good": good, "cut": good[:-1], "typed": file_bytes(entries(SHAPES, "BF16"))}


def wire_targets() -> dict[str, tuple[Check, Seeds]]:
    """Each target by its name, with inputs to begin from."""
    memory, stream = Memory(), Stream()
    return {
        "request": (Requests().check, request_seeds()),
        "tokens": (Tokens().check, token_seeds()),
        "frame": (check_frame, frame_seeds()),
        "manifest": (check_manifest, manifest_seeds()),
        "beats": (check_beats, beat_seeds()),
        "memory": (memory.check, memory.seeds()),
        "stream": (stream.check, stream.seeds()),
    }
