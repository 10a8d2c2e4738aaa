"""What a fleet is made of and how patient it is: one value that crosses to every actor as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from gtp_serve.errors import UsageError
from gtp_serve.server.launch import Launch

Strategy = Literal["auto", "pack", "spread"]
"""Where a replica's ranks go: on one node if any is large enough, else on few; on as few as possible; on one each."""

NAMESPACE = "gtp-serve"
"""Ray's, of all our named actors."""


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How many replicas, by the requests that are running or waiting."""

    low: int = 1
    high: int = 1
    target: float = 32.0
    """Requests of each replica that are wanted."""
    up_seconds: float = 10.0
    """The demand must have lasted, before a replica is added."""
    down_seconds: float = 120.0
    """And before one is drained."""

    def check(self) -> None:
        """Refuse what cannot be.

        :raises UsageError: naming it.
        """
        if not 1 <= self.low <= self.high:
            raise UsageError(f"{self.low} to {self.high} replicas cannot be", [("needed", "1 <= least <= most")])
        if self.target <= 0 or self.up_seconds < 0 or self.down_seconds < 0:
            raise UsageError("the aim of scaling must be above 0, and its delays 0 or more")


class FleetConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the fleet's actors need."""

    name: str
    launch: Launch
    scale: Scale = Scale()
    strategy: Strategy = "auto"
    cpus: float = 1.0
    """Of Ray's resource, for each rank."""
    gpus: float = 0.0
    rolling: bool = False
    """New weights replica by replica, so that two versions serve for a while, instead of on all at the same moment."""
    drain_seconds: float = 30.0
    poll_seconds: float = 0.5
    """Between two looks at a replica."""
    silent_seconds: float = 15.0
    """A replica that says nothing for so long is given up."""
    stalled_seconds: float = 60.0
    """One that has work and makes no step for so long, too."""
    start_seconds: float = 600.0
    """For a replica to start, its place in the cluster included."""
    lease_seconds: float = 120.0
    """Replicas end without a fleet, and the fleet without anybody who asks it, after so long."""
    backoff_seconds: tuple[float, ...] = (0.0, 1.0, 5.0, 15.0, 30.0)
    """Before a start that follows so many failed ones; what has served is replaced at once."""
    restarts: int = 8
    """Starts that fail one after another before the fleet waits for somebody to look."""

    @property
    def fleet_actor(self) -> str:
        """Name of the fleet's actor."""
        return f"{self.name}/fleet"

    def replica_actor(self, replica: str) -> str:
        """Name of a replica's actor, and of its placement group."""
        return f"{self.name}/{replica}"
