"""A process of the server is killed or stopped at every point of an update: it serves on, whole, or ends and says so.

How many cases run, and on how many servers, ``kill_matrix`` says.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from kill_board import POINTS, PROCESSES
from kill_lane import SERVER
from kill_matrix import SECONDS, SIGNALS, Lanes, cases_of, open_lanes

pytestmark = [pytest.mark.e2e, pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    with open_lanes(tmp_path_factory) as lanes:
        yield lanes


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("number", SIGNALS, ids=["kill", "stop"])
@pytest.mark.parametrize("victim", SERVER)
def test_w3_whoever_is_lost_at_whichever_point_no_answer_is_a_mix_and_the_rest_goes_on_or_ends(
    lanes: Lanes, victim: str, number: signal.Signals
) -> None:
    lanes.run(cases_of(victim, number))


def test_what_runs_has_every_victim_and_every_point() -> None:
    groups = [(victim, number) for victim in PROCESSES for number in SIGNALS]
    taken = [case for group in groups for case in cases_of(*group, seeds=1)]
    assert {case.point for case in taken} == set(POINTS)
    assert {(case.victim, case.number) for case in taken} == set(groups)
