"""What a fleet tells of its weights: all replicas together as one engine's status, and each of them."""

from __future__ import annotations

from collections.abc import Sequence

from gtp_serve.cluster.journal import Memory
from gtp_serve.cluster.member import Member
from gtp_serve.cluster.states import FleetStatus
from gtp_serve.cluster.versions import Versions


def fleet_status(
    members: Sequence[Member], versions: Versions, memory: Memory, *, wanted: int, paused: bool, rolling: bool
) -> FleetStatus:
    """How things are.

    :param memory: what the journal holds.
    :param wanted: how many replicas there should be.
    """
    ready = [member for member in members if member.state == "ready"]
    run = versions.current
    each = [member.status.weights for member in ready]
    befores = {weights.rollback_version for weights in each}
    return FleetStatus(
        version=versions.committed,
        digest=next((weights.digest for weights in each if weights.digest), ""),
        torn="" if ready else why_torn(members, memory),
        paused=paused,
        rollback_version=befores.pop() if len(befores) == 1 else None,
        memory="inplace" if any(weights.memory == "inplace" for weights in each) else "staged",
        update=None if run is None else run.record,
        history=memory.records,
        sleeping=tuple(sorted({tag for weights in each for tag in weights.sleeping})),
        replicas=tuple(member.view() for member in members),
        wanted=wanted,
        rolling=rolling,
        caught_up_bytes=versions.late.bytes_taken,
    )


def why_torn(members: Sequence[Member], memory: Memory) -> str:
    """Of a fleet without a ready replica: why nothing can serve until somebody pushes again; nothing when replicas are
    only on their way.
    """
    behind = [member for member in members if member.state == "behind"]
    if not behind or memory.initial or memory.disk is not None or not memory.committed:
        return ""
    return next((one.reason for one in behind if one.reason.startswith("no replica holds")), "")
