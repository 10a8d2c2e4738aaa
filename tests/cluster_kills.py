"""Kill cases on a real cluster: who dies, and when; what must hold afterwards.

Weights alternate between two sets, so that an answer can be held against what its version's weights say.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster_world import Front, World

VICTIMS = ("worker", "replica", "node", "front", "fleet")
MOMENTS = ("generation", "staging", "verified", "commit")
PROMPTS = ([3, 7, 11], [5, 1, 2, 9], [8, 8, 4])
TOKENS = 64
RECOVERY_SECONDS = 30.0
"""Until there are as many replicas as before, all of the committed version, without time that one waited for a core."""
FULL_SECONDS = 240.0


@dataclass
class Seen:
    """One case's outcome."""

    seed: int
    victim: str
    moment: str
    update: str = ""
    answers: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    serving_seconds: float = 0.0
    """From the kill until a replica is ready and all that are serve the committed version."""
    full_seconds: float = 0.0
    """Until there are as many replicas as before, all of that version."""
    queued_seconds: float = 0.0
    """Of these, how long a replica that came meanwhile could have run, and other work had the cores."""

    def line(self) -> str:
        errors = " ".join(f"{code}:{count}" for code, count in sorted(self.errors.items()))
        return (
            f"seed {self.seed:2d} {self.victim:8s} at {self.moment:10s} update {self.update or '-':22s} "
            f"answers {self.answers:3d} errors [{errors}] "
            f"serving {self.serving_seconds:5.1f} s full {self.full_seconds:5.1f} s, "
            f"without a core {self.queued_seconds:4.1f} s"
        )


