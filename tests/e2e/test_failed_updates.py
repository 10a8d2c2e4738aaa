"""Updates that fail, in each way that is quick, and trainers that die: processes hold no more than they held before.

GTP_SERVE_LONG_TESTS=1: a thousand of each.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkpoint_files import SMALL, random_tensors, write_hf
from foreign_trainer import free_port, obey
from safetensors.torch import save_file
from serve_command import Command

pytestmark = [pytest.mark.e2e, pytest.mark.distributed]

CONFIG = replace(SMALL, hidden_size=256, head_dim=64, ffn_size=512, vocab_size=501, vocab_rows=501, dtype="float32")
NORM = "model.norm.weight"
LONG = "GTP_SERVE_LONG_TESTS" in os.environ
FAILURES = 1000 if LONG else 200
DEATHS = 1000 if LONG else 20
GROWTH = 6 << 20
"""Bytes that a process's memory may waver by; one set of these weights is 4 MB, and 160 of them would be 640."""
_SETTLE = 40
_CONNECTIONS = 2
"""Of this test to the server, which may be open at one time and not at another."""


@dataclass(frozen=True)
class Served:
    http: httpx.Client
    command: Command
    folders: dict[str, Path]

    def push(self, version: str, source: dict[str, Any]) -> httpx.Response:
        return self.http.post("/weights/updates", json={"version": version, "source": source, "wait": True})

    def disk(self, version: str, weights: str) -> httpx.Response:
        return self.push(version, {"kind": "disk", "path": str(self.folders[weights])})

    def digest(self) -> str:
        return str(self.http.get("/weights/checksum").json()["digest"])

    def held(self) -> dict[int, tuple[int, int, int]]:
        """Memory, descriptors and threads of each process."""
        return {pid: (resident(pid), *_counts(pid)) for pid in family_of(self.command.process.pid)}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    tensors = random_tensors(CONFIG, 1)
    changes: dict[str, dict[str, torch.Tensor | None]] = {
        "good": {},
        "nan": {NORM: torch.full((CONFIG.hidden_size,), torch.nan)},
        "missing": {NORM: None},
        "misshapen": {NORM: torch.ones(3)},
    }
    for name, changed in changes.items():
        write_hf(tmp_path / name, CONFIG)
        values = {key: value for key, value in {**tensors, **changed}.items() if value is not None}
        save_file(values, tmp_path / name / "model.safetensors")
    words = ("--no-tokenizer", "--port", "0", "--dtype", "float32", "--kv-memory", "4MiB", "--tp", "2")
    command = Command("--ckpt", str(tmp_path / "good"), *words)
    try:
        with httpx.Client(base_url=command.url(), timeout=60, trust_env=False) as http:
            yield Served(http, command, {name: tmp_path / name for name in changes})
    finally:
        command.stop()


def family_of(root: int) -> set[int]:
    """A process and its descendants."""
    family = {root}
    for _ in range(4):
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) in family:
                        family.add(int(entry.name))
    return family


def resident(pid: int) -> int:
    """Bytes in memory that no file is behind."""
    found = re.search(r"^RssAnon:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return 1024 * int(found.group(1))


def _counts(pid: int) -> tuple[int, int]:
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


def check_flat(served: Served, before: dict[int, tuple[int, int, int]]) -> None:
    deadline = time.monotonic() + 20
    while True:  # the last one's threads may still be ending
        after = served.held()
        assert after.keys() == before.keys()
        if all(after[pid][1:] <= before[pid][1:] for pid in before) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    grown = {pid: tuple(b - a for a, b in zip(before[pid], after[pid], strict=True)) for pid in before}
    print(f"bytes, descriptors and threads more than after the first ones: {sorted(grown.values())}")
    for memory, descriptors, threads in grown.values():
        assert memory < GROWTH, grown
        assert descriptors <= _CONNECTIONS, grown
        assert threads <= 1, grown


def fail(served: Served, number: int) -> None:
    """One of the ways to fail, in turn."""
    version = f"f{number}"
    way = number % 6
    if way < 3:
        assert served.disk(version, ("nan", "missing", "misshapen")[way]).status_code == 422
    elif way == 3:
        data = (served.folders["good"] / "model.safetensors").read_bytes()
        params = {"version": version, "wait": "true", "digest": "0" * 32}
        headers = {"content-type": "application/octet-stream"}
        reply = served.http.post("/weights/updates", params=params, content=data, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (422, "digest-mismatch")
    elif way == 4:
        reply = served.push(version, {"kind": "disk", "path": str(served.folders["good"] / "nothing")})
        assert reply.status_code == 422
    else:
        source = {"kind": "distributed", "trainers": 2}
        reply = served.http.post("/weights/updates", json={"version": version, "source": source})
        assert reply.status_code == 202, reply.text
        path = f"/weights/updates/{reply.json()['id']}"
        assert served.http.post(f"{path}/abort", json={"reason": "nobody comes"}).json()["state"] == "aborted"


@pytest.mark.timeout(3600)
def test_w8_hundreds_of_failed_updates_leave_the_servers_processes_as_they_were(served: Served) -> None:
    assert served.disk("first", "good").status_code == 200
    digest = served.digest()
    for number in range(_SETTLE):
        fail(served, number)
    before = served.held()
    for number in range(_SETTLE, FAILURES):
        fail(served, number)
    check_flat(served, before)
    assert served.digest() == digest
    begun = 1 + sum(number % 6 != 4 for number in range(FAILURES))  # what cannot be opened does not even begin
    assert len(served.http.get("/weights").json()["history"]) == min(200, begun)
    assert served.disk("last", "good").json()["digest"] == digest


class Trainer:
    """A process that opens a group with the server's two ranks, and is killed."""

    def __init__(self, served: Served) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["foreign_trainer"])
        self.orders, theirs = context.Pipe()
        port = free_port()
        self.process = context.Process(target=obey, args=("torch", port, 3, theirs, {}, {}))
        self.process.start()
        theirs.close()
        place = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3}
        group = {**place, "group_name": "weights", "backend": "gloo"}
        reply = served.http.post("/init_weights_update_group", json=group)
        assert reply.status_code == 200, reply.text
        assert self.orders.recv() == "open"

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.orders.close()


def die(served: Served, number: int) -> None:
    """A trainer comes and is killed: before it says anything, or while the server waits for what it has told of."""
    trainer = Trainer(served)
    if number % 2:
        trainer.kill()
        return
    body = {"names": [NORM], "dtypes": ["float32"], "shapes": [[CONFIG.hidden_size]], "group_name": "weights"}
    killing = threading.Timer(0.02, trainer.kill)
    killing.start()
    reply = served.http.post("/update_weights_from_distributed", json=body)
    killing.join()
    assert reply.status_code == 400, reply.text
    assert served.http.post("/end_weight_update", json={}).status_code == 400


@pytest.mark.timeout(7200)
def test_w8_trainers_that_come_and_die_leave_the_servers_processes_as_they_were(served: Served) -> None:
    assert served.disk("first", "good").status_code == 200
    digest = served.digest()
    for number in range(DEATHS):
        die(served, number)
        if number == min(_SETTLE, DEATHS // 2) - 1:  # as the last one: its group is left by the next one to join
            before = served.held()
    check_flat(served, before)
    assert served.digest() == digest
    assert served.disk("last", "good").json()["digest"] == digest
