"""The real thing: a Ray cluster of three nodes on this machine, ``gtp-serve cluster`` on it, real engines.

One cluster and one fleet for all tests, since each takes many seconds to start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SMALL, random_tensors, write_hf
from cluster_example import example, serves
from cluster_kills import Kills, fleet_pid
from cluster_streams import Streams
from cluster_world import PATIENCE, Front, World
from safetensors.torch import save_file
from serve_command import Command

from gtp_serve.layout.huggingface import stored_name
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.refit import Publisher

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(1800)]

CONFIG = replace(SMALL, max_context=2048, dtype="float32")
SIZE = sum(tensor.nbytes for tensor in random_tensors(CONFIG).values())
TESTS = Path(__file__).parents[1]
LONG = os.environ.get("GTP_SERVE_LONG_TESTS") == "1"
SEEDS = range(50) if LONG else (10,)  # a worker, while an update is verified and not decided

long = pytest.mark.skipif(not LONG, reason="many processes more: set GTP_SERVE_LONG_TESTS=1")


def weights(seed: int) -> dict[str, torch.Tensor]:
    return random_tensors(CONFIG, seed)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two checkpoints of one model."""
    root = tmp_path_factory.mktemp("fleet")
    for name in ("first", "second"):
        write_hf(root / name, CONFIG, max_position_embeddings=CONFIG.max_context)
    other = {stored_name(name, CONFIG.family): tensor for name, tensor in weights(7).items()}
    for old in (root / "second").glob("*.safetensors"):
        save_file(other, old)
    return root / "first", root / "second"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    made = World()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module")
def fleet(world: World, folders: tuple[Path, Path]) -> Front:
    front = world.front(folders[0], "--replicas", "2")
    front.until(lambda body: [one["state"] for one in body["replicas"]] == ["ready", "ready"])
    return front


