"""The weights of all ranks as rank 0 commands them: its own directly, the others' through the leader.  No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Protocol

from gtp_serve.engine.rank_tasks import Answer, Ask, RankTasks, Tell
from gtp_serve.errors import EngineFault, UpdateFailed
from gtp_serve.refit.orders import Order, Report
from gtp_serve.refit.rank_api import RankControl

_LISTEN_SECONDS = 0.05

News = SimpleQueue[Report | Answer]
"""Where ranks put what they say of their weights, from any thread."""


class OtherRanks(Protocol):
    """What ``ranks.Leader`` is here: it puts into the same News what the others say."""

    size: int

    def check(self) -> None:
        """Raises GtpServeError when one of them is gone."""
        ...

    def tell(self, what: Tell) -> None:
        """To all of them."""
        ...

    def ask(self, call: int, what: Ask) -> None:
        """Of all of them."""
        ...


@dataclass(kw_only=True, slots=True)
class Question:
    """An Ask that all ranks have been given."""

    call: int
    size: int
    answers: dict[int, Answer] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all have answered."""
        return len(self.answers) == self.size

    @property
    def missing(self) -> str:
        """Who has not, for a message."""
        return ", ".join(f"tp{rank}" for rank in range(self.size) if rank not in self.answers)

    def bodies(self) -> list[bytes]:
        """All answers, in the order of the ranks.

        :raises UpdateFailed: the first rank's error.
        """
        for rank, answer in sorted(self.answers.items()):
            if answer.error is not None:
                code, message, details = answer.error
                where = [("on", f"rank tp{rank}")] if self.size > 1 else []
                raise UpdateFailed(message, [*details, *where], code=code)
        return [self.answers[rank].body for rank in range(self.size)]


class AllRanks:
    """Every rank hears the same in the same order.

    :param news: rank 0's reports go there too (its ``report`` is ``news.put``).
    """

    def __init__(
        self,
        weights: RankControl,
        news: News,
        others: OtherRanks | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.size = 1 if others is None else others.size
        self._weights = weights
        self._news = news
        self._others = others
        self._clock = clock
        self._tasks = RankTasks(0, weights, report=news.put, answer=news.put)
        self._open: dict[int, Question] = {}
        self._heard: list[Report] = []
        self._calls = 0

    def prepare(self, order: Order, seconds: float) -> Order:
        """Rank 0's part before the others hear of an update.

        :raises Exception: whatever it fails with.
        """
        return self._weights.prepare(order, seconds)

    def tell(self, what: Tell) -> None:
        """Have all ranks do something; what comes of it is in ``reports``."""
        if self._others is not None:
            self._others.tell(what)
        self._tasks.tell(what)

    def ask(self, what: Ask) -> Question:
        """Have all ranks do something between two steps: none may be under way."""
        self._calls += 1
        question = Question(call=self._calls, size=self.size)
        self._open[question.call] = question
        if self._others is not None:
            self._others.ask(question.call, what)
        self._tasks.ask(question.call, what)
        return question

    def wait(self, question: Question, seconds: float) -> None:
        """Until all have answered.

        :raises EngineFault: one has not in this time, or is gone.
        """
        deadline = self._clock() + seconds
        self._drain()
        while not question.complete:
            if self._others is not None:
                self._others.check()
            if self._clock() >= deadline:
                raise EngineFault(
                    f"rank {question.missing} did not do what all ranks were told to within {seconds:g} s",
                    code="rank-late",
                )
            self._drain(_LISTEN_SECONDS)

    def forget(self, question: Question) -> None:
        """Answers to it do not matter any more."""
        self._open.pop(question.call, None)

    def reports(self) -> list[Report]:
        """What the ranks have said of updates since the last call."""
        self._drain()
        heard, self._heard = self._heard, []
        return heard

    def _drain(self, seconds: float = 0.0) -> None:
        try:
            self._take(self._news.get(timeout=seconds) if seconds else self._news.get_nowait())
            while True:
                self._take(self._news.get_nowait())
        except Empty:
            return

    def _take(self, news: Report | Answer) -> None:
        if not isinstance(news, Answer):
            self._heard.append(news)
            return
        question = self._open.get(news.call)
        if question is not None:
            question.answers.setdefault(news.rank, news)
            if question.complete:
                del self._open[news.call]
