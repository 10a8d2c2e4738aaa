"""Replicas as actors of Ray's: where they are placed, how they are called, what their loss looks like."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.experimental import internal_kv
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.member import ReplicaLost, ReplicaUnreachable
from gtp_serve.cluster.placement import bundles, choose_strategy
from gtp_serve.cluster.replica_actor import Replica
from gtp_serve.cluster.settings import NAMESPACE, FleetConfig
from gtp_serve.cluster.states import ReplicaStatus
from gtp_serve.engine.messages import ControlCall, encode
from gtp_serve.errors import EngineFault, GtpServeError
from gtp_serve.refit.orders import Begin, Control, UpdateRecord

_T = TypeVar("_T")
_KV_NAMESPACE = b"gtp-serve"


async def ask(who: str, call: Awaitable[_T]) -> _T:
    """An actor's answer.

    :raises ReplicaLost: the actor, its node or an object that it had made is gone.
    :raises GtpServeError: what it raised.
    """
    try:
        return await call
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, EngineFault):  # the actor is there, and what it is for is not
            raise ReplicaLost(f"{who}: {cause.message}", cause.details, code=cause.code) from None
        if isinstance(cause, GtpServeError):
            raise cause from None
        if isinstance(cause, RayError) and not isinstance(cause, RayTaskError):
            raise ReplicaLost(f"{who}: an object was lost with the process that had made it") from None
        raise EngineFault(f"{who} failed with {type(cause).__name__}: {cause}", code="internal") from error
    except ActorUnavailableError as error:
        raise ReplicaUnreachable(f"{who} cannot be reached", [("ray", _first_line(error))]) from None
    except RayActorError as error:
        raise ReplicaLost(f"{who} is gone", [("ray", _first_line(error))]) from None
    except (RayError, GetTimeoutError) as error:
        raise ReplicaUnreachable(f"{who} cannot be reached", [("ray", _first_line(error))]) from None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


class RayPort:
    """A replica's actor, and its placement group."""

    def __init__(self, name: str, actor: Any, group: Any) -> None:
        self.actor = actor
        self._name, self._group = name, group

    async def start(self) -> ReplicaStatus:
        """Start its engine, once."""
        return msgspec.msgpack.decode(await ask(self._name, self.actor.start.remote()), type=ReplicaStatus)

    async def status(self) -> ReplicaStatus:
        """How it is now."""
        return msgspec.msgpack.decode(await ask(self._name, self.actor.status.remote()), type=ReplicaStatus)

    async def control(self, command: Control) -> Any:
        """Ask something about the weights."""
        frame = encode(ControlCall(call=0, command=command))
        return msgspec.json.decode(await ask(self._name, self.actor.control.remote(frame)))

    async def bring(self, begin: Begin, bundles: Sequence[Bundle]) -> UpdateRecord:
        """Begin an update whose bytes are in bundles."""
        answer = await ask(self._name, self.actor.bring.remote(msgspec.json.encode(begin), list(bundles)))
        return msgspec.json.decode(answer, type=UpdateRecord)

    async def settled(self, update: str, *, ended: bool) -> UpdateRecord:
        """An update's record once it is verified or has ended."""
        return msgspec.json.decode(await ask(self._name, self.actor.settled.remote(update, ended)), type=UpdateRecord)

    async def relay(self, bundles: Sequence[Bundle]) -> list[Bundle]:
        """Take bundles and offer them again from its node."""
        return list(await ask(self._name, self.actor.relay.remote(list(bundles))))

    async def export(self, update: str) -> tuple[str, list[Bundle]]:
        """Its weights: their version and bundles."""
        version, made = await ask(self._name, self.actor.export.remote(update))
        return str(version), list(made)

    async def release(self) -> None:
        """Let go of what updates have left."""
        await ask(self._name, self.actor.release.remote())

    async def forget(self, front: str) -> None:
        """A front is gone."""
        await ask(self._name, self.actor.forget.remote(front))

    async def stop(self, drain_seconds: float) -> None:
        """End it, running requests first."""
        await ask(self._name, self.actor.stop.remote(drain_seconds))

    def kill(self) -> None:
        """End it at once, with its place in the cluster."""
        with suppress(Exception):  # whatever is the matter with it, it is to go
            ray.kill(self.actor)
        if self._group is not None:
            with suppress(Exception):
                remove_placement_group(self._group)


class RayLauncher:
    """Makes replicas' actors.  They outlive the fleet's own process, which finds them again by their names.

    :param log: told where a replica goes.
    """

    def __init__(self, config: FleetConfig, log: Callable[[str, dict[str, Any]], None]) -> None:
        self._config, self._log = config, log

    async def launch(self, name: str, avoid: Sequence[str] = ()) -> RayPort:
        """A new one, once the cluster has a place for it.

        :param avoid: nodes that it must not go to: Ray may take a dead one for a living one for a while.
        :raises DoesNotFit: it never will.
        """
        config = self._config
        actor_name = config.replica_actor(name)
        needed = bundles(config.launch.engine.tp, config.cpus, config.gpus)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        strategy = choose_strategy(config.strategy, needed, nodes)
        elsewhere = [{"ray.io/node-id": f"!in({','.join(avoid)})"} for _ in needed] if avoid else None
        group = placement_group(
            needed, strategy=strategy, name=actor_name, lifetime="detached", bundle_label_selector=elsewhere
        )
        try:
            await group.ready()
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
            actor = (
                ray.remote(Replica)
                .options(
                    name=actor_name,
                    namespace=NAMESPACE,
                    lifetime="detached",
                    num_cpus=config.cpus,
                    num_gpus=config.gpus,
                    scheduling_strategy=place,
                    max_restarts=0,  # a replica that comes back by itself would serve old weights
                    max_concurrency=10_000,
                )
                .remote(msgspec.json.encode(config), name, group)
            )
        except BaseException:
            with suppress(Exception):
                remove_placement_group(group)
            raise
        self._log("replica", {"replica": name, "state": "placed", "strategy": strategy, "ranks": len(needed)})
        return RayPort(name, actor, group)

    async def adopt(self, name: str) -> RayPort | None:
        """One that is there already; None when it is gone."""
        actor_name = self._config.replica_actor(name)
        group = None
        with suppress(ValueError):
            group = await asyncio.to_thread(get_placement_group, actor_name)
        try:
            actor = await asyncio.to_thread(ray.get_actor, actor_name, NAMESPACE)
        except ValueError:
            if group is not None:
                with suppress(Exception):
                    remove_placement_group(group)
            return None
        return RayPort(name, actor, group)


class GcsStore:
    """The journal's value in Ray's global control store.

    :param fleet: its key.
    """

    def __init__(self, fleet: str) -> None:
        self._key = f"fleet/{fleet}".encode()

    def get(self) -> bytes | None:
        """The value, if there is one."""
        found: bytes | None = internal_kv._internal_kv_get(self._key, namespace=_KV_NAMESPACE)
        return found

    def put(self, value: bytes) -> None:
        """Write it; returns when the store has it."""
        internal_kv._internal_kv_put(self._key, value, overwrite=True, namespace=_KV_NAMESPACE)

    def delete(self) -> None:
        """Forget it."""
        internal_kv._internal_kv_del(self._key, namespace=_KV_NAMESPACE)
