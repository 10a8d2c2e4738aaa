"""What fuzzing and simulation have found, each with the right outcome, so that it does not come back."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoint_files import write_hf
from fakes_server import DATA, FakeClient, serving
from fuzz_files import gguf_bytes
from sim_world import World

from gtp_serve.engine.messages import decode_from_worker, decode_to_worker
from gtp_serve.engine.rank_messages import Link, Report
from gtp_serve.errors import (
    MAX_DETAIL,
    MAX_TEXT,
    CheckpointCorrupt,
    LayoutMismatch,
    RequestRejected,
    ShuttingDown,
)
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.files import parse_json
from gtp_serve.loaders.tokenizer_files import tokenizer_at
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.transports.session import Manifest
from gtp_serve.server.body import MAX_BODY_DEPTH, parse_json_object
from gtp_serve.server.update_fields import read_update


@pytest.mark.parametrize("opened", ["[", '{"a":'])
@pytest.mark.parametrize("depth", [MAX_BODY_DEPTH, 500, 990, 1000, 1020, 1023, 1024, 5000, 100_000])
def test_a_body_nested_to_any_depth_is_refused_and_no_fault_of_ours(opened: str, depth: int) -> None:
    closed = "]" if opened == "[" else "}"
    body = ('{"x":' + opened * depth + "1" + closed * depth + "}").encode()
    with pytest.raises(RequestRejected) as caught:
        parse_json_object(body)
    assert caught.value.code == "invalid-json"
    assert parse_json_object(('{"x":' + opened * 100 + "1" + closed * 100 + "}").encode())


def test_a_deeply_nested_body_is_answered_with_400_by_every_route_that_takes_json() -> None:
    async def ask() -> set[int]:
        async with serving(FakeClient()) as server:
            body = b'{"messages":' + b"[" * 1010 + b"]" * 1010 + b"}"
            paths = ("/generate", "/v1/chat/completions", "/v1/completions", "/tokenize", "/weights/updates", "/pause")
            headers = {"content-type": "application/json"}
            return {(await server.http.post(path, content=body, headers=headers)).status_code for path in paths}

    assert asyncio.run(ask()) == {400}


def test_spans_of_boxes_whose_start_and_shape_differ_in_length_are_refused_where_they_come_in() -> None:
    with pytest.raises(ValueError, match="rank"):
        Span("x", Box((0, 0), (3,)), Box((0,), (3,)))
    span = {"name": "x", "local": {"start": [0], "shape": [3, 4]}, "logical": {"start": [0, 0], "shape": [3, 4]}}
    shard = {"key": "x", "shape": [3, 4], "dtype": "float32", "spans": [span]}
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps({"shards": [shard]}), type=Manifest)
    stored = {"shard": shard, "segment": 0, "offset": 0, "digest": "0" * 32}
    source = {"kind": "memory", "segments": [{"pid": 1, "fd": 1, "size": 99}], "shards": [stored]}
    with pytest.raises(RequestRejected) as caught:
        read_update({"version": "1", "source": source})
    assert caught.value.param == "source.shards[0].shard.spans[0]"


def test_a_name_from_elsewhere_cannot_break_or_stretch_a_message() -> None:
    name = "a\nb\x1b[2J\u202e\u2028\ud800" + "n" * 100_000
    span = Span(name, Box.whole((1,)), Box.whole((1,)))
    with pytest.raises(LayoutMismatch) as caught:
        build_plan([Shard(name, (1,), "float32", (span,))], [], {"x": (1,)})
    text = str(caught.value)
    assert caught.value.message.isprintable()
    assert text.encode()
    assert len(caught.value.message) <= MAX_TEXT
    assert all(len(detail) <= MAX_DETAIL for _, detail in caught.value.details)
    assert "\\n" in text
    lines = CheckpointCorrupt("it died", [("last output", "first\nsecond")])
    assert lines.details == (("last output", "first\nsecond"),)  # of a detail the lines are kept


@pytest.mark.parametrize("text", ['{"a": "\\ud800"}', '{"\\udfff": 1}', '{"a": ["\\uD83D x"]}'])
def test_half_a_character_in_a_json_file_is_refused(text: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="half a character"):
        parse_json(text.encode(), "a file")


def test_a_whole_character_written_as_two_escapes_is_one() -> None:
    assert parse_json(b'{"a": "\\ud83d\\ude00"}', "a file") == {"a": "\U0001f600"}


@pytest.mark.parametrize("field", ["bos_token", "eos_token", "chat_template"])
def test_a_tokenizer_configuration_with_half_a_character_is_refused_by_name(field: str, tmp_path: Path) -> None:
    for path in (DATA / "tokenizer").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, field: "\ud800"}), encoding="ascii")
    with pytest.raises(CheckpointCorrupt, match=r"tokenizer_config\.json holds half a character"):
        tokenizer_at(tmp_path)
    write_hf(tmp_path)
    with pytest.raises(CheckpointCorrupt, match="half a character"):
        open_checkpoint(tmp_path)


def test_a_frame_that_is_nested_to_any_depth_is_no_message() -> None:
    deep = b"\x82\xa4type\xa5Stats\xa1x" + b"\x91" * 100_000 + b"\xc0"
    for decode in (decode_to_worker, decode_from_worker):
        with pytest.raises(msgspec.DecodeError):
            decode(deep)
    near, far = socket.socketpair()
    link: Link[Report] = Link(far, Report, patience=5.0)
    with near:
        near.sendall(len(deep[:60_000]).to_bytes(4, "little") + deep[:60_000])
        with pytest.raises(msgspec.DecodeError):
            link.receive()
    link.close()


def test_a_gguf_scale_that_is_no_number_makes_values_that_are_none_and_no_warning(tmp_path: Path) -> None:
    data = gguf_bytes(tmp_path / "model.gguf")
    (tmp_path / "model.gguf").write_bytes(data[:-34] + b"\x00\x7c" + bytes(32))  # an infinite scale, times zeros
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    tensors = dict(checkpoint.tensors())
    checkpoint.close()
    assert tensors["model.layers.0.mlp.down_proj.weight"].isnan().sum() == 32


def test_while_a_server_stops_its_ended_engine_is_no_failure() -> None:
    world = World(0).run()
    assert world.client.state == "dead"
    world.state.stopping = True
    assert world.state.status()["status"] == "stopping"
    with pytest.raises(ShuttingDown):
        world.state.require_serving()
    world.state.stopping = False
    assert world.state.status()["status"] == "failed"


def test_an_engine_that_has_nothing_to_do_says_so_and_one_that_is_silent_turns_health_red() -> None:
    world = World(1)
    reasons: list[Any] = []

    async def look_on() -> None:
        await asyncio.sleep(300)
        reasons.append((world.client.stats().last_step_age_seconds, world.state.health()))
        world.clock.advance(100)
        reasons.append((world.client.stats().last_step_age_seconds, world.state.health()))
        await asyncio.sleep(30)
        reasons.append((world.client.stats().last_step_age_seconds, world.state.health()))

    world._others = lambda: iter([look_on()])  # type: ignore[method-assign]
    world.on = set()
    world.run()
    ages = [age for age, _ in reasons]
    assert [reason is None for _, reason in reasons] == [True, False, True], reasons
    assert ages[0] == ages[2] == 0
    assert ages[1] >= 100
