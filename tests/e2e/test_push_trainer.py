"""A trainer pushes into a real server: from its state dict, from its GTP shards, and through the death of a rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from serve_command import Command

from gtp_serve.errors import UpdateFailed, UpdateRefused
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.refit import Publisher

pytestmark = [pytest.mark.e2e, pytest.mark.distributed]

DATA = Path(__file__).parents[1] / "data" / "megatron"
CKPT = DATA / "llama-tp1-pp1-gtp2-pad16-padded"
TIED = DATA / "qwen2-tp1-pp1-gtp2-pad128-padded"
SCRIPT = Path(__file__).parents[1] / "trainer_process.py"
VERSIONS = (str(number) for number in range(1, 1000))


def serve(ckpt: Path, *words: str) -> Iterator[str]:
    command = Command("--ckpt", str(ckpt), "--no-tokenizer", "--port", "0", "--max-running", "4", *words)
    try:
        yield command.url()
    finally:
        command.stop()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    yield from serve(CKPT)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[str]:
    yield from serve(TIED, "--tp", "2")


def digest_of(url: str) -> str:
    reply = httpx.get(f"{url}/weights/checksum", trust_env=False, timeout=30)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["digest"])


def values_of(ckpt: Path, factor: float = 1) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(ckpt)
    return {name: tensor * factor for name, tensor in checkpoint.tensors()}


@pytest.mark.parametrize("transport", ["distributed", "memory", "http", "auto"])
def test_other_weights_and_the_first_ones_again_end_with_the_first_digest(url: str, transport: Any) -> None:
    first = digest_of(url)
    publisher = Publisher(url, transport=transport)
    changed = publisher.push(values_of(CKPT, 0.5), next(VERSIONS))

    assert changed.state == "committed"
    assert changed.digest == digest_of(url) != first

    back = publisher.push(values_of(CKPT), next(VERSIONS), base=changed.version, in_flight="recompute")
    assert back.digest == digest_of(url) == first
    assert httpx.get(f"{url}/weights", trust_env=False).json()["version"] == back.version


def test_a_path_is_read_by_the_server(url: str) -> None:
    first = digest_of(url)

    assert Publisher(url).push(CKPT, next(VERSIONS)).digest == first


def test_a_dry_run_changes_nothing(url: str) -> None:
    first = digest_of(url)
    report = Publisher(url, transport="distributed").push(values_of(CKPT, 2), next(VERSIONS), dry_run=True)

    assert report.state == "verified"
    assert digest_of(url) == first


def test_an_update_that_cannot_be_is_refused_in_the_servers_words(url: str) -> None:
    first = digest_of(url)
    publisher = Publisher(url, transport="distributed")
    values = values_of(CKPT)
    with pytest.raises(UpdateRefused) as refused:
        publisher.push(values, next(VERSIONS), base="nothing")
    assert refused.value.code == "base-mismatch"

    name = "model.layers.1.mlp.up_proj.weight"
    values[name] = values[name].clone()
    values[name][3, 4] = float("nan")
    with pytest.raises(UpdateFailed, match=r"up_proj|gate_up|fc1|mlp"):
        publisher.push(values, next(VERSIONS))
    assert digest_of(url) == first


class Ranks:
    """All ranks of a trainer."""

    def __init__(self, url: str, ckpt: Path, size: int, folder: Path, **spec: Any) -> None:
        meet = folder / f"meet-{time.monotonic_ns()}"
        common = {"url": url, "ckpt": str(ckpt), "size": size, "meet": str(meet), **spec}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), json.dumps({**common, "rank": rank})],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            )
            for rank in range(size)
        ]

    def event(self, rank: int) -> dict[str, Any]:
        stream = self.processes[rank].stdout
        assert stream is not None
        told: dict[str, Any] = json.loads(stream.readline())
        return told

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def test_gtp_shards_of_two_processes_make_the_digest_of_a_cold_load_on_two_engine_ranks(
    two_ranks: str, tmp_path: Path
) -> None:
    first = digest_of(two_ranks)
    digests = []
    for factor in (0.5, 1):
        ranks = Ranks(
            two_ranks, TIED, 2, tmp_path, grid={"gtp": 2, "alignment": 128}, transport="distributed",
            version=next(VERSIONS), factor=factor,
        )  # fmt: skip
        told = [ranks.event(rank) for rank in range(2)]
        ranks.end()
        assert [one["event"] for one in told] == ["pushed"] * 2, told
        assert sum(one["sent"] for one in told) == sum(t.numel() * 2 for t in values_of(TIED).values())
        digests.append(told[0]["digest"])

    assert digests[0] != first
    assert digests[1] == first == digest_of(two_ranks)


def test_two_processes_write_into_shared_memory_together(url: str, tmp_path: Path) -> None:
    first = digest_of(url)
    ranks = Ranks(
        url, CKPT, 2, tmp_path, grid={"gtp": 2, "alignment": 16}, transport="auto", version=next(VERSIONS)
    )  # fmt: skip
    told = [ranks.event(rank) for rank in range(2)]
    ranks.end()

    assert [(one["event"], one.get("transport"), one.get("digest")) for one in told] == [
        ("pushed", "memory", first)
    ] * 2


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_trainer_rank_that_ends_in_the_middle_is_named_and_the_next_push_works(
    url: str, tmp_path: Path, death: signal.Signals
) -> None:
    first, grid = digest_of(url), {"gtp": 2, "alignment": 16}
    ranks = Ranks(
        url, CKPT, 2, tmp_path, grid=grid, transport="distributed", version=next(VERSIONS), factor=0.5, pause=0.1,
        leave=False,
    )  # fmt: skip
    try:
        assert ranks.event(1)["event"] == "sending"
        os.kill(ranks.processes[1].pid, death)
        killed = time.monotonic()
        told = [ranks.event(0) for _ in range(2)][1]
        seconds = time.monotonic() - killed
        threads = ranks.event(0)["names"]
    finally:
        ranks.end()

    name = f"trainer rank 1 (pid {ranks.processes[1].pid}, host "
    assert told["event"] == "failed"
    assert told["message"].startswith(name)
    assert seconds < 6
    assert threads == ["MainThread"]
    (record,) = httpx.get(f"{url}/weights", trust_env=False).json()["history"][:1]
    assert (record["state"], record["message"].startswith(name)) == ("aborted", True)
    assert digest_of(url) == first

    assert Publisher(url, transport="distributed").push(values_of(CKPT), next(VERSIONS)).digest == first


def test_an_engine_rank_that_dies_in_the_middle_fails_the_push_and_nobody_hangs(tmp_path: Path) -> None:
    command = Command("--ckpt", str(TIED), "--no-tokenizer", "--port", "0", "--max-running", "4", "--tp", "2")
    ranks = Ranks(
        command.url(), TIED, 2, tmp_path, grid={"gtp": 2, "alignment": 128}, transport="distributed",
        version="1", pause=0.1, leave=False,
    )  # fmt: skip
    try:
        for rank in range(2):
            assert ranks.event(rank)["event"] == "sending"
        os.kill(engine_rank(command.process.pid, 1), signal.SIGKILL)
        killed = time.monotonic()
        told = [ranks.event(rank) for rank in range(2)]
        seconds = time.monotonic() - killed
    finally:
        ranks.end()
        command.stop()

    assert [one["event"] for one in told] == ["failed"] * 2
    assert all(one["message"].startswith("engine rank") for one in told), told
    assert seconds < 10


def engine_rank(server: int, rank: int) -> int:
    """The process of an engine rank, among the server's descendants."""
    parents: dict[int, int] = {}
    words: dict[int, list[str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
                words[int(folder.name)] = folder.joinpath("cmdline").read_text().split("\0")
            except OSError:
                continue
    family = {server}
    for _ in range(4):
        family |= {pid for pid, parent in parents.items() if parent in family}
    (found,) = [
        pid
        for pid in family
        if "--rank" in words.get(pid, []) and words[pid][words[pid].index("--rank") + 1] == str(rank)
    ]
    return found
