"""A process that was stopped must not take that time for the silence of others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from cluster_fakes import FakeWorld

from gtp_serve.cluster.awake import AwakeClock, within
from gtp_serve.cluster.fleet import Fleet
from gtp_serve.cluster.journal import Journal
from gtp_serve.cluster.link import Link

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported


class Source:
    """A steady clock that goes where the test says."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_gap_counts_for_no_more_than_the_most() -> None:
    source = Source()
    clock = AwakeClock(2.0, source)
    seen = []
    for step in (0.5, 1.5, 600.0, 0.25):
        source.now += step
        seen.append(clock())

    assert seen == [0.5, 2.0, 4.0, 4.25]


def test_an_answer_that_came_while_this_process_stood_still_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtp_serve.cluster.awake.SLICE_SECONDS", 0.05)

    async def story() -> str:
        answer = asyncio.create_task(asyncio.sleep(0.1, "the answer"))
        asyncio.get_running_loop().call_later(0.02, time.sleep, 0.5)  # longer than all that it may take
        return await within(0.3, answer)

    assert asyncio.run(story()) == "the answer"


def test_a_call_that_takes_too_long_is_cancelled() -> None:
    async def story() -> bool:
        call = asyncio.ensure_future(asyncio.sleep(60))
        with pytest.raises(TimeoutError):
            await within(0.05, call)
        await asyncio.sleep(0)
        return call.cancelled()

    assert asyncio.run(story())


def test_a_fleet_that_was_stopped_for_long_loses_neither_its_replicas_nor_itself() -> None:
    async def story() -> None:
        world, source = FakeWorld(replicas=2), Source()
        fleet = Fleet(world.config, Journal(world.store), world, log=lambda *_: None, clock=AwakeClock(2.0, source))
        await fleet.open()
        async with asyncio.timeout(30):
            while [one.state for one in fleet.now().status.replicas] != ["ready", "ready"]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await fleet.view("front", -1, 0, 0.0)
        source.now += 10 * world.config.lease_seconds
        for _ in range(20):
            await asyncio.sleep(0.002)
        assert not fleet.over.is_set()
        assert [one.name for one in fleet.now().status.replicas] == ["replica-1", "replica-2"]
        assert "front" in fleet._fronts
        await fleet.close(0)

    asyncio.run(story())


class Silent:
    """A replica's actor that never says anything."""

    def __init__(self) -> None:
        self.listen = self

    def options(self, **_: object) -> Silent:
        return self

    def remote(self, *_: object) -> AsyncGenerator[Any, None]:
        async def frames() -> AsyncGenerator[Any, None]:
            await asyncio.sleep(60)
            yield None

        return frames()


def test_a_replica_is_given_up_by_the_time_that_its_front_has_run() -> None:
    async def story() -> list[str]:
        lost: list[str] = []
        link = Link("a", Silent(), "front", silent_seconds=15, on_lost=lambda _, reason: lost.append(reason))
        await asyncio.sleep(0.01)
        link.note_passed(10)
        link.note_passed(5)
        assert not lost
        link.note_passed(1)
        return lost

    assert asyncio.run(story()) == ["it has said nothing for 15 s"]
