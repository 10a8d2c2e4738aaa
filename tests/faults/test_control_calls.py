"""What is asked of an engine process about its weights, over a real socket, and what is told when one side ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import fake_worker
import pytest
from fakes import request
from update_fakes import begin

from gtp_serve.engine.client import EngineClient
from gtp_serve.errors import EngineFault, NotReady, ShuttingDown, UnknownUpdate, UpdateFailed, UpdateRefused
from gtp_serve.refit.orders import Checksum, Commit, Control, Pause, Resume, RollBack


@pytest.fixture(autouse=True)
def short_tmpdir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private temporary folder."""
    folder = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


@asynccontextmanager
async def engine(mode: str = "updates") -> AsyncIterator[EngineClient]:
    client = await EngineClient.start([sys.executable, fake_worker.__file__, mode])
    try:
        await asyncio.wait_for(client.wait_ready(), 20)
        yield client
    finally:
        await client.stop(0)


def test_an_update_under_a_stream_is_answered_told_and_seen_in_its_tokens() -> None:
    async def live() -> None:
        async with engine() as client:
            assert client.weights.version == "v0"
            stream = client.submit(request("a", max_new_tokens=60, ignore_eos=True))
            versions = [(await anext(stream)).weight_version]
            answer = await client.control(begin(version="v1"))
            assert (answer["id"], answer["kind"]) == ("u", "disk")
            record = await client.wait_update("u", 10)
            assert (record.state, record.base, record.source_bytes) == ("committed", "v0", 100)
            assert client.weights.version == "v1"
            versions += [event.weight_version async for event in stream]
            assert versions == sorted(versions)
            assert set(versions) == {"v0", "v1"}
            assert client.stats().weight_version == "v1"
            assert (await client.control(begin(version="v1")))["state"] == "committed"  # asked again
            assert (await client.control(RollBack()))["version"] == client.weights.version == "v0"

    asyncio.run(live())


def test_a_pause_is_answered_at_once_and_holds_until_it_is_taken_back() -> None:
    async def live() -> None:
        async with engine() as client:
            tokens: list[int] = []
            some = asyncio.Event()

            async def collect() -> None:
                async for event in client.submit(request("a", max_new_tokens=60, ignore_eos=True)):
                    tokens.extend(event.token_ids)
                    if len(tokens) >= 5:
                        some.set()

            collecting = asyncio.create_task(collect())
            await some.wait()
            assert (await client.control(Pause()))["paused"]
            assert client.weights.paused
            await asyncio.sleep(0.1)
            count = len(tokens)
            await asyncio.sleep(0.3)
            assert 5 <= len(tokens) == count < 60
            assert not (await client.control(Resume()))["paused"]
            await collecting
            assert len(tokens) == 60

    asyncio.run(live())


def test_errors_come_back_as_what_they_were() -> None:
    async def live() -> None:
        async with engine() as client:
            with pytest.raises(UnknownUpdate) as unknown:
                await client.control(Commit(id="never"))
            assert (unknown.value.http_status, unknown.value.code) == (404, "unknown-update")
            with pytest.raises(UpdateRefused, match="no version to go back") as refused:
                await client.control(RollBack())
            assert (refused.value.http_status, refused.value.code) == (409, "nothing-to-roll-back")
            with pytest.raises(UpdateRefused) as bad:
                await client.control(begin(deadline_seconds="soon"))
            assert bad.value.code == "bad-command"
            assert client.state == "ready"

    asyncio.run(live())


def test_an_engine_that_cannot_change_its_weights_says_so_and_goes_on() -> None:
    async def live() -> None:
        async with engine("serve") as client:
            with pytest.raises(UpdateRefused) as refused:
                await client.control(Checksum())
            assert refused.value.code == "no-updates"
            assert client.weights.version == "v0"
            events = [event async for event in client.submit(request("a", max_new_tokens=2))]
            assert events[-1].finish is not None

    asyncio.run(live())


@pytest.mark.parametrize("command", [Checksum(), RollBack()])
def test_nothing_is_asked_of_an_engine_that_is_not_there_yet(command: Control) -> None:
    async def live() -> None:
        client = await EngineClient.start([sys.executable, fake_worker.__file__, "hang"])
        try:
            with pytest.raises(NotReady):
                await client.control(command)
        finally:
            await client.stop(0)

    asyncio.run(live())


def test_whoever_waits_for_an_engine_that_is_killed_is_told() -> None:
    async def live() -> None:
        async with engine("silent") as client:
            await client.control(begin(version="v1"))
            waiter = asyncio.create_task(client.wait_update("u"))
            aborted = asyncio.create_task(client.control(Pause(mode="wait")))
            await asyncio.sleep(0.1)
            stuck = asyncio.create_task(client.wait_weights(lambda now: now.version == "never"))
            os.kill(client.pid, signal.SIGKILL)
            for task in (waiter, stuck):
                with pytest.raises(EngineFault):
                    await asyncio.wait_for(task, 10)
            assert (await aborted)["paused"]  # it was answered before

    asyncio.run(live())


def test_a_wait_has_an_end() -> None:
    async def live() -> None:
        async with engine("silent") as client:
            await client.control(begin(version="v1", deadline_seconds=0.3))
            with pytest.raises(TimeoutError):
                await client.wait_update("u", 0.05)
            record = await client.wait_update("u", 20)
            assert (record.state, record.code) == ("aborted", "update-deadline")

    asyncio.run(live())


def test_an_engine_that_is_stopped_answers_what_is_open_and_takes_no_new_weights() -> None:
    async def live() -> None:
        async with engine("silent") as client:
            await client.control(begin(version="v1"))
            stream = client.submit(request("a", max_new_tokens=200, ignore_eos=True))
            await anext(stream)
            paused = asyncio.create_task(client.control(Pause(mode="wait")))
            await asyncio.sleep(0.05)
            stopping = asyncio.create_task(client.stop(0.2))
            with pytest.raises((ShuttingDown, EngineFault, UpdateFailed)):
                await asyncio.wait_for(paused, 10)
            with pytest.raises((ShuttingDown, EngineFault)):
                await client.control(begin("v", "v2"))
            await stopping
            await stream.aclose()

    asyncio.run(live())
