"""The one update that is under way: who has voted, how far each rank is, until when.  No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from msgspec.structs import replace

from gtp_serve.refit.orders import (
    Fed,
    GroupOrder,
    Order,
    Progress,
    StageOrder,
    UpdateRecord,
    UpdateRequest,
    Vote,
)

HOLD_SECONDS = 3600.0
"""For the wish to commit a verified update, whose second set holds its memory."""

Phase = Literal["opening", "staging", "verified", "committing", "swapping", "failing"]
"""More precise than a record's state: opening and failing are told as staging, the next two as verified."""

Details = tuple[tuple[str, str], ...]


@dataclass(kw_only=True, slots=True)
class UnderWay:
    """An update that has not ended."""

    record: UpdateRecord
    content: str
    """Digest of what was asked for."""
    ranks: int
    started: float
    patience: float
    """Seconds for each of its waits."""
    deadline: float = field(init=False)
    phase: Phase
    request: UpdateRequest | None = None
    """None for a rollback."""
    votes: dict[int, Vote] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    fed: dict[int, int] = field(default_factory=dict)
    """Pieces that each rank has."""
    pieces: int = 0
    """That have been announced."""
    end_of_feed: bool = False
    verified_at: float | None = None

    def __post_init__(self) -> None:
        self.wait_from(self.started)

    def wait_from(self, now: float) -> None:
        """Its next wait begins."""
        self.deadline = now + self.patience

    @property
    def all_voted(self) -> bool:
        """Whether each rank has said its word, good or bad."""
        return len(self.votes) == self.ranks

    @property
    def touched(self) -> bool:
        """Whether what the update was to fill may have been written; a rank that is silent may be at it."""
        return not self.all_voted or any(vote.touched for vote in self.votes.values())

    @property
    def pieces_everywhere(self) -> int:
        """Pieces that all ranks have."""
        return min(self.fed.get(rank, 0) for rank in range(self.ranks))

    def stage(self, order: Order, now: float) -> StageOrder:
        """What the ranks are told, now that all that must be open is open."""
        self.phase = "staging"
        if isinstance(order, GroupOrder):
            self.record = replace(self.record, host=order.host, port=order.port)
        return StageOrder(
            update=self.record.id,
            version=self.record.version,
            order=order,
            memory=self.record.memory,
            deadline_seconds=max(0.1, self.deadline - now),
        )

    def note_fed(self, fed: Fed) -> None:
        """A rank has pieces; a number that is not higher than its last changes nothing."""
        if self.fed.get(fed.rank, 0) < fed.pieces <= self.pieces:
            self.fed[fed.rank] = fed.pieces

    def note_verified(self, now: float) -> None:
        """All ranks have it; in place, nothing is served until the commit, which must not be long in coming."""
        hold = self.patience if self.record.memory == "inplace" else HOLD_SECONDS
        self.phase, self.verified_at, self.deadline = "verified", now, now + hold
        self.record = replace(self.record, state="verified")

    def take(self, vote: Vote) -> bool:
        """A rank's word, if it is its first, into the record: the slowest rank's times, the bytes of all together."""
        if vote.rank in self.votes or not 0 <= vote.rank < self.ranks:
            return False
        self.votes[vote.rank] = vote
        votes = self.votes.values()
        seconds: dict[str, float] = {}
        for each in votes:
            for phase, taken in each.seconds.items():
                seconds[phase] = max(taken, seconds.get(phase, 0.0))
        self.record = replace(
            self.record,
            votes=sum(each.error is None for each in votes),
            seconds=seconds,
            source_bytes=sum(each.source_bytes for each in votes),
            target_bytes=sum(each.target_bytes for each in votes),
        )
        return True

    def difference(self, digests: list[str]) -> int | None:
        """The first rank whose weights are not those that it voted for; None when there is none."""
        wrong = (rank for rank, vote in sorted(self.votes.items()) if vote.digest and vote.digest != digests[rank])
        return next(wrong, None)

    def lateness(self, running: int, *, paused: bool) -> tuple[str, Details]:
        """What it waited for in vain: a message and who was late.

        :param running: requests that would have had to end.
        """
        seconds = f"{self.patience:g} s"
        requests = f"{running} requests were still running"
        if self.phase == "opening":
            waits = f"; {requests}" if running else ""
            return f"the update could not begin to arrive within {seconds}{waits}", ()
        if self.phase == "verified":
            return "nobody asked for the commit of the verified update in time", ()
        if self.phase == "committing":
            return f"{requests} after {seconds}" + (", and the engine is paused" if paused else ""), ()
        late = [rank for rank in range(self.ranks) if rank not in self.votes]
        names = ", ".join(f"tp{rank}" for rank in late)
        return (
            f"not all of the weights were there and verified within {seconds}; late: {names}",
            tuple((f"tp{rank}", _words(self.progress.get(rank))) for rank in late),
        )

    def ended(self, now: float, **fields: object) -> UpdateRecord:
        """Its last record."""
        seconds = {**self.record.seconds, "total": now - self.started}
        if fields.get("state") == "committed" and self.verified_at is not None:
            seconds["wait"] = now - self.verified_at
        return replace(self.record, seconds=seconds, host="", port=0, **fields)


def _words(progress: Progress | None) -> str:
    if progress is None:
        return "nothing was heard of it"
    return f"{progress.phase}, {progress.done} of {progress.total} bytes" if progress.total else progress.phase
