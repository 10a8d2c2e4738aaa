"""A Ray cluster of several nodes on this machine, and fronts of ``gtp-serve cluster`` on it."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serve_command import Command

STORE_BYTES = 100 << 20
PATIENCE = 120.0


def be_patient() -> None:
    """Ray gives a node 30 seconds to start, which a machine that is busy may not have."""
    from ray._private import services

    real: Any = services.get_node

    def get_node(*args: Any) -> Any:
        deadline = time.monotonic() + PATIENCE / 2
        while True:
            try:
                return real(*args)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    services.get_node = get_node


def until_it_starts(start: Callable[[], Any]) -> Any:
    """A node gives its own agents half a minute, too, and ends when they need longer: then another is started."""
    for _ in range(4):
        try:
            return start()
        except Exception as error:
            if "timed out" not in str(error):
                raise
    return start()


class World:
    """The cluster; close it.  Its head has room for one rank only, so that a node that may die has a replica.

    :param dashboard: port of Ray's dashboard, which also takes Serve's deployments; 0: there is none.
    """

    def __init__(self, nodes: int = 3, cpus: float = 2, dashboard: int = 0) -> None:
        os.environ["RAY_DEDUP_LOGS"] = "0"
        be_patient()
        self.cluster: Any = self._head(1, dashboard)
        self.cpus = cpus
        self.nodes = [self.add_node() for _ in range(nodes - 1)]
        self.fronts: list[Command] = []

    def _head(self, cpus: float, dashboard: int) -> Any:
        from ray.cluster_utils import Cluster

        made = Cluster()
        more: dict[str, Any] = {"include_dashboard": bool(dashboard)}
        if dashboard:
            more |= {"dashboard_port": dashboard, "dashboard_agent_listen_port": None}  # another cluster may have it
        until_it_starts(lambda: made.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES, **more))
        return made

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add_node(self) -> Any:
        return until_it_starts(
            lambda: self.cluster.add_node(
                num_cpus=self.cpus, object_store_memory=STORE_BYTES, include_log_monitor=False
            )
        )

    def front(self, ckpt: Path, *words: str) -> Front:
        common = ["--no-tokenizer"] if not any(word == "--tokenizer" for word in words) else []
        command = Command(
            "cluster", "--ckpt", str(ckpt), "--address", self.address, "--port", "0", "--device", "cpu",
            "--kv-memory", "8MiB", *common, *words,
        )  # fmt: skip
        self.fronts.append(command)
        return Front(command)

    def close(self) -> None:
        for front in self.fronts:
            front.stop()  # also closes what one that has ended has left open
        self.cluster.shutdown()


class Front:
    """One front, spoken to over HTTP."""

    command: Command
    """Unless something else runs it."""
    key = ""
    """For the weight routes, where one is needed."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.url = command.url(2 * PATIENCE)  # Ray's processes come before the engines

    @classmethod
    def at(cls, url: str) -> Front:
        """A front that something else runs, or will run."""
        made = cls.__new__(cls)
        made.url = url
        return made

    def call(self, method: str, path: str, body: Any = None, seconds: float = PATIENCE) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self.key}"} if self.key else {})
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                raw, status = answer.read(), answer.status
        except urllib.error.HTTPError as error:
            raw, status = error.read(), error.code
        except (urllib.error.URLError, ConnectionError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if not isinstance(reason, ConnectionError):
                raise
            return 0, f"nobody listens: {reason}"
        try:
            return status, json.loads(raw)
        except ValueError:
            return status, raw.decode()

    def get(self, path: str) -> Any:
        status, body = self.call("GET", path)
        assert status == 200, body
        return body

    def post(self, path: str, body: Any = None) -> Any:
        status, body = self.call("POST", path, {} if body is None else body)
        assert status in (200, 202), body
        return body

    def generate(self, ids: list[int], tokens: int = 8, **fields: Any) -> Any:
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.post("/generate", {"input_ids": ids, "sampling_params": sampling, **fields})

    def weights(self) -> Any:
        return self.get("/weights")

    def until(self, holds: Callable[[Any], bool], seconds: float = PATIENCE) -> Any:
        """The first weights body for which something holds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            status, body = self.call("GET", "/weights")
            if status == 200 and holds(body):
                return body
            time.sleep(0.05)
        raise AssertionError(f"not within {seconds:g} s: {body}")
