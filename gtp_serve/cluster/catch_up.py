"""Replicas that do not serve the committed version come to it: from a peer, or from the disk it came from.

Nothing of this asks the trainer.  A peer writes its live weights out while it goes on serving; if other weights come
to serve there meanwhile, what was written is of no use and is begun anew.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from gtp_serve.cluster.journal import Journal
from gtp_serve.cluster.member import Member, ReplicaLost
from gtp_serve.errors import GtpServeError, UpdateRefused
from gtp_serve.refit.orders import AbortUpdate, Begin, DiskOrder, MemoryOrder, UpdateRecord, UpdateRequest

EMPTY = MemoryOrder(segments=(), shards=())
"""Of an update whose bytes come in bundles."""
_TRIES = 3


class CatchUp:
    """Knows who has the committed version.

    :param under_way: id of the fleet's update under way; empty: none.
    """

    def __init__(
        self,
        members: Callable[[], Sequence[Member]],
        journal: Journal,
        under_way: Callable[[], str],
        log: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.bytes_taken = 0
        """From peers."""
        self._members, self._journal, self._under_way, self._log = members, journal, under_way, log
        self._exporting = asyncio.Lock()

    def is_current(self, member: Member) -> bool:
        """Whether a replica serves the committed version: by its own word, and because the fleet knows why."""
        memory, weights = self._journal.memory, member.status.weights
        if weights.torn or weights.version != memory.committed:
            return False
        if member.version == memory.committed or member.adopted:
            return True
        return memory.initial if member.fresh else True  # a label that is used twice may be another version's

    async def bring(self, member: Member) -> bool:
        """Bring a replica to the committed version; whether it is there now.

        :raises ReplicaLost: it is gone.
        """
        async with member.catching_up:  # whoever comes second finds it done
            return await self._bring(member)

    async def _bring(self, member: Member) -> bool:
        for _ in range(_TRIES):
            member.status = await member.port.status()
            memory = self._journal.memory
            await self._drop_left(member)
            if self.is_current(member):
                member.version, member.fresh = memory.committed, member.fresh and memory.initial
                return True
            peer = self._peer(member)
            if peer is None and memory.disk is None and memory.initial:
                # It has taken what was decided and then taken back; what the committed version is, a new one loads.
                raise ReplicaLost(
                    f"it serves {member.status.weights.version!r}, and only a new replica loads the first"
                )
            if peer is None and memory.disk is None:
                member.reason = f"no replica holds version {memory.committed!r} any more, and it came from no disk"
                return False
            try:
                record = await self._take(member, memory.committed, peer, memory.disk)
            except ReplicaLost as error:
                if not is_elsewhere(error, member):
                    raise
            except GtpServeError as error:
                member.reason = f"catching up failed: {error.message}"
                self._log("catch-up", {"replica": member.name, "error": str(error)})
            else:
                if record.state == "committed":
                    member.version, member.fresh = memory.committed, False
        return False

    async def drop_left(self, member: Member) -> None:
        """End an update that this replica was told of and nobody decides any more."""
        update = member.status.weights.update
        if update is not None:
            with suppress(GtpServeError):
                await member.port.control(AbortUpdate(id=update.id, reason="the fleet knows nothing of it"))

    async def _drop_left(self, member: Member) -> None:
        update = member.status.weights.update
        if update is not None and update.id != self._under_way():
            await self.drop_left(member)

    def _peer(self, member: Member) -> Member | None:
        committed = self._journal.memory.committed
        peers = [
            other
            for other in self._members()
            if other is not member and other.state == "ready" and other.version == committed
        ]
        return min(peers, key=lambda peer: peer.status.stats.running, default=None)

    async def _take(self, member: Member, version: str, peer: Member | None, disk: DiskOrder | None) -> UpdateRecord:
        request = UpdateRequest(order=EMPTY, version=version, any_order=True)
        update = f"catch-up-{uuid.uuid4().hex[:16]}"
        if peer is None:
            assert disk is not None  # the caller has looked
            await member.port.control(Begin(request=replace(request, order=disk), id=update))
            return await member.port.settled(update, ended=True)
        async with self._exporting:  # one at a time: each takes the memory of a copy
            try:
                found, bundles = await peer.port.export("")
            except ReplicaLost as error:
                raise elsewhere(error, peer) from None
            try:
                if found != version:
                    raise UpdateRefused(f"{peer.name} serves {found!r} by now", code="weights-changed")
                await member.port.bring(Begin(request=request, id=update), bundles)
                record = await member.port.settled(update, ended=True)
                self.bytes_taken += sum(bundle.payload for bundle in bundles)
                return record
            finally:
                with suppress(GtpServeError):
                    await peer.port.release()


def elsewhere(error: ReplicaLost, where: Member) -> ReplicaLost:
    """The loss of a replica, told in a call about another."""
    return ReplicaLost(error.message, [*error.details, ("on", where.name)], code=error.code)


def is_elsewhere(error: ReplicaLost, member: Member) -> bool:
    """Whether it was another replica that was lost."""
    return any(label == "on" and text != member.name for label, text in error.details)
