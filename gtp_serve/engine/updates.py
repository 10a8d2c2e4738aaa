"""Weights that change while an engine serves: carries out what ``UpdateMachine`` decides, on all ranks.  No torch.

    control -> machine -> all ranks are told -> their reports -> poll -> machine -> ... -> commit between two steps

The engine's driver calls ``poll`` before each step and, while ``busy``, every few milliseconds when there is none.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from gtp_serve.engine.all_ranks import AllRanks, News, OtherRanks
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.live_weights import LiveWeights
from gtp_serve.engine.rank_tasks import CommitNow, DropNow, EndFeedNow, FeedNow, RollBackNow, StageNow
from gtp_serve.engine.standstill import Standstill
from gtp_serve.errors import EngineFault, GtpServeError, ShuttingDown, UpdateFailed
from gtp_serve.refit.actions import Drop
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    Checksum,
    Commit,
    Control,
    EndFeed,
    Export,
    Fed,
    Feed,
    FlushCache,
    Join,
    Layout,
    Leave,
    Memory,
    Pause,
    ReadTensor,
    Relabel,
    Release,
    Report,
    Restore,
    Resume,
    RollBack,
    UpdateRecord,
    Vote,
    WeightsStatus,
)
from gtp_serve.refit.rank_api import RankControl
from gtp_serve.refit.update import DEADLINE_SECONDS, UpdateMachine

SWAP_SECONDS = 60.0
"""For all ranks to swap, during which no step can run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one control call."""

    call: int
    body: bytes = b"null"
    """JSON."""
    error: GtpServeError | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opening:
    """A Begin whose update the ranks have not heard of yet."""

    call: int
    begin: Begin
    deadline: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Waiting:
    """A call that is answered later.

    :param answer: its body once there is one, None before; raises what the call failed with.
    """

    call: int
    answer: Callable[[], Any | None]


class Updates:
    """One engine's way to other weights; made, it is the engine's ``updates``.

    :param weights: of rank 0, which reports into ``news``.
    :param others: the leader of the other ranks, whose ``news`` it is.
    :param after_swap: checks that what depends on the parameters' memory still holds; raises EngineFault.
    :param deadline_seconds: for updates that bring none.
    """

    def __init__(
        self,
        engine: Engine,
        weights: RankControl,
        news: News,
        *,
        others: OtherRanks | None = None,
        memory: Memory = "staged",
        deadline_seconds: float = DEADLINE_SECONDS,
        after_swap: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        engine.updates = self
        self._engine = engine
        self._ranks = AllRanks(weights, news, others, clock=clock)
        self._machine = UpdateMachine(
            version=engine.weight_version,
            ranks=self._ranks.size,
            clock=clock,
            wall=wall,
            memory=memory,
            deadline_seconds=deadline_seconds,
        )
        self._still = Standstill(engine, self._machine, clock=clock, deadline_seconds=deadline_seconds)
        self._live = LiveWeights(engine, self._ranks, self._machine, self._still, clock=clock)
        self._after_swap = after_swap
        self._clock = clock
        self._opening: _Opening | None = None
        self._waiting: list[_Waiting] = []
        self._outcomes: list[Outcome] = []
        self._mark: object = None

    @property
    def busy(self) -> bool:
        """Whether ``poll`` is to be called often."""
        return self._machine.current is not None or bool(self._waiting) or bool(self._outcomes)

    def status(self) -> WeightsStatus:
        """What serves, what is on its way, what has been."""
        return self._machine.status()

    def take_change(self) -> bool:
        """Whether the status has changed since the last call."""
        seen = self._machine.mark()
        changed, self._mark = seen != self._mark, seen
        return changed

    def control(self, call: int, command: Control) -> None:
        """Carry a command out, or begin to; its outcome comes out of a later ``poll``.

        :raises EngineFault: when the ranks cannot go on together.
        """
        try:
            self._control(call, command)
        except Exception as error:
            self._outcomes.append(Outcome(call=call, error=_told(error)))

    def poll(self) -> list[Outcome]:
        """Carry on with whatever is under way; outcomes of calls.

        :raises EngineFault: when the ranks cannot go on together.
        """
        for report in self._ranks.reports():
            self._take(report)
        if self._machine.current is not None:
            self._machine.tick(running=self._engine.num_started)
        self._tell_ranks()
        if self._opening is not None:
            self._open(self._opening)
        if self._machine.phase == "committing":
            self._commit()
        self._still.settle()
        return self._take_outcomes()

    def close(self) -> list[Outcome]:
        """Give up what is under way, since the engine ends; outcomes of the calls that are left."""
        record = self._machine.current
        if record is not None:
            self._machine.fail(record.id, UpdateFailed("the server ended", code="shutting-down"))
            self._tell_ranks()
        outcomes = self._take_outcomes()
        ended = ShuttingDown("the server ended before it was done")
        calls = [waiting.call for waiting in self._waiting]
        if self._opening is not None:
            calls.append(self._opening.call)
        self._waiting.clear()
        return [*outcomes, *(Outcome(call=call, error=ended) for call in calls)]

    # -- commands ----------------------------------------------------------------------------------

    def _control(self, call: int, command: Control) -> None:
        machine = self._machine
        match command:
            case Begin():
                self._begin(call, command)
            case Feed(id=update, piece=piece):
                number = machine.feed(update)
                self._ranks.tell(FeedNow(update=update, piece=piece))
                self._later(call, lambda: self._fed(update, number))
            case EndFeed(id=update, version=version):
                if machine.end_feed(update, version):
                    self._ranks.tell(EndFeedNow(update=update))
                self._done(call, machine.record(update))
            case Commit(id=update):
                self._done(call, machine.commit(update))
            case AbortUpdate(id=update, reason=reason):
                machine.abort(update, reason)
                self._later(call, lambda: self._ended(update))
            case RollBack(in_flight=in_flight):
                record = machine.roll_back(in_flight)
                self._later(call, lambda: self._committed(record.id))
            case Pause(mode=mode):
                self._later(call, self._still.pause(mode))
            case Resume():
                self._still.resume()
                self._done(call, machine.status())
            case Relabel(version=version):
                self._engine.settle()
                if machine.relabel(version) is not None:
                    self._engine.set_weight_version(version)
                self._done(call, machine.status())
            case Join() | Leave():
                self._later(call, self._live.change_group(command))
            case Export():
                self._later(call, self._live.export(command))
            case Checksum() | Layout() | ReadTensor() | Release() | Restore() | FlushCache():
                self._done(call, self._live.carry_out(command))
            case _:
                assert_never(command)

    def _done(self, call: int, body: Any) -> None:
        self._outcomes.append(Outcome(call=call, body=msgspec.json.encode(body)))

    def _later(self, call: int, answer: Callable[[], Any | None]) -> None:
        self._waiting.append(_Waiting(call=call, answer=answer))

    def _take_outcomes(self) -> list[Outcome]:
        waiting, self._waiting = self._waiting, []
        for entry in waiting:
            try:
                body = entry.answer()
            except Exception as error:
                self._outcomes.append(Outcome(call=entry.call, error=_told(error)))
                continue
            if body is None:
                self._waiting.append(entry)
            else:
                self._done(entry.call, body)
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _fed(self, update: str, number: int) -> UpdateRecord | None:
        record = self._machine.record(update)
        if self._machine.pieces_everywhere(update) >= number or record.state == "committed":
            return record
        if record.code:
            raise _failure(record)
        return None

    def _ended(self, update: str) -> UpdateRecord | None:
        return None if self._machine.is_current(update) else self._machine.record(update)

    def _committed(self, update: str) -> UpdateRecord | None:
        record = self._ended(update)
        if record is not None and record.state != "committed":
            raise _failure(record)
        return record

    # -- an update on its way ----------------------------------------------------------------------

    def _begin(self, call: int, command: Begin) -> None:
        record, seconds = self._machine.begin(command.id, command.request)
        if seconds is None:
            self._done(call, record)
        else:
            self._opening = _Opening(call=call, begin=command, deadline=self._clock() + seconds)

    def _open(self, opening: _Opening) -> None:
        """Have the ranks stage the update, once the engine is as it wants it."""
        update, request = opening.begin.id, opening.begin.request
        record = self._machine.record(update)
        in_place = record.memory == "inplace"
        if self._machine.is_current(update):
            if in_place and not self._still.quiet(request.in_flight):
                return
            try:
                order = self._ranks.prepare(request.order, opening.deadline - self._clock())
            except Exception as error:
                self._machine.fail(update, _told(error))
            else:
                if in_place:
                    self._still.stop_for(update)
                self._machine.stage(update, order)
                self._tell_ranks()
        self._opening = None
        record = self._machine.record(update)
        if record.code:
            self._outcomes.append(Outcome(call=opening.call, error=_failure(record)))
        else:
            self._done(opening.call, record)

    def _tell_ranks(self) -> None:
        for action in self._machine.take_actions():
            if isinstance(action, Drop):
                self._ranks.tell(DropNow(update=action.update))
            else:
                self._ranks.tell(StageNow(order=action))

    def _take(self, report: Report) -> None:
        match report:
            case Vote():
                self._machine.vote(report)
            case Fed():
                self._machine.note_fed(report)
            case _:
                self._machine.note_progress(report)

    def _commit(self) -> None:
        """Swap on all ranks, as soon as the update's policy lets it."""
        record = self._machine.current
        if record is None or (record.memory == "staged" and not self._still.quiet(record.in_flight)):
            return
        self._engine.settle()
        since = self._still.since or self._clock()
        swap = self._machine.take_swap()
        what = RollBackNow() if swap.roll_back else CommitNow(update=swap.update, version=swap.version)
        question = self._ranks.ask(what)
        self._ranks.wait(question, SWAP_SECONDS)
        try:
            digests = [msgspec.json.decode(body, type=str) for body in question.bodies()]
        except UpdateFailed as error:
            self._machine.tear(error.code, f"the swap failed: {error.message}", error.details)
            return
        self._after_swap()
        if self._machine.committed(digests, self._clock() - since).state == "committed":
            self._engine.set_weight_version(swap.version)


def _told(error: Exception) -> GtpServeError:
    """What a caller is told; an EngineFault is not for a caller but for the engine's driver.

    :raises EngineFault: when it is one.
    """
    if isinstance(error, EngineFault):
        raise error
    if isinstance(error, GtpServeError):
        return error
    traceback.print_exception(error)
    return UpdateFailed(f"{type(error).__name__}: {error}", code="internal")


def _failure(record: UpdateRecord) -> UpdateFailed:
    return UpdateFailed(record.message, record.details, code=record.code)
