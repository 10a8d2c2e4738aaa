"""SGLang's and vLLM's routes: fields, statuses and bodies, around an engine that answers from a script."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from fakes_server import FakeServer, serving
from fed_client import FedClient, pieces

from gtp_serve.errors import UpdateRefused
from gtp_serve.refit.orders import (
    Begin,
    DiskOrder,
    EndFeed,
    Feed,
    FlushCache,
    Join,
    JoinGroup,
    Leave,
    Pause,
    ReadTensor,
    Relabel,
    Release,
    Restore,
    Resume,
)
from gtp_serve.server.access import AdminGuard

GROUP: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
POSTS = (
    "/update_weights_from_disk",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_distributed",
    "/update_weights_from_tensor",
    "/update_weights_from_ipc",
    "/update_weight_version",
    "/get_weights_by_name",
    "/weights_checker",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/flush_cache",
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/abort_requests",
    "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/weight_checker",
    "/reset_prefix_cache",
    "/sleep",
    "/wake_up",
)
GETS = ("/get_weight_version", "/is_paused", "/weight_info", "/get_world_size", "/is_sleeping", "/flush_cache")


def run(
    work: Callable[[FakeServer, FedClient], Awaitable[None]], client: FedClient | None = None, **options: Any
) -> None:
    engine = client if client is not None else FedClient()

    async def body() -> None:
        async with serving(engine, **options) as server:
            await work(server, engine)

    asyncio.run(body())


async def post(server: FakeServer, path: str, status: int = 200, **body: Any) -> Any:
    reply = await server.http.post(path, json=body)
    assert reply.status_code == status, reply.text
    return reply.json()


def described(client: FedClient, index: int = 0, count: int = 3, dtypes: str = "dtypes") -> dict[str, Any]:
    piece = pieces(client, count)[index]
    return {"names": list(piece.names), dtypes: list(piece.dtypes), "shapes": [list(shape) for shape in piece.shapes]}


def test_every_route_asks_for_the_admin_key() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        for method, paths in (("POST", POSTS), ("GET", GETS)):
            for path in paths:
                reply = await server.http.request(method, path)
                assert reply.status_code == 401, path
        assert client.commands == []
        headers = {"authorization": "Bearer secret"}
        assert (await server.http.get("/weight_info", headers=headers)).json() == {"weight_version": "0"}

    run(work, guard=AdminGuard("secret"))


def test_no_route_answers_before_the_engine_is_ready() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        for path in POSTS:
            assert (await server.http.post(path)).status_code == 503

    run(work, ready=False)


# -- SGLang ------------------------------------------------------------------------------------------------------------


def test_sglang_group_is_joined_and_left_under_its_name() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        joined = await post(server, "/init_weights_update_group", **GROUP, group_name="slime-pp_0", backend="gloo")
        assert joined == {"success": True, "message": "Succeeded to initialize custom process group."}
        left = await post(server, "/destroy_weights_update_group", group_name="slime-pp_0")
        assert left == {"success": True, "message": "Succeeded to destroy custom process group."}
        join, leave = client.commands
        assert isinstance(join, Join)
        assert join.group == JoinGroup(
            name="slime-pp_0", host="127.0.0.1", port=29500, rank_offset=1, world_size=3, backend="gloo", kind="torch"
        )
        assert leave == Leave(name="slime-pp_0")

    run(work)


def test_sglang_group_has_sglangs_defaults() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        await post(server, "/init_weights_update_group", **GROUP)
        (join,) = client.commands
        assert isinstance(join, Join)
        assert (join.group.name, join.group.backend) == ("weight_update_group", "nccl")

    run(work)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"master_port": 0}, "master_port must be a whole number from 1 to 65535, not 0"),
        ({"master_address": None}, "master_address is missing"),
        ({"rank_offset": 0}, "rank_offset must be"),
        ({"world_size": True}, "world_size must be a whole number"),
        ({"backend": "mpi"}, "backend 'mpi' is not possible"),
    ],
)
def test_sglang_group_with_a_wrong_field_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        body = await post(server, "/init_weights_update_group", 400, **{**GROUP, **change})
        assert body["success"] is False
        assert words in body["message"]
        assert client.commands == []

    run(work)


def test_sglang_refusal_of_the_engine_is_a_400_with_its_words() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        client.refuse = UpdateRefused("the engine is asleep", [("try", "later")])
        body = await post(server, "/init_weights_update_group", 400, **GROUP)
        assert body == {"success": False, "message": "the engine is asleep; try: later"}

    run(work)


def test_sglang_buckets_commit_with_the_last_and_the_label_comes_with_each() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        for index in range(3):
            body = await post(
                server,
                "/update_weights_from_distributed",
                **described(client, index),
                group_name="g",
                weight_version="12",
                flush_cache=False,
            )
            assert body["success"] is True
            assert client.weights.version == ("12" if index == 2 else "0")
        assert body["message"] == "Succeeded to update parameter online. Weight version updated to 12."
        assert {feed.piece.group for feed in client.asked(Feed)} == {"g"}
        assert (await server.http.get("/get_weight_version")).json() == {"weight_version": "12"}

    run(work)


def test_sglang_bucket_may_be_flattened_and_may_come_under_torchs_names_of_types() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        fields = described(client)
        fields["dtypes"] = [f"torch.{one}" for one in fields["dtypes"]]
        await post(server, "/update_weights_from_distributed", **fields, load_format="flattened_bucket")
        (feed,) = client.asked(Feed)
        assert feed.piece.packed == "flattened_bucket"
        assert set(feed.piece.dtypes) == {"float32"}
        assert feed.piece.group == "weight_update_group"

    run(work)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"load_format": "pickle"}, "load_format 'pickle' is not possible"),
        ({"selector": "draft"}, "there is no draft model"),
        ({"names": []}, "must have one length"),
        ({"shapes": [[1], [-1]]}, "shapes must be a list of lists"),
        ({"names": "model.norm.weight"}, "names must be a list"),
        ({"weight_version": ""}, "weight_version must be a string"),
    ],
)
def test_sglang_bucket_with_a_wrong_field_is_refused_before_the_engine_hears_of_it(
    change: dict[str, Any], words: str
) -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        body = await post(server, "/update_weights_from_distributed", 400, **{**described(client), **change})
        assert words in body["message"]
        assert client.commands == []

    run(work)


def test_sglang_update_beside_running_requests_waits_for_them_or_ends_them() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        for index, (fields, policy) in enumerate([({}, "wait"), ({"abort_all_requests": True}, "abort")]):
            await post(server, "/update_weights_from_distributed", **described(client, count=1), **fields)
            assert client.asked(Begin)[index].request.in_flight == policy
        client.set_weights(paused=True)
        await post(server, "/update_weights_from_distributed", **described(client, count=1))
        assert client.asked(Begin)[2].request.in_flight == "keep"

    run(work)


def test_sglang_continue_with_missing_tensors_is_refused_and_stays_paused() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        await post(server, "/pause_generation")
        await post(server, "/update_weights_from_distributed", **described(client), weight_version="1")
        body = await post(server, "/continue_generation", 400)
        assert body["success"] is False
        assert "never came" in body["message"]
        assert client.asked(Resume) == []
        assert await post(server, "/continue_generation") == {
            "message": "Generation continued successfully.",
            "status": "ok",
        }
        assert len(client.asked(Resume)) == 1
        assert client.weights.version == "0"

    run(work)


def test_sglang_end_commits_what_begin_opened() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        assert (await post(server, "/begin_weight_update", selector="all"))["success"] is True
        await post(server, "/update_weights_from_distributed", **described(client, count=1))
        assert (await post(server, "/end_weight_update"))["success"] is True
        assert client.weights.version == "1"
        assert (await post(server, "/begin_weight_update", 400, selector="draft"))["success"] is False

    run(work)


@pytest.mark.parametrize(("mode", "ours"), [(None, "abort"), ("retract", "recompute"), ("in_place", "keep")])
def test_sglang_pause_modes(mode: str | None, ours: str) -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        body = await post(server, "/pause_generation", **(dict[str, Any](mode=mode) if mode else {}))
        assert body == {"message": "Generation paused successfully.", "status": "ok"}
        assert client.commands == [Pause(mode=ours)]  # type: ignore[arg-type]
        assert (await post(server, "/pause_generation", 400, mode="freeze"))["success"] is False

    run(work)


@pytest.mark.parametrize("path", ["/update_weights_from_tensor", "/update_weights_from_ipc"])
def test_d5_sglang_pickles_are_refused_with_the_safe_ways(path: str) -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        body = await post(server, path, 400, serialized_named_tensors=["gASVKAAAAA=="])
        assert body["success"] is False
        assert "/update_weights_from_distributed" in body["message"]
        assert "safetensors" in body["message"]
        assert client.commands == []

    run(work)


def test_sglang_update_from_disk_is_answered_when_it_serves() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        call = asyncio.create_task(
            server.http.post("/update_weights_from_disk", json={"model_path": "/somewhere", "weight_version": "3"})
        )
        await client.wait_weights(lambda now: now.update is not None, 10)
        assert not call.done()
        client.end_update("committed")
        assert (await call).json() == {
            "success": True,
            "message": "Succeeded to update model weights.",
            "num_paused_requests": 0,
        }
        (begin,) = client.asked(Begin)
        assert begin.request.order == DiskOrder(path="/somewhere")
        assert (begin.request.version, begin.request.in_flight, begin.request.any_order) == ("3", "wait", True)

    run(work)


def test_sglang_update_from_disk_that_fails_is_a_400() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        call = asyncio.create_task(server.http.post("/update_weights_from_disk", json={"model_path": "/nowhere"}))
        await client.wait_weights(lambda now: now.update is not None, 10)
        client.end_update("aborted", code="ckpt-not-found", message="there is no checkpoint at /nowhere")
        reply = await call
        assert reply.status_code == 400
        assert reply.json() == {"success": False, "message": "there is no checkpoint at /nowhere"}
        for wrong in ({"load_format": "dummy"}, {"manifest": {"a": 1}}, {"model_path": None}):
            await post(server, "/update_weights_from_disk", 400, **{"model_path": "/x", **wrong})

    run(work)


def test_sglang_checker_compares_with_its_snapshot() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        assert (await post(server, "/weights_checker", 400, action="compare"))["success"] is False
        client.body = {"digest": "aa", "ranks": ["a0", "a1"]}
        body = await post(server, "/weights_checker")
        assert body["per_engine_checksum"] == "aa"
        assert [rank["per_gpu_checksum"] for rank in body["ranks"]] == ["a0", "a1"]
        assert body["ranks"][1]["parallelism_info"]["tp_rank"] == 1
        assert (await post(server, "/weights_checker", action="snapshot"))["success"] is True
        assert (await post(server, "/weights_checker", action="compare"))["success"] is True
        client.body = {"digest": "bb", "ranks": ["b0", "b1"]}
        assert "differ" in (await post(server, "/weights_checker", 400, action="compare"))["message"]
        await post(server, "/weights_checker", action="reset_tensors")
        assert client.commands[-2:] == [Release(tags=("weights",)), Restore(tags=("weights",))]
        await post(server, "/weights_checker", 400, action="shake")

    run(work, FedClient(body={"digest": "", "ranks": []}))


def test_sglang_memory_routes_answer_null() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        assert await post(server, "/release_memory_occupation") is None
        assert await post(server, "/resume_memory_occupation", tags=["weights"]) is None
        assert await post(server, "/resume_memory_occupation", tags=["cuda_graph"]) is None
        await post(server, "/release_memory_occupation", 400, tags=["disk"])
        assert client.commands == [Release(tags=("weights", "kv_cache")), Restore(tags=("weights",))]

    run(work)


def test_sglang_values_cache_label_and_requests() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        client.body = {"values": [[1.0, 2.0]]}
        assert await post(server, "/get_weights_by_name", name="lm_head.weight", truncate_size=1) == [[1.0, 2.0]]
        reply = await server.http.get("/flush_cache?timeout=1.5")
        assert (reply.status_code, reply.text) == (200, "Cache flushed.\n")
        assert (await server.http.get("/flush_cache?timeout=soon")).status_code == 400
        body = await post(server, "/update_weight_version", new_version="v9")
        assert body == {"success": True, "message": "Weight version updated to v9", "new_version": "v9"}
        assert client.commands == [ReadTensor(name="lm_head.weight", limit=1), FlushCache(), Relabel(version="v9")]

    run(work)


def test_sglang_tied_head_is_read_from_the_embedding() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        await post(server, "/get_weights_by_name", name="lm_head.weight")
        assert client.commands == [ReadTensor(name="lm_head.weight", limit=100)]

    run(work, FedClient(body={"values": []}))


@pytest.mark.parametrize(
    ("path", "body", "ended"),
    [
        ("/abort_request", {"rid": "one"}, ["one-0", "one-1"]),
        ("/abort_request", {"rid": ""}, []),
        ("/abort_request", {"abort_all": True}, ["one-0", "one-1", "two"]),
        ("/abort_requests", {"request_ids": ["two", "three"]}, ["two"]),
        ("/abort_requests", {}, ["one-0", "one-1", "two"]),
    ],
)
def test_requests_are_ended_by_name_or_all(path: str, body: dict[str, Any], ended: list[str]) -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        with server.state.call(["one-0", "one-1", "two"]):
            reply = await server.http.post(path, json=body)
        assert reply.status_code == 200
        assert sorted(client.aborted) == ended
        if path == "/abort_requests":
            assert reply.json() == {"status": "aborted", "aborted": len(ended)}
        else:
            assert reply.content == b""

    run(work)


# -- vLLM --------------------------------------------------------------------------------------------------------------


def test_vllm_group_is_joined_as_vllm_joins_it() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        assert await post(server, "/init_weight_transfer_engine", init_info=GROUP) == {
            "message": "Weight transfer initialized"
        }
        unique_id = base64.b64encode(bytes(128)).decode()
        by_id = {"nccl_unique_id_b64": unique_id, "rank_offset": 1, "world_size": 2}
        await post(server, "/init_weight_transfer_engine", init_info=by_id)
        await post(server, "/shutdown_weight_transfer_engine")
        first, second, leave = client.commands
        assert isinstance(first, Join)
        assert isinstance(second, Join)
        assert (first.group.kind, first.group.backend, first.group.port) == ("stateless", "gloo", 29500)
        assert (second.group.backend, second.group.unique_id) == ("nccl", unique_id)
        assert leave == Leave(name="vllm")

    run(work)


@pytest.mark.parametrize("init_info", [{}, {"packed": True}, None, [], "x", [{**GROUP}, {**GROUP, "rank_offset": 2}]])
def test_vllm_group_of_another_kind_is_refused(init_info: Any) -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        body = await post(server, "/init_weight_transfer_engine", 400, init_info=init_info)
        assert body["error"]["message"]
        assert client.commands == []

    run(work)


def test_vllm_update_takes_effect_when_it_is_finished_and_takes_its_label_then() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        assert await post(server, "/start_weight_update") == {"message": "Weight update started"}
        info = described(client, count=1, dtypes="dtype_names")
        assert await post(server, "/update_weights", update_info={**info, "packed": True}) == {
            "message": "Weights updated"
        }
        assert client.weights.version == "0"
        body = await post(server, "/finish_weight_update", weight_version="policy-3")
        assert body == {"message": "Weight update finished", "weight_version": "policy-3"}
        (feed,), (end,) = client.asked(Feed), client.asked(EndFeed)
        assert (feed.piece.packed, feed.piece.bucket_bytes, feed.piece.group) == ("vllm_packed", 1 << 30, "vllm")
        assert end.version == "policy-3"
        assert (await server.http.get("/weight_info")).json() == {"weight_version": "policy-3"}

    run(work)


def test_vllm_lists_may_be_left_out_from_the_second_time_on_and_the_form_is_the_groups() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        group = {**GROUP, "packed": True, "packed_buffer_size_bytes": 4096}
        await post(server, "/init_weight_transfer_engine", init_info=group)
        info = described(client, count=1, dtypes="dtype_names")
        updates: list[Any] = [info, [{"names": [], "dtype_names": [], "shapes": []}] * 2]
        for update in updates:
            await post(server, "/start_weight_update")
            await post(server, "/update_weights", update_info=update)
            await post(server, "/finish_weight_update")
        first, second = client.asked(Feed)
        assert first.piece == second.piece
        assert (first.piece.packed, first.piece.bucket_bytes) == ("vllm_packed", 4096)
        assert client.weights.version == "2"

    run(work)


def test_vllm_update_without_a_start_commits_with_its_last_tensor() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        await post(server, "/update_weights", update_info=described(client, count=1, dtypes="dtype_names"))
        assert client.weights.version == "1"
        await post(server, "/finish_weight_update")

    run(work)


def test_vllm_finish_of_an_update_with_missing_tensors_is_refused_by_name() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        await post(server, "/start_weight_update")
        await post(server, "/finish_weight_update", 400)
        await post(server, "/start_weight_update")
        await post(server, "/update_weights", update_info=described(client, dtypes="dtype_names"))
        body = await post(server, "/finish_weight_update", 400)
        assert "never came" in body["error"]["message"]
        assert client.weights.version == "0"

    run(work)


def test_vllm_finish_never_says_that_a_version_serves_which_does_not() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        refused = await post(server, "/finish_weight_update", 400, weight_version="policy-3")
        assert refused["error"]["code"] == "tensors-missing"
        assert "policy-3" in refused["error"]["message"]
        await post(server, "/start_weight_update")
        await post(server, "/update_weights", update_info=described(client, count=1, dtypes="dtype_names"))
        for _ in range(2):  # the answer to the first may have been lost
            body = await post(server, "/finish_weight_update", weight_version="policy-3")
            assert body["weight_version"] == "policy-3"

    run(work)


@pytest.mark.parametrize(
    "body",
    [
        {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "ipc_handles_pickled": "gASV"}},
        {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "ipc_handles": [{}]}},
        {"weight_dir": None},
    ],
)
def test_vllm_pickled_handles_are_refused_with_the_safe_way(body: dict[str, Any]) -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        reply = await post(server, "/update_weights", 400, **body)
        assert reply["error"]["code"] == "pickle-refused"
        assert "instead" in reply["error"]["message"]
        assert client.commands == []

    run(work)


def test_vllm_update_from_a_folder_is_prime_rls() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        call = asyncio.create_task(server.http.post("/update_weights", json={"weight_dir": "/weights/step_4"}))
        await client.wait_weights(lambda now: now.update is not None, 10)
        client.end_update("committed")
        reply: httpx.Response = await call
        assert (reply.status_code, reply.json()["status"]) == (200, "ok")
        assert client.asked(Begin)[0].request.order == DiskOrder(path="/weights/step_4")

    run(work)


def test_vllm_sleep_and_wake_up() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": False}
        reply = await server.http.post("/sleep?level=2&mode=keep")
        assert reply.json() == {"status": "sleeping", "level": 2}
        client.set_weights(paused=True, sleeping=("weights", "kv_cache"))
        assert (await server.http.get("/is_sleeping")).json() == {"is_sleeping": True}
        assert (await server.http.get("/is_paused")).json() == {"is_paused": True}
        reply = await server.http.post("/wake_up?tags=weights")
        assert reply.json() == {"status": "sleeping", "tags": ["weights"]}
        client.set_weights(sleeping=("kv_cache",))
        reply = await server.http.post("/wake_up")
        assert reply.json() == {"status": "awake", "tags": ["weights", "kv_cache"]}
        assert client.commands == [
            Pause(mode="keep"),
            Release(tags=("weights", "kv_cache")),
            Restore(tags=("weights",)),
            Restore(tags=("kv_cache",)),
            Resume(),
        ]
        for wrong in ("/sleep?level=3", "/sleep?mode=nap", "/wake_up?tags=disk"):
            assert (await server.http.post(wrong)).status_code == 400

    run(work)


def test_vllm_checker_compares_with_the_callers_baseline() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        body = await post(server, "/weight_checker", action="checksum")
        assert body == {"checksums": {"rank0": "a0", "rank1": "a1"}}
        same = await post(server, "/weight_checker", action="compare", baseline=body["checksums"])
        assert same == {"match": True, "mismatches": [], "ranks": ["rank0", "rank1"]}
        other = await post(server, "/weight_checker", action="compare", baseline={"rank0": "a0", "rank1": "b1"})
        assert other == {"match": False, "mismatches": ["rank1"], "ranks": ["rank0", "rank1"]}
        assert await post(server, "/weight_checker", action="reset") == {"status": "reset"}
        await post(server, "/weight_checker", 400, action="compare")

    run(work, FedClient(body={"digest": "aa", "ranks": ["a0", "a1"]}))


def test_vllm_world_size_and_prefix_cache() -> None:
    async def work(server: FakeServer, client: FedClient) -> None:
        assert (await server.http.get("/get_world_size?include_dp=true")).json() == {"world_size": 1}
        assert (await server.http.post("/reset_prefix_cache?reset_running_requests=false")).json() == {"success": True}
        assert client.commands == [FlushCache()]

    run(work)