def case_of(seed: int) -> tuple[str, str]:
    """Every victim at every moment, in twenty seeds."""
    return VICTIMS[seed % len(VICTIMS)], MOMENTS[seed // len(VICTIMS) % len(MOMENTS)]


class Kills:
    """A fleet of two replicas under load, its victims, and what its two weight sets answer.

    :param sets: two checkpoints of one model.
    """

    def __init__(self, world: World, front: Front, sets: tuple[Path, Path], replicas: int = 2) -> None:
        self.world, self.front, self.sets, self.replicas = world, front, sets, replicas
        now = front.weights()
        self.version = max(
            int(label.partition("+")[0]) for label in (now["version"], *(one["version"] for one in now["history"]))
        )
        self.weights_of: dict[str, int] = {}
        self.expected: dict[int, list[list[int]]] = {}
        self.digests: dict[int, str] = {}
        self.told: dict[str, str] = {}
        """The last message of each code."""
        self.push(0)
        self.learn(0)
        self.push(1)
        self.learn(1)

    def learn(self, which: int) -> None:
        self.expected[which] = [self.front.generate(prompt, TOKENS)["output_ids"] for prompt in PROMPTS]
        self.digests[which] = self.front.get("/weights/checksum")["digest"]

    def begin(self, which: int, *, at: Front | None = None, **fields: Any) -> tuple[str, str]:
        """Start an update through disk; its version and id.

        :param at: the front that is told; requests go to the first one all the while.
        """
        self.version += 1
        version, update = str(self.version), f"case-{self.version}"
        self.weights_of[version] = which
        source = {"kind": "disk", "path": str(self.sets[which]), "max_bytes_per_second": 65536}
        (at or self.front).post("/weights/updates", {"version": version, "id": update, "source": source, **fields})
        return version, update

    def push(self, which: int) -> str:
        return self.begin(which, wait=True)[0]

    # -- a case --------------------------------------------------------------------------------------

    def run(self, seed: int) -> Seen:
        chance = random.Random(seed)
        victim, moment = case_of(seed)
        seen = Seen(seed, victim, moment)
        before = self.front.weights()
        current = self.weights_of[before["version"]]
        other = self.world.front(self.sets[0], "--replicas", str(self.replicas)) if victim == "front" else None
        stop = threading.Event()
        with ThreadPoolExecutor(5) as pool:
            loads = [pool.submit(self._load, stop, seen, random.Random(100 * seed + n)) for n in range(4)]
            try:
                time.sleep(chance.uniform(0.2, 0.6))
                version = update = ""
                if moment != "generation":
                    driver = other or self.front
                    version, update = self.begin(1 - current, at=driver, commit="manual", in_flight="wait")
                if moment in ("verified", "commit"):
                    self._wait_state(update, "verified")
                committing: Future[Any] | None = None
                if moment == "commit":
                    committing = pool.submit(self._commit, update)
                    time.sleep(chance.uniform(0.0, 0.02))
                killed = time.monotonic()
                gone = self._kill(victim, chance, other)
                if moment in ("staging", "verified"):
                    time.sleep(chance.uniform(0.0, 1.0))
                    self._wait_settled(update)
                    self._commit(update)
                if committing is not None:
                    committing.result()
                if update:
                    seen.update = self._end_of(update)
                self._until_noted(victim, gone)
                seen.serving_seconds = self._until_serving() - killed
                seen.full_seconds = self._until_full() - killed
                seen.queued_seconds = self._queued({one["name"] for one in before["replicas"]})
            finally:
                stop.set()
            for load in loads:
                load.result(timeout=200)
        self._check(seen, before["version"], version)
        if victim == "node":
            self.world.nodes.append(self.world.add_node())
        return seen

    def _commit(self, update: str) -> None:
        self.front.call("POST", f"/weights/updates/{update}/commit", {"wait": True})

    def _record(self, update: str) -> Any:
        status, body = self.front.call("GET", f"/weights/updates/{update}")
        return body if status in (200, 202) else {"state": "unknown"}  # 202: it is under way

    def _wait_state(self, update: str, state: str) -> None:
        deadline = time.monotonic() + 60
        while (record := self._record(update))["state"] != state:
            assert time.monotonic() < deadline, record
            assert record["state"] == "staging", record
            time.sleep(0.01)

    def _wait_settled(self, update: str) -> None:
        deadline = time.monotonic() + 90
        while self._record(update)["state"] == "staging" and time.monotonic() < deadline:
            time.sleep(0.05)

    def _end_of(self, update: str) -> str:
        deadline = time.monotonic() + 90
        while (record := self._record(update))["state"] in ("staging", "verified") and time.monotonic() < deadline:
            time.sleep(0.05)
        return f"{record['state']} {record.get('code', '')}".strip()

    # -- who dies ------------------------------------------------------------------------------------

    def _kill(self, victim: str, chance: random.Random, other: Front | None) -> Any:
        """End it; what will not be there any more once that is known."""
        ready = [one for one in self.front.weights()["replicas"] if one["pid"]]
        if victim == "node":  # not the head: without it there is no cluster
            mortal = {one.node_id for one in self.world.nodes}
            ready = [one for one in ready if one["node"] in mortal]
        chosen = chance.choice(ready)
        if victim == "worker":
            _end(chosen["pid"])
        elif victim == "replica":
            _end(_parent(chosen["pid"]))
        elif victim == "fleet":
            pid = fleet_pid(self.world.address)
            _end(pid)
            return pid
        elif victim == "front":
            assert other is not None
            _end(other.command.process.pid)
        else:
            self._kill_node(chosen["node"])
            return {one["name"] for one in ready if one["node"] == chosen["node"]}
        return {chosen["name"]}

    def _until_noted(self, victim: str, gone: Any) -> None:
        if victim == "front":
            return
        if victim == "fleet":
            deadline = time.monotonic() + FULL_SECONDS
            while time.monotonic() < deadline:
                with suppress(AssertionError):
                    if fleet_pid(self.world.address) != gone:
                        return
                time.sleep(0.05)
            raise AssertionError("the fleet's actor did not come back")
        self.front.until(lambda body: not gone & {one["name"] for one in body["replicas"]}, FULL_SECONDS)

    def _kill_node(self, node: str) -> None:
        found = next(one for one in self.world.nodes if one.node_id == node)
        self.world.nodes.remove(found)
        self.world.cluster.remove_node(found, allow_graceful=False)

    # -- what must hold ------------------------------------------------------------------------------

    def _load(self, stop: threading.Event, seen: Seen, chance: random.Random) -> None:
        """Requests without end; each must be answered, and rightly, or end with an error that says why."""
        while not stop.is_set():
            which = chance.randrange(len(PROMPTS))
            code = self._ask(which, stream=chance.random() < 0.5)
            if code:
                seen.errors[code] = seen.errors.get(code, 0) + 1
                time.sleep(0.05)
            else:
                seen.answers += 1

    def _ask(self, which: int, *, stream: bool) -> str:
        sampling = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": PROMPTS[which], "sampling_params": sampling, "stream": stream}
        if not stream:
            status, answer = self.front.call("POST", "/generate", body, 150)
            if status != 200:
                return self._told(answer["error"])
            return self._compare(which, answer)
        request = urllib.request.Request(
            self.front.url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        last: Any = None
        try:
            with urllib.request.urlopen(request, timeout=150) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        last = json.loads(line[6:])
        except urllib.error.HTTPError as error:
            return self._told(json.loads(error.read())["error"])
        assert last is not None
        return self._told(last["error"]) if "error" in last else self._compare(which, last)

    def _told(self, error: Any) -> str:
        self.told[error["code"]] = error["message"]
        return str(error["code"])

    def _compare(self, which: int, answer: Any) -> str:
        spans = answer["meta_info"]["weight_versions"]
        assert len(spans) == 1, f"a mixed answer, though the update waits: {spans}"
        finish = answer["meta_info"]["finish_reason"]
        if finish["type"] == "abort":
            return str(finish.get("code") or "abort")
        version = spans[0]["version"]
        expected = self.expected[self.weights_of[version]][which]
        assert answer["output_ids"] == expected, f"version {version} does not answer so"
        return ""

    def _until_serving(self) -> float:
        def serving(body: Any) -> bool:
            ready = [one for one in body["replicas"] if one["state"] == "ready"]
            return bool(ready) and all(one["version"] == body["version"] for one in ready) and body["update"] is None

        self.front.until(serving, FULL_SECONDS)
        return time.monotonic()

    def _until_full(self) -> float:
        def full(body: Any) -> bool:
            ready = [one for one in body["replicas"] if one["state"] == "ready" and one["version"] == body["version"]]
            return len(ready) == self.replicas == len(body["replicas"])

        self.front.until(full, FULL_SECONDS)
        return time.monotonic()

    def _queued(self, before: set[str]) -> float:
        """Of the new replica that had to wait for longest: its actor, then its engine, which follow one another."""
        new = [one["pid"] for one in self.front.weights()["replicas"] if one["name"] not in before]
        return max((queued_seconds(_parent(pid)) + queued_seconds(pid) for pid in new), default=0.0)

    def _check(self, seen: Seen, before: str, version: str) -> None:
        now = self.front.weights()["version"]
        if seen.update.startswith("committed"):
            assert now == version, f"committed {version}, and {now} serves"
        elif seen.update:
            assert now == before, f"{seen.update}, and {now} serves instead of {before}"
        checksum = self.front.get("/weights/checksum")  # fails when replicas differ
        assert checksum["digest"] == self.digests[self.weights_of[now]], "other bytes than this version's"
        allowed = {"replica-lost", "worker-died", "not-ready", "shutting-down"}
        assert set(seen.errors) <= allowed, (seen.errors, self.told)
        assert seen.full_seconds - seen.queued_seconds <= RECOVERY_SECONDS, seen.line()


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def queued_seconds(pid: int) -> float:
    """How long a process's main thread has waited for a core, of all its life."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def _parent(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rsplit(")", 1)[1].split()[1])


def fleet_pid(address: str) -> int:
    """Of the fleet's actor on the cluster at this address, by its process title and its raylet's words."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if not (entry / "cmdline").read_bytes().startswith(b"ray::FleetActor"):
                    continue
                variables = dict(word.split("=", 1) for word in (entry / "environ").read_text().split("\0") if word)
                raylet = Path("/proc") / variables["RAY_RAYLET_PID"] / "cmdline"
                if address in raylet.read_text():
                    return int(entry.name)
            except OSError:
                continue
    raise AssertionError("there is no fleet actor")
