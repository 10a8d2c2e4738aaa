"""Simulated ranks: what each holds is a word; a step's tokens depend on what all of them hold and on the KV memory.

Commands reach the other ranks and reports come back after delays, in order for each rank; a rank may die, be silent,
or fail in any phase of an update.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import Empty
from typing import Any, cast

from sim_clock import Clock

from gtp_serve.engine.rank_tasks import Ask, RankTasks, Tell
from gtp_serve.engine.step import NO_TOKEN, StepPlan, StepResult
from gtp_serve.errors import EngineFault, UpdateFailed
from gtp_serve.refit.orders import Order, Report, StageOrder, Vote

FAULTS = ("prepare", "stage", "write", "vote", "silent", "commit", "other_digest", "late")
"""Where an update may fail on a rank."""
FIRST_BYTE, EOS = 3, 2
LETTERS = b"abcdexy9B KZ"
"""Few, so that stop strings of several come about."""


def content_of(version: str) -> str:
    """What ranks hold that serve a version."""
    return f"w{version}"


def token_after(prefix: Sequence[int], content: str, seed: str, ends: Sequence[int]) -> int:
    """The next token as a function of everything that may decide it; mostly printable, sometimes half a character."""
    value = zlib.crc32(f"{content} {seed} {tuple(prefix)}".encode())
    if value % 17 == 0:
        token = FIRST_BYTE + (0xC3, 0xA9, 0xE6)[value // 17 % 3]
    elif value % 23 == 0:
        token = EOS
    else:
        token = FIRST_BYTE + LETTERS[value // 23 % len(LETTERS)]
    return FIRST_BYTE + LETTERS[0] if token in ends else token


class Wires:
    """Everything that is on its way between ranks, and the News that rank 0 reads."""

    def __init__(self, clock: Clock, rng: random.Random, slow: float) -> None:
        self._clock, self._rng, self._slow = clock, rng, slow
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._last: dict[str, float] = {}
        self._serial = count()
        self._news: list[Any] = []

    def later(self, wire: str, what: Callable[[], None], extra: float = 0.0) -> None:
        """Do something after a delay, and after everything else on this wire."""
        delay = self._rng.random() * 0.01 + extra
        if self._rng.random() < self._slow:
            delay += self._rng.random() * 3
        at = max(self._last.get(wire, 0.0), self._clock.now + delay)
        self._last[wire] = at
        heapq.heappush(self._due, (at, next(self._serial), what))

    def next_due(self) -> float:
        """When something will happen, at the earliest."""
        return self._due[0][0] if self._due else float("inf")

    def pump(self, until: float) -> None:
        """Let everything happen that is due."""
        while self._due and self._due[0][0] <= until:
            at, _, what = heapq.heappop(self._due)
            self._clock.now = max(self._clock.now, at)
            what()

    # -- as the queue of news ----------------------------------------------------------------------

    def put(self, item: Any) -> None:
        """Something is said."""
        self._news.append(item)

    def get_nowait(self) -> Any:
        """What was said first.

        :raises Empty: nothing was said.
        """
        self.pump(self._clock.now)
        if not self._news:
            raise Empty
        return self._news.pop(0)

    def get(self, timeout: float) -> Any:
        """The same, after waiting."""
        until = self._clock.now + timeout
        while not self._news and self._due and self._due[0][0] <= until:
            self.pump(self._due[0][0])
        if not self._news:
            self._clock.now = max(self._clock.now, until)
        return self.get_nowait()


@dataclass
class SimWeights:
    """One rank's weights."""

    rank: int
    wires: Wires
    rng: random.Random
    plan_fault: Callable[[int], str]
    """Where the next update fails on this rank; empty: nowhere."""
    live: str = "w0"
    other: str = "nothing"
    order: StageOrder | None = None
    fault: str = ""
    dead: bool = False
    dropped: set[str] = field(default_factory=set)
    leader: bool = False

    def prepare(self, order: Order, deadline: float) -> Order:
        self.fault = self.plan_fault(self.rank)
        if self.fault == "prepare":
            raise UpdateFailed("no port is free", code="no-port")
        return order

    def stage(self, order: StageOrder) -> None:
        if not self.leader:
            self.fault = self.plan_fault(self.rank)
        self.order = order
        if self.fault == "stage":
            raise UpdateFailed("the path cannot be read", code="ckpt-not-found")
        self._write(order, f"part of {order.update}")
        self.wires.later(f"work{self.rank}", partial(self._finish, order), extra=self.rng.random() * 0.2)

    def _write(self, order: StageOrder, what: str) -> None:
        if order.memory == "inplace":
            self.live = what
        else:
            self.other = what

    def _finish(self, order: StageOrder) -> None:
        if self.dead or order.update in self.dropped:
            return
        good = self.fault not in ("write", "vote")
        if self.fault != "write":
            self._write(order, content_of(order.version))
        if self.fault == "silent":
            return
        error = None if good else ("broken", "the bytes are wrong", ())
        vote = Vote(update=order.update, rank=self.rank, error=error, digest=self._digest(order) if good else "")
        self.say(vote, extra=200.0 if self.fault == "late" else 0.0)
        if self.rng.random() < 0.2:
            self.say(vote)  # messages may come twice

    def _digest(self, order: StageOrder) -> str:
        return f"{content_of(order.version)}@{self.rank}"

    def say(self, report: Report, extra: float = 0.0) -> None:
        """To rank 0."""
        if not self.dead:
            self.wires.later(f"up{self.rank}", partial(self._arrive, report), extra)

    def _arrive(self, report: Report) -> None:
        self.wires.put(report)

    def feed(self, update: str, piece: Any) -> None:
        raise AssertionError("nothing is fed here")

    end_feed = feed

    def drop(self, update: str) -> None:
        self.dropped.add(update)
        self.say(Vote(update=update, rank=self.rank, error=("dropped", "it was dropped", ())))

    def commit(self, update: str, version: str) -> str:
        assert self.order is not None
        assert self.order.update == update
        if self.fault == "commit":
            raise UpdateFailed("the swap broke", code="swap-broke")
        if self.order.memory == "staged":
            self.live, self.other = self.other, self.live
        return f"{'else' if self.fault == 'other_digest' else self.live}@{self.rank}"

    def roll_back(self) -> str:
        self.live, self.other = self.other, self.live
        return f"{self.live}@{self.rank}"

    def checksum(self) -> str:
        return f"{self.live}@{self.rank}"

    def shards(self) -> Sequence[Any]:
        return ()

    def _unused(self, *args: Any) -> Any:
        raise AssertionError("not asked for here")

    read_tensor = join_group = leave_group = release = restore = export = _unused


