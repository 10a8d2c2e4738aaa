"""Ranks without tensors: what they hold is a word, and the test says when they vote and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
from fakes import ScriptedRunner, engine_config

from gtp_serve.engine.all_ranks import News
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.rank_tasks import Ask, RankTasks, Tell
from gtp_serve.engine.updates import Outcome, Updates
from gtp_serve.errors import GtpServeError, UpdateFailed
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.orders import (
    Begin,
    Control,
    DiskOrder,
    Fed,
    GroupOrder,
    JoinGroup,
    Memory,
    Order,
    Piece,
    RankExport,
    Report,
    StageOrder,
    TensorPart,
    UpdateRecord,
    UpdateRequest,
    Vote,
)
from gtp_serve.request import Request, TokenEvent


@dataclass
class FakeWeights:
    """One rank.

    :param votes: it votes for each update as soon as it hears of it.
    """

    rank: int
    report: Callable[[Report], None]
    votes: bool = False
    live: str = "first"
    other: str = "nothing"
    order: StageOrder | None = None
    calls: list[str] = field(default_factory=list)
    breaks_in: str = ""
    """A call that raises."""
    in_swap: Callable[[], None] = lambda: None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.breaks_in:
            raise UpdateFailed(f"{name} broke", [("here", "yes")], code="broken")

    def prepare(self, order: Order, deadline: float) -> Order:
        self._call("prepare")
        assert deadline > 0
        return msgspec.structs.replace(order, host="10.0.0.1", port=7) if isinstance(order, GroupOrder) else order

    def stage(self, order: StageOrder) -> None:
        self.order = order
        self._call("stage")
        if self.votes:
            self.vote()

    def vote(self, error: str = "", *, touched: bool = True) -> None:
        """Say that all is there and good, or what is wrong."""
        assert self.order is not None
        if touched and self.order.memory == "inplace":
            self.live = self.order.update
        elif touched:
            self.other = self.order.update
        self.report(
            Vote(
                update=self.order.update,
                rank=self.rank,
                error=(error, f"{error} it is", ()) if error else None,
                digest="" if error else f"{self.order.update}@{self.rank}",
                source_bytes=100,
                target_bytes=50,
                seconds={"transfer": 1.0 + self.rank},
                touched=touched,
            )
        )

    def feed(self, update: str, piece: Piece) -> None:
        self._call("feed")

    def fed(self, pieces: int) -> None:
        """Say that pieces are there."""
        assert self.order is not None
        self.report(Fed(update=self.order.update, rank=self.rank, pieces=pieces))

    def end_feed(self, update: str) -> None:
        self._call("end_feed")

    def drop(self, update: str) -> None:
        self._call("drop")

    def commit(self, update: str, version: str) -> str:
        self.in_swap()
        self._call("commit")
        assert self.order is not None
        assert self.order.update == update
        if self.order.memory == "staged":
            self.live, self.other = self.other, self.live
        return f"{self.live}@{self.rank}"

    def roll_back(self) -> str:
        self._call("roll_back")
        self.live, self.other = self.other, self.live
        return f"{self.live}@{self.rank}"

    def checksum(self) -> str:
        self._call("checksum")
        return f"{self.live}@{self.rank}"

    def read_tensor(self, name: str, limit: int) -> Sequence[TensorPart]:
        """Half of the columns of what is two columns wide."""
        values = tuple(float(10 * row + self.rank) for row in range(limit) for _ in range(4))
        return [TensorPart(start=(0, 4 * self.rank), shape=(limit, 4), values=values)]

    def shards(self) -> Sequence[Shard]:
        box = Box((0, 0), (4, 4))
        return [Shard(key=f"p{self.rank}", shape=(4, 4), dtype="float32", spans=(Span("x", box, box),))]

    def join_group(self, group: JoinGroup) -> None:
        self._call("join")

    def leave_group(self, name: str) -> None:
        self._call("leave")

    def export(self, update: str, owned: Sequence[Shard]) -> RankExport:
        self._call("export")
        return RankExport()

    def release(self, tags: Sequence[str]) -> None:
        self._call("release")

    def restore(self, tags: Sequence[str]) -> None:
        self._call("restore")


class FakeOthers:
    """The other ranks in this process; they do what they are told at once, or once ``held`` is over."""

    def __init__(self, weights: Sequence[FakeWeights], news: News) -> None:
        self.size = 1 + len(weights)
        self.fault: Exception | None = None
        self.on_check: Callable[[], None] = lambda: None
        self.held: list[Callable[[], None]] | None = None
        self._tasks = [RankTasks(each.rank, each, report=news.put, answer=news.put) for each in weights]

    def check(self) -> None:
        self.on_check()
        if self.fault is not None:
            raise self.fault

    def tell(self, what: Tell) -> None:
        for each in self._tasks:
            self._do(partial(each.tell, what))

    def ask(self, call: int, what: Ask) -> None:
        for each in self._tasks:
            self._do(partial(each.ask, call, what))

    def _do(self, what: Callable[[], Any]) -> None:
        if self.held is None:
            what()
        else:
            self.held.append(what)


class Bench:
    """An engine of two ranks on a scripted runner, with a clock that stands still."""

    def __init__(self, *, memory: Memory = "staged", votes: bool = True, ranks: int = 2, **limits: int) -> None:
        self.now = 100.0
        self.runner = ScriptedRunner()
        config = replace(engine_config(**limits), weight_version="0")
        self.engine = Engine(config, self.runner, draw_seed=lambda: 0, clock=lambda: self.now, log=lambda text: None)
        self.news = News()
        self.ranks = [FakeWeights(rank, self.news.put, votes) for rank in range(ranks)]
        self.others = FakeOthers(self.ranks[1:], self.news)
        self.swaps_checked = 0
        self.updates = Updates(
            self.engine,
            self.ranks[0],
            self.news,
            others=self.others if ranks > 1 else None,
            memory=memory,
            after_swap=self._count_swap,
            clock=lambda: self.now,
            wall=lambda: 1000.0 + self.now,
        )
        self.outcomes: dict[int, Outcome] = {}
        self.events: dict[str, list[TokenEvent]] = {}
        self._calls = 0

    def _count_swap(self) -> None:
        self.swaps_checked += 1

    def let_pass(self, seconds: float) -> None:
        self.now += seconds

    def ask(self, command: Control) -> int:
        self._calls += 1
        self.updates.control(self._calls, command)
        return self._calls

    def answer(self, command: Control) -> Any:
        """What comes of a command within a few polls; raises what it fails with."""
        call = self.ask(command)
        for _ in range(4):
            self.poll()
        return self.result(call)

    def result(self, call: int) -> Any:
        outcome = self.outcomes.pop(call)
        if outcome.error is not None:
            raise outcome.error
        return msgspec.json.decode(outcome.body)

    def poll(self) -> None:
        self.outcomes |= {outcome.call: outcome for outcome in self.updates.poll()}

    def step(self, times: int = 1) -> None:
        """As the worker does it."""
        for _ in range(times):
            self.poll()
            if not self.engine.has_work():
                continue
            for event in self.engine.step():
                self.events.setdefault(event.rid, []).append(event)
            self.engine.check_invariants()

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.engine.add(request)

    def run(self) -> None:
        """Until nothing is left to do."""
        for _ in range(1000):
            if not self.engine.has_work() and not self.updates.busy:
                return
            self.step()
        raise AssertionError("it does not end")

    def tokens(self, rid: str) -> tuple[int, ...]:
        return tuple(token for event in self.events.get(rid, []) for token in event.token_ids)

    def versions(self, rid: str) -> list[str]:
        """Of each token."""
        return [event.weight_version for event in self.events.get(rid, []) if event.token_ids]

    def record(self, update: str) -> UpdateRecord:
        status = self.updates.status()
        records = [*status.history, *([status.update] if status.update else [])]
        return next(record for record in records if record.id == update)


def begin(update: str = "u", version: str = "1", **fields: Any) -> Begin:
    """An update from a path."""
    return Begin(id=update, request=UpdateRequest(**{"order": DiskOrder(path="/ckpt"), "version": version, **fields}))


def code_of(bench: Bench, command: Control) -> str:
    """Of the error that a command is answered with."""
    try:
        bench.answer(command)
    except GtpServeError as error:
        return error.code
    raise AssertionError(f"{command} was carried out")
