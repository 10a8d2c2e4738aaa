"""A fleet over replicas without engines: what is committed where, what comes from whom, who takes requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec
import pytest
from cluster_fakes import FakeWorld

from gtp_serve.cluster.fleet import Fleet
from gtp_serve.cluster.settings import Scale
from gtp_serve.errors import NotReady, UpdateFailed, UpdateRefused
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    Checksum,
    Commit,
    DiskOrder,
    MemoryOrder,
    Order,
    Pause,
    Relabel,
    Resume,
    RollBack,
    UpdateRecord,
    UpdateRequest,
)  # fmt: skip

EMPTY = MemoryOrder(segments=(), shards=())


def story(replicas: int = 2, **options: Any) -> Callable[[Callable[[FakeWorld, Fleet], Awaitable[None]]], None]:
    def run(play: Callable[[FakeWorld, Fleet], Awaitable[None]]) -> None:
        async def whole() -> None:
            world = FakeWorld(replicas=replicas, **options)
            fleet = world.fleet()
            await fleet.open()
            await ready(fleet, replicas)
            try:
                await play(world, fleet)
            finally:
                await fleet.close(0)

        asyncio.run(whole())

    return run


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 (what it waits for has no event)
            await asyncio.sleep(0.001)


async def ready(fleet: Fleet, count: int) -> None:
    await until(lambda: sum(one.state == "ready" for one in fleet.now().status.replicas) == count)


async def push(
    world: FakeWorld, fleet: Fleet, version: str, holds: str = "", order: Order = EMPTY, **fields: Any
) -> UpdateRecord:
    request = UpdateRequest(order=order, version=version, **fields)
    bundles = None if isinstance(order, DiskOrder) else world.bundles(holds or f"weights {version}", count=7)
    await fleet.control(Begin(request=request, id=f"u{version}"), bundles)
    await until(lambda: fleet.versions.record(f"u{version}")[0].state in ("committed", "aborted", "verified"))
    await until(lambda: fleet.versions.current is None or request.commit == "manual")
    return fleet.versions.record(f"u{version}")[0]


def held(world: FakeWorld) -> set[tuple[str, str]]:
    return {(one.version, one.holds) for one in world.replicas.values() if not one.dead}


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_each_bundle_leaves_the_trainer_once_for_any_number_of_replicas(replicas: int) -> None:
    @story(replicas)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        record = await push(world, fleet, "1")
        assert record.state == "committed"
        assert sorted(world.trainer_reads) == list(range(7))
        assert held(world) == {("1", "weights 1")}
        if replicas > 1:
            assert all(one.relayed for one in world.replicas.values())  # the work is shared


def test_a_late_replica_takes_the_committed_version_from_a_peer() -> None:
    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        await push(world, fleet, "1")
        world.trainer_reads.clear()
        world.replicas["replica-2"].kill()
        await until(lambda: "replica-3" in world.replicas)
        await ready(fleet, 2)
        assert held(world) == {("1", "weights 1")}
        assert world.trainer_reads == []
        assert fleet.now().status.caught_up_bytes == 0  # the fakes' bundles have no shards


def test_bad_weights_are_committed_nowhere_and_the_replica_is_named() -> None:
    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        record = await push(world, fleet, "1", "bad bytes")
        assert (record.state, record.code) == ("aborted", "digest-mismatch")
        assert dict(record.details)["on"] in ("replica-1", "replica-2")
        assert held(world) == {("0", "as loaded")}
        assert (await push(world, fleet, "2")).state == "committed"


def test_a_verified_update_waits_for_the_wish_and_can_be_dropped() -> None:
    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        assert (await push(world, fleet, "1", commit="manual")).state == "verified"
        with pytest.raises(UpdateRefused, match="under way"):
            await push(world, fleet, "2")
        await fleet.control(AbortUpdate(id="u1", reason="no"), None)
        assert fleet.versions.record("u1")[0].code == "aborted"
        await push(world, fleet, "3", commit="manual")
        await fleet.control(Commit(id="u3"), None)
        await until(lambda: fleet.versions.current is None)
        assert held(world) == {("3", "weights 3")}
        with pytest.raises(UpdateRefused, match="is committed"):
            await fleet.control(AbortUpdate(id="u3"), None)


def test_a_dry_run_changes_nothing() -> None:
    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        assert (await push(world, fleet, "1", dry_run=True)).state == "verified"
        assert held(world) == {("0", "as loaded")}
        assert all(one.update is None for one in world.replicas.values())


def test_the_same_id_is_the_same_update_and_another_content_is_refused() -> None:
    @story(1)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        first = await push(world, fleet, "1")
        assert await push(world, fleet, "1") == first
        with pytest.raises(UpdateRefused, match="another content"):
            await fleet.control(Begin(request=UpdateRequest(order=EMPTY, version="9"), id="u1"), world.bundles("x"))
        with pytest.raises(UpdateRefused, match="served before"):
            await fleet.control(Begin(request=UpdateRequest(order=EMPTY, version="0"), id="u2"), world.bundles("x"))


def test_a_commit_that_every_replica_refuses_is_taken_back() -> None:
    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        for one in world.replicas.values():
            one.refuses_commit = True
        record = await push(world, fleet, "1")
        assert (record.state, fleet.versions.committed) == ("aborted", "0")
        assert held(world) == {("0", "as loaded")}
        await ready(fleet, 2)


def test_a_replica_that_misses_a_commit_takes_no_request_until_it_has_caught_up() -> None:
    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        late = world.replicas["replica-2"]
        late.refuses_commit = True
        assert (await push(world, fleet, "1")).state == "committed"
        state = {one.name: one.state for one in fleet.now().status.replicas}
        assert state["replica-2"] != "ready" or late.version == "1"
        late.refuses_commit = False
        await ready(fleet, 2)
        assert held(world) == {("1", "weights 1")}


def test_a_version_that_nobody_holds_any_more_is_not_replaced_by_an_older_one() -> None:
    @story(1)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        await push(world, fleet, "1")
        world.replicas["replica-1"].kill()
        await until(lambda: bool(fleet.now().status.torn))
        assert "no replica holds version '1'" in fleet.now().status.torn
        with pytest.raises(NotReady):
            await fleet.control(Checksum(), None)
        assert (await push(world, fleet, "2")).state == "committed"
        await ready(fleet, 1)
        assert fleet.now().status.torn == ""


def test_a_version_from_disk_is_read_again() -> None:
    @story(1)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        await push(world, fleet, "1", order=DiskOrder(path="weights on disk"))
        world.replicas["replica-1"].kill()
        await until(lambda: "replica-2" in world.replicas)
        await ready(fleet, 1)
        assert held(world) == {("1", "weights on disk")}


def test_rollback_takes_all_replicas_back() -> None:
    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        await push(world, fleet, "1")
        assert (await fleet.control(RollBack(), None)).version == "0"
        assert held(world) == {("0", "as loaded")}
        await ready(fleet, 2)
        world.replicas["replica-1"].kill()
        await ready(fleet, 2)
        assert held(world) == {("0", "as loaded")}


def test_another_label_is_every_replicas() -> None:
    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        await fleet.control(Relabel(version="renamed"), None)
        assert fleet.now().status.version == "renamed"
        assert held(world) == {("renamed", "as loaded")}
        await ready(fleet, 2)


def test_replicas_that_differ_are_told_of() -> None:
    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        assert (await fleet.control(Checksum(), None))["digest"] == "as loaded"
        world.replicas["replica-2"].holds = "something else"
        with pytest.raises(UpdateFailed, match="do not hold the same"):
            await fleet.control(Checksum(), None)


def test_replicas_come_and_go_with_the_requests() -> None:
    async def play() -> None:
        world = FakeWorld(replicas=1)
        world.config = msgspec.structs.replace(
            world.config, scale=Scale(low=1, high=3, target=2, up_seconds=0, down_seconds=0.02)
        )
        fleet = world.fleet()
        await fleet.open()
        await ready(fleet, 1)
        await fleet.view("front", -1, 6, 0)
        await ready(fleet, 3)
        await fleet.view("front", -1, 0, 0)
        await until(lambda: len(fleet.members) == 1)
        assert [one.name for one in fleet.members] == ["replica-1"]  # the newest go first
        await fleet.close(0)

    asyncio.run(play())


def test_starts_that_fail_again_and_again_are_told_and_stop() -> None:
    async def play() -> None:
        world = FakeWorld(replicas=1)
        world.config = msgspec.structs.replace(world.config, restarts=3)
        world.chance.death = 1.0
        fleet = world.fleet()
        await fleet.open()
        await until(lambda: "the last 3 starts" in fleet.now().fault)
        count = len(world.replicas)
        await asyncio.sleep(0.02)
        assert len(world.replicas) == count
        await fleet.close(0)

    asyncio.run(play())


def test_a_fleet_that_nobody_asks_ends_itself() -> None:
    async def play() -> None:
        world = FakeWorld(replicas=1)
        world.config = msgspec.structs.replace(world.config, lease_seconds=0.02)
        fleet = world.fleet()
        await fleet.open()
        async with asyncio.timeout(30):
            await fleet.over.wait()
        await fleet.close(0)
        assert world.store.get() is None

    asyncio.run(play())


def test_a_fleet_that_starts_again_finds_its_replicas_and_records() -> None:
    async def play() -> None:
        world = FakeWorld(replicas=2)
        fleet = world.fleet()
        await fleet.open()
        await ready(fleet, 2)
        record = await push(world, fleet, "1")
        await stop_tasks(fleet)
        again = world.fleet()
        await again.open()
        assert [one.state for one in again.now().status.replicas] == ["ready", "ready"]  # as soon as it can be asked
        assert set(world.replicas) == {"replica-1", "replica-2"}  # none was started anew
        assert again.versions.record("u1")[0] == record
        assert again.now().status.version == "1"
        await again.close(0)

    asyncio.run(play())


def test_a_fleet_that_starts_again_knows_that_it_was_paused() -> None:
    async def play() -> None:
        world = FakeWorld(replicas=2)
        fleet = world.fleet()
        await fleet.open()
        await ready(fleet, 2)
        await fleet.control(Pause(), None)
        await stop_tasks(fleet)
        again = world.fleet()
        await again.open()
        assert again.now().status.paused
        await again.control(Resume(), None)
        assert not again.now().status.paused
        assert [one.paused for one in world.replicas.values()] == [False, False]
        await again.close(0)

    asyncio.run(play())


async def stop_tasks(fleet: Fleet) -> None:
    tasks = [task for task in (fleet._loop, *(member.task for member in fleet.members)) if task is not None]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def test_a_replica_that_cannot_be_reached_has_a_stand_in_long_before_it_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gtp_serve.cluster.member.MISSING_SECONDS", 0.01)

    @story(2)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        await push(world, fleet, "1")
        away = world.replicas["replica-1"]
        away.unreachable = True
        await until(lambda: "replica-3" in world.replicas)
        assert world.avoided["replica-3"] == [(away.node,)]  # Ray may take that node for a living one
        await until(lambda: [one.state for one in fleet.members] == ["behind", "ready", "ready"])
        assert not away.dead
        assert fleet.members[0].reason == "it cannot be reached"
        assert (await push(world, fleet, "2")).state == "committed"  # who cannot be reached catches up
        await asyncio.sleep(0.05)
        assert "replica-4" not in world.replicas  # one is enough
        away.unreachable = False
        await until(lambda: len(fleet.members) == 2)
        assert [(one.name, one.state) for one in fleet.members] == [("replica-1", "ready"), ("replica-2", "ready")]
        assert (away.version, away.holds) == ("2", "weights 2")
        assert world.replicas["replica-3"].drains == [30]  # and not cut off


def test_a_stand_in_that_waits_for_a_place_may_have_that_of_the_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtp_serve.cluster.member.MISSING_SECONDS", 0.01)

    @story(1)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        world.full = True
        away = world.replicas["replica-1"]
        away.unreachable = True
        await until(lambda: "replica-2" in world.avoided)
        away.kill()
        await until(lambda: len(world.avoided["replica-2"]) == 2)
        assert world.avoided["replica-2"] == [(away.node,), ()]
        world.full = False
        await until(lambda: [one.name for one in fleet.members if one.state == "ready"] == ["replica-2"])
        assert set(world.replicas) == {"replica-1", "replica-2"}


def test_a_fleet_that_ends_keeps_its_replicas_until_their_streams_have_ended() -> None:
    async def play() -> None:
        world = FakeWorld(replicas=2)
        fleet = world.fleet()
        await fleet.open()
        await ready(fleet, 2)
        first, second = world.replicas.values()
        second.streams.clear()
        closing = asyncio.create_task(fleet.close(20))
        await until(lambda: first.dead)
        # A front that asks meanwhile must not be told that the replica is gone: it would give up its streams.
        assert [(one.name, one.state) for one in fleet.now().status.replicas] == [("replica-2", "draining")]
        assert not second.dead
        second.streams.set()
        await closing
        assert (second.dead, second.drains, fleet.members) == (True, [20], ())
        assert world.store.get() is None

    asyncio.run(play())


def test_the_end_of_a_fleet_does_not_cut_a_replica_short_that_is_being_drained() -> None:
    async def play() -> None:
        world = FakeWorld(replicas=2)
        fleet = world.fleet()
        await fleet.open()
        await ready(fleet, 2)
        going = world.replicas["replica-2"]
        going.streams.clear()
        fleet._drain(fleet.members[1], 20, "there are more replicas than wanted")
        await until(lambda: bool(going.drains))
        closing = asyncio.create_task(fleet.close(20))
        await until(lambda: world.replicas["replica-1"].dead)
        assert not going.dead
        await fleet.close(0)  # whoever cannot wait says so
        assert going.dead
        await closing

    asyncio.run(play())


def test_a_long_poll_answers_when_something_changes() -> None:
    @story(1)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        serial = fleet.now().serial
        waiting: Coroutine[Any, Any, Any] = fleet.view("front", serial, 0, 20)
        task = asyncio.create_task(waiting)
        await asyncio.sleep(0.01)
        await push(world, fleet, "1")
        view = await task
        assert view.serial != serial
        assert "front" in fleet._fronts
        fleet.leave("front")
        assert "front" not in fleet._fronts


def test_in_a_rolling_update_all_but_one_serve_at_any_time() -> None:
    @story(3, rolling=True)
    async def _(world: FakeWorld, fleet: Fleet) -> None:
        least = [3]
        note = fleet.note_change

        def look() -> None:
            note()
            least.append(sum(one.state == "ready" for one in fleet.now().status.replicas))

        fleet.versions._on_change = look
        assert (await push(world, fleet, "1")).state == "committed"
        await ready(fleet, 3)
        assert held(world) == {("1", "weights 1")}
        assert min(least) == 2
        assert sorted(world.trainer_reads) == list(range(7))