def next_version(front: Front) -> str:
    used = [front.weights()["version"], *(one["version"] for one in front.weights()["history"])]
    return str(max(int(version.partition("+")[0]) for version in used) + 1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


def many(front: Front) -> list[Any]:
    with ThreadPoolExecutor(16) as pool:
        jobs = [pool.submit(front.generate, [3, index % 20 + 1, 7, index % 5 + 1], 12) for index in range(64)]
        return [job.result()["output_ids"] for job in jobs]


def test_every_route_answers_as_on_one_machine(fleet: Front) -> None:
    assert fleet.get("/ready") == {"status": "ready"}
    assert fleet.get("/health")["status"] == "healthy"
    info = fleet.get("/model_info")
    # A Hugging Face folder says one number of rows for both: those of its vocabulary and those that are there.
    assert (info["weight_version"], info["fleet"], info["vocab_size"]) == ("0", "default", CONFIG.vocab_rows)
    answer = fleet.generate([3, 7, 11], return_logprob=True)
    assert len(answer["output_ids"]) == 8 == len(answer["meta_info"]["output_token_logprobs"])
    completion = fleet.post("/v1/completions", {"prompt": [3, 7, 11], "max_tokens": 4, "temperature": 0})
    assert completion["usage"]["completion_tokens"] <= 4
    assert fleet.get("/v1/models")["data"][0]["id"] == "first"
    assert set(fleet.get("/weights/layout")["tensors"]) == set(weights(0))
    assert fleet.get("/openapi.json")["openapi"]
    assert fleet.call("POST", "/generate", {"input_ids": [999]})[0] == 400
    assert fleet.call("POST", "/weights/updates", {"version": "5"})[0] == 400
    sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": [3, 7, 11], "sampling_params": sampling, "stream": True}).encode()
    request = urllib.request.Request(fleet.url + "/generate", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as lines:
        events = [line for line in lines if line.startswith(b"data: ")]
    assert json.loads(events[-2][6:])["output_ids"] == answer["output_ids"][:5]


def test_weights_shows_the_fleet_and_metrics_have_replica_labels(fleet: Front) -> None:
    body = fleet.weights()
    names = {one["name"] for one in body["replicas"]}
    assert len(names) == 2 == body["wanted"]
    assert {one["version"] for one in body["replicas"]} == {body["version"]}
    fleet.generate([1, 2, 3])
    lines = fleet.call("GET", "/metrics")[1].splitlines()
    counted = [line for line in lines if line.startswith("gtp_serve_replica_generation_tokens_total{")]
    assert {name for name in names for line in counted if f'replica="{name}"' in line} == names


def test_no_death_of_a_replicas_node_takes_the_fleets_actor_along(world: World, fleet: Front) -> None:
    variables = Path(f"/proc/{fleet_pid(world.address)}/environ").read_text().split("\0")
    head = world.cluster.head_node.all_processes["raylet"][0].process.pid
    assert f"RAY_RAYLET_PID={head}" in variables


@long
def test_two_replicas_and_two_ranks_on_two_nodes_give_what_one_gives(
    world: World, fleet: Front, folders: tuple[Path, Path]
) -> None:
    wide = world.front(folders[0], "--tp", "2", "--placement", "spread", "--fleet", "wide")
    try:
        assert many(wide) == many(fleet)
        before = fleet.generate([3, 7, 11], return_logprob=True)["meta_info"]["output_token_logprobs"]
        after = wide.generate([3, 7, 11], return_logprob=True)["meta_info"]["output_token_logprobs"]
        assert [one[0] for one in after] == pytest.approx([one[0] for one in before], abs=1e-5)
        for transport in ("http", "distributed"):  # the second rank's bytes go to the second node
            Publisher(wide.url, transport=transport).push(weights(3), next_version(wide))
        loads = [one["running"] + one["waiting"] for one in fleet.weights()["replicas"]]
        assert len(loads) == 2
    finally:
        wide.command.process.send_signal(signal.SIGTERM)
        assert wide.command.end()[0] == 0


@pytest.mark.parametrize("transport", ["memory", "http", "distributed"])
def test_one_copy_leaves_the_trainer_whatever_way_it_comes(fleet: Front, transport: Any) -> None:
    version = next_version(fleet)
    report = Publisher(fleet.url, transport=transport).push(weights(int(version)), version)

    assert report.state == "committed"
    assert report.sent_bytes / SIZE <= 1.001
    checksum = fleet.get("/weights/checksum")
    assert set(checksum["replicas"].values()) == {report.digest} == {checksum["digest"]}
    assert fleet.generate([3, 7, 11])["meta_info"]["weight_version"] == version


def test_a_late_replica_takes_nothing_from_the_trainer(fleet: Front) -> None:
    version = next_version(fleet)
    Publisher(fleet.url, transport="http").push(weights(int(version)), version)
    before = fleet.weights()
    lost = before["replicas"][0]
    os.kill(lost["pid"], signal.SIGKILL)

    def whole(body: Any) -> bool:
        states = {one["name"]: one["state"] for one in body["replicas"]}
        return lost["name"] not in states and list(states.values()) == ["ready", "ready"]

    after = fleet.until(whole)
    assert after["caught_up_bytes"] - before["caught_up_bytes"] >= SIZE
    assert {one["version"] for one in after["replicas"]} == {version}
    assert len(set(fleet.get("/weights/checksum")["replicas"].values())) == 1


def test_a_rollback_takes_all_replicas_back(fleet: Front) -> None:
    digests = [fleet.get("/weights/checksum")["digest"]]
    before = fleet.weights()["version"]
    version = next_version(fleet)
    digests.append(Publisher(fleet.url, transport="memory").push(weights(int(version)), version).digest)

    assert fleet.post("/weights/rollback", {"wait": True})["version"] == before
    assert fleet.get("/weights/checksum")["digest"] == digests[0] != digests[1]


@long
def test_trainer_actors_push_and_a_rollout_worker_samples(
    world: World, fleet: Front, folders: tuple[Path, Path]
) -> None:
    version = next_version(fleet)
    words = [str(TESTS / "cluster_trainers.py"), world.address, "default", str(folders[0]), version]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=10 * PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])

    assert told["state"] == "committed"
    assert told["ratio"] == 1.0  # two padded shards of each matrix, and of norms one copy
    assert fleet.weights()["version"] == told["version"]
    assert [group[0] == group[1] for group in told["before"]] == [True, True]
    assert told["versions"] == [[[told["version"], 0, 6]]] * 2
    assert told["after"][0] == fleet.generate([3, 7, 11], 6)["output_ids"]
    assert told["score_error"] < 1e-5


