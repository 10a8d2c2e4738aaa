"""A real engine process behind a real socket: streams, stops, and every way in which one side can vanish."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import fake_worker
import pytest
from fakes import request, scripted_output

from gtp_serve.engine.client import EngineClient
from gtp_serve.engine.messages import Phase
from gtp_serve.errors import (
    CheckpointCorrupt,
    EngineFault,
    EnvironmentFault,
    GtpServeError,
    NotReady,
    PromptTooLong,
    QueueFull,
    RequestRejected,
    ShuttingDown,
)
from gtp_serve.request import FinishReason, Request, TokenEvent


@pytest.fixture(autouse=True)
def short_tmpdir(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A private temporary folder, so that anything left behind is seen."""
    folder = tmp_path_factory.mktemp("s")
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    return folder


def argv(mode: str) -> list[str]:
    return [sys.executable, fake_worker.__file__, mode]


@asynccontextmanager
async def engine(mode: str = "serve") -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(argv(mode))
    try:
        await asyncio.wait_for(client.wait_ready(), 20)
        yield client
    finally:
        await client.stop(0)


def modes(folder: Path) -> list[int]:
    return [entry.stat().st_mode & 0o777 for entry in folder.iterdir()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie waits only for its parent to look.
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


async def until(holds: Callable[[], bool], seconds: float = 5.0) -> None:
    for _ in range(int(seconds * 100)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came about")


async def collect(client: EngineClient, req: Request) -> tuple[tuple[int, ...], FinishReason]:
    events: list[TokenEvent] = [event async for event in client.submit(req)]
    assert {event.rid for event in events} == {req.rid}
    assert all(event.finish is None for event in events[:-1])
    reason = events[-1].finish
    assert reason is not None
    return tuple(token for event in events for token in event.token_ids), reason


async def first_events(client: EngineClient, req: Request, seen: asyncio.Event) -> None:
    """Read a stream to its end; ``seen`` is set with the first event."""
    async for _ in client.submit(req):
        seen.set()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(40):
            await test()

    asyncio.run(bounded())


LONG: dict[str, Any] = {"max_new_tokens": 200, "ignore_eos": True}


def test_many_streams_at_once_each_get_their_own_tokens(short_tmpdir: Path) -> None:
    requests = [request(f"r{n}", [n % 50, 3], max_new_tokens=n % 20 + 1) for n in range(60)]

    async def test() -> None:
        async with engine() as client:
            answers = await asyncio.gather(*(collect(client, req) for req in requests))
            await until(lambda: sum(client.stats().requests_total.values()) == 60)
            stats = client.stats()
        assert [tokens for tokens, _ in answers] == [scripted_output(req) for req in requests]
        assert (stats.kv_blocks_used, stats.last_step_age_seconds) == (0, 0.0)
        assert client.state == "dead"
        assert client.fault is None
        assert not client.died.is_set()
        assert not alive(client.pid)

    run(test)
    assert list(short_tmpdir.iterdir()) == []


def test_phases_and_facts_arrive_and_the_socket_folder_goes_once_connected(short_tmpdir: Path) -> None:
    phases: list[Phase] = []

    async def test() -> None:
        client = await EngineClient.start(argv("serve"), on_phase=phases.append)
        assert modes(short_tmpdir) == [0o700]
        assert client.state == "starting"
        with pytest.raises(NotReady):
            await collect(client, request("a"))
        ready = await client.wait_ready()
        assert ready.facts["vocab_size"] == 50
        assert ready.facts["pid"] == client.pid
        assert modes(short_tmpdir) == []
        assert (await collect(client, request("a")))[0] == scripted_output(request("a"))
        await client.stop(1)

    run(test)
    assert [(phase.name, phase.state) for phase in phases] == [
        ("load weights", "running"),
        ("load weights", "ok"),
    ]


def test_refused_requests_raise_what_the_engine_raised() -> None:
    async def test() -> None:
        async with engine() as client:
            with pytest.raises(PromptTooLong) as long:
                await collect(client, request("a", [1] * 300))
            with pytest.raises(RequestRejected, match="is 50") as bad:
                await collect(client, request("a", [50]))
            with pytest.raises(RequestRejected, match="cannot be passed on"):
                await collect(client, request("a", temperature="hot"))
            with pytest.raises(RequestRejected, match="cannot be passed on"):
                await collect(client, request("a", seed=2**70))
            assert (long.value.code, bad.value.param) == ("prompt-too-long", "input_ids")
            assert (await collect(client, request("a")))[0] == scripted_output(request("a"))

    run(test)


@pytest.mark.parametrize("by", ["client", "engine"])
def test_overload_is_refused_and_the_rest_is_served(by: str) -> None:
    async def test() -> None:
        async with engine("slow") as client:
            if by == "engine":
                client._max_open = 1000
            requests = [request(f"r{n}", [1, 2], max_new_tokens=5, ignore_eos=True) for n in range(64 + 8 + 30)]
            answers = await asyncio.gather(*(collect(client, req) for req in requests), return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, QueueFull)]
        served = [answer[0] for answer in answers if isinstance(answer, tuple)]
        assert (len(served), len(refused)) == (64 + 8, 30)
        assert set(map(len, served)) == {5}
        assert {error.http_status for error in refused} == {503}

    run(test)


def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    async def test() -> None:
        async with engine("slow") as client:
            seen = asyncio.Event()
            running = asyncio.create_task(first_events(client, request("a", **LONG), seen))
            await seen.wait()
            with pytest.raises(RequestRejected, match="'a' is in use") as caught:
                await collect(client, request("a"))
            assert caught.value.code == "duplicate-rid"
            await client.abort("a")
            await running
            assert (await collect(client, request("a", max_new_tokens=3)))[0] == scripted_output(
                request("a", max_new_tokens=3)
            )

    run(test)


@pytest.mark.parametrize("how", ["aclose", "cancel"])
def test_an_abandoned_stream_is_aborted_and_its_name_can_be_used_at_once(how: str) -> None:
    async def test() -> None:
        async with engine("slow") as client:
            if how == "aclose":
                stream = client.submit(request("a", **LONG))
                await anext(stream)
                await stream.aclose()
            else:
                seen = asyncio.Event()
                task = asyncio.create_task(first_events(client, request("a", **LONG), seen))
                await seen.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            again = request("a", [9, 9], max_new_tokens=4, ignore_eos=True)
            assert (await collect(client, again))[0] == scripted_output(again)
            await until(lambda: client.stats().requests_total.get("abort") == 1)
            await until(lambda: client.stats().kv_blocks_used == 0)

    run(test)


def test_abort_ends_the_stream_with_an_event() -> None:
    async def test() -> None:
        async with engine("slow") as client:
            seen = asyncio.Event()
            events = []

            async def read() -> None:
                async for event in client.submit(request("a", **LONG)):
                    events.append(event)
                    seen.set()

            task = asyncio.create_task(read())
            await seen.wait()
            await client.abort("a")
            await client.abort("nobody")
            await task
        assert events[-1].finish == FinishReason(type="abort", message="aborted by the client", code="aborted")

    run(test)


def test_stop_drains_what_runs_and_refuses_what_comes() -> None:
    async def test() -> None:
        async with engine("slow") as client:
            req = request("a", max_new_tokens=30, ignore_eos=True)
            task = asyncio.create_task(collect(client, req))
            await until(lambda: client.stats().running == 1)
            stopping = asyncio.create_task(client.stop(20))
            await asyncio.sleep(0)
            with pytest.raises(ShuttingDown) as caught:
                await collect(client, request("b"))
            assert (await task)[0] == scripted_output(req)
            started = time.monotonic()
            await stopping
            assert time.monotonic() - started < 3  # not the whole drain time
        assert caught.value.http_status == 503
        assert client.fault is None

    run(test)


def test_a_request_that_reaches_a_stopping_engine_is_refused_there() -> None:
    async def test() -> None:
        async with engine("slow") as client:
            running = asyncio.create_task(collect(client, request("a", max_new_tokens=30, ignore_eos=True)))
            await until(lambda: client.stats().running == 1)
            stopping = asyncio.create_task(client.stop(20))
            await asyncio.sleep(0)
            client.state = "ready"  # as if the request had crossed the Stop on its way
            with pytest.raises(ShuttingDown):
                await collect(client, request("b"))
            client.state = "stopping"
            await running
            await stopping

    run(test)


@pytest.mark.parametrize("second", [False, True])
def test_the_end_of_the_drain_aborts_what_still_runs(second: bool) -> None:
    async def test() -> None:
        async with engine("slow") as client:
            task = asyncio.create_task(collect(client, request("a", **LONG)))
            await until(lambda: client.stats().running == 1)
            started = time.monotonic()
            stops = [asyncio.create_task(client.stop(30 if second else 0.2))]
            if second:
                await asyncio.sleep(0.1)
                stops.append(asyncio.create_task(client.stop(0)))
            _, reason = await task
            await asyncio.gather(*stops)
            assert time.monotonic() - started < 1.9
        assert (reason.type, reason.code) == ("abort", "shutting-down")
        assert client.fault is None

    run(test)


def test_an_idle_engine_stops_quickly() -> None:
    async def test() -> None:
        async with engine() as client:
            started = time.monotonic()
            await client.stop(30)
            assert time.monotonic() - started < 2
            with pytest.raises(EngineFault):
                await collect(client, request("a"))

    run(test)


def test_an_engine_that_is_still_starting_can_be_stopped(short_tmpdir: Path) -> None:
    async def test() -> None:
        client = await EngineClient.start(argv("hang"))
        waiting = asyncio.create_task(client.wait_ready())
        await asyncio.sleep(0.2)
        await client.stop(30)
        with pytest.raises(EngineFault, match="was stopped"):
            await waiting
        assert not client.died.is_set()
        assert not alive(client.pid)

    run(test)
    assert list(short_tmpdir.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "cls", "text"),
    [
        ("refuse", CheckpointCorrupt, "a file is short; try: another copy"),
        ("crash", EngineFault, "ZeroDivisionError: something unforeseen"),
        ("exit", EngineFault, r"ended with exit code 17 while load weights.*loading, says the worker"),
    ],
)
def test_an_engine_that_fails_to_start_says_why(
    mode: str, cls: type[GtpServeError], text: str, short_tmpdir: Path
) -> None:
    async def test() -> None:
        client = await EngineClient.start(argv(mode))
        with pytest.raises(cls, match=f"(?s){text}"):
            await client.wait_ready()
        assert type(client.fault) is cls
        assert client.died.is_set()
        await client.stop(0)
        assert not alive(client.pid)

    run(test)
    assert list(short_tmpdir.iterdir()) == []


