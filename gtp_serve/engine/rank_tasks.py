"""What a rank does about its weights when it is told to, on rank 0 and on the others alike.  No torch.

``Tell`` is done at once and says what comes of it by reports; ``Ask`` gets one answer, also when it fails.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any, Literal, assert_never

import msgspec

from gtp_serve.errors import EngineFault, GtpServeError
from gtp_serve.layout.spans import Shard
from gtp_serve.refit.orders import JoinGroup, Piece, Report, StageOrder, TensorPart, Vote
from gtp_serve.refit.rank_api import RankControl


class StageNow(msgspec.Struct, frozen=True, tag=True):
    """Begin to stage an update."""

    order: StageOrder


class FeedNow(msgspec.Struct, frozen=True, tag=True):
    """Receive the next tensors of a fed update."""

    update: str
    piece: Piece


class EndFeedNow(msgspec.Struct, frozen=True, tag=True):
    """Verify a fed update."""

    update: str


class DropNow(msgspec.Struct, frozen=True, tag=True):
    """Give an update up."""

    update: str


Tell = StageNow | FeedNow | EndFeedNow | DropNow


class CommitNow(msgspec.Struct, frozen=True, tag=True):
    """Have the staged set serve; answered with the rank's digest."""

    update: str
    version: str


class RollBackNow(msgspec.Struct, frozen=True, tag=True):
    """Have the set before serve; answered with the rank's digest."""


class ChecksumNow(msgspec.Struct, frozen=True, tag=True):
    """Answered with the rank's digest of the live set."""


class ReadNow(msgspec.Struct, frozen=True, tag=True):
    """Answered with TensorParts."""

    name: str
    limit: int


class ShardsNow(msgspec.Struct, frozen=True, tag=True):
    """Answered with the rank's parameters."""


class JoinNow(msgspec.Struct, frozen=True, tag=True):
    """Join somebody's group; steps go on meanwhile."""

    group: JoinGroup


class LeaveNow(msgspec.Struct, frozen=True, tag=True):
    """Leave a group; steps go on meanwhile."""

    name: str


class MemoryNow(msgspec.Struct, frozen=True, tag=True):
    """Give memory back or take it again."""

    change: Literal["release", "restore"]
    tags: tuple[str, ...]


class ExportNow(msgspec.Struct, frozen=True, tag=True):
    """Write parameters into sealed memory while steps go on; answered with a RankExport."""

    update: str
    owned: tuple[tuple[Shard, ...], ...]


Ask = CommitNow | RollBackNow | ChecksumNow | ReadNow | ShardsNow | JoinNow | LeaveNow | MemoryNow | ExportNow


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What came of an Ask: a JSON body, or why it failed."""

    call: int
    rank: int
    body: bytes = b"null"
    error: tuple[str, str, tuple[tuple[str, str], ...]] | None = None
    """Code, message and details."""


Failure = tuple[str, str, tuple[tuple[str, str], ...]]


class RankTasks:
    """Carries commands out on one rank's weights.

    :param report: takes a vote for what could not even begin.
    :param answer: takes answers, from any thread.
    :param after_swap: raises EngineFault when something depends on where parameters lay; this ends the rank.
    """

    def __init__(
        self,
        rank: int,
        weights: RankControl,
        *,
        report: Callable[[Report], None],
        answer: Callable[[Answer], None],
        after_swap: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._weights = weights
        self._report = report
        self._answer = answer
        self._after_swap = after_swap

    def tell(self, what: Tell) -> None:
        """Do it; an exception becomes a vote against the update."""
        update = what.order.update if isinstance(what, StageNow) else what.update
        try:
            self._tell(what)
        except Exception as error:
            begun = not isinstance(what, StageNow)  # else it was refused before a byte moved
            self._report(Vote(update=update, rank=self._rank, error=failure_of(error), touched=begun))

    def _tell(self, what: Tell) -> None:
        match what:
            case StageNow(order=order):
                self._weights.stage(order)
            case FeedNow(update=update, piece=piece):
                self._weights.feed(update, piece)
            case EndFeedNow(update=update):
                self._weights.end_feed(update)
            case DropNow(update=update):
                self._weights.drop(update)
            case _:
                assert_never(what)

    def ask(self, call: int, what: Ask) -> None:
        """Do it and answer; what waits for others is done in a thread of its own."""
        if isinstance(what, JoinNow | LeaveNow | ExportNow):
            threading.Thread(target=self._do, args=(call, what), name="weights-group", daemon=True).start()
        else:
            self._do(call, what)

    def _do(self, call: int, what: Ask) -> None:
        try:
            answer = Answer(call=call, rank=self._rank, body=msgspec.json.encode(self._ask(what)))
        except EngineFault:
            raise
        except Exception as error:
            answer = Answer(call=call, rank=self._rank, error=failure_of(error))
        self._answer(answer)

    def _swapped(self, digest: str) -> str:
        self._after_swap()
        return digest

    def _ask(self, what: Ask) -> Any:
        match what:
            case CommitNow(update=update, version=version):
                return self._swapped(self._weights.commit(update, version))
            case RollBackNow():
                return self._swapped(self._weights.roll_back())
            case ChecksumNow():
                return self._weights.checksum()
            case ReadNow(name=name, limit=limit):
                return tuple(self._weights.read_tensor(name, limit))
            case ShardsNow():
                return tuple(self._weights.shards())
            case JoinNow(group=group):
                return self._weights.join_group(group)
            case LeaveNow(name=name):
                return self._weights.leave_group(name)
            case ExportNow(update=update, owned=owned):
                return self._weights.export(update, owned[self._rank] if owned else ())
            case MemoryNow(change="release", tags=tags):
                return self._weights.release(tags)
            case MemoryNow(tags=tags):
                return self._weights.restore(tags)
            case _:
                assert_never(what)


def failure_of(error: Exception) -> Failure:
    """Code, message and details of whatever was raised; the traceback of what was not foreseen goes to stderr."""
    if isinstance(error, GtpServeError):
        return error.code, error.message, error.details
    traceback.print_exception(error)
    return "internal", f"{type(error).__name__}: {error}", ()


def parts_of(body: bytes) -> tuple[TensorPart, ...]:
    """What a ReadNow was answered with."""
    return msgspec.json.decode(body, type=tuple[TensorPart, ...])