@long
def test_the_grpo_example_closes_the_loop_on_ray(world: World, fleet: Front, folders: tuple[Path, Path]) -> None:
    base = next_version(fleet)
    Publisher(fleet.url, transport="disk").push(folders[0], base)
    words = ["--ckpt", str(folders[0]), "--address", world.address, "--steps", "2", "--dtype", "float32"]
    done = subprocess.run(
        [sys.executable, str(TESTS.parent / "examples" / "grpo_ray.py"), *words],
        capture_output=True, text=True, timeout=10 * PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert [step["version"] for step in steps] == [f"{base}+1", f"{base}+2"]
    assert [step["stale"] for step in steps] == [[], []]
    assert max(step["logprob_error"] for step in steps) < 1e-4  # trainer and fleet have the same weights
    assert fleet.weights()["version"] == f"{base}+2"


@long
def test_a_batch_that_was_killed_goes_on_where_it_was_cut(world: World, fleet: Front, tmp_path: Path) -> None:
    rows = [{"input_ids": [3, 7, number % 20 + 1]} for number in range(60)] + [{"nothing": 1}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    words = ["--in", str(tmp_path / "prompts.jsonl"), "--out", str(out), "--address", world.address, "--batch", "4"]
    words += ["--max-new-tokens", "48", "--temperature", "0", "--workers", "1", "--quiet"]
    command = [sys.executable, "-m", "gtp_serve.cluster.batch", *words]

    def written() -> list[Any]:
        return [json.loads(line) for part in out.glob("part-*.jsonl") for line in part.read_text().splitlines()]

    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + PATIENCE
    while len(written()) < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    first.wait()
    before = len(written())
    ended = subprocess.run(command, capture_output=True, text=True, timeout=10 * PATIENCE)
    assert ended.returncode == 0, ended.stderr[-3000:]
    done = json.loads(ended.stdout.splitlines()[-1])

    assert 8 <= before < 61
    assert before <= done["before"] <= before + 4  # a part that was on its way may still have been finished
    assert done["rows"] + done["before"] == 61
    lines = written()
    assert sorted(line["id"] for line in lines) == sorted(f"prompts.jsonl:{number}" for number in range(61))
    assert [line["id"] for line in lines if line["error"]] == ["prompts.jsonl:60"]
    line = next(line for line in lines if line["id"] == "prompts.jsonl:47")
    assert line["output_ids"] == fleet.generate([3, 7, 8], 48)["output_ids"]
    assert len(line["logprobs"]) == 48
    assert line["weight_versions"] == [[fleet.weights()["version"], "0", "48"]]


@long
def test_smollm2_on_two_replicas_answers_as_on_one_and_takes_one_copy(world: World, demo_dir: Path) -> None:
    options = ["--ckpt", str(demo_dir / "megatron"), "--tokenizer", str(demo_dir / "hf"), "--kv-memory", "256MiB"]
    texts = [f"{number} things to know about the {thing}:" for number in range(16) for thing in ("sea", "sun")]

    def answers(front: Front) -> list[Any]:
        sampling = {"max_new_tokens": 24, "temperature": 0}
        with ThreadPoolExecutor(32) as pool:
            bodies = [{"text": text, "sampling_params": sampling} for text in texts for _ in range(2)]
            return [reply["text"] for reply in pool.map(lambda body: front.post("/generate", body), bodies)]

    one = Command(*options, "--port", "0", "--device", "cpu", "--threads", "1")
    try:
        expected = answers(Front(one))
    finally:
        one.stop()
    front = world.front(demo_dir / "megatron", *options[2:], "--replicas", "2", "--fleet", "smollm")
    try:
        front.until(lambda body: [each["state"] for each in body["replicas"]] == ["ready", "ready"])
        assert answers(front) == expected
        each = front.call("GET", "/metrics")[1].splitlines()
        counted = [line for line in each if line.startswith("gtp_serve_replica_generation_tokens_total{")]
        assert len(counted) == 2
        assert all(float(line.rpartition(" ")[2]) > 64 * 24 / 5 for line in counted)  # both have worked

        with closing(open_checkpoint(demo_dir / "hf")) as checkpoint:
            tensors = {name: tensor * 1.5 for name, tensor in checkpoint.tensors()}
            report = Publisher(front.url, transport="http").push(tensors, "1")
        assert report.sent_bytes / sum(tensor.nbytes for tensor in tensors.values()) <= 1.001
        assert set(front.get("/weights/checksum")["replicas"].values()) == {report.digest}
        assert answers(front) != expected
    finally:
        front.command.process.send_signal(signal.SIGTERM)
        assert front.command.end()[0] == 0


def test_a_replica_too_many_goes_without_a_lost_token_and_so_does_the_fleet(
    world: World, folders: tuple[Path, Path]
) -> None:
    words = ["--min-replicas", "1", "--max-replicas", "2", "--target-requests", "4", "--drain-timeout", "120"]
    front = world.front(folders[0], *words, "--up-after", "0.5", "--down-after", "1", "--fleet", "scaled")
    first = front.weights()["replicas"][0]["name"]
    with Streams(front) as streams:
        streams.want(8)
        grown = front.until(lambda body: [one["state"] for one in body["replicas"]] == ["ready", "ready"])
        assert grown["replicas"][0]["name"] == first
        time.sleep(2)  # both have streams
        streams.want(3)
        going = front.until(lambda body: [one["state"] for one in body["replicas"]] == ["ready", "draining"])
        second = going["replicas"][1]
        assert second["running"] > 0  # or nothing would have been seen here
        front.until(lambda body: [one["name"] for one in body["replicas"]] == [first])
        assert not Path(f"/proc/{second['pid']}").exists()
        streams.join()
        streams.want(16)
        time.sleep(1)
        streams.want(0)
        front.command.process.send_signal(signal.SIGTERM)
    assert front.command.end()[0] == 0
    assert streams.wrong == []
    assert streams.whole >= 8 + 16


@long
def test_ray_serve_runs_the_example_as_an_application(world: World, folders: tuple[Path, Path], tmp_path: Path) -> None:
    port = free_port()
    file, key = example(tmp_path, folders[0], port)
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent)}
    command = [str(Path(sys.executable).with_name("serve")), "run", "--address", world.address, str(file)]
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        serves(port, key, weights(7))
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(PATIENCE)


