"""The ranks of one replica: rank 0 in the replica's own process group, each other in an actor of its own."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.memory_host import MemoryHost
from gtp_serve.cluster.rank_actor import RankActor
from gtp_serve.cluster.settings import FleetConfig
from gtp_serve.engine.far import FarRanks
from gtp_serve.refit.orders import MemoryOrder, RankExport, Segment, StoredShard
from gtp_serve.server.launch import Launch, launch_argv


class ReplicaRanks:
    """Where each rank runs, and what holds memory for it there.

    :param group: the placement group, whose bundle r is rank r's.
    """

    def __init__(self, config: FleetConfig, group: Any, address: str) -> None:
        self.key = secrets.token_hex(32)
        """The ranks' secret."""
        self.launch = self._with_place(config.launch, address)
        self.host = MemoryHost()
        """Of rank 0's node."""
        self._config, self._group = config, group
        self._actors: list[Any] = []
        self._nodes: list[str] = []

    def _with_place(self, launch: Launch, address: str) -> Launch:
        launch = msgspec.structs.replace(launch, refit_host=address)
        if launch.engine.tp == 1:
            return launch
        port, store = free_ports(address, 2)
        return msgspec.structs.replace(launch, far=FarRanks(host=address, port=port, store_port=store))

    async def start(self) -> None:
        """Have the other ranks' processes started."""
        tp = self.launch.engine.tp
        cls = ray.remote(RankActor)
        for rank in range(1, tp):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            self._actors.append(
                cls.options(
                    num_cpus=self._config.cpus, num_gpus=self._config.gpus, scheduling_strategy=place, max_restarts=0
                ).remote()
            )
        self._nodes = [str(ray.get_runtime_context().get_node_id())]
        self._nodes += await asyncio.gather(*(actor.node.remote() for actor in self._actors))
        await asyncio.gather(
            *(
                actor.start.remote([*launch_argv(self.launch), "--rank", str(rank)], self.key)
                for rank, actor in enumerate(self._actors, 1)
            )
        )

    async def fetch(self, update: str, bundles: Sequence[Bundle]) -> MemoryOrder:
        """Bundles into memory on each node that has a rank; the order that tells the ranks where."""
        by_node = self._holders()
        found = await asyncio.gather(*(self._fetch_at(rank, update, bundles) for rank in by_node.values()))
        places = dict(zip(by_node, found, strict=True))
        segment, stored = places[self._nodes[0]]
        elsewhere: dict[int, tuple[Segment, ...]] = {
            rank: (places[node][0],) for rank, node in enumerate(self._nodes) if node != self._nodes[0]
        }
        return MemoryOrder(segments=(segment,), shards=stored, elsewhere=elsewhere)

    def _holders(self) -> dict[str, int]:
        """The lowest rank of each node."""
        found: dict[str, int] = {}
        for rank, node in enumerate(self._nodes):
            found.setdefault(node, rank)
        return found

    async def _fetch_at(
        self, rank: int, update: str, bundles: Sequence[Bundle]
    ) -> tuple[Segment, tuple[StoredShard, ...]]:
        if rank == 0:
            return await self.host.fetch(update, bundles)
        answer: tuple[Segment, tuple[StoredShard, ...]] = await self._actors[rank - 1].fetch.remote(update, bundles)
        return answer

    async def publish(self, ranks: Sequence[RankExport]) -> list[Bundle]:
        """What the ranks have written out, as objects, each on its rank's node."""
        given = [(rank, one) for rank, one in enumerate(ranks) if one.segment is not None]
        parts = await asyncio.gather(*(self._publish_at(rank, one) for rank, one in given))
        return [bundle for part in parts for bundle in part]

    async def _publish_at(self, rank: int, given: RankExport) -> list[Bundle]:
        assert given.segment is not None  # the caller has looked
        if rank == 0:
            return await self.host.publish(given.segment, given.shards)
        answer: list[Bundle] = await self._actors[rank - 1].publish.remote(given.segment, given.shards)
        return answer

    async def drop(self, update: str) -> None:
        """An update has ended: its memory may go."""
        self.host.drop(update)
        for node, rank in self._holders().items():
            if node != self._nodes[0]:
                self._actors[rank - 1].drop.remote(update)

    def stop(self) -> None:
        """End the other ranks."""
        for actor in self._actors:
            actor.stop.remote()
            ray.kill(actor)


def free_ports(address: str, count: int) -> list[int]:
    """Ports of this machine that nobody uses now; who binds them late may find that somebody was faster."""
    sockets = [socket.create_server((address, 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports
