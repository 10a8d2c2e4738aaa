"""A fleet's client over links without replicas: where a request goes on, where it ends, what it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from cluster_fakes import fake_config

from gtp_serve.cluster.client import FleetClient
from gtp_serve.cluster.link import Link
from gtp_serve.cluster.member import ReplicaLost
from gtp_serve.cluster.replica_actor import Replica
from gtp_serve.cluster.states import FleetStatus, FleetView, ReplicaView
from gtp_serve.cluster.wire import pack
from gtp_serve.engine.messages import EngineStats, Events, Submit
from gtp_serve.errors import EngineFault, GtpServeError, NotReady, QueueFull, RequestRejected, ShuttingDown
from gtp_serve.refit.orders import UpdateRecord
from gtp_serve.request import FinishReason, Request, SamplingParams, TokenEvent

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported


class FakeLink:
    """A replica that gives tokens until its time has come."""

    def __init__(self, name: str, tokens: int = 3, end: GtpServeError | None = None) -> None:
        self.name, self.tokens, self.end = name, tokens, end
        self.stats = EngineStats(kv_blocks_total=100)
        self.lost = ""
        self.open = self.load = 0
        self.closed = 0
        self.asked: list[Request] = []

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.asked.append(request)
        try:
            for token in range(self.tokens):
                await asyncio.sleep(0)
                if self.lost:
                    raise ReplicaLost(self.lost)
                last = token == self.tokens - 1 and self.end is None
                finish = FinishReason(type="length") if last else None
                yield TokenEvent(rid=request.rid, token_ids=(token,), finish=finish)
            if self.end is not None:
                raise self.end
        finally:
            self.closed += 1

    def has_been_lost(self, seconds: float) -> bool:
        return False

    def give_up(self, reason: str) -> None:
        self.lost = reason

    def finish(self) -> None:
        self.lost = "closed"


class FakeFleet:
    """An actor's handle whose only call is ``view``."""

    def __init__(self, view: FleetView) -> None:
        self._view = view

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object) -> bytes:
            await asyncio.sleep(0.005)
            return msgspec.msgpack.encode(self._view)

        return type("Method", (), {"remote": staticmethod(call)})


def run(story: Callable[[FleetClient], Coroutine[Any, Any, None]], *links: FakeLink, versions: str = "1") -> None:
    async def whole() -> None:
        each = tuple(
            ReplicaView(name=link.name, state="ready", version=version)
            for link, version in zip(links, versions * len(links), strict=False)
        )
        view = FleetView(serial=1, status=FleetStatus(version="1", replicas=each), max_open=4)
        client = FleetClient(FakeFleet(view), fake_config(len(links)))
        client._links.update({link.name: link for link in links})  # type: ignore[misc]
        await client.wait_ready()
        await story(client)
        await client.stop(0, fleet=False)

    asyncio.run(whole())


def request(rid: str = "r", **fields: Any) -> Request:
    return Request(rid=rid, input_ids=(1, 2, 3), sampling=SamplingParams(), **fields)


async def tokens_of(client: FleetClient, asked: Request) -> list[int]:
    found: list[int] = []
    async with aclosing(client.submit(asked)) as events:
        async for event in events:
            found += event.token_ids
            if event.finish is not None:
                break
    return found


def test_a_request_leaves_nothing_behind_when_its_reader_stops_at_the_end() -> None:
    async def story(client: FleetClient) -> None:
        for number in range(20):
            assert await tokens_of(client, request(f"r{number}")) == [0, 1, 2]
        assert client._rids == {}

    run(story, FakeLink("a"))


def test_a_reader_that_leaves_closes_the_replicas_stream_at_once() -> None:
    link = FakeLink("a", 100)

    async def story(client: FleetClient) -> None:
        async with aclosing(client.submit(request())) as events:
            await anext(events)
        assert (link.closed, client._rids) == (1, {})

    run(story, link)


@pytest.mark.parametrize(
    "end",
    [
        ReplicaLost("gone"),
        EngineFault("died", code="worker-died"),
        QueueFull("full"),
        ShuttingDown("it is drained, and this front has not heard of it yet"),
    ],
)
def test_before_its_first_token_a_request_goes_on_elsewhere(end: GtpServeError) -> None:
    bad, good = FakeLink("a", 0, end), FakeLink("b")
    good.load = 3  # so that the other is tried first

    async def story(client: FleetClient) -> None:
        assert await tokens_of(client, request()) == [0, 1, 2]
        assert (len(bad.asked), len(good.asked)) == (1, 1)

    run(story, bad, good)


def test_after_its_first_token_it_ends_with_an_error_that_says_how_far_it_came() -> None:
    bad, good = FakeLink("a", 2, ReplicaLost("gone")), FakeLink("b")
    good.load = 3

    async def story(client: FleetClient) -> None:
        with pytest.raises(EngineFault, match="a was lost after 2 tokens") as caught:
            await tokens_of(client, request())
        assert caught.value.code == "replica-lost"
        assert good.asked == []

    run(story, bad, good)


def test_a_refusal_is_the_requests_and_not_tried_elsewhere() -> None:
    bad, good = FakeLink("a", 0, RequestRejected("no", code="bad-grammar")), FakeLink("b")
    good.load = 3

    async def story(client: FleetClient) -> None:
        with pytest.raises(RequestRejected, match="no"):
            await tokens_of(client, request())
        assert good.asked == []

    run(story, bad, good)


