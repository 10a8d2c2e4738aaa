"""One case of the kill matrix: an update under way, a signal to somebody at some point, and what must hold after it."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kill_board import PROCESSES
from kill_lane import PATIENCE, SERVER, TRAINERS, Answer, Client, Lane, check_spans, until

TRANSFER = ("store open", "joined", "shards exchanged", "first bucket", "middle bucket", "last bucket")
EARLY = ("begin", *TRANSFER)
FAULT = 6
"""Exit code of a server whose engine is gone."""
_OTHER = {"a": "b", "b": "a"}
_SHORT, _LONG = 0.2, 3.0
"""Seconds that a process stands still: nobody minds, and everybody but the engine's ranks among themselves does."""


@dataclass(frozen=True)
class Case:
    """Fixed by its seed but for what the kernel's scheduler adds."""

    seed: int
    point: str
    at: str
    """Whose arrival at the point sets the signal off."""
    victim: str
    number: signal.Signals
    kind: str
    in_flight: str
    hold: float
    """For SIGSTOP: seconds until it is continued; 0: it never is."""
    memory: str = "staged"

    @property
    def ends_server(self) -> bool:
        """Whether the server cannot go on without the victim."""
        return self.victim in SERVER and (self.number == signal.SIGKILL or self.hold == 0)


def make_case(victim: str, number: signal.Signals, point: str, seed: int, *, memory: str = "staged") -> Case:
    choose = random.Random(f"{victim} {number} {point} {seed}")
    kind = "distributed"
    if point not in TRANSFER and victim not in TRAINERS and choose.random() < 0.4:
        kind = "disk"
    if point == "rollback":
        kind = "rollback"
    return Case(
        seed=seed,
        point=point,
        at=choose.choice(_watchers(point, victim)),
        victim=victim,
        number=number,
        kind=kind,
        in_flight=choose.choice(("recompute", "recompute", "keep", "wait", "abort")),
        hold=_hold(victim, choose) if number == signal.SIGSTOP else 0.0,
        memory=memory,
    )


def _watchers(point: str, victim: str) -> Sequence[str]:
    """Who comes to a point; where the victim does itself, mostly that is taken."""
    if point in TRANSFER[1:]:
        there = ["engine0", "engine1", "trainer0", "trainer1"]
    elif point in ("begin", "store open") and victim in TRAINERS:
        there = list(TRAINERS)
    else:
        there = ["engine0", "engine1"]
    return [*there, *[victim] * 3] if victim in there else there


def _hold(victim: str, choose: random.Random) -> float:
    if victim == "engine1":
        return choose.choice((0.0, _SHORT))
    if victim in TRAINERS:
        return choose.choice((0.0, _LONG))
    return choose.choice((_SHORT, _LONG))


def run_case(lane: Lane, case: Case) -> None:
    """:raises AssertionError: with all that there is to know."""
    if lane.url and "http" in lane.hear():
        lane.url = ""
    if not lane.url:
        lane.start_server()
        lane.baseline = lane.held()
    clients: list[Client] = []
    try:
        _Run(lane, case, clients).run()
    except BaseException as error:
        error.add_note(f"{case}\nrecords {_history(lane)}\n{lane.last_log()}")
        raise
    finally:
        lane.board.disarm()
        for client in clients:
            client.stop()
    lane.cases += 1


def _history(lane: Lane) -> str:
    try:
        return json.dumps(lane.ask("GET", "/weights", seconds=2)[1]["history"][:2])
    except Exception as error:
        return repr(error)


