"""kill -9 at any moment of a start and of a generation: nobody and nothing is left, and the next start works at once.

START_KILLS=200 makes that many in place of 4, and has every process killed while generating.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from checkpoint_files import SMALL, write_hf
from load_storm import body_of, children_of

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(7200)]

KILLS = int(os.environ.get("START_KILLS", "4"))
MARK = "GTP_SERVE_TEST_START"
PATIENCE = 120.0
PROMPT = (3, 1, 4, 1, 5)


class World:
    """One server after another on the same port."""

    def __init__(self, folder: Path, place: Path) -> None:
        self.folder, self.place, self.mark = folder, place, uuid.uuid4().hex
        self.shared = set(os.listdir("/dev/shm"))
        with contextlib.closing(socket.socket()) as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, MARK: self.mark, "TMPDIR": str(self.place), "OMP_NUM_THREADS": "1"}
        with (self.place.parent / "log").open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "gtp_serve.server", "--ckpt", str(self.folder), "--port", str(self.port)),
                    *("--no-tokenizer", "--device", "cpu", "--kv-memory", "2MiB", "--log", "json", *words),
                ],
                stderr=log,
                env=environment,
            )

    def log(self) -> str:
        return (self.place.parent / "log").read_text(encoding="utf-8", errors="replace")[-3000:]

    def wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None, f"it ended with {process.returncode}:\n{self.log()}"
            assert time.monotonic() < deadline, self.log()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready", trust_env=False, timeout=10).status_code == 200:
                    return
            time.sleep(0.05)

    def answer(self) -> list[int]:
        reply = httpx.post(f"{self.url}/generate", content=body_of(PROMPT, 8), trust_env=False, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        found: list[int] = reply.json()["output_ids"]
        return found

    def family(self) -> set[int]:
        """Processes that any of the servers has started."""
        found = set()
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if self.mark.encode() in (entry / "environ").read_bytes() and "Z" not in _state(entry):
                    found.add(int(entry.name))
        return found

    def check_alone(self, what: str) -> None:
        """Nobody is left, and no shared memory; a socket's folder may wait for the next start."""
        deadline = time.monotonic() + 30
        while left := self.family():
            assert time.monotonic() < deadline, f"{what}: {left} live on\n{self.log()}"
            time.sleep(0.05)
        new = {name for name in set(os.listdir("/dev/shm")) - self.shared if "gtp" in name or "torch" in name}
        assert new == set(), what

    def kill_all(self) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _state(entry: Path) -> str:
    return (entry / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("model")
    write_hf(folder, replace(SMALL, dtype="float32"))
    short = Path(tempfile.mkdtemp(prefix="k"))  # sockets' paths have little room
    place = short / "t"
    place.mkdir()
    made = World(folder, place)
    try:
        yield made
    finally:
        made.kill_all()
        shutil.rmtree(short)


def kill(process: subprocess.Popen[bytes], victim: str) -> None:
    """The HTTP process, the engine (if there is one yet), or both at once."""
    engines = children_of(process.pid) if process.poll() is None else []
    victims = {"http": [process.pid], "engine": engines, "both": [process.pid, *engines]}[victim]
    for pid in victims or [process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_killed_at_any_moment_of_a_start_it_leaves_nothing_and_starts_again_at_once(world: World) -> None:
    rng = random.Random(9)
    began = time.monotonic()
    process = world.start()
    world.wait_ready(process)
    span = time.monotonic() - began
    truth = world.answer()
    kill(process, "both")
    process.wait(30)
    world.check_alone("the first one")
    for number in range(KILLS):
        victim = rng.choice(("http", "engine", "both"))
        process = world.start()
        pause = rng.uniform(0.02, 1.1) * span
        time.sleep(pause)
        what = f"kill {number} of {victim} after {pause:.2f} of {span:.2f} s"
        assert process.poll() is None, f"{what}: it ended before with {process.returncode}\n{world.log()}"
        kill(process, victim)
        code = process.wait(60)
        assert code != 0, what
        world.check_alone(what)
    process = world.start()
    world.wait_ready(process)
    assert world.answer() == truth
    assert [path.name for path in world.place.iterdir() if path.name.startswith("gtp-serve")] == []
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_killed_while_it_generates_its_clients_know_and_it_starts_again_at_once(world: World) -> None:
    rng = random.Random(4)
    world.kill_all()
    world.check_alone("the test before")
    for victim in ("http", "engine", "both") if KILLS > 20 else ("http",):
        process = world.start()
        world.wait_ready(process)
        truth = world.answer()
        told: list[str] = []
        asking = [threading.Thread(target=_stream, args=(world.url, told)) for _ in range(4)]
        for thread in asking:
            thread.start()
        time.sleep(rng.uniform(0.02, 0.3))
        kill(process, victim)
        for thread in asking:
            thread.join(60)
            assert not thread.is_alive()
        assert process.wait(60) != 0
        assert len(told) == 4
        assert all(end in ("broken", "error", "whole", "refused") for end in told), told
        world.check_alone(f"{victim} while generating")
        again = world.start()
        world.wait_ready(again)
        assert world.answer() == truth
        again.kill()
        again.wait(30)
        world.check_alone("the one after")


def _stream(url: str, told: list[str]) -> None:
    """How a stream ended: a client is never left with an answer that only looks whole."""
    end = "broken"
    body = body_of(PROMPT, 50, stream="delta")
    try:
        with httpx.stream("POST", f"{url}/generate", content=body, trust_env=False, timeout=60) as reply:
            if reply.status_code != 200:
                end = "refused"
            for line in reply.iter_lines():
                if line == "data: [DONE]" and end == "broken":
                    end = "whole"
                elif line.startswith("data: {") and "error" in json.loads(line[6:]):
                    end = "error"
    except httpx.HTTPError:
        pass
    told.append(end)
