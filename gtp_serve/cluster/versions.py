"""One weight version for all replicas: prepare everywhere, decide durably, commit; whoever missed it catches up.

    begin -> preparing --all verified--> verified --wish--> DECIDED (in the journal) -> committed everywhere
                  `--any doubt--> aborted, the old version serves on     `--a replica missed it: behind -> catches up

The trainer's bytes go to one replica each and from there to the others.  Knows replicas by ``Port`` only.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace

from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.catch_up import EMPTY, CatchUp
from gtp_serve.cluster.decisions import Decisions, Outcome
from gtp_serve.cluster.journal import Journal
from gtp_serve.cluster.member import Member, ReplicaLost
from gtp_serve.cluster.prepare import Preparation, Run, begin_at
from gtp_serve.errors import EngineFault, GtpServeError, NotReady, UnknownUpdate, UpdateFailed, UpdateRefused
from gtp_serve.refit import refusals
from gtp_serve.refit.admission import check_request
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    EndFeed,
    FedOrder,
    Feed,
    GroupOrder,
    Join,
    Leave,
    MemoryOrder,
    Relabel,
    RollBack,
    UpdateRecord,
    UpdateRequest,
)
from gtp_serve.refit.versions import Labels, check_form

_GRACE_SECONDS = 30.0
_LABELS_KEPT = 1000


class Versions:
    """The fleet's weights.

    :param members: all replicas there are.
    :param on_change: told whenever ``current`` or the journal has changed.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        journal: Journal,
        *,
        deadline_seconds: float,
        rolling: bool,
        on_change: Callable[[], None],
        log: Callable[[str, dict[str, Any]], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.current: Run | None = None
        self._members = members
        self._journal = journal
        self._seconds = deadline_seconds
        self._on_change = on_change
        self._log = log
        self._wall = wall
        self._labels = Labels(journal.memory.labels[-1] if journal.memory.labels else "")
        for label in journal.memory.labels:
            self._labels.set_live(label)
        self.late = CatchUp(members, journal, lambda: "" if self.current is None else self.current.record.id, log)
        """Brings replicas to the committed version."""
        self._preparation = Preparation(rolling=rolling)
        self._decisions = Decisions(
            members, journal, self.late, rolling=rolling, on_change=lambda: self._on_change(), log=log, wall=wall
        )
        self._group = ""
        """The replica that has joined a trainer's group."""

    @property
    def committed(self) -> str:
        """The version that everybody serves, or must come to serve."""
        return self._journal.memory.committed

    def found_first(self, version: str) -> None:
        """The first replica there ever was serves this: the fleet's first version."""
        if not self.committed:
            self._labels = Labels(version)
            self._journal.write(committed=version, labels=(version,))
            self._on_change()

    # -- what is asked -------------------------------------------------------------------------------

    def record(self, update: str) -> tuple[UpdateRecord, str]:
        """An update by its id, and the digest of what it was asked for.

        :raises UnknownUpdate: there is none.
        """
        if self.current is not None and self.current.record.id == update:
            return self.current.record, self.current.content
        for record in self._journal.memory.records:
            if record.id == update:
                return record, self._journal.memory.contents.get(update, "")
        raise UnknownUpdate(f"there is no update {update[:64]!r} among the last ones", param="id")

    async def begin(self, begin: Begin, bundles: Sequence[Bundle] | None) -> UpdateRecord:
        """Start an update.

        :param bundles: its bytes, unless the replicas get them from its order.
        :raises UpdateRefused: as things are, it cannot be; nothing has changed.
        """
        request = begin.request
        content = xxhash.xxh3_128_hexdigest(msgspec.json.encode(_plain(request)))
        with suppress(UnknownUpdate):
            record, known = self.record(begin.id)
            if known != content:
                raise refusals.another_content(record)
            return record
        check_form(begin.id)
        self._check_free()
        participants = self._participants(self._group if isinstance(request.order, FedOrder) else "")
        kinds = {member.status.weights.memory for member in participants}
        memory = check_request(request, self._labels, "inplace" if "inplace" in kinds else "staged")
        record = UpdateRecord(
            id=begin.id,
            version=request.version,
            base=self.committed,
            state="staging",
            kind=str(request.order.__struct_config__.tag),
            in_flight=request.in_flight,
            memory=memory,
            dry_run=request.dry_run,
            began=self._wall(),
        )
        run = Run(
            record=record,
            request=request,
            content=content,
            bundles=bundles,
            participants=participants,
            seconds=request.deadline_seconds or self._seconds,
            began=time.monotonic(),
        )
        self.current = run
        if isinstance(request.order, GroupOrder | FedOrder):
            await self._open_seed(run)
        self._journal.write(pending=replace(run.record, host="", port=0))
        self._on_change()
        run.task = asyncio.create_task(self._drive(run))
        return run.record

    def _check_free(self) -> None:
        if self.current is not None:
            raise refusals.under_way(self.current.record)
        if self._journal.memory.deciding is not None:
            raise UpdateRefused("the decision before is still being carried out", code="update-under-way")

    def _participants(self, first: str = "") -> list[Member]:
        """Replicas that serve; without any, those that wait for a version that nobody has any more.

        :param first: the name of the one that is to come first, if it is there.
        """
        members = self._members()
        ready = [member for member in members if member.state == "ready"]
        ready = ready or [member for member in members if member.alive]
        if not ready:
            raise NotReady("no replica can take weights now", [("try", "again when one is ready")])
        return sorted(ready, key=lambda member: member.name != first)

    async def _open_seed(self, run: Run) -> None:
        """The one replica that receives from the trainer's ranks must be there before they are told where."""
        seed = run.participants[0]
        try:
            body = await seed.port.control(begin_at(run))
        except GtpServeError:
            self.current = None
            raise
        opened = msgspec.convert(body, UpdateRecord)
        run.record = replace(run.record, host=opened.host, port=opened.port)

    async def ask_group(self, command: Join | Leave | Feed | EndFeed) -> Any:
        """What a trainer says to an engine that has joined its group: always the same replica."""
        run = self.current
        if run is not None and isinstance(run.request.order, FedOrder):
            return await run.participants[0].port.control(command)
        members = self._participants(self._group)
        self._group = members[0].name
        return await members[0].port.control(command)

    def commit(self, update: str) -> UpdateRecord:
        """Wish a verified update to be committed.

        :raises UpdateRefused: it is not verified yet, or has ended otherwise.
        """
        record, _ = self.record(update)
        run = self.current
        if run is not None and run.record.id == update:
            if record.state != "verified":
                raise refusals.not_verified(record)
            run.wish.set()
        elif record.state != "committed":
            raise refusals.ended_otherwise(record)
        return record

    async def abort(self, update: str, reason: str) -> UpdateRecord:
        """Give an update up; returns when it has ended.

        :raises UpdateRefused: it is decided.
        """
        record, _ = self.record(update)
        run = self.current
        if record.state == "committed" or (run is not None and run.record.id == update and run.decided):
            raise refusals.committed(record)
        if run is not None and run.record.id == update and run.task is not None:
            run.dropped = ("aborted", reason)
            run.task.cancel()
            await asyncio.wait([run.task])
        return self.record(update)[0]

    async def roll_back(self, command: RollBack) -> UpdateRecord:
        """Back to the version before, on every replica; one that has it not catches up.

        :raises UpdateRefused: no replica has a version to go back to.
        """
        self._check_free()
        ready = self._participants()
        for member in ready:
            member.status = await member.port.status()
        befores = [member.status.weights.rollback_version for member in ready]
        version = next((before for before in befores if before is not None), None)
        if version is None:
            raise UpdateRefused("there is no version to go back to", code="nothing-to-roll-back")
        now = self._wall()
        own_id = f"rollback-{uuid.uuid4().hex[:12]}"
        record = UpdateRecord(
            id=own_id, version=version, base=self.committed, state="verified", kind="rollback",
            in_flight=command.in_flight, began=now,
        )  # fmt: skip
        request = UpdateRequest(order=EMPTY, version=version, in_flight=command.in_flight, any_order=True)
        run = Run(
            record=record, request=request, content="", bundles=None, seconds=self._seconds, began=time.monotonic(),
            participants=[member for member, before in zip(ready, befores, strict=True) if before == version],
        )  # fmt: skip
        self.current = run
        run.task = asyncio.create_task(self._decide_safely(run))
        await asyncio.wait([run.task])
        record = self.record(own_id)[0]
        if record.state != "committed":
            raise UpdateFailed(record.message, record.details, code=record.code)
        return record

    async def relabel(self, version: str) -> Any:
        """The same weights under another label, on every replica.

        :raises UpdateRefused: it is no label, or an update is under way.
        """
        check_form(version)
        self._check_free()
        ready = [member for member in self._participants() if member.state == "ready"]
        if version == self.committed or not ready:
            return {"version": self.committed}
        memory = self._journal.memory
        # A replica that dies now comes back with the first version's label, which is not this one: it takes a peer's.
        self._journal.write(committed=version, initial=False, disk=memory.disk)
        answers = await asyncio.gather(
            *(member.port.control(Relabel(version=version)) for member in ready), return_exceptions=True
        )
        for member, answer in zip(ready, answers, strict=True):
            if not isinstance(answer, BaseException):
                member.version = version
        self._labels.set_live(version)
        self._journal.write(labels=(*memory.labels, version)[-_LABELS_KEPT:])
        self._on_change()
        return next((answer for answer in answers if not isinstance(answer, BaseException)), {"version": version})

    # -- an update on its way ------------------------------------------------------------------------

    async def _drive(self, run: Run) -> None:
        try:
            fed = isinstance(run.request.order, FedOrder)  # each piece gives it its full time again
            async with asyncio.timeout(None if fed else 2 * run.seconds + _GRACE_SECONDS):
                await self._preparation.prepare(run)
        except asyncio.CancelledError:
            code, reason = run.dropped or ("shutting-down", "the fleet ended")
            await self._give_up(run, UpdateFailed(reason, code=code))
            return
        except TimeoutError:
            late = f"the replicas had not verified the update after {2 * run.seconds + _GRACE_SECONDS:g} s"
            await self._give_up(run, UpdateFailed(late, code="update-deadline"))
            return
        except Exception as error:
            await self._give_up(run, _told(error))
            return
        if run.record.dry_run:
            await self._drop(run)
            self._end(run, replace(run.record, state="verified"))
            return
        run.record = replace(run.record, state="verified", votes=len(run.participants))
        self._on_change()
        try:
            if run.request.commit == "manual":
                await run.wish.wait()
        except asyncio.CancelledError:
            code, reason = run.dropped or ("shutting-down", "the fleet ended")
            await self._give_up(run, UpdateFailed(reason, code=code))
            return
        await self._decide_safely(run)

    # -- the decision --------------------------------------------------------------------------------

    async def _decide_safely(self, run: Run) -> None:
        try:
            outcome = await self._decisions.decide(run)
            self.current = None
            self._write(outcome)
            self._note_end(outcome.record)
        except Exception as error:  # the journal could not be written, or a bug: nobody must wait for ever
            await self._give_up(run, _told(error))

    # -- the end -------------------------------------------------------------------------------------

    async def _give_up(self, run: Run, error: GtpServeError) -> None:
        await self._drop(run)
        details = tuple((str(label), str(text)) for label, text in error.details)
        self._end(run, replace(run.record, state="aborted", code=error.code, message=error.message, details=details))

    async def _drop(self, run: Run) -> None:
        order = AbortUpdate(id=run.record.id, reason="the fleet gave the update up")
        members = [member for member in self._members() if member.alive]
        await asyncio.gather(*(member.port.control(order) for member in members), return_exceptions=True)
        await asyncio.gather(*(member.port.release() for member in members), return_exceptions=True)

    def _end(self, run: Run, record: UpdateRecord) -> None:
        self.current = None
        self._write(Outcome(record=record, content=run.content))
        self._note_end(record)

    def _note_end(self, record: UpdateRecord) -> None:
        self._on_change()
        self._log(
            "weights", {"update": record.id, "version": record.version, "state": record.state, "code": record.code}
        )

    def _write(self, outcome: Outcome) -> None:
        record, changes = replace(outcome.record, host="", port=0), outcome.changes
        if record.state == "committed":
            self._labels.set_live(record.version)
            changes = {**changes, "labels": (*self._journal.memory.labels, record.version)[-_LABELS_KEPT:]}
        self._journal.end(record, outcome.content, **changes)

    # -- after a restart -----------------------------------------------------------------------------

    async def recover(self) -> None:
        """Carry out what was decided, drop what was not."""
        decision = self._journal.memory.deciding
        alive = [member for member in self._members() if member.alive]
        if decision is None:
            await asyncio.gather(*(self.late.drop_left(member) for member in alive))
            pending = self._journal.memory.pending
            if pending is not None:
                why = "the fleet's own process ended before it was decided"
                self._journal.end(replace(pending, state="aborted", code="fleet-restarted", message=why), "")
            return
        self._write(await self._decisions.recover(decision))
        self._on_change()


def _plain(request: UpdateRequest) -> UpdateRequest:
    """What an update is, without where a front has its bytes."""
    return replace(request, order=EMPTY) if isinstance(request.order, MemoryOrder) else request


def _told(error: Exception) -> GtpServeError:
    if isinstance(error, ReplicaLost):
        return UpdateFailed(error.message, error.details, code=error.code)
    if isinstance(error, GtpServeError) and not isinstance(error, EngineFault):
        return error
    return UpdateFailed(f"{type(error).__name__}: {error}", code="internal")