class SimOthers:
    """The other ranks as rank 0 reaches them."""

    def __init__(self, weights: Sequence[SimWeights], wires: Wires) -> None:
        self.size = 1 + len(weights)
        self._weights, self._wires = weights, wires
        self._tasks = [
            RankTasks(one.rank, cast(Any, one), report=one.say, answer=partial(self._answer, one)) for one in weights
        ]

    def _answer(self, one: SimWeights, answer: Any) -> None:
        if not one.dead:
            self._wires.later(f"up{one.rank}", lambda: self._wires.put(answer))

    def check(self) -> None:
        """:raises EngineFault: one is gone."""
        for one in self._weights:
            if one.dead:
                raise EngineFault(f"rank tp{one.rank} got signal 9", code="rank-died")

    def tell(self, what: Tell) -> None:
        """To all of them."""
        for one, tasks in zip(self._weights, self._tasks, strict=True):
            self._wires.later(f"down{one.rank}", partial(self._do, one, partial(tasks.tell, what)))

    def ask(self, call: int, what: Ask) -> None:
        """Of all of them."""
        for one, tasks in zip(self._weights, self._tasks, strict=True):
            self._wires.later(f"down{one.rank}", partial(self._do, one, partial(tasks.ask, call, what)))

    @staticmethod
    def _do(one: SimWeights, what: Callable[[], None]) -> None:
        if not one.dead:
            what()


class SimRunner:
    """Steps over a paged KV memory that remembers by which weights each entry was made.

    :param wrong: told what the KV memory holds that it must not.
    """

    def __init__(
        self, ranks: Sequence[SimWeights], rng: random.Random, wrong: Callable[[str], None], *, fails: float, bad: float
    ) -> None:
        self._ranks, self._rng, self._wrong = ranks, rng, wrong
        self._fails, self._bad = fails, bad
        self._memory: dict[int, tuple[int, int, str]] = {}
        self._fed: dict[str, int] = {}
        self.not_finite: set[str] = set()
        self.failed: set[str] = set()

    def content(self) -> str:
        """What serves; of no version when the ranks differ."""
        held = {rank.live for rank in self._ranks}
        return held.pop() if len(held) == 1 else "a mix"

    def note_swap(self, kept: dict[str, int]) -> None:
        """From here on all KV must be of what serves now, but for so many tokens of requests that keep it."""
        self._fed = dict(kept)

    def launch(self, plan: StepPlan) -> SimRunner:
        """Compute the plan."""
        if self._rng.random() < self._fails:
            self.failed |= {item.rid for item in plan.items}
            raise RuntimeError("out of memory in this step")
        content = self.content()
        tokens: list[int] = []
        for item in plan.items:
            before = self._entries(item.block_table, item.start, plan.block_size)
            if [at for _, at, _ in before] != list(range(item.start)):
                self._wrong(f"{item.rid}: the KV memory holds other positions")
            if self._fed.get(item.rid) != item.start and {by for _, _, by in before} - {content}:
                self._wrong(f"{item.rid}: found KV that other weights have made")
            self._fed[item.rid] = item.context_len
            for slot, token, at in zip(item.slots(plan.block_size), item.token_ids, item.positions, strict=True):
                self._memory[slot] = (token, at, content)
        for item in plan.samplers:
            assert item.sample is not None
            prefix = [token for token, _, _ in self._entries(item.block_table, item.context_len, plan.block_size)]
            seed = f"{item.sample.seed} {item.sample.index}" if item.sample.temperature > 0 else ""
            tokens.append(token_after(prefix, content, seed, item.sample.banned))
            if self._rng.random() < self._bad:
                self.not_finite.add(item.rid)
                tokens[-1] = NO_TOKEN
        self._result = StepResult(token_ids=tuple(tokens), logprobs=(-0.5,) * len(tokens))
        return self

    def wait(self) -> StepResult:
        """What ``launch`` has computed."""
        return self._result

    def _entries(self, table: Sequence[int], length: int, block_size: int) -> list[tuple[int, int, str]]:
        nothing = (-1, -1, "")
        return [
            self._memory.get(table[at // block_size] * block_size + at % block_size, nothing) for at in range(length)
        ]
