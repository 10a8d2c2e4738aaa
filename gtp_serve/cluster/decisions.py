"""The second phase of a fleet's update: what is decided is written down, then carried out on every replica.

What is not in the journal has not happened: a fleet that starts again drops prepared updates and carries out decided
ones.  A replica that misses a decision falls behind, and takes no request until it has caught up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from gtp_serve.cluster.catch_up import CatchUp
from gtp_serve.cluster.journal import Decision, Journal
from gtp_serve.cluster.member import Member, ReplicaLost
from gtp_serve.cluster.prepare import Run
from gtp_serve.errors import GtpServeError, UpdateFailed
from gtp_serve.refit.orders import Commit, DiskOrder, RollBack, UpdateRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a decision, to be written to the journal."""

    record: UpdateRecord
    content: str
    changes: dict[str, object] = field(default_factory=dict)
    """Of the journal's memory, beside the record."""


class Decisions:
    """Decides, and sees that it is done.

    :param members: all replicas there are.
    :param rolling: to one replica after the other.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        journal: Journal,
        late: CatchUp,
        *,
        rolling: bool,
        on_change: Callable[[], None],
        log: Callable[[str, dict[str, Any]], None],
        wall: Callable[[], float],
    ) -> None:
        self._members, self._journal, self._late, self._rolling = members, journal, late, rolling
        self._on_change, self._log, self._wall = on_change, log, wall

    async def decide(self, run: Run) -> Outcome:
        """Write the decision for a verified run, and commit it everywhere."""
        record, before = run.record, self._journal.memory
        decision = Decision(
            update=record.id,
            version=record.version,
            in_flight=record.in_flight,
            roll_back=record.kind == "rollback",
            kind=record.kind,
            content=run.content,
            base=before.committed,
            base_initial=before.initial,
            base_disk=before.disk,
        )
        order = run.request.order
        disk = order if isinstance(order, DiskOrder) else None
        self._journal.write(committed=record.version, deciding=decision, initial=False, disk=disk)
        run.decided = True
        self._on_change()
        ends = await self._carry_out(decision, run.participants)
        if not ends and not self._is_served(record.version):
            return _undone(decision, run.record)
        for member in self._members():
            if member.state == "ready" and member.version != record.version and not self._rolling:
                self._fall_behind(member, "it missed the last update")
        if self._rolling:
            for member in list(self._members()):
                if member.state == "ready" and member.version != record.version:
                    await self._roll(member)
        committed = replace(
            run.record,
            state="committed",
            seconds={**run.record.seconds, "total": time.monotonic() - run.began},
            stall_seconds=max((ended.stall_seconds for ended in ends), default=0.0),
            digest=next((ended.digest for ended in ends), ""),
        )
        return Outcome(record=committed, content=run.content, changes={"deciding": None})

    async def recover(self, decision: Decision) -> Outcome:
        """Carry out what an earlier life of the fleet has decided."""
        alive = [member for member in self._members() if member.alive]
        for member in alive:
            if member.status.weights.version == decision.version:
                member.version, member.fresh = decision.version, False
        await self._carry_out(decision, [one for one in alive if not one.version and _holds(one, decision)])
        record = UpdateRecord(
            id=decision.update,
            version=decision.version,
            base=decision.base,
            state="committed",
            kind="rollback" if decision.roll_back else decision.kind,
            in_flight=decision.in_flight,
            began=self._wall(),
        )
        if not self._is_served(decision.version):
            return _undone(decision, record)
        return Outcome(record=record, content=decision.content, changes={"deciding": None})

    async def _roll(self, member: Member) -> None:
        """The next replica of a rolling update; the fleet looks after one that does not get there."""
        self._fall_behind(member, "it is its turn in a rolling update")
        with suppress(GtpServeError):
            if await self._late.bring(member):
                member.state, member.reason = "ready", ""
        self._on_change()

    async def _carry_out(self, decision: Decision, members: Sequence[Member]) -> list[UpdateRecord]:
        """Commit; the records of those that have."""
        results = await asyncio.gather(*(self._commit_at(decision, one) for one in members), return_exceptions=True)
        for member, result in zip(members, results, strict=True):
            if isinstance(result, ReplicaLost):
                self._log("replica-lost", {"replica": member.name, "while": "committing"})
            elif not isinstance(result, UpdateRecord):
                self._log("commit-missed", {"replica": member.name, "error": str(result)})
        return [result for result in results if isinstance(result, UpdateRecord)]

    async def _commit_at(self, decision: Decision, member: Member) -> UpdateRecord:
        if decision.roll_back:
            body = await member.port.control(RollBack(in_flight=decision.in_flight))
            record = msgspec.convert(body, UpdateRecord)
        else:
            await member.port.control(Commit(id=decision.update))
            record = await member.port.settled(decision.update, ended=True)
        if record.state != "committed":
            raise UpdateFailed(record.message, record.details, code=record.code or None)
        member.version, member.fresh = decision.version, False
        self._on_change()
        return record

    def _fall_behind(self, member: Member, reason: str) -> None:
        member.state, member.reason = "behind", reason
        self._on_change()

    def _is_served(self, version: str) -> bool:
        """Whether any replica has come to it: one that was started meanwhile may have taken it from the disk."""
        return any(member.alive and member.version == version for member in self._members())


def _undone(decision: Decision, record: UpdateRecord) -> Outcome:
    """Nobody serves it and nobody was told that it would be: the version before goes on."""
    failed = replace(record, state="aborted", code="replica-lost", message="no replica could commit it", details=())
    changes: dict[str, object] = {
        "deciding": None,
        "committed": decision.base,
        "initial": decision.base_initial,
        "disk": decision.base_disk,
    }
    return Outcome(record=failed, content=decision.content, changes=changes)


def _holds(member: Member, decision: Decision) -> bool:
    if decision.roll_back:
        return member.status.weights.rollback_version == decision.version
    update = member.status.weights.update
    return update is not None and update.id == decision.update and update.state == "verified"
