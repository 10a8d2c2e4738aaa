"""A fleet whose replicas die at any call, and which dies itself: none serves another version than the committed."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress

import pytest
from cluster_fakes import INITIAL, FakeWorld

from gtp_serve.cluster.fleet import Fleet
from gtp_serve.errors import GtpServeError, UnknownUpdate
from gtp_serve.refit.orders import Begin, DiskOrder, MemoryOrder, UpdateRequest

SEEDS = 2000 if os.environ.get("GTP_SERVE_LONG_TESTS") == "1" else 150
EMPTY = MemoryOrder(segments=(), shards=())


async def settle(world: FakeWorld, fleet: Fleet) -> None:
    """No more deaths: wait until everything is as it should be, or cannot be without a push."""
    world.chance.death = 0.0
    for _ in range(4000):
        view = fleet.now().status
        ready = [one for one in view.replicas if one.state == "ready"]
        unnoticed = any(world.replicas[one.name].dead for one in ready)
        if (len(ready) == view.wanted or view.torn) and view.update is None and not unnoticed:
            return
        await asyncio.sleep(0.001)
    states = [(one.name, one.state, one.version, one.reason) for one in view.replicas]
    raise AssertionError(f"does not settle: {states}, wanted {view.wanted}, {fleet._journal.memory}")


def check(world: FakeWorld, fleet: Fleet, contents: dict[str, str]) -> None:
    """Whoever takes requests holds, byte for byte, what the committed version's label stands for."""
    view = fleet.now().status
    for one in view.replicas:
        if one.state == "ready":
            replica = world.replicas[one.name]
            assert replica.version == view.version == one.version
            assert replica.holds == contents[view.version], (replica.holds, view.version)


async def end_hard(fleet: Fleet) -> None:
    """The fleet's process dies: whatever it was doing stops where it was."""
    tasks = [member.task for member in fleet.members] + [fleet._loop]
    if fleet.versions.current is not None:
        tasks.append(fleet.versions.current.task)
    fleet.versions._on_change = lambda: None
    living = [task for task in tasks if task is not None]
    fleet.versions.current = None
    for task in living:
        # Not a cancellation that is cleaned up behind: nothing of it may reach the journal or a replica.
        task.cancel()
    fleet._journal._store = type("Gone", (), {"put": lambda *_: None, "delete": lambda *_: None})()
    with suppress(BaseException):
        await asyncio.wait(living, timeout=1)


async def life(seed: int, *, rolling: bool) -> None:
    dice = random.Random(seed)
    world = FakeWorld(seed, rolling=rolling, replicas=dice.choice((1, 2, 3)))
    contents = {"0": INITIAL}
    fleet = world.fleet()
    await fleet.open()
    await settle(world, fleet)
    for number in range(1, 6):
        version, update = str(number), f"update-{number}"
        contents[version] = f"weights {number}"
        world.chance.death = dice.choice((0.0, 0.02, 0.1))
        disk = dice.random() < 0.3
        order = DiskOrder(path=contents[version]) if disk else EMPTY
        request = UpdateRequest(order=order, version=version, commit=dice.choice(("auto", "manual")))
        fell = dice.random() < 0.3
        acknowledged = False
        try:
            await fleet.control(Begin(request=request, id=update), None if disk else world.bundles(contents[version]))
            for _ in range(dice.randrange(60)):
                await asyncio.sleep(0)
            if fell:
                await end_hard(fleet)
                fleet = world.fleet()
                await fleet.open()
            for _ in range(3000):
                record, _ = fleet.versions.record(update)
                if record.state in ("committed", "aborted"):
                    break
                if record.state == "verified" and request.commit == "manual":
                    fleet.versions.commit(update)
                await asyncio.sleep(0.0005)
            acknowledged = record.state == "committed"
        except UnknownUpdate as error:
            raise AssertionError("an update that was begun must end, whoever dies") from error
        except GtpServeError:
            pass
        before = fleet.versions.committed
        if acknowledged:
            assert before == version
        await settle(world, fleet)
        assert not acknowledged or fleet.versions.committed == version
        check(world, fleet, contents)
        if fleet.now().status.torn:  # whoever pushes next heals it
            continue
    await fleet.close(0)


@pytest.mark.parametrize("rolling", [False, True], ids=["at once", "rolling"])
def test_no_replica_serves_another_version_whoever_dies(rolling: bool) -> None:
    async def all_lives() -> None:
        for start in range(0, SEEDS, 25):
            await asyncio.gather(*(life(seed, rolling=rolling) for seed in range(start, start + 25)))

    asyncio.run(all_lives())
