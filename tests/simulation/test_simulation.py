"""Thousands of lives of a whole server on one thread, each drawn from a seed and judged by a model.

SIM_SEED=1234 lives one seed again; SIM_SEEDS=100000 draws so many in place of 2,000.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import sim_world
from sim_faults import PLANTED
from sim_judge import judge
from sim_world import SWITCHES, Call, World

SEEDS = int(os.environ.get("SIM_SEEDS", "2000"))
ONE = os.environ.get("SIM_SEED")
PARTS = 4
MOST_TRIES = 300
"""Seeds within which a planted fault must be found."""

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(autouse=True)
def fresh_application() -> Iterator[None]:
    """What a planted fault leaves in an application is not for the next test."""
    sim_world.forget_application()
    yield
    sim_world.forget_application()


def verdict(seed: int) -> str:
    """What is wrong with a seed's history, and how to live it again; empty: nothing."""
    world = World(seed).run()
    found = judge(world)
    return f"SIM_SEED={seed} (on: {', '.join(sorted(world.on))}):\n  " + "\n  ".join(found[:5]) if found else ""


@pytest.mark.parametrize("part", range(PARTS))
def test_in_every_life_each_request_ends_once_with_the_tokens_of_the_versions_that_it_names(part: int) -> None:
    seeds = [int(ONE)] if ONE else range(part, SEEDS, PARTS)
    wrong = [text for seed in seeds if (text := verdict(seed))]
    assert not wrong, f"{len(wrong)} of {len(seeds)} seeds\n" + "\n".join(wrong[:5])


def history(seed: int) -> object:
    world = World(seed).run()
    calls = [(call.status, call.gone, call.finals, call.chunks) for call in world.calls]
    return calls, world.turns, world.clock.now, world.updates.status()


@pytest.mark.parametrize("seed", [3, 12, 92, 139])
def test_a_seed_lives_the_same_life_again(seed: int) -> None:
    assert history(seed) == history(seed)


def test_what_the_switches_are_for_does_happen() -> None:
    """Else the lives above would show little."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        world = World(seed).run()
        seen.update(world.on)
        status = world.updates.status()
        seen.update(f"update {record.state}" for record in status.history)
        seen["torn"] += bool(status.torn)
        seen["died"] += bool(world.died)
        seen["left"] += any(call.gone is not None for call in world.calls)
        seen["several versions"] += any(
            chunk.count(b'"start":') > 1 for call in _streams(world) for chunk in call.chunks
        )
        stats = world.engine.stats()
        seen["preempted"] += bool(stats.preemptions_total)
        seen["failed step"] += bool(stats.failed_steps_total)
        seen["non-finite"] += bool(stats.non_finite_total)
        seen["cached"] += bool(stats.cached_tokens_total)
        seen["refused"] += any(call.status in (429, 503) for call in world.calls)
    wanted = ["update committed", "update aborted", "update torn", "torn", "died", "left", "preempted", "failed step"]
    wanted += ["non-finite", "cached", "refused", "several versions", *SWITCHES]
    assert [name for name in wanted if seen[name] < 3] == []


def _streams(world: World) -> list[Call]:
    return [call for call in world.calls if call.stream and len(call.rids) == 1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str) -> None:
    with PLANTED[name]():
        found = next((text for seed in range(MOST_TRIES) if (text := verdict(seed))), "")
    assert found, f"{MOST_TRIES} lives with the fault '{name}' were judged good"
