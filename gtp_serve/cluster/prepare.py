"""The first phase of a fleet's update: every replica has the new weights, verified, before anything is decided."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace

from gtp_serve.cluster.bundles import Bundle, share_out
from gtp_serve.cluster.catch_up import EMPTY, is_elsewhere
from gtp_serve.cluster.member import Member, ReplicaLost
from gtp_serve.errors import GtpServeError, UpdateFailed, UpdateRefused
from gtp_serve.refit.orders import Begin, DiskOrder, FedOrder, GroupOrder, UpdateRecord, UpdateRequest


@dataclass(kw_only=True, eq=False)
class Run:
    """The update under way."""

    record: UpdateRecord
    request: UpdateRequest
    content: str
    bundles: Sequence[Bundle] | None
    participants: list[Member]
    seconds: float
    began: float
    wish: asyncio.Event = field(default_factory=asyncio.Event)
    decided: bool = False
    dropped: tuple[str, str] | None = None
    """Code and reason, when somebody aborts it."""
    task: asyncio.Task[None] | None = None


class Preparation:
    """Brings a run's weights to its participants.

    :param rolling: to the first of them only; the others come after the decision.
    """

    def __init__(self, *, rolling: bool) -> None:
        self._rolling = rolling

    async def prepare(self, run: Run) -> None:
        """Returns when all that still take part have verified the run's weights.

        :raises UpdateFailed: on one of them it cannot be, or none is left.
        :raises ReplicaLost: the one that all others depend on is gone.
        """
        if self._rolling:
            del run.participants[1:]  # the others come one by one, behind the decision
        order = run.request.order
        if run.bundles is not None:
            bundles = await self._relay(run, run.bundles)
            run.bundles = None
            await self._all(run, lambda member: self._bring(run, member, bundles))
        elif isinstance(order, GroupOrder | FedOrder):
            await self._from_seed(run)
        elif isinstance(order, DiskOrder):
            await self._all(run, lambda member: self._from_order(run, member))
        else:
            raise UpdateRefused("memory of one host cannot be given to a fleet without its bytes", code="bad-segment")

    async def _relay(self, run: Run, bundles: Sequence[Bundle]) -> list[Bundle]:
        """Each bundle leaves its maker's node once: to one replica, which offers it to all."""
        takers = list(run.participants)
        if len(takers) == 1:
            return list(bundles)
        placed: dict[int, Bundle] = {}

        async def take(taker: Member, share: list[int]) -> None:
            offered = await taker.port.relay([bundles[index] for index in share])
            placed.update(zip(share, offered, strict=True))

        await asyncio.gather(*(take(*pair) for pair in zip(takers, share_out(bundles, len(takers)), strict=True)))
        return [placed[index] for index in range(len(bundles))]

    async def _from_seed(self, run: Run) -> None:
        seed, others = run.participants[0], run.participants[1:]
        verified = await self._verified(run, seed)
        self._note(run, verified)
        run.record = replace(run.record, version=verified.version)  # a fed update may learn its label at its end
        run.request = replace(run.request, version=verified.version)
        if not others:
            return
        _, bundles = await seed.port.export(run.record.id)
        try:
            run.participants = others
            await self._all(run, lambda member: self._bring(run, member, bundles), needed=False)
        finally:
            run.participants = [seed, *run.participants]
            with suppress(GtpServeError):
                await seed.port.release()

    async def _from_order(self, run: Run, member: Member) -> UpdateRecord:
        await member.port.control(begin_at(run))
        return await self._verified(run, member)

    async def _bring(self, run: Run, member: Member, bundles: Sequence[Bundle]) -> UpdateRecord:
        begin = begin_at(run)
        await member.port.bring(Begin(request=replace(begin.request, order=EMPTY), id=begin.id), bundles)
        return await self._verified(run, member)

    async def _verified(self, run: Run, member: Member) -> UpdateRecord:
        record = await member.port.settled(run.record.id, ended=False)
        if record.state != "verified":
            details = [*record.details, ("on", member.name)]
            raise UpdateFailed(record.message or "it was dropped", details, code=record.code or None)
        return record

    async def _all(self, run: Run, do: Callable[[Member], Awaitable[UpdateRecord]], *, needed: bool = True) -> None:
        """On every participant; one whose process is gone takes no part any more, anything else ends the update."""
        members = list(run.participants)
        results = await asyncio.gather(*(do(member) for member in members), return_exceptions=True)
        left: list[Member] = []
        for member, result in zip(members, results, strict=True):
            if isinstance(result, ReplicaLost) and not is_elsewhere(result, member):
                continue
            if isinstance(result, BaseException):
                raise result
            left.append(member)
            self._note(run, result)
        run.participants = left
        if not left and needed:
            raise UpdateFailed("every replica was lost while it was being prepared", code="replica-lost")

    def _note(self, run: Run, record: UpdateRecord) -> None:
        seconds = dict(run.record.seconds)
        for phase, taken in record.seconds.items():
            seconds[phase] = max(taken, seconds.get(phase, 0.0))
        run.record = replace(
            run.record,
            seconds=seconds,
            source_bytes=run.record.source_bytes + record.source_bytes,
            target_bytes=run.record.target_bytes + record.target_bytes,
        )


def begin_at(run: Run) -> Begin:
    """What a replica is asked for a run: nothing there is committed before the fleet has decided."""
    request = replace(run.request, commit="manual", any_order=True, base=None, dry_run=False)
    return Begin(request=replace(request, deadline_seconds=run.seconds), id=run.record.id)
