"""A test's hold on a zygote: servers and trainers forked by it, requests to them, and what they leave behind."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kill_board import PROCESSES, Board
from kill_world import PROMPT, wrong_tokens

SERVER = ("http", "engine0", "engine1")
TRAINERS = ("trainer0", "trainer1")
PATIENCE = 60.0
_PAUSE = 0.5
"""The longest between two requests of a client."""
_SCRIPT = Path(__file__).with_name("kill_zygote.py")
_WORDS = (
    "--no-tokenizer", "--port", "0", "--tp", "2", "--max-running", "4", "--kv-memory", "2MiB", "--log", "json",
    "--dtype", "float32", "--drain-timeout", "2",
)  # fmt: skip


def until(holds: Callable[[], Any], seconds: float, what: str, pause: float = 0.01) -> Any:
    """What ``holds`` gives, once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(pause)
    return found


@dataclass
class Answer:
    """One request's tokens and whose they are, as far as they came."""

    tokens: list[int] = field(default_factory=list)
    spans: list[tuple[str, int, int]] = field(default_factory=list)
    finish: str = ""
    """Empty: it did not end."""
    trouble: str = ""


def stream_to(url: str, count: int, answer: Answer) -> None:
    """One streamed request; whatever comes is kept."""
    host, _, port = url.rpartition("//")[2].partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": PROMPT, "sampling_params": sampling, "stream": "delta"})
    try:
        connection.request("POST", "/generate", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            answer.trouble = f"{reply.status} {reply.read()[:300]!r}"
        while line := reply.readline():
            if line.startswith(b"data: {"):
                _take(json.loads(line[6:]), answer)
    except (OSError, http.client.HTTPException) as error:
        answer.trouble = f"{type(error).__name__}: {error}"
    finally:
        connection.close()


def _take(part: Any, answer: Answer) -> None:
    if "error" in part:
        answer.trouble = str(part["error"])
        return
    meta = part["meta_info"]
    answer.tokens += part["output_ids"]
    answer.spans = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
    if meta["finish_reason"] is not None:
        answer.finish = meta["finish_reason"]["type"]


class Lane:
    """One zygote and all that comes from it; ``hatch`` starts it."""

    def __init__(self, folder: Path, folders: dict[str, Path]) -> None:
        self.folder, self.folders = folder, folders
        self.tmp = folder / "t"
        self.tmp.mkdir()
        self.log = folder / "log"
        self.board = Board(folder / "board")
        self.url = ""
        self.made: dict[str, str] = {}
        """Which weights each version is."""
        self.ended: dict[str, int] = {}
        self.baseline: dict[str, tuple[int, int]] = {}
        self.digests: dict[str, str] = {}
        self.cases = 0
        self._serial = 0
        self._pids: dict[str, int] = {}
        self.zygote = 0
        """Its process id."""
        (self._orders_in, self._orders), (self._told, self._told_out) = os.pipe(), os.pipe()
        self._pending = b""

    # -- the zygote

    @property
    def ends(self) -> tuple[int, int]:
        """What the zygote has for its stdin and stdout."""
        return self._orders_in, self._told_out

    def close_ends(self) -> None:
        """They are the zygote's from now on."""
        for end in self.ends:
            os.close(end)

    def wait_ready(self) -> None:
        until(lambda: any(event["event"] == "ready" for event in self._events()), PATIENCE * 2, "the zygote")

    def _fork(self, name: str, **spec: Any) -> None:
        self.hear()
        self._pids.pop(name, None)
        self.ended.pop(name, None)
        order = json.dumps({"name": name, "log": str(self.log), **spec}).encode() + b"\n"
        assert os.write(self._orders, order) == len(order)

    def _events(self) -> Iterator[dict[str, Any]]:
        while select.select([self._told], [], [], 0)[0]:
            data = os.read(self._told, 1 << 16)
            assert data, f"the zygote has ended: {self.last_log()}"
            *lines, self._pending = (self._pending + data).split(b"\n")
            for line in lines:
                event = json.loads(line)
                if event["event"] == "ready":
                    self.zygote = event["pid"]
                elif event["event"] == "started":
                    self._pids[event["name"]] = event["pid"]
                elif event["event"] == "ended" and self._pids.get(event["name"]) == event["pid"]:
                    self.ended[event["name"]] = event["code"]
                yield event

    def hear(self) -> dict[str, int]:
        """Exit codes of what has ended so far."""
        for _ in self._events():
            pass
        return self.ended

    def last_log(self, lines: int = 30) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""

    def close(self) -> None:
        """End everything, stopped or not."""
        for pid in self.family():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os.close(self._orders)
        os.close(self._told)

    # -- what it forks

    def start_server(self, *words: str) -> None:
        self.board.forget(*PROCESSES)
        self.log.write_text("")
        self.made = {"0": "a"}
        self._fork("http", run="server", words=["--ckpt", str(self.folders["a"]), *_WORDS, *words])
        self.url = until(self._ready, PATIENCE, "a server that is ready")

    def _ready(self) -> str:
        assert "http" not in self.hear(), self.last_log()
        for line in self.log.read_text(errors="replace").splitlines():
            if '"ready"' in line and line.startswith("{"):
                told = json.loads(line)
                if told["event"] == "ready":
                    return str(told["url"])
        return ""

    def start_trainers(self, version: str, weights: str, **fields: Any) -> list[Path]:
        """Push from two ranks; where each writes down what came of it."""
        self.board.forget(*TRAINERS)
        self._serial += 1
        outs = [self.folder / f"push{self._serial}-{rank}" for rank in range(2)]
        meet = self.folder / f"meet{self._serial}"
        for rank, out in enumerate(outs):
            self._fork(
                TRAINERS[rank], run="trainer", rank=rank, url=self.url, version=version, weights=weights,
                meet=str(meet), out=str(out), bucket_bytes=1024, fields=fields,
            )  # fmt: skip
        return outs

    def fresh_version(self) -> str:
        self._serial += 1
        return f"v{self._serial}"

    def signal(self, name: str, number: signal.Signals) -> None:
        pid = self.board.pid(name)
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- requests

    def ask(self, method: str, path: str, body: Any = None, *, seconds: float = 30.0) -> tuple[int, Any]:
        host, _, port = self.url.rpartition("//")[2].partition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=seconds)
        try:
            data = None if body is None else json.dumps(body)
            headers = {} if body is None else {"content-type": "application/json"}
            connection.request(method, path, data, headers)
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        status, body = self.ask("GET", path)
        assert status == 200, (path, status, body)
        return body

    def push_disk(self, version: str, weights: str, **fields: Any) -> tuple[int, Any]:
        source = {"kind": "disk", "path": str(self.folders[weights])}
        self.made[version] = weights
        return self.ask("POST", "/weights/updates", {"version": version, "source": source, **fields})

    def stream(self, count: int, answer: Answer) -> None:
        stream_to(self.url, count, answer)

    # -- what is left

    def family(self) -> set[int]:
        """Every living process that comes from this zygote, itself included: orphans are its own."""
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with suppress(OSError):
                    state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                    parents[int(entry.name)] = (int(parent), state)
        found = {self.zygote} & parents.keys()
        while more := {pid for pid, (parent, _) in parents.items() if parent in found} - found:
            found |= more
        return {pid for pid in found if parents[pid][1] != "Z"}

    def wait_alone(self, *names: str, seconds: float = 10.0) -> None:
        """Until only these processes are left beside the zygote."""
        wanted = {self.zygote, *(self.board.pid(name) for name in names)}
        until(lambda: self.family() == wanted, seconds, f"only {names} are left", 0.1)
        gone = {name for name in self._pids if name not in names}
        until(lambda: gone <= self.hear().keys(), seconds, f"the ends of {gone}")

    def held(self) -> dict[str, tuple[int, int]]:
        """Threads and sealed or other files in memory of each of the server's processes."""
        return {name: _held(self.board.pid(name)) for name in SERVER}


