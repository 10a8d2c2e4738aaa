"""``gtp-serve --tp N`` as a user runs it: several engine processes behind one HTTP process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ranks_harness import is_gone, until

pytestmark = [pytest.mark.distributed, pytest.mark.e2e]

DATA = Path(__file__).parents[1] / "data"
LLAMA = DATA / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
START_SECONDS = 120.0


class Server:
    """A running ``gtp-serve --tp 2 --log json`` whose temporary files go to a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "gtp_serve.server", "--ckpt", str(LLAMA), "--no-tokenizer"),
                *("--port", "0", "--dtype", "float32", "--max-running", "8", "--tp", "2", "--log", "json"),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"event": "other", "text": line})

    def find(self, event: str) -> dict[str, Any] | None:
        return next((line for line in list(self.lines) if line["event"] == event), None)

    def url(self) -> str:
        until(lambda: self.find("ready") is not None or self.process.poll() is not None, START_SECONDS)
        ready = self.find("ready")
        assert ready is not None, self.lines
        return str(ready["url"])

    def ranks(self) -> tuple[int, int]:
        """Process ids of rank 0 and rank 1."""
        (first,) = children(self.process.pid)
        (second,) = children(first)
        return first, second

    def end(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    try:
        yield running
    finally:
        running.close()


def streaming(http: httpx.Client) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": 50, "ignore_eos": True}
    body = {"input_ids": [[1, 2, 3]] * 64, "stream": True, "sampling_params": sampling}
    return http.stream("POST", "/generate", json=body)


def test_two_ranks_start_serve_and_stop_without_a_word_too_many(server: Server) -> None:
    with httpx.Client(base_url=server.url(), timeout=60, trust_env=False, verify=False) as http:
        sampling = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
        reply = http.post("/generate", json={"input_ids": [1, 2, 3], "sampling_params": sampling}).json()
    assert len(reply["output_ids"]) == 8
    first, second = server.ranks()
    server.process.send_signal(signal.SIGINT)
    assert server.end(10.0) == 0
    assert is_gone(first)
    assert is_gone(second)
    assert [line for line in server.lines if line["event"] == "other"] == []
    phases = [line for line in server.lines if line["event"] == "phase" and line["state"] == "ok"]
    assert any("2 ranks of" in line.get("detail", "") for line in phases)
    assert [line["phase"] for line in phases].count("load_weights") == 1
    assert list(server.folder.iterdir()) == []


def test_a_rank_that_is_killed_while_streaming_ends_the_server_by_name(server: Server) -> None:
    url = server.url()
    first, second = server.ranks()
    with httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as http, streaming(http) as response:
        lines = response.iter_lines()
        next(lines)
        os.kill(second, signal.SIGKILL)
        assert server.end(2.5) == 6
        rest = "".join(lines)
    failed = server.find("failed")
    assert failed is not None
    assert failed["code"] == "worker-died"
    assert failed["message"] == f"tensor-parallel rank tp1 (pid {second}) got signal 9 while serving"
    assert "worker-died" in rest
    until(lambda: is_gone(first) and is_gone(second), 2.0)
    assert list(server.folder.iterdir()) == []


def test_a_rank_that_is_killed_while_idle_ends_the_server(server: Server) -> None:
    server.url()
    _, second = server.ranks()
    os.kill(second, signal.SIGKILL)
    assert server.end(2.5) == 6


@pytest.mark.parametrize("victim", ["http", "rank 0"])
def test_no_rank_outlives_the_others(server: Server, victim: str) -> None:
    server.url()
    first, second = server.ranks()
    if victim == "http":
        server.process.kill()
    else:
        os.kill(first, signal.SIGKILL)
        assert server.end(2.5) == 6
    until(lambda: is_gone(first) and is_gone(second), 2.0)
    assert list(server.folder.iterdir()) == []


def test_a_number_of_ranks_that_the_heads_do_not_allow_is_refused_before_anything_is_loaded() -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "gtp_serve.server", "--ckpt", str(LLAMA), "--no-tokenizer"),
            *("--port", "0", "--tp", "3", "--log", "json"),
        ],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [json.loads(line) for line in ran.stderr.splitlines()]
    assert ran.returncode == 2
    assert lines[-1]["code"] == "usage"
    assert lines[-1]["message"] == "--tp 3 is not possible for this model"
    assert lines[-1]["details"] == {
        "it has": "4 attention heads, 2 KV heads, 176 feed-forward rows",
        "possible": "--tp 1, 2, 4",
    }
    assert not any("start_engine" in line.get("phase", "") for line in lines)
