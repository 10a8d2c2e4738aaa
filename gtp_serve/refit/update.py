"""What becomes of an update of the weights: decides everything, does nothing.  No torch, no clock, no thread.

    begin -> opening -> staging --all ranks vote--> verified --wish--> committing -> take_swap -> committed
                |          `---any doubt---+-----------'-----------------'                `-> torn: a rank failed in it
                v                          v
             aborted           failing: drop, hear each rank's word -> aborted, the old version serves on
                                                                    -> torn, if the live set was being written

The label changes in ``committed`` only, after all ranks have voted and all have swapped.  What a method refuses
(UpdateRefused) has changed nothing; a message that comes twice, late or for another update changes nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace

from gtp_serve.errors import GtpServeError, UnknownUpdate
from gtp_serve.refit import feeding, refusals
from gtp_serve.refit.actions import Drop, Swap
from gtp_serve.refit.admission import check_request
from gtp_serve.refit.history import History
from gtp_serve.refit.live import Live
from gtp_serve.refit.orders import (
    Fed,
    InFlight,
    Memory,
    Order,
    Progress,
    StageOrder,
    UpdateRecord,
    UpdateRequest,
    Vote,
    WeightsStatus,
)
from gtp_serve.refit.under_way import Details, Phase, UnderWay
from gtp_serve.refit.versions import check_form

DEADLINE_SECONDS = 120.0
STOP_SECONDS = 5.0
"""For the ranks to stop an update that was given up."""


class UpdateMachine:
    """One engine's updates.

    :param version: label of the weights that were loaded first.
    :param ranks: how many must vote.
    :param clock: monotonic seconds.
    :param wall: seconds since 1970, for the records.
    """

    def __init__(
        self,
        *,
        version: str,
        ranks: int,
        clock: Callable[[], float],
        wall: Callable[[], float],
        memory: Memory = "staged",
        deadline_seconds: float = DEADLINE_SECONDS,
    ) -> None:
        self.ranks = ranks
        self.memory: Memory = memory
        self.paused = False
        self.live = Live(version)
        self._seconds = deadline_seconds
        self._clock, self._wall = clock, wall
        self._current: UnderWay | None = None
        self._history = History()
        self._actions: list[StageOrder | Drop] = []

    # -- what there is -----------------------------------------------------------------------------

    @property
    def current(self) -> UpdateRecord | None:
        """The update under way."""
        return self._current.record if self._current else None

    @property
    def phase(self) -> Phase | None:
        """Of the update under way."""
        return self._current.phase if self._current else None

    def status(self) -> WeightsStatus:
        """Everything that is told."""
        return WeightsStatus(
            version=self.live.version,
            digest=self.live.digest,
            torn=self.live.torn,
            paused=self.paused,
            rollback_version=self.live.before[0] if self.live.before else None,
            memory=self.memory,
            update=self.current,
            history=self._history.newest_first(),
            sleeping=self.live.sleeping,
        )

    def mark(self) -> object:
        """Equal to an earlier one if the status is as it was then."""
        live = self.live
        return (self.current, self._history.total, self.paused, live.torn, live.digest, live.sleeping)

    def record(self, update: str) -> UpdateRecord:
        """Of an update by its id.

        :raises UnknownUpdate: there is none, or more than 200 have ended since.
        """
        return self._find(update)[0]

    def is_current(self, update: str) -> bool:
        """Whether it is under way."""
        return self._at(update) is not None

    def pieces_everywhere(self, update: str) -> int:
        """Pieces of a fed update that all ranks have; 0 when it is not under way."""
        current = self._at(update)
        return current.pieces_everywhere if current else 0

    def take_actions(self) -> list[StageOrder | Drop]:
        """What all ranks are to be told now, in order; each is given out once."""
        actions, self._actions = self._actions, []
        return actions

    def _find(self, update: str) -> tuple[UpdateRecord, str]:
        current = self._at(update)
        return (current.record, current.content) if current else self._history.find(update)

    def _at(self, update: str, *phases: Phase) -> UnderWay | None:
        current = self._current
        if current is None or current.record.id != update or (phases and current.phase not in phases):
            return None
        return current

    # -- begin -------------------------------------------------------------------------------------

    def begin(self, update: str, request: UpdateRequest) -> tuple[UpdateRecord, float | None]:
        """Start an update: its record and, if it is a new one, its seconds to begin in: ``stage`` is next, or ``fail``.

        :raises UpdateRefused: as things are, it cannot be.
        """
        content = xxhash.xxh3_128_hexdigest(msgspec.json.encode(request))
        known = self._known(update, content)
        if known is not None:
            return known, None
        check_form(update)
        self._check_free()
        memory = check_request(request, self.live.labels, self.memory)
        seconds = request.deadline_seconds or self._seconds
        kind, in_flight, dry_run = str(request.order.__struct_config__.tag), request.in_flight, request.dry_run
        record = self._new_record(update, request.version, kind, memory, in_flight=in_flight, dry_run=dry_run)
        self._current = UnderWay(
            record=record,
            content=content,
            ranks=self.ranks,
            started=self._clock(),
            patience=seconds,
            phase="opening",
            request=request,
        )
        return record, seconds

    def _known(self, update: str, content: str) -> UpdateRecord | None:
        try:
            record, known = self._find(update)
        except UnknownUpdate:
            return None
        if known != content:
            raise refusals.another_content(record)
        return record

    def _check_free(self) -> None:
        if self._current is not None:
            raise refusals.under_way(self._current.record)
        self.live.check_memory()

    def _new_record(self, update: str, version: str, kind: str, memory: Memory, **fields: Any) -> UpdateRecord:
        fields = {"state": "staging", "base": self.live.version, "began": self._wall(), **fields}
        return UpdateRecord(id=update, version=version, kind=kind, memory=memory, **fields)

    def stage(self, update: str, order: Order) -> None:
        """All that must be open is open (and, in place, no step runs): the ranks are to be told."""
        current = self._at(update, "opening")
        if current is not None:
            self._actions.append(current.stage(order, self._clock()))

    # -- what comes from the ranks -----------------------------------------------------------------

    def vote(self, vote: Vote) -> None:
        """A rank's word; its first one counts."""
        current = self._at(vote.update, "staging", "failing")
        if current is None or not current.take(vote):
            return
        if current.phase == "failing":
            self._end_failing(current)
        elif vote.error is not None:
            code, message, details = vote.error
            where = (("on", f"rank tp{vote.rank}"),) if self.ranks > 1 else ()
            self._fail(current, code, message, (*details, *where))
        elif current.all_voted:
            self._note_verified(current)

    def note_progress(self, progress: Progress) -> None:
        """For the message if the rank is late."""
        current = self._at(progress.update)
        if current is not None:
            current.progress[progress.rank] = progress

    def note_fed(self, fed: Fed) -> None:
        """A rank has pieces of a fed update."""
        current = self._at(fed.update, "staging")
        if current is not None:
            current.note_fed(fed)

    def _note_verified(self, current: UnderWay) -> None:
        current.note_verified(self._clock())
        if current.record.dry_run:
            self._actions.append(Drop(update=current.record.id))
            self._end_untaken(current, "verified")
        elif current.request is not None and current.request.commit == "auto":
            self._wish(current)

    def _wish(self, current: UnderWay) -> None:
        current.phase = "committing"
        current.wait_from(self._clock())

    # -- pieces ------------------------------------------------------------------------------------

    def feed(self, update: str) -> int:
        """See ``feeding.announce``; each piece gives the update its full time again."""
        return feeding.announce(self.record(update), self._at(update), self._clock())

    def end_feed(self, update: str, version: str | None = None) -> bool:
        """See ``feeding.end``."""
        return feeding.end(self.record(update), self._at(update), version, self._clock())

    # -- commit, abort, rollback, relabel ----------------------------------------------------------

    def commit(self, update: str) -> UpdateRecord:
        """Wish a verified update to be committed.

        :raises UpdateRefused: it is not verified yet, or has ended otherwise.
        """
        record = self.record(update)
        current = self._at(update)
        if current is not None and current.phase == "verified":
            self._wish(current)
        elif current is not None and current.phase not in ("committing", "swapping"):
            raise refusals.not_verified(record)
        elif current is None and record.state != "committed":
            raise refusals.ended_otherwise(record)
        return record

    def abort(self, update: str, reason: str) -> UpdateRecord:
        """Give an update up; it has ended once all ranks have stopped.

        :raises UpdateRefused: it is committed.
        """
        record = self.record(update)
        if record.state == "committed" or self._at(update, "swapping"):
            raise refusals.committed(record)
        return self._give_up(update, "aborted", reason, ())

    def fail(self, update: str, error: GtpServeError) -> UpdateRecord:
        """The update cannot go on, for a reason that is not a rank's."""
        return self._give_up(update, error.code, error.message, error.details)

    def _give_up(self, update: str, code: str, message: str, details: Details) -> UpdateRecord:
        current = self._at(update, "opening", "staging", "verified", "committing")
        if current is not None:
            self._fail(current, code, message, details)
        return self.record(update)

    def roll_back(self, in_flight: InFlight) -> UpdateRecord:
        """Wish the set before to be served again.

        :raises UpdateRefused: there is none, or an update is under way.
        """
        self._check_free()
        version, _ = self.live.check_before()
        own_id = self._history.own_id("rollback")
        record = self._new_record(own_id, version, "rollback", "staged", state="verified", in_flight=in_flight)
        now = self._clock()
        self._current = UnderWay(
            record=record,
            content="",
            ranks=self.ranks,
            started=now,
            patience=self._seconds,
            phase="committing",
            verified_at=now,
        )
        return record

    def relabel(self, version: str) -> UpdateRecord | None:
        """The same weights have another label from now on; None when it is the one they have.

        :raises UpdateRefused: it is no label, or there are no whole weights, or an update is under way.
        """
        check_form(version)
        self._check_free()
        self.live.check_whole()
        if version == self.live.version:
            return None
        own_id, digest = self._history.own_id("label"), self.live.digest
        record = self._new_record(own_id, version, "label", self.memory, state="committed", digest=digest)
        self.live.labels.set_live(version)
        self._history.add(record)
        return record

    def sleep(self, tags: Sequence[str]) -> None:
        """Memory is being given back.

        :raises UpdateRefused: an update is under way.
        """
        if self._current is not None:
            raise refusals.under_way(self._current.record)
        self.live.sleep(tags)

    # -- the swap ----------------------------------------------------------------------------------

    def take_swap(self) -> Swap:
        """Of the update that is ``committing``; from here on nothing but ``committed`` or ``tear`` can follow."""
        current = self._current
        if current is None or current.phase != "committing":
            raise RuntimeError("no update is to be committed")
        current.phase = "swapping"
        record = current.record
        return Swap(update=record.id, version=record.version, roll_back=record.kind == "rollback")

    def committed(self, digests: Sequence[str], stall_seconds: float) -> UpdateRecord:
        """All ranks have swapped: the label changes now, unless a rank does not hold what it voted for.

        :param digests: of each rank's live set, in order.
        """
        current = self._swapping()
        wrong = current.difference(list(digests))
        if wrong is not None:
            return self.tear("digest-mismatch", f"rank tp{wrong} holds other weights than it has verified", ())
        self.live.replace(current.record.version, digests, keeps_old=current.record.memory == "staged")
        return self._end(current, state="committed", stall_seconds=stall_seconds, digest=self.live.digest)

    def tear(self, code: str, message: str, details: Details) -> UpdateRecord:
        """A rank failed in the swap: what the ranks hold now may be a mix."""
        current = self._swapping()
        self.live.tear(message)
        return self._end(current, state="torn", code=code, message=message, details=details)

    def _swapping(self) -> UnderWay:
        if self._current is None or self._current.phase != "swapping":
            raise RuntimeError("no swap is under way")
        return self._current

    # -- the end -----------------------------------------------------------------------------------

    def tick(self, *, running: int = 0) -> None:
        """Look at the clock.

        :param running: requests that the update may be waiting for.
        """
        current = self._current
        if current is None or current.phase == "swapping" or self._clock() < current.deadline:
            return
        if current.phase == "failing":
            self._end_untaken(current, "aborted")
            return
        message, details = current.lateness(running, paused=self.paused)
        self._fail(current, "update-deadline", message, details)

    def _fail(self, current: UnderWay, code: str, message: str, details: Details) -> None:
        current.record = replace(current.record, code=code, message=message, details=tuple(details))
        if current.phase == "opening" or current.request is None:  # the ranks have not heard of it
            self._end(current, state="aborted")
            return
        self._actions.append(Drop(update=current.record.id))
        current.phase, current.deadline = "failing", self._clock() + STOP_SECONDS
        self._end_failing(current)

    def _end_failing(self, current: UnderWay) -> None:
        if current.all_voted:  # each rank has stopped
            self._end_untaken(current, "aborted")

    def _end_untaken(self, current: UnderWay, state: str) -> None:
        """What arrived is not to serve; what it has overwritten is lost."""
        if current.touched and current.record.memory == "inplace":
            self.live.tear(current.record.message)
            state = "torn"
        elif current.touched:
            self.live.before = None
        self._end(current, state=state)

    def _end(self, current: UnderWay, **fields: object) -> UpdateRecord:
        record = current.ended(self._clock(), **fields)
        self._history.add(record, current.content)
        self._current = None
        return record
