"""What a running server has open on the network, and what it does there by itself: nothing."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from serve_command import Command
from socket_table import Socket, processes, sockets

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
CKPT = DATA / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
TP = 2

#: Runs at the start of each Python process of the server and writes down what it does with the network and with
#: pickles.
HOOK = """
import os, sys
watched = {"socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto", "pickle.find_class"}
file = os.open(os.environ["AUDIT_FILE"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
def hook(event, args):
    if event in watched:
        words = [str(arg) for arg in args if not hasattr(arg, "fileno")]
        os.write(file, f"{os.getpid()} {event} {words}\\n".encode())
os.write(file, f"{os.getpid()} started\\n".encode())
sys.addaudithook(hook)
"""


@dataclass
class Watched:
    """A server with what it had open at any time."""

    command: Command
    audit: Path
    seen: set[Socket]

    def sockets(self) -> set[Socket]:
        return sockets(processes(self.command.process.pid))

    def watch(self) -> None:
        while self.command.process.poll() is None:
            self.seen |= self.sockets()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("audit")
    (folder / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUDIT_FILE", str(folder / "events"))
        patch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
        words = ("--tokenizer", str(DATA / "tokenizer251"), "--port", "0", "--max-running", "4", "--tp", str(TP))
        command = Command("--ckpt", str(CKPT), *words, "--device", "cpu")
    watched = Watched(command, folder / "events", set())
    watcher = threading.Thread(target=watched.watch)
    watcher.start()
    try:
        command.url()
        yield watched
    finally:
        command.stop()
        watcher.join(10)


def use(watched: Watched) -> None:
    """One of everything that a client can ask for."""
    with httpx.Client(base_url=watched.command.url(), timeout=60, trust_env=False) as http:
        prompt = {"text": "hello", "sampling_params": {"max_new_tokens": 4}}
        assert http.post("/generate", json=prompt).status_code == 200
        assert http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 4}).status_code == 200
        for path in ("/", "/docs", "/metrics", "/stats", "/weights", "/openapi.json"):
            assert http.get(path).status_code == 200
        disk = {"source": {"kind": "disk", "path": str(CKPT)}, "version": "1", "wait": True}
        reply = http.post("/weights/updates", json=disk)
        assert reply.status_code == 200, reply.text
        assert http.post("/generate", json=prompt).status_code == 200


def test_n1_listening_sockets_are_exactly_the_documented_ones(watched: Watched) -> None:
    port = watched.command.url().rpartition(":")[2]

    listening = {one for one in watched.sockets() if one.state == "listening"}

    http = {one for one in listening if one.kind == "tcp" and one.local == f"127.0.0.1:{port}"}
    ranks = {one for one in listening if one.kind == "tcp"} - http
    unix = {one for one in listening if one.kind == "unix"}
    assert len(http) == 1
    # gloo: each rank of --tp takes its neighbours' connections, on the loopback address.
    assert len(ranks) <= TP
    assert all(one.local.startswith("127.0.0.1:") for one in ranks)
    # The engine's sockets are files in a folder that only the server's user can open, which is gone by now.
    assert all(re.search(r"/gtp-serve-\w+/", one.local) for one in unix), unix
    assert listening == http | ranks | unix
    page = " ".join((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8").split())
    assert "one TCP port on `--host`" in page
    assert "each rank of `--tp`" in page


def test_n5_the_server_opens_no_connection_by_itself(watched: Watched) -> None:
    use(watched)

    after = watched.sockets()
    seen = watched.seen | after
    assert {one.kind for one in seen} <= {"tcp", "unix"}, "no datagrams: no name is looked up, nothing is announced"
    assert all(one.loopback or one.state == "listening" for one in seen if one.kind == "tcp"), seen
    events = [line.split(" ", 2) for line in watched.audit.read_text().splitlines()]
    assert len({pid for pid, *_ in events}) >= 1 + TP, "the hook ran in the server and in each rank"
    assert {name for _, name, *_ in events if name.startswith("socket")} <= {"socket.bind", "socket.getaddrinfo"}
    names = {rest[0].split(",")[0].strip("[]'") for _, name, *rest in events if name == "socket.getaddrinfo"}
    assert names <= {"127.0.0.1", "localhost", socket.gethostname()}, names


def test_d4_nothing_is_unpickled_in_any_process_of_the_server(watched: Watched) -> None:
    use(watched) if not watched.audit.exists() else None

    assert "pickle.find_class" not in watched.audit.read_text()
