"""A trainer's rank is killed or stopped at every point of an update: the server serves on, whole, and says so."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest
from kill_lane import TRAINERS
from kill_matrix import SECONDS, SIGNALS, Lanes, cases_in_place, cases_of, open_lanes

pytestmark = [pytest.mark.e2e, pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def lanes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    with open_lanes(tmp_path_factory) as lanes:
        yield lanes


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("number", SIGNALS, ids=["kill", "stop"])
@pytest.mark.parametrize("victim", TRAINERS)
def test_w3_whoever_is_lost_at_whichever_point_no_answer_is_a_mix_and_the_server_goes_on(
    lanes: Lanes, victim: str, number: signal.Signals
) -> None:
    lanes.run(cases_of(victim, number))


@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("number", SIGNALS, ids=["kill", "stop"])
def test_in_place_a_lost_trainer_leaves_nothing_that_serves_or_what_was_and_the_next_update_heals(
    lanes: Lanes, number: signal.Signals
) -> None:
    lanes.run(cases_in_place(number))
