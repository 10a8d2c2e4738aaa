"""From a checkpoint path to a fleet that serves, phase by phase, as ``server.bringup`` does for one engine."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import ray
from ray.experimental import internal_kv

from gtp_serve.cluster.client import FleetClient
from gtp_serve.cluster.fleet_actor import find_or_make
from gtp_serve.cluster.replica_metrics import ReplicaMetrics
from gtp_serve.cluster.settings import NAMESPACE, FleetConfig, Scale, Strategy
from gtp_serve.cluster.states import FleetView
from gtp_serve.engine.messages import Phase
from gtp_serve.errors import EnvironmentFault
from gtp_serve.hardware import Hardware, find_hardware
from gtp_serve.server.bringup import Bringup
from gtp_serve.server.launch import Launch
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.startup import Reporter
from gtp_serve.server.state import Managed, ServerState

_PROBE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterOptions:
    """What ``gtp-serve cluster`` was asked beside the options of ``serve``."""

    address: str | None = "auto"
    """Of the Ray cluster; None: one that is started on this machine."""
    fleet: str = "default"
    scale: Scale = field(default_factory=Scale)
    strategy: Strategy = "auto"
    cpus: float = 1.0
    rolling: bool = False
    keep: bool = False
    """Leave the replicas running when the front ends."""
    poll_seconds: float = 0.5
    lease_seconds: float = 120.0


class ClusterBringup(Bringup):
    """One start of a front, and of the fleet if there is none of its name yet."""

    def __init__(
        self,
        cluster: ClusterOptions,
        options: ServeOptions,
        reporter: Reporter,
        state: ServerState,
        metrics: Metrics,
        *,
        port: Phase,
        url: str,
        started: float,
    ) -> None:
        super().__init__(options, reporter, state, metrics, port=port, url=url, started=started)
        self._cluster = cluster
        self._dashboard = ""

    async def _find_hardware(self) -> Hardware:
        """Of a node that a replica can go to: the front's own may have no GPU."""
        with self._phase("join Ray cluster") as say:
            self._dashboard = await asyncio.to_thread(join, self._cluster.address)
            take_signals_back()
            nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            gpus = sum(node["Resources"].get("GPU", 0) for node in nodes)
            say(f"{len(nodes)} nodes, {gpus:g} GPUs" + (f", dashboard {self._dashboard}" if self._dashboard else ""))
        return await asyncio.to_thread(_probe, 1 if gpus and self._options.device != "cpu" else 0)

    def _launch(self, found: Any, budget: Any, hardware: Hardware) -> Launch:
        launch = super()._launch(found, budget, hardware)
        # A replica that starts later must not load what the trainer has saved meanwhile.
        launch = msgspec.structs.replace(launch, iteration=launch.iteration or found.facts.iteration)
        # A rank has the cores that it was given, not its machine's.
        if self._options.threads:
            return launch
        return msgspec.structs.replace(launch, threads=max(1, int(self._cluster.cpus)))

    async def _start_client(self, launch: Launch) -> Managed:
        cluster = self._cluster
        config = FleetConfig(
            name=cluster.fleet,
            launch=launch,
            scale=cluster.scale,
            strategy=cluster.strategy,
            cpus=cluster.cpus,
            gpus=1.0 if launch.engine.device == "cuda" else 0.0,
            rolling=cluster.rolling,
            drain_seconds=self._options.drain_timeout,
            poll_seconds=cluster.poll_seconds,
            lease_seconds=cluster.lease_seconds,
        )
        client = FleetClient(find_or_make(config), config)
        self.client = held = _Front(client, keep=cluster.keep)
        client.on_view(self._show)
        await client.wait_ready()
        self._metrics.add(ReplicaMetrics(client))
        return held

    def _show(self, view: FleetView) -> None:
        ready = sum(replica.state == "ready" for replica in view.status.replicas)
        if self._state.serving is None:
            self._state.set_phase(
                Phase(name="start replicas", state="running", done=ready, total=max(1, view.status.wanted))
            )

    def _more_facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"fleet": self._cluster.fleet}
        return facts | ({"ray_dashboard": self._dashboard} if self._dashboard else {})


class _Front:
    """A fleet's client whose end ends the fleet, or leaves it to others."""

    def __init__(self, client: FleetClient, *, keep: bool) -> None:
        self._client, self._keep = client, keep

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def stop(self, drain_seconds: float) -> None:
        """End this front, and the fleet unless it is to be kept."""
        await self._client.stop(drain_seconds, fleet=not self._keep)


def make(cluster: ClusterOptions) -> Callable[..., Bringup]:
    """What brings a front up."""
    return partial(ClusterBringup, cluster)


def join(address: str | None) -> str:
    """Connect this process to a Ray cluster; the URL of its dashboard, if it has one.

    :param address: ``auto`` or ``host:port``; None starts a cluster of this machine's own.
    :raises EnvironmentFault: when there is none.
    """
    logging.getLogger("ray").setLevel(logging.ERROR)
    if ray.is_initialized():  # by Ray Serve, whose process this is
        return _dashboard()
    try:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EnvironmentFault(
            f"there is no Ray cluster at {address or 'this machine'}",
            [
                ("ray", str(error).splitlines()[0] if str(error) else type(error).__name__),
                ("try", "ray start --head, or --address host:port, or --address local"),
            ],
        ) from error
    ray.put(b"")  # the first one imports much, for which nobody should wait who brings weights
    return _dashboard()


def _dashboard() -> str:
    """Where the cluster itself says it is: within Ray Serve, Ray's own functions name the port that it mostly has."""
    raw: bytes | None = internal_kv._internal_kv_get(b"webui:url", namespace=b"dashboard")
    url = (raw or b"").decode()
    return f"http://{url}" if url and "://" not in url else url


def take_signals_back() -> None:
    """Have SIGTERM and SIGINT come to Python's handlers again, after joining.  Nothing off the main thread: there the
    process is one of Ray's own, as a front of Ray Serve's is, and so are its signals.

    Ray puts a handler for crashes behind Python's back, for SIGTERM too: it prints a stack, passes the signal on, and
    ends the process with SIGABRT three seconds later, in the middle of what is being drained.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        handler = signal.getsignal(number)
        if handler is not None:  # not Python's own to begin with
            signal.signal(number, handler)
            signal.siginterrupt(number, False)


def _probe(gpus: int) -> Hardware:
    """Hardware of a node as a replica would find it."""
    task = ray.remote(find_hardware).options(num_cpus=0, num_gpus=gpus)
    try:
        found: Hardware = ray.get(task.remote(), timeout=_PROBE_SECONDS)
    except ray.exceptions.RayError as error:
        raise EnvironmentFault(
            "no node of the cluster could be looked at", [("ray", str(error).strip().splitlines()[0])]
        ) from error
    return found
