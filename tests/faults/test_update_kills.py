"""Somebody is killed or stopped at every point of an update: the server serves on, whole, or ends, and says so.

There are 348 cases, and all of them run.  KILL_CASES=2000 runs several seeds of each, KILL_CASES=87 a quarter in which
each victim and each point comes; KILL_LANES says how many servers go through them at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from kill_board import POINTS, PROCESSES
from kill_cases import TRANSFER, Case, kill_everybody, make_case, run_case
from kill_lane import TRAINERS, Lane
from kill_world import write_folder

pytestmark = [pytest.mark.e2e, pytest.mark.distributed]

LANES = int(os.environ.get("KILL_LANES", "2"))
CASES = int(os.environ.get("KILL_CASES", "348"))
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)


def points(victim: str) -> list[str]:
    """No trainer takes part in a rollback."""
    return [point for point in POINTS if victim not in TRAINERS or point != "rollback"]


COMBINATIONS = sum(len(points(victim)) for victim in PROCESSES) * len(SIGNALS)
SEEDS = max(1, -(-CASES // COMBINATIONS))
STEP = max(1, COMBINATIONS // CASES)


def share(cases: list[Case], victim: str, number: signal.Signals) -> list[Case]:
    """Every STEP-th case, beginning at another one for each group."""
    first = PROCESSES.index(victim) * len(SIGNALS) + SIGNALS.index(number)
    return cases[first % STEP :: STEP]


@dataclass
class Lanes:
    """Several servers, each of which takes the next case when it is done with one."""

    free: SimpleQueue[Lane]
    pool: ThreadPoolExecutor

    def run(self, cases: list[Case]) -> list[str]:
        """What went wrong."""
        return [trouble for trouble in self.pool.map(self._one, cases) if trouble]

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


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    folders = {name: write_folder(tmp_path_factory.mktemp(name), name) for name in ("a", "b")}
    shared = set(os.listdir("/dev/shm"))
    made: list[Lane] = []
    free: SimpleQueue[Lane] = SimpleQueue()
    try:
        for _ in range(LANES):
            made.append(Lane(_short(tmp_path_factory), folders))
        for lane in made:
            lane.wait_ready()
            free.put(lane)
        with ThreadPoolExecutor(LANES) as pool:
            yield Lanes(free, pool)
    finally:
        for lane in made:
            lane.close()
    assert {name for name in set(os.listdir("/dev/shm")) - shared if "gtp" in name or "torch" in name} == set()


def _short(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("k")  # sockets' paths have little room


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", SIGNALS, ids=["kill", "stop"])
@pytest.mark.parametrize("victim", PROCESSES)
def test_w3_whoever_is_lost_at_whichever_point_no_answer_is_a_mix_and_the_rest_goes_on_or_ends(
    lanes: Lanes, victim: str, number: signal.Signals
) -> None:
    cases = [make_case(victim, number, point, seed) for seed in range(SEEDS) for point in points(victim)]
    troubles = lanes.run(share(cases, victim, number))
    assert not troubles, f"{len(troubles)} of {len(cases)} cases:\n" + "\n\n".join(troubles[:3])


def test_the_share_that_runs_has_every_victim_and_every_point() -> None:
    groups = [(victim, number) for victim in PROCESSES for number in SIGNALS]
    taken = [
        case
        for victim, number in groups
        for case in share([make_case(victim, number, point, 0) for point in points(victim)], victim, number)
    ]
    assert {case.point for case in taken} == set(POINTS)
    assert {(case.victim, case.number) for case in taken} == set(groups)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", SIGNALS, ids=["kill", "stop"])
def test_in_place_a_lost_trainer_leaves_nothing_that_serves_or_what_was_and_the_next_update_heals(
    lanes: Lanes, number: signal.Signals
) -> None:
    cases: list[Any] = [
        make_case(victim, number, point, seed, memory="inplace")
        for seed in range(-(-SEEDS // 3))
        for victim in TRAINERS
        for point in TRANSFER
    ]
    troubles = lanes.run(cases)
    assert not troubles, f"{len(troubles)} of {len(cases)} cases:\n" + "\n\n".join(troubles[:3])
