"""The engine's weight commands, carried out for a fleet: who is asked, and what is made of several answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, assert_never

from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.member import Member
from gtp_serve.cluster.versions import Versions
from gtp_serve.errors import NotReady, UpdateFailed, UpdateRefused
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    Checksum,
    Commit,
    Control,
    EndFeed,
    Export,
    Feed,
    FlushCache,
    Join,
    Layout,
    Leave,
    Pause,
    ReadTensor,
    Relabel,
    Release,
    Restore,
    Resume,
    RollBack,
)


async def carry_out(
    command: Control, bundles: Sequence[Bundle] | None, versions: Versions, members: Sequence[Member]
) -> Any:
    """The answer of one engine that stands for all.

    :param bundles: the bytes of a Begin whose front has them.
    :raises GtpServeError: why there is none.
    """
    match command:
        case Begin():
            return await versions.begin(command, bundles)
        case Commit(id=update):
            return versions.commit(update)
        case AbortUpdate(id=update, reason=reason):
            return await versions.abort(update, reason)
        case RollBack():
            return await versions.roll_back(command)
        case Relabel(version=version):
            return await versions.relabel(version)
        case Join() | Leave() | Feed() | EndFeed():
            return await versions.ask_group(command)
        case Checksum():
            return await _checksum(members)
        case Layout() | ReadTensor():
            return await _ready(members)[0].port.control(command)
        case Pause() | Resume() | Release() | Restore() | FlushCache():
            return await _all(command, members)
        case Export():
            raise UpdateRefused("a fleet's weights are written out by its replicas only", code="not-supported")
        case _:
            assert_never(command)


def _ready(members: Sequence[Member]) -> list[Member]:
    ready = [member for member in members if member.state == "ready"]
    if not ready:
        raise NotReady("no replica is ready", [("try", "again in a while")])
    return ready


async def _all(command: Control, members: Sequence[Member]) -> Any:
    answers = await asyncio.gather(*(member.port.control(command) for member in _ready(members)))
    return answers[0]


async def _checksum(members: Sequence[Member]) -> dict[str, Any]:
    """All replicas hold the same bytes, or this fails and says who does not."""
    ready = _ready(members)
    answers = await asyncio.gather(*(member.port.control(Checksum()) for member in ready))
    digests = {member.name: str(answer["digest"]) for member, answer in zip(ready, answers, strict=True)}
    if len(set(digests.values())) > 1:
        raise UpdateFailed("the replicas do not hold the same weights", sorted(digests.items()), code="digest-mismatch")
    return {**answers[0], "replicas": digests}
