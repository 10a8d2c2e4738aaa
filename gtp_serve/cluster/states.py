"""What the fleet tells of itself: its replicas, and the version that all of them serve."""

from __future__ import annotations

from typing import Literal

import msgspec

from gtp_serve.engine.messages import EngineStats
from gtp_serve.refit.orders import WeightsStatus

State = Literal["starting", "behind", "ready", "draining", "lost"]
"""A replica's: being started, catching up with the committed version, taking requests, taking no more, gone."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica says of itself."""

    name: str
    node: str = ""
    """Ray's id of the node of rank 0."""
    address: str = ""
    pid: int = 0
    """Of rank 0's engine process."""
    engine: Literal["starting", "ready", "stopping", "dead"] = "starting"
    stats: EngineStats = EngineStats()
    weights: WeightsStatus = WeightsStatus(version="")
    fault: str = ""
    facts: dict[str, str | int | float] = {}
    """Of the engine's Ready."""


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """A replica as the fleet sees it."""

    name: str
    state: State
    version: str = ""
    digest: str = ""
    node: str = ""
    address: str = ""
    pid: int = 0
    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    starts: int = 1
    reason: str = ""
    """Why it is in this state, when that is not plain."""


class FleetStatus(WeightsStatus, frozen=True, kw_only=True):
    """An engine's weight status, of all replicas together, and each of them."""

    replicas: tuple[ReplicaView, ...] = ()
    wanted: int = 0
    """How many replicas there should be."""
    rolling: bool = False
    """Two versions may serve at the same time while an update is on its way."""
    caught_up_bytes: int = 0
    """That replicas took from their peers, since the fleet began."""


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """What fronts are told, each time something has changed."""

    serial: int
    """Counts changes in one life of the fleet's process."""
    status: FleetStatus
    life: str = ""
    """Which life."""
    fault: str = ""
    """Why the fleet cannot go on by itself."""
    facts: dict[str, str | int | float] = {}
    """Of a replica's Ready; empty until there is one."""
    max_open: int = 0
    """Requests that all ready replicas together take."""
