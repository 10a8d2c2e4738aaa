"""Processes that take part in transfers together: ``transfer_process.py``, started and told what to do."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from gtp_serve.layout.gtp import Grid

SCRIPT = Path(__file__).with_name("transfer_process.py")
PATIENCE = 60


class Participant:
    """A process of ``transfer_process.py``, which takes part in one transfer after another."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))

    def start(self, **spec: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(spec) + "\n")
        self.process.stdin.flush()

    def event(self, kind: str) -> dict[str, Any]:
        while True:
            found = self._events.get(timeout=PATIENCE)
            if found["event"] == kind:
                return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Crew:
    """Processes that the transfers of a file share; one that was killed is replaced."""

    def __init__(self) -> None:
        self.members: list[Participant] = []
        self._updates = count()

    def muster(self, size: int) -> list[Participant]:
        missing = size - len(self.members)
        fresh = [Participant() for _ in range(missing)]
        for participant in fresh:
            participant.event("ready")
        self.members += fresh
        return self.members[:size]

    def world(
        self,
        model: str,
        grid: Grid,
        tp: int,
        *,
        replicas: int = 1,
        bucket_bytes: int = 4096,
        backend: str = "gloo",
        devices: bool = False,
    ) -> World:
        trainers = grid.tp * grid.gtp * grid.pp * replicas
        members = self.muster(trainers + tp)
        common = {
            "model": model,
            "grid": {name: getattr(grid, name) for name in ("tp", "gtp", "pp", "alignment")},
            "replicas": replicas,
            "trainers": trainers,
            "engines": tp,
            "bucket_bytes": bucket_bytes,
            "backend": backend,
            "devices": devices,
        }
        return World(members[:trainers], members[trainers:], common, self._updates)

    def bury(self, participant: Participant) -> None:
        self.members.remove(participant)
        participant.close()


@dataclass
class World:
    """All participants of one layout."""

    trainers: list[Participant]
    engines: list[Participant]
    common: dict[str, Any]
    updates: Iterator[int]

    @property
    def everybody(self) -> list[Participant]:
        return [*self.trainers, *self.engines]

    def begin(self, seed: int, *, pause: float = 0.0, dying: int | None = None) -> None:
        """:param dying: trainer rank that ends while connections are made."""
        spec = {**self.common, "seed": seed, "update": f"update-{next(self.updates)}"}
        self.engines[0].start(**spec, side="engine", rank=0)
        spec["port"] = self.engines[0].event("port")["port"]
        for rank, engine in enumerate(self.engines[1:], 1):
            engine.start(**spec, side="engine", rank=rank)
        for rank, trainer in enumerate(self.trainers):
            trainer.start(**spec, side="trainer", rank=rank, pause=pause, dies=rank == dying)

    def push(self, seed: int, *, leaks: bool = True) -> list[dict[str, Any]]:
        """A transfer that must succeed: what the trainers tell of it.

        :param leaks: check that nothing is left; a driver of a device keeps threads and descriptors of its own.
        """
        self.begin(seed)
        ends = [one.event("end") for one in self.everybody]
        assert [(end.get("error"), end.get("wrong", [])) for end in ends] == [(None, [])] * len(ends)
        assert not leaks or [end["leaked"] for end in ends] == [{}] * len(ends)
        return ends[: len(self.trainers)]