def test_a_command_that_does_not_exist_is_an_environment_fault(short_tmpdir: Path) -> None:
    async def test() -> None:
        with pytest.raises(EnvironmentFault, match="cannot be started"):
            await EngineClient.start([str(short_tmpdir / "nothing")])

    run(test)
    assert list(short_tmpdir.iterdir()) == []


def test_a_killed_engine_fails_every_stream_within_two_seconds(short_tmpdir: Path) -> None:
    async def test() -> None:
        client = await EngineClient.start(argv("slow"))
        await client.wait_ready()
        seen = [asyncio.Event() for _ in range(5)]
        tasks = [
            asyncio.create_task(first_events(client, request(f"r{n}", **LONG), event)) for n, event in enumerate(seen)
        ]
        await asyncio.gather(*(event.wait() for event in seen))

        os.kill(client.pid, signal.SIGKILL)
        killed = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)

        assert time.monotonic() - killed < 2
        assert all(isinstance(result, EngineFault) for result in results)
        assert len({id(result) for result in results}) == 5
        assert client.died.is_set()
        assert client.state == "dead"
        assert client.fault is not None
        text = str(client.fault)
        assert f"(pid {client.pid}) got signal 9 while serving" in text
        assert "probably the kernel's out-of-memory killer" in text
        with pytest.raises(EngineFault):
            await collect(client, request("late"))
        await client.stop(0)
        assert not alive(client.pid)

    run(test)
    assert list(short_tmpdir.iterdir()) == []


