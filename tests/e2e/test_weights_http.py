"""The weight routes over a real socket, with an engine that begins and ends updates when the test says so."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from fakes_server import FakeClient, FakeServer, engine_config, serving
from safetensors_bytes import entries, file_bytes

from gtp_serve.errors import CheckpointNotFound, EngineFault, GtpServeError, UpdateFailed, UpdateRefused
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    Checksum,
    Commit,
    DiskOrder,
    GroupOrder,
    Layout,
    MemoryOrder,
    Order,
    Pause,
    Resume,
    RollBack,
    Segment,
    StoredShard,
    StreamOrder,
    UpdateRecord,
    UpdateRequest,
    WeightsStatus,
)
from gtp_serve.refit.shared import SharedBytes
from gtp_serve.server.access import AdminGuard

pytestmark = pytest.mark.e2e

DISK = {"version": "1", "source": {"kind": "disk", "path": "/ckpts/run"}}
SHAPES = logical_tensors(engine_config().model)
FILE = file_bytes(entries(SHAPES, "BF16"))
STREAM = {"content-type": "application/octet-stream"}
ROUTES = [
    ("GET", "/weights"),
    ("GET", "/weights/checksum"),
    ("GET", "/weights/layout"),
    ("POST", "/weights/updates"),
    ("GET", "/weights/updates/u1"),
    ("POST", "/weights/updates/u1/commit"),
    ("POST", "/weights/updates/u1/abort"),
    ("POST", "/weights/rollback"),
    ("POST", "/pause"),
    ("POST", "/resume"),
]


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


def error_of(response: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"code", "message", "param", "did_you_mean", "type"}
    return error


async def begin(server: FakeServer, **changed: Any) -> httpx.Response:
    body = {name: value for name, value in {**DISK, **changed}.items() if value != "leave out"}
    return await server.http.post("/weights/updates", json=body)


async def stream(server: FakeServer, data: Any = FILE, **query: Any) -> httpx.Response:
    params = {"version": "1", **query}
    return await server.http.post("/weights/updates", params=params, content=data, headers=STREAM)


async def update_begun(server: FakeServer) -> None:
    while server.client.weights.update is None:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0.005)


def last(server: FakeServer) -> UpdateRequest:
    """What the engine was last asked to begin."""
    command = server.client.commands[-1]
    assert isinstance(command, Begin)
    return command.request


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_answers_whom_it_must_not(method: str, path: str) -> None:
    async def go() -> None:
        async with serving() as server:
            for headers in ({"x-forwarded-for": "127.0.0.1"}, {"origin": "http://evil.example"}):
                reply = await server.http.request(method, path, headers=headers, json=DISK)
                assert (reply.status_code, error_of(reply)["code"]) == (403, "admin-only-local")
            assert server.client.commands == []
            local = await server.http.request(method, path, headers={"content-type": "application/json"})
            assert local.status_code not in (401, 403)
        async with serving(guard=AdminGuard("s3cret")) as server:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                reply = await server.http.request(method, path, headers=headers, json=DISK)
                assert (reply.status_code, error_of(reply)["code"]) == (401, "admin-key-needed")
                assert reply.headers["www-authenticate"] == "Bearer"
            assert server.client.commands == []
            right = {"authorization": "Bearer s3cret", "x-forwarded-for": "10.0.0.1"}
            assert (await server.http.request(method, path, headers=right)).status_code not in (401, 403)

    run(go())


def test_a_server_that_does_not_serve_yet_answers_503() -> None:
    async def go() -> None:
        async with serving(ready=False) as server:
            for method, path in ROUTES:
                reply = await server.http.request(method, path)
                assert (reply.status_code, error_of(reply)["code"]) == (503, "not-ready")

    run(go())


def test_weights_tells_version_state_and_history() -> None:
    async def go() -> None:
        async with serving() as server:
            first = (await server.http.get("/weights")).json()
            assert (first["version"], first["state"], first["update"], first["history"]) == ("0", "idle", None, [])
            record = (await begin(server)).json()
            assert (await server.http.get("/weights")).json()["update"] == record
            assert (await server.http.get("/weights")).json()["state"] == "staging"
            server.client.end_update("committed", digest="d1", source_bytes=7)
            server.client.set_weights(digest="d1", rollback_version="0")
            after = (await server.http.get("/weights")).json()
            assert (after["version"], after["state"], after["digest"]) == ("1", "idle", "d1")
            assert after["rollback_version"] == "0"
            assert [one["source_bytes"] for one in after["history"]] == [7]
            assert (await server.http.get("/model_info")).json()["weight_version"] == "1"
            server.client.set_weights(paused=True)
            assert (await server.http.get("/weights")).json()["state"] == "paused"

    run(go())


def test_each_source_and_field_arrives_at_the_engine() -> None:
    box = Box.whole((2, 3))
    shard = Shard("w", (2, 3), "float32", (Span("model.norm.weight", box, box),))
    stored = StoredShard(shard=shard, segment=0, offset=0, digest="00" * 16)
    memory = MemoryOrder(segments=(Segment(pid=7, fd=3, size=24),), shards=(stored,))
    orders: list[tuple[dict[str, Any], Order]] = [
        ({"kind": "disk", "path": "/a"}, DiskOrder(path="/a")),
        (
            {"kind": "disk", "path": "/a", "iteration": 3, "max_bytes_per_second": 1 << 20},
            DiskOrder(path="/a", iteration=3, max_bytes_per_second=1 << 20),
        ),
        ({"kind": "distributed", "trainers": 2}, GroupOrder(trainers=2)),
        (
            {"kind": "distributed", "trainers": 2, "backend": "nccl", "bucket_bytes": 1 << 20},
            GroupOrder(trainers=2, backend="nccl", bucket_bytes=1 << 20),
        ),
        ({"kind": "memory", **msgspec.to_builtins(memory, str_keys=True), "type": None}, memory),
    ]

    async def go() -> None:
        async with serving() as server:
            for source, order in orders:
                source = {name: value for name, value in source.items() if name not in ("type", "elsewhere")}
                reply = await begin(server, source=source)
                assert reply.status_code == 202, reply.text
                assert last(server) == UpdateRequest(order=order, version="1")
            fields: dict[str, Any] = {"base": "0", "in_flight": "recompute", "commit": "manual", "memory": "inplace"}
            await begin(server, **fields, deadline_seconds=7, dry_run=True, id="mine")
            assert last(server) == UpdateRequest(
                order=DiskOrder(path="/ckpts/run"), version="1", deadline_seconds=7.0, dry_run=True, **fields
            )
            assert server.client.weights.update is not None
            assert server.client.weights.update.id == "mine"
            nothing = dict.fromkeys(
                ("base", "in_flight", "commit", "memory", "deadline_seconds", "dry_run", "id", "wait")
            )
            await begin(server, **nothing)
            assert last(server) == UpdateRequest(order=DiskOrder(path="/ckpts/run"), version="1")

    run(go())


WRONG: list[tuple[dict[str, Any], str, str, str | None]] = [
    # what is changed, the code, the field, the nearest right one
    ({"version": "leave out"}, "missing-field", "version", None),
    ({"source": "leave out"}, "missing-field", "source", None),
    ({"verison": "1"}, "unknown-field", "verison", "version"),
    ({"weight_version": "1"}, "unknown-field", "weight_version", "version"),
    ({"model_path": "/a"}, "unknown-field", "model_path", "source"),
    ({"x" * 5000: 1}, "unknown-field", "x" * 64 + "...", None),
    ({"version": 1}, "invalid-value", "version", None),
    ({"version": "a b"}, "invalid-value", "version", None),
    ({"version": ""}, "invalid-value", "version", None),
    ({"version": "x" * 129}, "invalid-value", "version", None),
    ({"version": "a\u0007"}, "invalid-value", "version", None),
    ({"base": "a b"}, "invalid-value", "base", None),
    ({"in_flight": "recomptue"}, "invalid-value", "in_flight", "recompute"),
    ({"in_flight": ["keep"]}, "invalid-value", "in_flight", None),
    ({"commit": "later"}, "invalid-value", "commit", None),
    ({"memory": "device"}, "invalid-value", "memory", None),
    ({"deadline_seconds": 0}, "invalid-value", "deadline_seconds", None),
    ({"deadline_seconds": 1e9}, "invalid-value", "deadline_seconds", None),
    ({"deadline_seconds": "7"}, "invalid-value", "deadline_seconds", None),
    ({"dry_run": 1}, "invalid-value", "dry_run", None),
    ({"wait": "yes"}, "invalid-value", "wait", None),
    ({"id": "../x"}, "invalid-value", "id", None),
    ({"source": "/ckpts/run"}, "invalid-value", "source", None),
    ({"source": {}}, "missing-field", "source.kind", None),
    ({"source": {"knid": "disk"}}, "unknown-field", "source.knid", "kind"),
    ({"source": {"kind": "dsik"}}, "invalid-value", "source.kind", "disk"),
    ({"source": {"kind": "fed", "group": "g"}}, "invalid-value", "source.kind", None),
    ({"source": {"kind": "disk"}}, "missing-field", "source.path", None),
    ({"source": {"kind": "disk", "path": "run"}}, "invalid-value", "source.path", None),
    ({"source": {"kind": "disk", "path": "/a\0b"}}, "invalid-value", "source.path", None),
    ({"source": {"kind": "disk", "path": "/a", "trainers": 2}}, "unknown-field", "source.trainers", None),
    ({"source": {"kind": "disk", "path": "/a", "iteration": -1}}, "invalid-value", "source.iteration", None),
    ({"source": {"kind": "distributed"}}, "missing-field", "source.trainers", None),
    ({"source": {"kind": "distributed", "trainers": 0}}, "invalid-value", "source.trainers", None),
    ({"source": {"kind": "distributed", "trainers": 1, "host": "a"}}, "unknown-field", "source.host", None),
    ({"source": {"kind": "distributed", "trainers": 1, "backend": "mpi"}}, "invalid-value", "source.backend", None),
    ({"source": {"kind": "memory"}}, "invalid-value", "source", None),
    (
        {"source": {"kind": "memory", "segments": [{"pid": "1", "fd": 1, "size": 1}], "shards": []}},
        "invalid-value",
        "source.segments[0].pid",
        None,
    ),
    (
        {"source": {"kind": "memory", "segments": [], "shards": [{"shard": 1}]}},
        "invalid-value",
        "source.shards[0].shard",
        None,
    ),
]


def test_a_wrong_field_is_refused_by_name_and_nothing_begins() -> None:
    async def go() -> None:
        async with serving() as server:
            for changed, code, param, right in WRONG:
                reply = await begin(server, **changed)
                error = error_of(reply)
                assert (reply.status_code, error["code"], error["param"]) == (400, code, param), changed
                assert error["did_you_mean"] == right
                assert right is None or right in error["message"] or code == "invalid-value"
            for content, code in (
                (b"", "invalid-json"),
                (b"[]", "invalid-json"),
                (b'{"version":"1","version":"2"}', "duplicate-key"),
            ):
                reply = await server.http.post(
                    "/weights/updates", content=content, headers={"content-type": "application/json"}
                )
                assert (reply.status_code, error_of(reply)["code"]) == (400, code)
            reply = await server.http.post("/weights/updates", content=b"a=b", headers={"content-type": "text/plain"})
            assert reply.status_code == 415
            assert server.client.commands == []

    run(go())


def test_whoever_waits_for_a_manual_commit_is_told_when_it_can_be_done() -> None:
    async def go() -> None:
        async with serving() as server:
            waiting = asyncio.create_task(begin(server, wait=True, commit="manual"))
            await update_begun(server)
            await asyncio.sleep(0.02)
            assert not waiting.done()
            assert server.client.weights.update is not None
            server.client.set_weights(update=msgspec.structs.replace(server.client.weights.update, state="verified"))
            reply = await waiting
            assert (reply.status_code, reply.json()["state"]) == (202, "verified")
            server.client.set_weights(update=None)
            waiting = asyncio.create_task(begin(server, wait=True, commit="manual"))
            await update_begun(server)
            server.client.end_update("aborted", code="not-finite", message="w has a NaN")
            assert ((await waiting).status_code, error_of(await waiting)["code"]) == (422, "not-finite")

    run(go())


def test_fields_of_the_query_count_and_none_may_come_twice() -> None:
    async def go() -> None:
        async with serving() as server:
            reply = await server.http.post("/weights/updates?base=0&dry_run=true", json=DISK)
            assert (reply.status_code, last(server).base, last(server).dry_run) == (202, "0", True)
            reply = await server.http.post("/weights/updates?version=1", json=DISK)
            assert (reply.status_code, error_of(reply)["code"], error_of(reply)["param"]) == (
                400,
                "duplicate-key",
                "version",
            )
            reply = await server.http.post("/weights/updates?waitt=1", json=DISK)
            assert (reply.status_code, error_of(reply)["did_you_mean"]) == (400, "wait")

    run(go())


def test_an_update_is_202_until_it_has_ended_and_200_then() -> None:
    async def go() -> None:
        async with serving() as server:
            reply = await begin(server)
            assert reply.status_code == 202
            path = reply.headers["location"]
            assert path == f"/weights/updates/{reply.json()['id']}"
            assert (await server.http.get(path)).status_code == 202
            server.client.end_update("aborted", code="aborted", message="enough")
            ended = await server.http.get(path)
            assert (ended.status_code, ended.json()["state"], ended.json()["code"]) == (200, "aborted", "aborted")
            server.client.unheard = UpdateRecord(id="another", version="9", base="0", state="staging", kind="disk")
            assert (await server.http.get("/weights/updates/another")).status_code == 202
            unknown = await server.http.get("/weights/updates/none")
            assert (unknown.status_code, error_of(unknown)["code"]) == (404, "unknown-update")

    run(go())


ENDS: list[tuple[str, dict[str, Any], int]] = [
    ("committed", {}, 200),
    ("aborted", {"code": "digest-mismatch", "message": "w: its bytes differ"}, 422),
    ("aborted", {"code": "aborted", "message": "enough"}, 409),
    ("aborted", {"code": "update-deadline", "message": "late", "details": (("tp1", "transfer"),)}, 504),
    ("torn", {"code": "not-finite", "message": "w has a NaN"}, 422),
]


@pytest.mark.parametrize(("state", "fields", "status"), ENDS)
@pytest.mark.parametrize("streamed", [False, True])
def test_whoever_waits_is_told_how_it_ended(state: str, fields: dict[str, Any], status: int, streamed: bool) -> None:
    async def go() -> None:
        async with serving() as server:
            waiting = asyncio.create_task(stream(server, wait="true") if streamed else begin(server, wait=True))
            await update_begun(server)
            await asyncio.sleep(0.02)
            assert not waiting.done()
            server.client.end_update(state, **fields)
            reply = await waiting
            assert reply.status_code == status
            record = reply.json() if status == 200 else reply.json()["update"]
            assert record["state"] == state
            if status != 200:
                assert error_of(reply)["code"] == fields["code"]
                assert fields["message"] in error_of(reply)["message"]
                assert all(text in error_of(reply)["message"] for pair in fields.get("details", ()) for text in pair)

    run(go())


def test_a_dry_run_that_was_good_is_200() -> None:
    async def go() -> None:
        async with serving() as server:
            waiting = asyncio.create_task(begin(server, wait=True, dry_run=True))
            await update_begun(server)
            record = server.client.end_update("verified", dry_run=True)
            reply = await waiting
            assert (reply.status_code, reply.json()["state"]) == (200, "verified")
            assert (await server.http.get(f"/weights/updates/{record.id}")).status_code == 200

    run(go())


REFUSALS: list[tuple[GtpServeError, int]] = [
    (UpdateRefused("update u is under way", code="update-under-way"), 409),
    (UpdateFailed("no memory", code="update-failed"), 422),
    (CheckpointNotFound("there is nothing at /ckpts/run"), 422),
    (EngineFault("the engine process got signal 9"), 503),
]


@pytest.mark.parametrize(("error", "status"), REFUSALS)
def test_what_the_engine_refuses_is_told_with_its_code(error: GtpServeError, status: int) -> None:
    async def go() -> None:
        async with serving(FakeClient(refuse=error)) as server:
            for reply in (await begin(server), await stream(server), await server.http.post("/weights/rollback")):
                assert (reply.status_code, error_of(reply)["code"]) == (status, error.code)
                assert status == 503 or error.message in error_of(reply)["message"]

    run(go())


def test_an_engine_that_dies_ends_the_waiting() -> None:
    async def go() -> None:
        async with serving() as server:
            waiting = asyncio.create_task(begin(server, wait=True))
            await update_begun(server)
            server.client.state = "dead"
            server.client.set_weights()
            reply = await waiting
            assert (reply.status_code, error_of(reply)["code"]) == (503, "worker-died")

    run(go())


def test_commit_abort_and_rollback_are_passed_on() -> None:
    async def go() -> None:
        async with serving() as server:
            name = (await begin(server)).json()["id"]
            post = server.http.post
            assert (await post(f"/weights/updates/{name}/commit")).status_code == 202
            assert (await post(f"/weights/updates/{name}/abort", json={"reason": "worse"})).json()["id"] == name
            assert (await post(f"/weights/updates/{name}/abort")).status_code == 202
            rolled = await post("/weights/rollback", json={"in_flight": "recompute"})
            assert (rolled.status_code, rolled.json()["kind"]) == (202, "rollback")
            waiting = asyncio.create_task(post("/weights/rollback?wait=true&in_flight=wait"))
            while len(server.client.commands) < 6:  # noqa: ASYNC110 - the fake has no event for it
                await asyncio.sleep(0.005)
            server.client.end_update("committed")
            assert (await waiting).json()["state"] == "committed"
            assert server.client.commands[1:] == [
                Commit(id=name),
                AbortUpdate(id=name, reason="worse"),
                AbortUpdate(id=name),
                RollBack(in_flight="recompute"),
                RollBack(in_flight="wait"),
            ]
            for path in ("/weights/updates/none/commit", "/weights/updates/none/abort"):
                assert (await post(path)).status_code == 404
            for path, body, code in (
                ("/weights/rollback", {"version": "3"}, "unknown-field"),
                ("/weights/rollback?in_flight=keep", {"in_flight": "keep"}, "duplicate-key"),
                (f"/weights/updates/{name}/commit", {"reason": "x"}, "unknown-field"),
                (f"/weights/updates/{name}/abort", {"reason": 3}, "invalid-value"),
            ):
                reply = await post(path, json=body)
                assert (reply.status_code, error_of(reply)["code"]) == (400, code)

    run(go())


def test_pause_and_resume_have_vllms_shape_and_default() -> None:
    async def go() -> None:
        async with serving() as server:
            post = server.http.post
            assert (await post("/pause")).json() == {"status": "paused", "mode": "abort", "weight_version": "0"}
            for mode in ("keep", "recompute", "wait", "abort"):
                assert (await post("/pause", params={"mode": mode, "clear_cache": "false"})).json()["mode"] == mode
            assert (await post("/pause", json={"mode": "keep"})).json()["status"] == "paused"
            assert (await post("/resume")).json() == {"status": "resumed", "weight_version": "0"}
            assert server.client.commands == [
                *(Pause(mode=mode) for mode in ("abort", "keep", "recompute", "wait", "abort", "keep")),
                Resume(),
            ]
            wrong = await post("/pause?mode=kep")
            assert (wrong.status_code, error_of(wrong)["did_you_mean"]) == (400, "keep")
            twice = await post("/pause?mode=keep&mode=wait")
            assert (twice.status_code, error_of(twice)["code"]) == (400, "duplicate-key")

    run(go())


def test_checksum_and_layout_are_the_engines_answers() -> None:
    async def go() -> None:
        async with serving(FakeClient(body={"digest": "d"})) as server:
            for path, command in (("/weights/checksum", Checksum()), ("/weights/layout", Layout())):
                assert (await server.http.get(path)).json() == {"digest": "d"}
                assert server.client.commands[-1] == command

    run(go())


def test_torn_weights_serve_nothing_and_say_why() -> None:
    async def go() -> None:
        weights = WeightsStatus(version="0", torn="rank tp1 failed in the swap")
        async with serving(FakeClient(weights=weights)) as server:
            for body in ({"text": "a"}, {"text": "a", "stream": True}):
                reply = await server.generate(**body)
                assert (reply.status_code, error_of(reply)["code"]) == (503, "weights_torn")
                assert "rank tp1 failed" in error_of(reply)["message"]
                assert reply.headers["retry-after"] == "1"
            ready = await server.http.get("/ready")
            assert (ready.status_code, ready.json()["status"], error_of(ready)["code"]) == (503, "torn", "weights_torn")
            assert ready.json()["reason"] == "rank tp1 failed in the swap"
            assert (await server.http.get("/health")).status_code == 200
            assert (await server.http.get("/weights")).json()["state"] == "torn"
            assert "gtp_serve_weights_torn 1.0" in (await server.http.get("/metrics")).text
            assert (await begin(server)).status_code == 202  # the way out
            server.client.set_weights(torn="")
            assert (await server.http.get("/ready")).json() == {"status": "ready"}

    run(go())


def test_a_paused_engine_is_ready_and_healthy_however_long_it_makes_no_step() -> None:
    async def go() -> None:
        async with serving(FakeClient(age=1000.0)) as server:
            assert (await server.http.get("/health")).status_code == 503
            server.client.set_weights(paused=True)
            assert (await server.http.get("/health")).status_code == 200
            assert (await server.http.get("/ready")).json() == {"status": "ready", "paused": True}

    run(go())


# -- a body of weights ---------------------------------------------------------------------------------


def test_a_streamed_file_becomes_sealed_memory_that_goes_with_its_update() -> None:
    async def go() -> None:
        async with serving() as server:
            for state in ("committed", "aborted"):
                reply = await stream(server, base="0", deadline_seconds="9", in_flight="wait", id=f"it-{state}")
                assert (reply.status_code, reply.json()["kind"], reply.json()["id"]) == (
                    202,
                    "safetensors",
                    f"it-{state}",
                )
                request = last(server)
                assert (request.base, request.deadline_seconds, request.in_flight) == ("0", 9.0, "wait")
                assert isinstance(request.order, StreamOrder)
                shared = SharedBytes(request.order.segment)
                assert bytes(shared.view) == FILE
                shared.close()
                server.client.end_update(state, version="0")
                await asyncio.sleep(0.02)
                with pytest.raises(UpdateRefused):
                    SharedBytes(request.order.segment)

    run(go())


def test_a_chunked_body_is_taken_too() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(FILE), 1000):
            yield FILE[start : start + 1000]

    async def go() -> None:
        async with serving() as server:
            assert (await stream(server, chunks())).status_code == 202

    run(go())


def test_a_wrong_body_or_query_is_refused_and_nothing_begins() -> None:
    lacking = file_bytes(entries({name: shape for name, shape in SHAPES.items() if name != "model.norm.weight"}))
    queries: list[tuple[dict[str, Any], str, str]] = [
        ({"version": None}, "missing-field", "version"),
        ({"verison": "1"}, "unknown-field", "verison"),
        ({"source": "x"}, "unknown-field", "source"),
        ({"deadline_seconds": "soon"}, "invalid-value", "deadline_seconds"),
        ({"wait": "maybe"}, "invalid-value", "wait"),
        ({"digest": "abc"}, "invalid-value", "digest"),
    ]

    async def go() -> None:
        async with serving() as server:
            for query, code, param in queries:
                given = {k: v for k, v in {"version": "1", **query}.items() if v is not None}
                reply = await server.http.post("/weights/updates", params=given, content=FILE, headers=STREAM)
                assert (reply.status_code, error_of(reply)["code"], error_of(reply)["param"]) == (400, code, param)
            reply = await stream(server, lacking)
            assert reply.status_code == 422
            assert "model.norm.weight" in error_of(reply)["message"]
            assert (await stream(server, digest="0" * 32)).status_code == 422
            assert (await stream(server, FILE[:-1])).status_code == 422
            assert (await stream(server, base="7")).json()["error"]["code"] == "base-mismatch"
            assert server.client.commands == []

    run(go())


def test_a_refusal_reaches_a_client_that_is_still_sending() -> None:
    async def go() -> None:
        bad = file_bytes(entries({**SHAPES, "model.extra.weight": (1,)}), b"")
        async with serving() as server:
            await check(server, bad, b"HTTP/1.1 422 Unprocessable Entity", "model.extra.weight")
        async with serving(guard=AdminGuard("s3cret")) as server:
            await check(server, FILE, b"HTTP/1.1 401 Unauthorized", "the admin key is missing")
        async with serving(ready=False) as server:
            await check(server, FILE, b"HTTP/1.1 503 Service Unavailable", "starting")

    async def check(server: FakeServer, bad: bytes, line: bytes, word: str) -> None:
        port = int(server.url.rpartition(":")[2])
        head = "POST /weights/updates?version=1 HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        head += "content-type: application/octet-stream\r\ntransfer-encoding: chunked\r\n\r\n"

        def talk() -> bytes:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
                sock.sendall(head.encode() + b"%x\r\n" % len(bad) + bad + b"\r\n")
                filler = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
                for _ in range(200):
                    sock.sendall(filler)  # an early close would break this or lose the answer
                answer = b""
                while chunk := sock.recv(65536):
                    answer += chunk
                return answer

        answer = await asyncio.to_thread(talk)
        status, _, rest = answer.partition(b"\r\n")
        assert status == line
        assert b"connection: close" in rest
        assert word in json.loads(rest.rpartition(b"\r\n\r\n")[2])["error"]["message"]

    run(go())


def test_one_body_at_a_time_and_none_while_an_update_is_under_way() -> None:
    async def go() -> None:
        release = asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield FILE[:100]
            await release.wait()
            yield FILE[100:]

        async with serving() as server:
            first = asyncio.create_task(stream(server, slow()))
            await asyncio.sleep(0.1)
            second = await stream(server)
            assert (second.status_code, error_of(second)["code"]) == (409, "update-under-way")
            release.set()
            assert (await first).status_code == 202
            third = await stream(server)
            assert (third.status_code, error_of(third)["code"]) == (409, "update-under-way")

    run(go())


def test_a_body_sent_again_under_its_id_begins_nothing_new() -> None:
    async def go() -> None:
        async with serving() as server:
            record = (await stream(server, id="it")).json()
            again = await stream(server, id="it")
            assert (again.status_code, again.json()) == (202, record)
            other = await stream(server, id="it", version="2")
            assert (other.status_code, error_of(other)["code"]) == (409, "id-in-use")
            server.client.end_update("committed")
            assert (await stream(server, id="it", wait="1")).json()["state"] == "committed"
            assert sum(isinstance(command, Begin) for command in server.client.commands) == 1

    run(go())


def test_a_client_that_leaves_in_its_body_leaves_nothing() -> None:
    async def go() -> None:
        async with serving() as server:
            port = int(server.url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST /weights/updates?version=1 HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: {len(FILE)}\r\n"
            writer.write(head.encode() + b"content-type: application/octet-stream\r\n\r\n" + FILE[: len(FILE) // 2])
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.close()
            await asyncio.sleep(0.1)
            assert server.client.commands == []
            assert (await stream(server)).status_code == 202

    run(go())


def test_a_client_that_leaves_while_it_waits_takes_nothing_back() -> None:
    async def go() -> None:
        async with serving() as server:
            with pytest.raises(httpx.ReadTimeout):
                await server.http.post(
                    "/weights/updates", params={"version": "1", "wait": "1"}, content=FILE, headers=STREAM, timeout=0.2
                )
            order = last(server).order
            assert isinstance(order, StreamOrder)
            SharedBytes(order.segment).close()
            server.client.end_update("committed")
            assert (await server.http.get("/weights")).json()["version"] == "1"

    run(go())