def test_a_replica_of_another_version_takes_no_request() -> None:
    old, new = FakeLink("a"), FakeLink("b")
    new.load = 3

    async def story(client: FleetClient) -> None:
        await tokens_of(client, request())
        assert (old.asked, len(new.asked)) == ([], 1)

    run(story, old, new, versions="01")


def test_a_request_waits_for_a_replica_no_longer_than_it_may() -> None:
    async def story(client: FleetClient) -> None:
        with pytest.raises(NotReady, match="no replica could take"):
            await tokens_of(client, request(deadline_seconds=0.05))
        assert (client._held, client._rids) == (0, {})

    run(story, FakeLink("a"), versions="0")


def test_a_front_that_ends_and_leaves_the_replicas_lets_its_requests_end_first() -> None:
    link = FakeLink("a", 50)

    async def story(client: FleetClient) -> None:
        asked = asyncio.create_task(tokens_of(client, request()))
        while not link.asked:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await client.stop(30, fleet=False)
        assert await asked == list(range(50))
        with pytest.raises(ShuttingDown):
            await tokens_of(client, request("late"))

    run(story, link)


def test_what_another_front_has_begun_is_known_after_a_refresh() -> None:
    async def story(client: FleetClient) -> None:
        begun = UpdateRecord(id="u", version="2", base="1", state="staging", kind="disk")
        fleet: Any = client._fleet
        fleet._view = msgspec.structs.replace(
            fleet._view, serial=2, status=msgspec.structs.replace(fleet._view.status, update=begun)
        )
        assert client.weights.update is None
        await client.refresh()
        assert client.weights.update == begun

    run(story, FakeLink("a"))


class FakeEngine:
    """An engine whose requests never end."""

    def __init__(self) -> None:
        self.running: set[str] = set()

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.running))

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.running.add(request.rid)
        try:
            await asyncio.sleep(60)
            yield TokenEvent(rid=request.rid, token_ids=(1,))
        finally:
            self.running.discard(request.rid)


def test_a_front_that_listens_again_leaves_none_of_its_old_requests_running() -> None:
    async def story() -> None:
        replica = Replica.__new__(Replica)  # without Ray
        engine = FakeEngine()
        replica._name, replica._boxes, replica._running, replica._alone = "a", {}, {}, asyncio.Event()
        replica._client = engine  # type: ignore[assignment]
        for rid in ("first", "second"):
            frames = replica.listen("front")
            await anext(frames)
            await replica.send("front", pack([Submit(requests=(request(rid),))]))
            await replica.send("other", pack([Submit(requests=(request("others"),))]))
            await asyncio.sleep(0.01)
            assert engine.running == {f"front/{rid}", "other/others"}
        await replica.forget("front")
        await replica.forget("other")

    asyncio.run(story())


def test_a_replica_that_was_drained_waits_for_each_fronts_word_that_it_has_all() -> None:
    async def story() -> None:
        replica = Replica.__new__(Replica)
        replica._name, replica._boxes, replica._running, replica._alone = "a", {}, {}, asyncio.Event()
        replica._client = FakeEngine()  # type: ignore[assignment]
        for front in ("one", "two"):
            await anext(replica.listen(front))
        waiting = asyncio.create_task(replica._until_told())
        await replica.forget("one")
        await asyncio.sleep(0.5)
        assert not waiting.done()
        await replica.forget("two")
        async with asyncio.timeout(1):  # far less than a front has that says nothing
            await waiting

    asyncio.run(story())


class FakeActor:
    """A replica's actor that notes what it is told, and says what the test puts in."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": lambda _, *__: self.said.append(name), "options": self._options})()

    def _options(self, **_: Any) -> Any:
        async def listen(_: str) -> AsyncGenerator[Any, None]:
            while True:
                frame = asyncio.get_running_loop().create_future()
                frame.set_result(await self.frames.get())
                yield frame

        return type("Call", (), {"remote": staticmethod(listen)})


def test_a_drained_replica_is_let_go_after_its_last_stream_and_told_so() -> None:
    async def story() -> None:
        actor = FakeActor()
        link = Link("a", actor, "front", silent_seconds=9, on_lost=lambda *_: None)
        events = link.submit(request())
        first = asyncio.create_task(anext(events))
        await asyncio.sleep(0.01)
        link.finish()
        assert (link.lost, actor.said) == ("", ["send"])
        for token, finish in ((5, None), (6, FinishReason(type="length"))):
            one = TokenEvent(rid="r", token_ids=(token,), finish=finish)
            actor.frames.put_nowait(pack([Events(events=(one,))]))
        tokens = [*(await first).token_ids]
        async for event in events:
            tokens += event.token_ids
        assert tokens == [5, 6]
        assert (link.lost, actor.said) == ("it was drained", ["send", "forget"])
        link.finish()  # each view says that it is being drained
        assert actor.said == ["send", "forget"]
        with pytest.raises(ReplicaLost):  # so that it goes to another
            await anext(link.submit(request("late")))

    asyncio.run(story())


def test_names_are_not_used_twice_at_a_time_and_there_is_a_limit() -> None:
    async def story(client: FleetClient) -> None:
        async with aclosing(client.submit(request())) as first:
            await anext(first)
            with pytest.raises(RequestRejected, match="in use"):
                await tokens_of(client, request())
            client._rids.update(dict.fromkeys("xyz"))
            with pytest.raises(QueueFull, match="4 requests"):
                await tokens_of(client, request("other"))
            client._rids = {"r": None}

    run(story, FakeLink("a", 100))
