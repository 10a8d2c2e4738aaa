"""The fleet as an actor of Ray's: one for each fleet, found by its name, started again by Ray when it dies."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray

from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.fleet import Fleet
from gtp_serve.cluster.journal import Journal
from gtp_serve.cluster.ray_port import GcsStore, RayLauncher
from gtp_serve.cluster.settings import NAMESPACE, FleetConfig
from gtp_serve.engine.messages import ControlCall, ControlDone, decode_to_worker, encode, refused
from gtp_serve.errors import EngineFault, EnvironmentFault, GtpServeError

_LAST_SECONDS = 0.2
_HEAD = {"node:__internal_head__": 0.001}
"""A resource that every head node has.  There, no other node's death takes the fleet along, and without it there is no
cluster.
"""


class FleetActor:
    """Calls are bytes and bundles; what a command raises comes back as a message, by its class."""

    def __init__(self, config: bytes) -> None:
        self._config = msgspec.json.decode(config, type=FleetConfig)
        self._opening: asyncio.Task[Fleet] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def _fleet(self) -> Fleet:
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        return await asyncio.shield(self._opening)

    async def _open(self) -> Fleet:
        fleet = Fleet(
            self._config, Journal(GcsStore(self._config.name)), RayLauncher(self._config, log_line), log=log_line
        )
        await fleet.open()
        self._ending = asyncio.create_task(self._end_when_alone(fleet))
        return fleet

    async def _end_when_alone(self, fleet: Fleet) -> None:
        await fleet.over.wait()
        await fleet.close(0)
        leave()

    async def pid(self) -> int:
        """Of this actor's process."""
        await self._fleet()
        return os.getpid()

    async def config(self) -> bytes:
        """What the fleet was made of."""
        return msgspec.json.encode(self._config)

    async def view(self, front: str, since: int, held: int, seconds: float) -> bytes:
        """See ``Fleet.view``."""
        fleet = await self._fleet()
        return msgspec.msgpack.encode(await fleet.view(front, since, held, seconds))

    async def control(self, command: bytes, bundles: Sequence[Bundle] | None) -> tuple[bytes, bytes]:
        """A ControlCall: the engine's message that answers it, and how things are then."""
        fleet = await self._fleet()
        call = decode_to_worker(command)
        if not isinstance(call, ControlCall):
            raise EngineFault("only commands about weights are taken here", code="internal")
        try:
            answer = await fleet.control(call.command, bundles)
            told = encode(ControlDone(call=call.call, body=msgspec.json.encode(answer)))
        except GtpServeError as error:
            told = encode(refused(call.call, error))
        return told, msgspec.msgpack.encode(fleet.now())

    async def leave(self, front: str) -> None:
        """A front ends in good order."""
        (await self._fleet()).leave(front)

    async def close(self, drain_seconds: float) -> None:
        """End the fleet; its actor goes right after this is answered."""
        await (await self._fleet()).close(drain_seconds)
        asyncio.get_running_loop().call_later(_LAST_SECONDS, leave)


def leave() -> None:
    """End this process for good: Ray does not start it again."""
    ray.kill(ray.get_runtime_context().current_actor)


def log_line(event: str, fields: dict[str, Any]) -> None:
    """A line of JSON in this actor's log."""
    print(json.dumps({"event": event, "time": round(time.time(), 3), **fields}), file=sys.stderr, flush=True)


def find_fleet(name: str) -> Any:
    """The handle of a fleet's actor.

    :raises EnvironmentFault: there is none of this name.
    """
    try:
        return ray.get_actor(f"{name}/fleet", NAMESPACE)
    except ValueError:
        raise EnvironmentFault(
            f"there is no fleet {name!r} on this Ray cluster", [("try", f"gtp-serve cluster --fleet {name}")]
        ) from None


def find_or_make(config: FleetConfig) -> Any:
    """The handle of the fleet's actor; one that is there already is kept as it is.

    :raises ValueError: never for a fleet that exists: Ray decides who makes it.
    """
    return (
        ray.remote(FleetActor)
        .options(
            name=config.fleet_actor,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=_HEAD,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=10_000,
        )
        .remote(msgspec.json.encode(config))
    )
