"""A tensor-parallel rank beside rank 0: an actor of Ray's that starts the rank's process on its node and holds it.

The process is the one that a server on one machine starts; it finds rank 0 over TCP, and ends with this actor.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence

import ray

from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.memory_host import MemoryHost
from gtp_serve.engine.far import KEY_VARIABLE
from gtp_serve.refit.orders import Segment, StoredShard


class RankActor:
    """One rank's place in the cluster."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._host = MemoryHost()

    async def node(self) -> str:
        """Ray's id of this node."""
        return str(ray.get_runtime_context().get_node_id())

    async def start(self, argv: Sequence[str], key: str) -> int:
        """Start the rank's process; its id.

        :param key: the ranks' secret.
        """
        # stdin is a lifeline: nothing is ever written to it, and it closes when this process is gone.
        self._process = subprocess.Popen(  # noqa: ASYNC220 (it must be started by the thread that lives as long as this)
            list(argv), stdin=subprocess.PIPE, env={**os.environ, KEY_VARIABLE: key}
        )
        return self._process.pid

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)

    async def fetch(self, update: str, bundles: Sequence[Bundle]) -> tuple[Segment, tuple[StoredShard, ...]]:
        """See ``MemoryHost.fetch``."""
        return await self._host.fetch(update, bundles)

    async def publish(self, segment: Segment, stored: Sequence[StoredShard]) -> list[Bundle]:
        """See ``MemoryHost.publish``."""
        return await self._host.publish(segment, stored)

    async def drop(self, update: str) -> None:
        """An update has ended."""
        self._host.drop(update)
