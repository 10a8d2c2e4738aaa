"""The kill matrix's worst moments once more with the command itself and its own processes, as they always start."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from kill_lane import Answer, check_spans, stream_to, until
from kill_world import write_folder
from serve_command import Command

pytestmark = [pytest.mark.e2e, pytest.mark.distributed]

MARK = "GTP_SERVE_TEST_COMMAND"
FAULT = 6


@dataclass
class Tree:
    """A running command and all of its processes."""

    command: Command
    url: str
    folders: dict[str, Path]
    mark: str
    tmp: Path

    def family(self) -> dict[int, list[str]]:
        """Words of each living process that comes from the command."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    if self.mark.encode() in (entry / "environ").read_bytes() and state != "Z":
                        found[int(entry.name)] = (entry / "cmdline").read_text().split("\0")
        return found

    def pid(self, name: str) -> int:
        """``http``, ``engine0`` or ``engine1``."""
        if name == "http":
            return self.command.process.pid
        engines = {pid: words for pid, words in self.family().items() if "--launch" in words}
        ranks = {("engine1" if "--rank" in words else "engine0"): pid for pid, words in engines.items()}
        return ranks[name]

    def begin(self, version: str, source: dict[str, Any]) -> httpx.Response:
        body = {"version": version, "source": source, "in_flight": "recompute", "commit": "manual"}
        return httpx.post(f"{self.url}/weights/updates", json=body, trust_env=False, timeout=30)

    def state(self) -> str:
        return str(httpx.get(f"{self.url}/weights", trust_env=False, timeout=30).json()["state"])


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tree]:
    tmp = tmp_path / "t"
    tmp.mkdir()
    mark = uuid.uuid4().hex
    monkeypatch.setenv("TMPDIR", str(tmp))
    monkeypatch.setenv(MARK, mark)
    folders = {name: write_folder(tmp_path / name, name) for name in ("a", "b")}
    words = ("--no-tokenizer", "--port", "0", "--tp", "2", "--kv-memory", "2MiB", "--dtype", "float32")
    command = Command("--ckpt", str(folders["a"]), *words)
    tree = Tree(command, command.url(), folders, mark, tmp)
    try:
        yield tree
    finally:
        for pid in tree.family():
            if pid != os.getpid():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        command.stop()


def at_the_moment(tree: Tree, moment: str) -> None:
    """Bring an update there; one whose trainers never come stays at its beginning for a while."""
    disk = {"kind": "disk", "path": str(tree.folders["b"])}
    source = disk if moment == "verified" else {"kind": "distributed", "trainers": 2}
    assert tree.begin("1", source).status_code == 202
    until(lambda: tree.state() == moment, 20, f"an update that is {moment}")


@pytest.mark.parametrize(("victim", "moment"), [("http", "staging"), ("engine0", "verified"), ("engine1", "staging")])
def test_a_command_that_loses_a_process_ends_whole_and_leaves_nothing(tree: Tree, victim: str, moment: str) -> None:
    answer = Answer()
    streaming = threading.Thread(target=stream_to, args=(tree.url, 400, answer))
    streaming.start()
    at_the_moment(tree, moment)
    os.kill(tree.pid(victim), signal.SIGKILL)
    code = tree.command.process.wait(20)
    streaming.join(30)

    assert code == (-signal.SIGKILL if victim == "http" else FAULT)
    until(lambda: not tree.family(), 10, "the end of all processes")
    assert list(tree.tmp.iterdir()) == []
    check_spans(answer, {"0": "a"})


def test_a_command_whose_processes_were_stopped_for_a_moment_goes_on_with_its_update(tree: Tree) -> None:
    answer = Answer()
    streaming = threading.Thread(target=stream_to, args=(tree.url, 200, answer))
    streaming.start()
    at_the_moment(tree, "verified")
    for victim in ("http", "engine0", "engine1"):
        pid = tree.pid(victim)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.7)
        os.kill(pid, signal.SIGCONT)
    update = httpx.get(f"{tree.url}/weights", trust_env=False).json()["update"]["id"]
    path = f"{tree.url}/weights/updates/{update}/commit"
    record = httpx.post(path, json={"wait": True}, trust_env=False, timeout=30).json()
    streaming.join(60)

    assert record["state"] == "committed"
    assert (answer.trouble, answer.finish) == ("", "length")
    check_spans(answer, {"0": "a", "1": "b"})
    assert len(tree.family()) == 3