def hatch(lanes: Sequence[Lane]) -> subprocess.Popen[bytes]:
    """Their zygotes, forked from one process, so that everything is imported once; it ends when they all have."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip
    words = [word for lane in lanes for word in (str(lane.folder), *map(str, lane.ends))]
    ends = [end for lane in lanes for end in lane.ends]
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(
        [sys.executable, str(_SCRIPT), *words], pass_fds=ends, env=environment, stdin=nothing, stdout=nothing
    )
    for lane in lanes:
        lane.close_ends()
    return process


def _held(pid: int) -> tuple[int, int]:
    memory = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            memory += os.readlink(entry).startswith("/memfd:")
    return len(os.listdir(f"/proc/{pid}/task")), memory


class Client(threading.Thread):
    """Asks again and again until told to end, at first without a pause; all its answers are kept."""

    def __init__(self, lane: Lane, count: int) -> None:
        super().__init__(daemon=True)
        self.answers: list[Answer] = []
        self._lane, self._count, self._over = lane, count, threading.Event()
        self.start()

    def run(self) -> None:
        while not self._over.is_set():
            self.answers.append(Answer())
            self._lane.stream(self._count, self.answers[-1])
            if self.answers[-1].trouble:
                return
            # What comes after the first second is mostly somebody's wait for silence, which need not cost a core.
            self._over.wait(min(_PAUSE, len(self.answers) / 40))

    def stop(self) -> None:
        self._over.set()

    def end(self) -> list[Answer]:
        self.stop()
        self.join(PATIENCE)
        assert not self.is_alive(), "a request never ended"
        return self.answers


def check_spans(answer: Answer, made: dict[str, str], *, recomputed: bool = True) -> None:
    """Each token is what the weights that it is said to be of would have said next.

    :param recomputed: also tokens after the first span: they have read all before them with their own weights.
    """
    at = 0
    for version, start, end in answer.spans:
        assert (start, version in made) == (at, True), answer
        at = end
        if start == 0 or recomputed:
            tokens = [*PROMPT, *answer.tokens]
            wrong = wrong_tokens(made[version], tokens, start + len(PROMPT), end + len(PROMPT))
            assert not wrong, f"tokens {wrong[:5]} of {answer} are not by version {version} ({made[version]})"
    assert at == len(answer.tokens)
