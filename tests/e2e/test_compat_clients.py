"""Recorded calls of slime, TRL and others against the real command: a gloo process plays their trainer's rank 0."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkpoint_files import SMALL, random_tensors, write_hf
from client_sequence import played
from foreign_trainer import NamedGroup, free_port
from parity.model_harness import fill
from rank_places import Absent
from safetensors.torch import save_file
from serve_command import Command
from torch import Tensor

from gtp_serve.models.decoder import build_decoder
from gtp_serve.refit.digest import combine
from gtp_serve.refit.verify import rank_digest

pytestmark = [pytest.mark.e2e, pytest.mark.distributed]

CLIENTS = Path(__file__).parents[1] / "data" / "clients"
CONFIG = replace(SMALL, max_context=2048, dtype="float32")
NORM = "model.norm.weight"
BUCKET_BYTES = 8_000
LONG = 1000
"""Tokens of a request that runs while weights change."""


@dataclass
class Served:
    """A running server whose weights these tests change again and again."""

    http: httpx.Client
    url: str
    ranks: int
    folder: Path
    pushes: int = 0

    def fresh(self) -> tuple[Path, dict[str, Tensor]]:
        """Other weights than all before, as a trainer has them."""
        self.pushes += 1
        folder = self.folder / f"push-{self.pushes}"
        write_hf(folder, CONFIG)
        tensors = random_tensors(CONFIG, seed=1000 + self.pushes)
        save_file(tensors, folder / "model.safetensors")
        return folder, tensors

    def play(self, client: str, folder: Path, **options: Any) -> list[dict[str, Any]]:
        recording = CLIENTS / f"{client}.json"
        return played(self.url, recording, folder, ranks=self.ranks, bucket_bytes=BUCKET_BYTES, **options)

    def get(self, path: str) -> Any:
        return self.http.get(path).json()

    def generate(self, count: int = 4) -> Any:
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        reply = self.http.post("/generate", json={"input_ids": [3, 1, 4], "sampling_params": sampling})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def check_serves(self, tensors: Mapping[str, Tensor], version: str) -> None:
        assert self.get("/weights/checksum")["digest"] == digest_of(tensors, self.ranks)
        assert self.generate()["meta_info"]["weight_version"] == version
        assert self.get("/is_paused") == {"is_paused": False}


def digest_of(tensors: Mapping[str, Tensor], ranks: int) -> str:
    """What a server that has loaded these weights says of them."""
    digests = []
    for rank in range(ranks):
        place = Absent(rank, ranks) if ranks > 1 else None
        decoder = build_decoder(
            CONFIG, dtype=torch.float32, device="cpu", tp_rank=rank, tp_size=ranks, collective=place
        )
        fill(decoder, tensors)
        digests.append(rank_digest(decoder.targets()))
    return combine(digests)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("compat")
    write_hf(folder / "first", CONFIG, max_position_embeddings=CONFIG.max_context)
    command = Command(
        *("--ckpt", str(folder / "first"), "--no-tokenizer", "--port", "0", "--max-running", "8"),
        *("--dtype", "float32", "--tp", str(request.param)),
    )
    try:
        url = command.url()
        with httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as http:
            yield Served(http, url, request.param, folder)
    finally:
        command.stop()


def check_answers(client: str, calls: list[dict[str, Any]]) -> None:
    """Each recorded call was made and got 200 and at least the fields that its client reads."""
    recorded = json.loads((CLIENTS / f"{client}.json").read_text(encoding="utf-8"))["steps"]
    assert list(dict.fromkeys(call["path"] for call in calls)) == [step["path"] for step in recorded]
    for call in calls:
        assert call["status"] == 200, call
        answer, expected = call["answer"], call["expected"]
        assert answer == expected or expected.items() <= answer.items(), call


@pytest.mark.parametrize(
    ("client", "labelled"),
    [
        ("slime", True),
        ("trl", False),
        ("vllm", True),
        ("sglang_flattened", False),
        ("slime_disk", True),
        ("prime_rl", False),
    ],
)
def test_a_clients_own_calls_bring_its_weights_bit_for_bit(server: Served, client: str, labelled: bool) -> None:
    folder, tensors = server.fresh()
    before = server.get("/weights")["version"]
    label = f"step-{server.pushes}" if labelled else ""
    check_answers(client, server.play(client, folder, weight_version=label))
    version = server.get("/weights")["version"]
    assert version == label or (not labelled and version not in ("", before))
    server.check_serves(tensors, version)


def test_without_a_label_the_number_in_the_live_one_is_raised(server: Served) -> None:
    server.http.post("/update_weight_version", json={"new_version": "iter_0000041"})
    folder, tensors = server.fresh()
    check_answers("trl", server.play("trl", folder))
    server.check_serves(tensors, "iter_0000042")


def test_an_incomplete_slime_update_is_refused_by_name_and_changes_nothing(server: Served) -> None:
    good, tensors = server.fresh()
    check_answers("slime", server.play("slime", good, weight_version="good"))
    bad, _ = server.fresh()
    calls = {call["path"]: call for call in server.play("slime", bad, weight_version="bad", leave_out=[NORM])}
    refused = calls["/continue_generation"]
    assert refused["status"] == 400
    assert refused["answer"]["success"] is False
    assert NORM in refused["answer"]["message"]
    assert server.get("/is_paused") == {"is_paused": True}
    assert server.get("/weights")["version"] == "good"
    assert server.http.post("/continue_generation", json={}).status_code == 200
    server.check_serves(tensors, "good")


def test_an_incomplete_trl_update_is_refused_by_name_and_the_old_weights_go_on(server: Served) -> None:
    good, tensors = server.fresh()
    check_answers("slime", server.play("slime", good, weight_version="kept"))
    bad, _ = server.fresh()
    calls = {call["path"]: call for call in server.play("trl", bad, leave_out=[NORM])}
    assert calls["/finish_weight_update"]["status"] == 400
    assert NORM in calls["/finish_weight_update"]["answer"]["error"]["message"]
    assert calls["/resume"]["status"] == 200
    server.check_serves(tensors, "kept")


def test_a_wrong_tensor_is_refused_at_its_bucket_and_its_trainer_is_not_left_hanging(server: Served) -> None:
    good, tensors = server.fresh()
    check_answers("slime", server.play("slime", good, weight_version="right"))
    bad, _ = server.fresh()
    calls = server.play("slime", bad, weight_version="wrong", rename={NORM: "model.normal.weight"})
    buckets = [call for call in calls if call["path"] == "/update_weights_from_distributed"]
    wrong = [call for call in buckets if "model.normal.weight" in call["answer"]["message"]]
    assert wrong
    assert wrong[0]["status"] == 400
    last = next(call for call in calls if call["path"] == "/continue_generation")
    assert last["status"] == 400
    assert server.http.post("/continue_generation", json={}).status_code == 200
    server.check_serves(tensors, "right")


def test_a_trainer_that_dies_in_a_bucket_changes_nothing_and_the_next_one_is_taken(server: Served) -> None:
    good, tensors = server.fresh()
    check_answers("slime", server.play("slime", good, weight_version="before"))
    bad, _ = server.fresh()
    calls = server.play("slime", bad, weight_version="lost", die_at=2)
    assert [call["path"] for call in calls].count("/update_weights_from_distributed") == 1
    assert server.http.post("/continue_generation", json={}).status_code == 400
    assert server.http.post("/continue_generation", json={}).status_code == 200
    server.check_serves(tensors, "before")
    after, tensors = server.fresh()
    check_answers("slime", server.play("slime", after, weight_version="after"))
    server.check_serves(tensors, "after")


def test_requests_that_run_during_an_update_without_a_pause_end_on_the_weights_they_began_with(server: Served) -> None:
    folder, tensors = server.fresh()
    check_answers("slime", server.play("slime", folder, weight_version="old"))
    folder, tensors = server.fresh()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.generate, LONG) for _ in range(2)]
        check_answers("sglang_flattened", server.play("sglang_flattened", folder))
        replies = [reply.result(60) for reply in running]
    now = server.get("/weights")
    assert now["version"] == "old-1"
    assert now["history"][0]["in_flight"] == "wait"
    for reply in replies:
        spans = reply["meta_info"]["weight_versions"]
        assert [(span["start"], span["end"]) for span in spans] == [(0, LONG)]
    assert "old" in {reply["meta_info"]["weight_version"] for reply in replies}
    server.check_serves(tensors, "old-1")


def test_a_server_that_is_stopped_while_a_group_is_open_ends_cleanly(tmp_path: Path) -> None:
    write_hf(tmp_path / "first", CONFIG, max_position_embeddings=CONFIG.max_context)
    command = Command(
        *("--ckpt", str(tmp_path / "first"), "--no-tokenizer", "--port", "0", "--max-running", "8"),
        *("--dtype", "float32", "--tp", "2"),
    )
    try:
        url, port = command.url(), free_port()
        fields = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
        with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            body = {**fields, "group_name": "left-open", "backend": "gloo"}
            joining = pool.submit(http.post, "/init_weights_update_group", json=body)
            group = NamedGroup("left-open", port, 3)
            assert joining.result(60).status_code == 200
        command.process.send_signal(signal.SIGINT)
        code, seconds = command.end()
        group.close()
        assert code == 0
        assert seconds < 10
        assert [line for line in command.lines if line["event"] == "other"] == []
    finally:
        command.stop()