@long
def test_serve_deploy_hands_the_example_to_a_cluster(folders: tuple[Path, Path], tmp_path: Path) -> None:
    port, board = free_port(), free_port()
    file, key = example(tmp_path, folders[0], port)
    command, where = str(Path(sys.executable).with_name("serve")), ["--address", f"http://127.0.0.1:{board}"]
    made = World(2, dashboard=board)
    try:
        subprocess.run([command, "deploy", *where, str(file)], check=True, timeout=2 * PATIENCE)
        front = serves(port, key, weights(7))
        assert front.get("/model_info")["ray_dashboard"].endswith(f":{board}")
        subprocess.run([command, "shutdown", "--yes", *where], check=True, timeout=2 * PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while front.call("GET", "/ready")[0] == 200 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert front.call("GET", "/ready")[0] != 200
    finally:
        made.close()


@long
def test_whoever_dies_no_answer_is_mixed_and_the_committed_version_is_everywhere(
    world: World, fleet: Front, folders: tuple[Path, Path]
) -> None:
    kills = Kills(world, fleet, folders)
    for seed in SEEDS:
        seen = kills.run(seed)
        print(seen.line())


@long
def test_a_front_that_ends_leaves_no_replica_behind(world: World, fleet: Front) -> None:
    pids = [one["pid"] for one in fleet.weights()["replicas"]]
    fleet.command.process.send_signal(signal.SIGTERM)
    assert fleet.command.end()[0] == 0
    deadline = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    said = [line["text"] for line in fleet.command.lines if line["event"] == "other"]
    assert not [line for line in said if "SIGTERM received" in line]  # by Ray, which then aborts within 3 seconds
