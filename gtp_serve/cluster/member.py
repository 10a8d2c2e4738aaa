"""A replica as the fleet holds it: what it can be asked, and what is known of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.states import ReplicaStatus, ReplicaView, State
from gtp_serve.errors import EngineFault
from gtp_serve.refit.orders import Begin, Control, UpdateRecord

MISSING_SECONDS = 2.0
"""A replica that cannot be reached for so long gets a stand-in, long before it counts as lost."""


class ReplicaLost(EngineFault):
    """A replica's process, or its node, is gone."""

    default_code = "replica-lost"


class ReplicaUnreachable(ReplicaLost):
    """It does not answer now; whether it is gone shows later."""


class Port(Protocol):
    """The calls of a replica.  Each raises ReplicaLost when it is gone, and the engine's own errors."""

    async def start(self) -> ReplicaStatus:
        """Returns when it can take requests; called again, what it said before."""
        ...

    async def status(self) -> ReplicaStatus:
        """How it is now."""
        ...

    async def control(self, command: Control) -> Any:
        """Ask something about the weights; plain JSON values."""
        ...

    async def bring(self, begin: Begin, bundles: Sequence[Bundle]) -> UpdateRecord:
        """Begin an update whose bytes are in bundles."""
        ...

    async def settled(self, update: str, *, ended: bool) -> UpdateRecord:
        """An update's record once it is verified or has ended.

        :param ended: wait on, until it has ended.
        """
        ...

    async def relay(self, bundles: Sequence[Bundle]) -> list[Bundle]:
        """Take bundles and offer them again, from this replica's node."""
        ...

    async def export(self, update: str) -> tuple[str, list[Bundle]]:
        """Its weights, or those of a verified update: their version and bundles."""
        ...

    async def release(self) -> None:
        """Let go of memory that an export or an update has left."""
        ...

    def forget(self, front: str) -> Coroutine[Any, Any, None]:
        """A front is gone: end its requests."""
        ...

    async def stop(self, drain_seconds: float) -> None:
        """End it, running requests first."""
        ...

    def kill(self) -> None:
        """End it at once, with its place in the cluster."""
        ...


class Launcher(Protocol):
    """Makes replicas."""

    async def launch(self, name: str, avoid: Sequence[str] = ()) -> Port:
        """A new one; it may wait for a place.

        :param avoid: nodes that it must not go to.
        """
        ...

    async def adopt(self, name: str) -> Port | None:
        """One that an earlier life of the fleet has made; None when it is gone."""
        ...


@dataclass(kw_only=True, eq=False)
class Member:
    """One replica and what the fleet has made of it."""

    name: str
    port: Port
    state: State = "starting"
    status: ReplicaStatus
    version: str = ""
    """That it serves, as far as the fleet knows for certain; empty: whatever it has loaded."""
    fresh: bool = True
    """It has what it loaded when it started."""
    reason: str = ""
    adopted: bool = False
    heard: float = 0.0
    """When it last said something, by the fleet's clock."""
    unreachable: float | None = None
    """Since when it cannot be reached, by the fleet's clock."""
    stalled: float | None = None
    """Since when it has work and makes no step, by the fleet's clock."""
    task: asyncio.Task[None] | None = field(default=None, repr=False)
    catching_up: asyncio.Lock = field(default_factory=asyncio.Lock, repr=False)

    @property
    def alive(self) -> bool:
        """It has an engine to speak to."""
        return self.state in ("behind", "ready")

    def is_missing(self, now: float) -> bool:
        """Whether another should be started in its place, by the fleet's clock."""
        return self.alive and self.unreachable is not None and now - self.unreachable >= MISSING_SECONDS

    def view(self) -> ReplicaView:
        """For whoever asks."""
        stats = self.status.stats
        return ReplicaView(
            name=self.name,
            state=self.state,
            version=self.version,
            digest=self.status.weights.digest,
            node=self.status.node,
            address=self.status.address,
            pid=self.status.pid,
            running=stats.running,
            waiting=stats.waiting,
            kv_blocks_used=stats.kv_blocks_used,
            kv_blocks_total=stats.kv_blocks_total,
            reason=self.reason,
        )


class Nowhere:
    """The port of a replica that has no process yet."""

    def __getattr__(self, name: str) -> Any:
        if name == "kill":
            return lambda: None

        async def lost(*_: object, **__: object) -> Any:
            raise ReplicaLost("it has not started yet")

        return lost
