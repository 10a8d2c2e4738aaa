"""A fleet as a plain Ray Serve application: ``serve run gtp_serve.cluster.app:app ckpt=PATH tp=2 replicas=2``.

Serve runs the front, the same ASGI application as on one machine, and starts it again when it dies; the replicas are
the fleet's, as with ``gtp-serve cluster``, and outlive the front.  ``deploy/ray-serve.yaml`` is an example.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Receive, Scope, Send

from gtp_serve.cluster.bringup import ClusterBringup, ClusterOptions
from gtp_serve.cluster.settings import Scale
from gtp_serve.engine.messages import Phase
from gtp_serve.errors import UsageError
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.app import build_app
from gtp_serve.server.cli import parse_serve
from gtp_serve.server.failures import as_known_error
from gtp_serve.server.front_door import front_door
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.startup import Lines
from gtp_serve.server.state import ServerState
from gtp_serve.server.supervise import set_up_logging
from gtp_serve.server.weights_watch import watch_weights

_OWN = (
    "fleet", "replicas", "min_replicas", "max_replicas", "target_requests", "up_after", "down_after", "placement",
    "cpus_per_rank", "rolling",
)  # fmt: skip
_HEALTH_SECONDS = 10.0


_APPS: list[ASGIApp] = []
"""This process's application, once there is one.  Serve pickles what it is given as the ingress, so the application
cannot be in that: its copy finds it here.
"""


class Door:
    """The front's application, as Serve must have it before there is one."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if not _APPS:
            raise RuntimeError("a request came before the front was made")
        # Serve's proxy has looked at the path before; our routes know nothing of a prefix.
        await _APPS[-1]({**scope, "root_path": ""}, receive, send)


door = Door()


class Front:
    """One front: HTTP in, requests to the fleet.

    What Serve makes of it has another name: this one must be found here by whoever unpickles that, or it would be
    pickled with everything that its methods name, ``_APPS`` too.

    :param args: as ``app`` takes them.
    """

    def __init__(self, args: dict[str, Any]) -> None:
        options, cluster = read_args(args)
        reporter = Lines(sys.stderr, as_json=True)
        log = set_up_logging(reporter, options.verbosity)
        self._options = options
        self._state = ServerState()
        metrics = Metrics(self._state, aliases=options.metrics_aliases)
        guard = AdminGuard(options.admin_key)
        app = build_app(self._state, metrics, log, guard=guard, refit_seconds=options.refit_timeout, pages=options.page)
        _APPS.append(front_door(app, api_key=options.api_key, admin_key=options.admin_key, cors=options.cors))
        self._reporter, self._metrics = reporter, metrics
        started = time.monotonic()
        port = Phase(name="Ray Serve front", state="ok")
        self._bringup = ClusterBringup(
            cluster, options, reporter, self._state, metrics, port=port, url="http://127.0.0.1:8000", started=started
        )
        self._life: asyncio.Task[None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._life = asyncio.get_event_loop().create_task(self._live())

    async def _live(self) -> None:
        try:
            client = await self._bringup.run()
            await watch_weights(client, self._metrics, self._reporter)
        except Exception as error:
            self._state.fault = as_known_error(error)
            self._reporter.failure(self._state.fault)

    async def check_health(self) -> None:
        """For Serve: a front that has lost the fleet for good is started again."""
        if self._state.fault is not None:
            raise RuntimeError(str(self._state.fault))

    async def __del__(self) -> None:
        """Let the fleet know at once; the replicas stay for other fronts, or end with their lease."""
        if self._bringup.client is not None:
            await self._bringup.client.stop(0)


deployment = serve.deployment(
    name="gtp-serve-front",
    health_check_period_s=_HEALTH_SECONDS,
    max_ongoing_requests=100_000,
    ray_actor_options={"num_cpus": 0},
)(serve.ingress(door)(Front))


def read_args(args: dict[str, Any]) -> tuple[ServeOptions, ClusterOptions]:
    """Arguments of the application: settings of ``serve`` by their names, and the cluster's own.

    :raises UsageError: naming what cannot be.
    """
    given = {str(name).replace("-", "_"): value for name, value in args.items()}
    own = {name: given.pop(name) for name in _OWN if name in given}
    words: list[str] = []
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if value is True or str(value).lower() == "true":
            words.append(option)
        elif value is not False and str(value).lower() != "false":
            words += [option, str(value)]
    options = parse_serve(words, os.environ, Path())
    count = int(own.get("replicas", 1))
    low = int(own.get("min_replicas", count))
    scale = Scale(
        low=low,
        high=int(own.get("max_replicas", max(low, count))),
        target=float(own.get("target_requests", 32)),
        up_seconds=float(own.get("up_after", 10)),
        down_seconds=float(own.get("down_after", 120)),
    )
    scale.check()
    placement = str(own.get("placement", "auto"))
    if placement not in ("auto", "pack", "spread"):
        raise UsageError(f"placement {placement!r} is none", [("possible", "auto, pack, spread")])
    return options, ClusterOptions(
        fleet=str(own.get("fleet", "default")),
        scale=scale,
        strategy="auto" if placement == "auto" else "pack" if placement == "pack" else "spread",
        cpus=float(own.get("cpus_per_rank", 1)),
        rolling=str(own.get("rolling", "false")).lower() == "true",
        keep=True,
    )


def app(args: dict[str, Any]) -> serve.Application:
    """The application, for ``serve run`` and for Serve's configuration files.

    :param args: ``ckpt``, ``tp`` and whatever else ``gtp-serve cluster`` takes, with underscores.
    :raises UsageError: naming what cannot be.
    """
    read_args(args)  # what is wrong shows here, not in a log of a replica's
    bound: serve.Application = deployment.bind(dict(args))
    return bound
