"""The kill matrix: every victim, point and signal, gone through by several servers at once.

There are 348 cases, and all of them run.  KILL_CASES=2000 runs several seeds of each, KILL_CASES=87 a quarter in which
each victim and each point comes; KILL_LANES says how many servers go through them at once in each of the two files.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

import pytest
from kill_board import POINTS, PROCESSES
from kill_cases import TRANSFER, Case, kill_everybody, make_case, run_case
from kill_lane import PATIENCE, TRAINERS, Lane, hatch
from kill_world import write_folder

SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
SECONDS = 3600
"""For the tests of a group, which have dozens of cases or, with KILL_CASES, thousands."""
_LANES = int(os.environ.get("KILL_LANES", "4"))
_CASES = int(os.environ.get("KILL_CASES", "348"))


def points(victim: str) -> list[str]:
    """No trainer takes part in a rollback."""
    return [point for point in POINTS if victim not in TRAINERS or point != "rollback"]


COMBINATIONS = sum(len(points(victim)) for victim in PROCESSES) * len(SIGNALS)
_SEEDS = max(1, -(-_CASES // COMBINATIONS))
_STEP = max(1, COMBINATIONS // _CASES)


def cases_of(victim: str, number: signal.Signals, seeds: int = _SEEDS) -> list[Case]:
    """Those that run: every STEP-th, beginning at another one for each group."""
    cases = [make_case(victim, number, point, seed) for seed in range(seeds) for point in points(victim)]
    first = PROCESSES.index(victim) * len(SIGNALS) + SIGNALS.index(number)
    return cases[first % _STEP :: _STEP]


def cases_in_place(number: signal.Signals) -> list[Case]:
    """A trainer is lost while weights that serve are overwritten."""
    return [
        make_case(victim, number, point, seed, memory="inplace")
        for seed in range(-(-_SEEDS // 3))
        for victim in TRAINERS
        for point in TRANSFER
    ]


@dataclass
class Lanes:
    """Several servers, each of which takes the next case when it is done with one."""

    free: SimpleQueue[Lane]
    pool: ThreadPoolExecutor

    def run(self, cases: Sequence[Case]) -> None:
        """:raises AssertionError: what went wrong."""
        troubles = [trouble for trouble in self.pool.map(self._one, cases) if trouble]
        assert not troubles, f"{len(troubles)} of {len(cases)} cases:\n" + "\n\n".join(troubles[:3])

    def _one(self, case: Case) -> str:
        lane = self.free.get()
        try:
            run_case(lane, case)
        except Exception as error:
            kill_everybody(lane)
            return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        finally:
            self.free.put(lane)
        return ""


@contextmanager
def open_lanes(factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    """They leave nothing in shared memory."""
    folders = {name: write_folder(factory.mktemp(name), name) for name in ("a", "b")}
    shared = set(os.listdir("/dev/shm"))
    lanes = [Lane(factory.mktemp("k"), folders) for _ in range(_LANES)]  # sockets' paths have little room
    free: SimpleQueue[Lane] = SimpleQueue()
    process = hatch(lanes)
    try:
        for lane in lanes:
            lane.wait_ready()
            free.put(lane)
        with ThreadPoolExecutor(_LANES) as pool:
            yield Lanes(free, pool)
    finally:
        for lane in lanes:
            lane.close()
        process.wait(PATIENCE)
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "gtp" in name or "torch" in name} == set()