class _Run:
    def __init__(self, lane: Lane, case: Case, clients: list[Client]) -> None:
        self.lane, self.case, self.clients = lane, case, clients
        self.version = lane.fresh_version()
        self.before = ""
        self.outs: list[Path] = []
        self.call: threading.Thread | None = None
        self.recomputed = case.in_flight != "keep"

    def run(self) -> None:
        lane, case = self.lane, self.case
        self.before = lane.get("/weights")["version"]
        if case.kind == "rollback":
            status, record = lane.push_disk(self.version, self._other(), wait=True)
            assert (status, record["state"]) == (200, "committed"), record
            self.before, self.version = self.version, self.before
        self.clients.append(Client(lane, random.Random(case.seed).choice((6, 20, 40))))
        lane.board.arm(case.point, at=case.at, victim=case.victim, number=case.number)
        self._begin()
        fired = until(lambda: lane.board.fired, 20, f"{case.at} came to {case.point}")
        if case.ends_server:
            self._check_end(fired)
        else:
            self._check_going_on()

    def _other(self) -> str:
        return _OTHER[self.lane.made[self.before]]

    def _begin(self) -> None:
        lane, case = self.lane, self.case
        fields: dict[str, Any] = {"in_flight": case.in_flight, "deadline_seconds": 8.0, "memory": case.memory}
        if case.kind == "distributed":
            lane.made[self.version] = self._other()
            self.outs = lane.start_trainers(self.version, self._other(), **fields)
            return
        if case.kind == "disk":
            work = lambda: lane.push_disk(self.version, self._other(), **fields, wait=True)  # noqa: E731
        else:
            work = lambda: lane.ask("POST", "/weights/rollback", {"in_flight": case.in_flight})  # noqa: E731
        self.call = threading.Thread(target=_quietly, args=(work,))
        self.call.start()

    # -- the server is gone

    def _check_end(self, fired: float) -> None:
        lane, case = self.lane, self.case
        until(lambda: "http" in lane.hear(), 15, "the server's end")
        wanted = -signal.SIGKILL if case.victim == "http" else FAULT
        assert lane.ended["http"] == wanted, lane.ended
        lane.wait_alone(seconds=20)
        assert list(lane.tmp.iterdir()) == []
        lane.url = ""
        self._join_call()
        for out in self.outs:
            told = self._told(out)
            assert told["event"] == "failed" or case.point in ("commit", "committed"), told
        self._check_answers(cut=True)

    # -- the server goes on

    def _check_going_on(self) -> None:
        lane, case = self.lane, self.case
        if case.number == signal.SIGSTOP and case.victim in SERVER:
            time.sleep(case.hold)
            lane.signal(case.victim, signal.SIGCONT)
        record = until(self._record, 20, "the update's end", 0.05)
        if case.number == signal.SIGSTOP and case.victim in TRAINERS:
            self._end_stopped()
        else:
            until(lambda: all(name in lane.hear() for name in TRAINERS if self.outs), 20, "the trainers' ends")
        self._join_call()
        self._check_record(record)
        self._check_told(record)
        if case.memory == "staged":
            self._check_answers(cut=False)
        self._check_next()
        lane.wait_alone(*SERVER)
        self._check_held()
        assert list(lane.tmp.iterdir()) == []

    def _check_held(self) -> None:
        """Threads have ended and memory is closed; the HTTP process keeps a few threads for the next blocking call."""
        lane = self.lane
        deadline = time.monotonic() + 15
        while True:
            held = lane.held()
            extra = {
                name: (threads, memory)
                for name, (threads, memory) in held.items()
                if memory > lane.baseline[name][1] or (name != "http" and threads > lane.baseline[name][0])
            }
            if not extra:
                return
            assert time.monotonic() < deadline, f"threads and files in memory {extra}, at first {lane.baseline}"
            time.sleep(0.05)

    def _record(self) -> Any:
        status = self.lane.get("/weights")
        found = [one for one in status["history"] if one["version"] == self.version and one["kind"] == self.case.kind]
        return found[0] if found and status["update"] is None else None

    def _end_stopped(self) -> None:
        """The other rank ends by itself; a rank that comes to itself too late does so too."""
        lane, case = self.lane, self.case
        other = next(name for name in TRAINERS if name != case.victim)
        if case.hold:
            lane.signal(case.victim, signal.SIGCONT)
            until(lambda: case.victim in lane.hear(), 20, f"the end of {case.victim}, which was continued")
        until(lambda: other in lane.hear(), 25, f"the end of {other}")
        lane.signal(case.victim, signal.SIGKILL)
        until(lambda: case.victim in lane.hear(), 5, f"the end of {case.victim}")

    def _check_record(self, record: Any) -> None:
        lane, case = self.lane, self.case
        assert record["state"] in ("committed", "aborted", "torn"), record
        assert (record["state"] == "torn") <= (case.memory == "inplace"), record
        if case.victim in TRAINERS:
            if case.point in EARLY[:-1] and case.at == case.victim:
                assert record["state"] != "committed", record
            if case.point in ("verifying", "verified", "commit", "committed"):
                assert record["state"] == "committed", record
        if case.hold == _SHORT:
            assert record["state"] == "committed", record
        if record["state"] != "committed":
            assert record["code"], record
            assert record["message"], record
        serving = self.version if record["state"] == "committed" else self.before
        status = lane.get("/weights")
        assert status["version"] == serving, status
        if record["state"] == "torn":
            assert status["state"] == "torn"
            code, body = lane.ask("POST", "/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
            assert (code, body["error"]["code"]) == (503, "weights_torn")
            return
        self._check_digest(serving)

    def _check_digest(self, serving: str) -> None:
        found = self.lane.get("/weights/checksum")
        assert (found["version"], found["matches"] is not False) == (serving, True), found
        known = self.lane.digests.setdefault(self.lane.made[serving], found["digest"])
        assert found["digest"] == known, found

    def _check_told(self, record: Any) -> None:
        for rank, out in enumerate(self.outs):
            if self.case.victim == TRAINERS[rank] and not out.exists():
                continue
            told = self._told(out)
            assert told["event"] == ("pushed" if record["state"] == "committed" else "failed"), (told, record)
            assert told.get("digest", record["digest"]) == record["digest"]

    def _told(self, out: Path) -> Any:
        told = json.loads(out.read_text())
        assert told["threads"] == [], told
        return told

    def _check_next(self) -> None:
        """An update goes through and back again, by disk or by new trainers."""
        lane, serving = self.lane, self.lane.get("/weights")["version"]
        weights, version = _OTHER[lane.made[serving]], lane.fresh_version()
        if self.case.seed % 4 == 3:
            lane.made[version] = weights
            for out in lane.start_trainers(version, weights):
                told = json.loads(until(lambda out=out: out.exists() and out.read_text(), 20, "the next push"))  # type: ignore[misc]
                assert told["event"] == "pushed", told
        else:
            status, record = lane.push_disk(version, weights, wait=True)
            assert (status, record["state"]) == (200, "committed"), record
        answer = Answer()
        lane.stream(5, answer)
        assert answer.spans == [(version, 0, 5)], answer
        check_spans(answer, lane.made)
        self._check_digest(version)

    # -- either way

    def _join_call(self) -> None:
        if self.call is not None:
            self.call.join(PATIENCE)
            assert not self.call.is_alive(), "a call never ended"

    def _check_answers(self, *, cut: bool) -> None:
        for client in self.clients:
            for answer in client.end():
                if not cut:
                    assert answer.trouble == "", answer
                    assert answer.finish in ("length", "abort"), answer
                    assert answer.finish == "length" or self.case.in_flight == "abort", answer
                check_spans(answer, self.lane.made, recomputed=self.recomputed)


def _quietly(work: Any) -> None:
    try:
        work()
    except Exception:  # the server may be gone; what came of it is looked up
        return


def kill_everybody(lane: Lane) -> None:
    """After a case that went wrong: nothing of it may touch the next."""
    for name in PROCESSES:
        lane.signal(name, signal.SIGKILL)
    lane.wait_alone(seconds=10)
    lane.url = ""