def test_steps_that_keep_failing_end_the_engine_and_say_so(capfd: pytest.CaptureFixture[str]) -> None:
    async def test() -> None:
        client = await EngineClient.start(argv("poison"))
        await client.wait_ready()
        for n in range(2):
            _, reason = await collect(client, request(f"r{n}"))
            assert (reason.type, reason.code) == ("abort", "engine-error")
        with pytest.raises(EngineFault, match="3 steps in a row failed") as caught:
            await collect(client, request("r2"))
        assert caught.value.code == "engine-error"
        await client.died.wait()
        await client.stop(0)
        assert not alive(client.pid)

    run(test)
    assert "poisoned step 2" in capfd.readouterr().err  # the worker's stderr is passed on


def test_a_stuck_step_shows_as_a_growing_age_and_stop_still_ends_it() -> None:
    async def test() -> None:
        async with engine("stuck") as client:
            task = asyncio.create_task(collect(client, request("a")))
            await asyncio.sleep(0.5)
            assert 0.3 < client.stats().last_step_age_seconds < 5
            os.kill(client.pid, signal.SIGKILL)
            with pytest.raises(EngineFault):
                await task
            assert client.stats().last_step_age_seconds == 0.0

    run(test)


def test_a_terminal_interrupt_leaves_the_engine_to_its_parent() -> None:
    async def test() -> None:
        async with engine() as client:
            os.kill(client.pid, signal.SIGINT)
            os.kill(client.pid, signal.SIGTERM)
            assert (await collect(client, request("a")))[0] == scripted_output(request("a"))

    run(test)


PARENT = """
import asyncio, sys
from gtp_serve.engine.client import EngineClient

async def main():
    client = await EngineClient.start(sys.argv[1:])
    if sys.argv[-1] != "hang":
        await client.wait_ready()
    print(client.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("mode", ["serve", "hang", "stuck"])
def test_l3_a_killed_parent_takes_its_engine_with_it(mode: str, short_tmpdir: Path) -> None:
    command = [sys.executable, "-c", PARENT, *argv(mode)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)

        parent.kill()

    asyncio.run(until(lambda: not alive(pid), 5))
    if mode != "hang":
        assert list(short_tmpdir.iterdir()) == []


def test_the_client_imports_neither_torch_nor_numpy() -> None:
    check = "import sys, gtp_serve.engine.client; print({'torch', 'numpy'} & set(sys.modules))"

    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"
