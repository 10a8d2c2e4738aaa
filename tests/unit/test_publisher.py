"""A trainer's push against a small server: every way in, and every refusal and failure in the server's words."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from refit_harness import weight_memory
from refit_server import KEY, RefitServer
from safetensors.torch import load
from transfer_world import MODELS, engine_ranks, model_bytes, same, state_dict, trainer_ranks

from gtp_serve.errors import UnknownUpdate, UpdateFailed, UpdateRefused, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import HEAD
from gtp_serve.refit import Publisher, publisher
from gtp_serve.refit.client import WeightsClient
from gtp_serve.refit.offer import TensorOffer
from gtp_serve.refit.transports.send import send

MODEL = MODELS["qwen2"]
SEED = 5
Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def server() -> Iterator[RefitServer]:
    server = RefitServer(MODEL, tp=2)
    yield server
    server.close()


def check_arrived(server: RefitServer) -> None:
    cold = engine_ranks(MODEL, 2, seed=SEED)
    assert [same(a, b) for a, b in zip(server.engines, cold, strict=True)] == [[], []]


@pytest.mark.parametrize("transport", ["distributed", "memory", "auto"])
def test_a_state_dict_arrives_whole_and_once(server: RefitServer, transport: Any) -> None:
    report = Publisher(server.url, KEY, transport).push(state_dict(MODEL, SEED), "7", base="0", in_flight="recompute")

    check_arrived(server)
    assert (report.version, report.state, report.sent_bytes) == ("7", "committed", model_bytes(MODEL))
    assert report.transport == ("memory" if transport == "auto" else transport)
    assert report.digest == "d" * 32
    _, path, fields = server.requests[1]
    assert path == "/weights/updates"
    assert (fields["version"], fields["base"], fields["in_flight"]) == ("7", "0", "recompute")


def test_one_publisher_pushes_again_and_again(server: RefitServer) -> None:
    publisher = Publisher(server.url, KEY, "distributed")
    publisher.push(state_dict(MODEL, 1), "1")
    publisher.push(state_dict(MODEL, SEED), "2")

    check_arrived(server)


def test_padded_pieces_of_one_rank_become_whole_tensors_of_a_stream(server: RefitServer) -> None:
    (pairs,) = trainer_ranks(MODEL, Grid(alignment=32), state_dict(MODEL, SEED))
    report = Publisher(server.url, KEY, "http").push(pairs, "7", dry_run=False)

    sent = load(server.body)
    expected = state_dict(MODEL, SEED)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], expected[name]) for name in expected)
    assert (report.wire_bytes, report.sent_bytes) == (len(server.body), model_bytes(MODEL))
    assert server.requests[1][2]["dry_run"] == "false"


def test_a_path_is_told_to_the_server_and_nothing_is_read(server: RefitServer, tmp_path: Path) -> None:
    server.refuse = (409, {"error": {"code": "base-mismatch", "message": "version 3 serves, not 2", "param": "base"}})

    with pytest.raises(UpdateRefused, match="version 3 serves, not 2") as refused:
        Publisher(server.url, KEY).push(tmp_path / "run", "7", base="2")
    assert (refused.value.code, refused.value.http_status, refused.value.details) == (
        "base-mismatch", 409, (("field", "base"),),
    )  # fmt: skip
    assert server.requests[0][2]["source"] == {"kind": "disk", "path": str(tmp_path / "run")}


def test_weights_that_do_not_fit_are_refused_before_the_server_hears_of_an_update(server: RefitServer) -> None:
    values = state_dict(MODEL, SEED)
    with pytest.raises(UpdateRefused, match=rf"{Q} is missing"):
        Publisher(server.url, KEY).push({name: one for name, one in values.items() if name != Q}, "7")
    with pytest.raises(UpdateRefused, match=f"{HEAD} is not known: the served model's head is its embedding"):
        Publisher(server.url, KEY).push(values | {HEAD: values[Q]}, "7")

    assert {path for _, path, _ in server.requests} == {"/weights/layout"}


def test_a_wrong_key_is_told(server: RefitServer) -> None:
    with pytest.raises(UpdateRefused, match="the admin key is wrong") as refused:
        Publisher(server.url, "another").push(state_dict(MODEL, SEED), "7")

    assert (refused.value.code, refused.value.http_status) == ("admin-key-needed", 401)


def test_what_the_engine_found_wrong_is_raised_in_its_words(server: RefitServer) -> None:
    def stop() -> None:
        raise UpdateFailed("rank 1 has no memory left", [("needed", "2 GiB")], code="no-memory")

    server.tell = stop
    with pytest.raises(UpdateFailed, match="rank 1 has no memory left") as failed:
        Publisher(server.url, KEY, "distributed").push(state_dict(MODEL, SEED), "7")

    assert (failed.value.code, failed.value.details) == ("no-memory", (("needed", "2 GiB"),))


def test_a_rank_that_did_not_hear_that_all_went_well_asks_and_does_not_say_that_it_failed(
    server: RefitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_and_lose(*args: Any, **named: Any) -> None:
        send(*args, **named)
        raise UpdateFailed("engine rank 0 has been silent for 2.1 s", code="peer-silent")

    monkeypatch.setattr(publisher, "send", send_and_lose)
    report = Publisher(server.url, KEY, "distributed").push(state_dict(MODEL, SEED), "7")

    assert (report.state, report.digest) == ("committed", "d" * 32)
    check_arrived(server)


def test_an_offer_that_fails_in_the_middle_drops_the_update_on_the_server(
    server: RefitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(*_: Any) -> None:
        raise UpdateFailed("the tensor was freed", code="freed")

    monkeypatch.setattr(TensorOffer, "copy", copy)
    with pytest.raises(UpdateFailed, match="the tensor was freed"):
        Publisher(server.url, KEY, "distributed").push(state_dict(MODEL, SEED), "7")

    assert [method for method, path, _ in server.requests if path.endswith("/abort")] == ["POST"]
    for _ in range(200):
        left = [thread for thread in threading.enumerate() if thread.name.startswith("refit-")]
        if not left:
            break
        time.sleep(0.02)  # the engine's side ends a little later
    assert left == []


def test_a_server_that_is_not_there_is_told_in_one_sentence() -> None:
    with pytest.raises(UpdateFailed, match=r"the server at 127\.0\.0\.1:9 does not answer"):
        Publisher("http://127.0.0.1:9").push(state_dict(MODEL, SEED), "7")


def test_memory_of_a_push_is_gone_afterwards(server: RefitServer) -> None:
    before, opened = sorted(os.listdir("/dev/shm")), weight_memory()
    Publisher(server.url, KEY, "memory").push(state_dict(MODEL, SEED), "1")

    assert weight_memory() == opened
    assert sorted(os.listdir("/dev/shm")) == before


def test_a_server_that_cannot_open_the_memory_gets_the_weights_over_a_group(
    server: RefitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def map_nothing(*_: Any) -> int:
        raise UpdateRefused("it is not there", code="bad-segment")

    monkeypatch.setattr(server, "map", map_nothing)
    report = Publisher(server.url, KEY).push(state_dict(MODEL, SEED), "7")

    assert report.transport == "distributed"
    check_arrived(server)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"url": "localhost:30000"}, "no URL of a server"),
        ({"url": "ftp://host"}, "no URL of a server"),
        ({"url": "http://h", "key": "a\nb"}, "one line of ASCII"),
        ({"url": "http://h", "transport": "pigeon"}, "'pigeon' is no transport"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_made(arguments: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Publisher(**arguments)


def test_a_path_and_weights_go_by_their_own_ways(server: RefitServer) -> None:
    with pytest.raises(UsageError, match="takes weights, not the path"):
        Publisher(server.url, KEY, "distributed").push("/ckpts/run", "7")
    with pytest.raises(UsageError, match="takes the path of a checkpoint"):
        Publisher(server.url, KEY, "disk").push(state_dict(MODEL, SEED), "7")


def test_an_update_that_the_server_has_forgotten_is_unknown(server: RefitServer) -> None:
    with pytest.raises(UnknownUpdate, match="there is no update 'x'"):
        WeightsClient(server.url, KEY).update("x")
