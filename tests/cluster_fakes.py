"""Replicas without engines: each holds a name for the weights that it serves, and can die at any call."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.fleet import Fleet
from gtp_serve.cluster.journal import InMemory, Journal
from gtp_serve.cluster.member import ReplicaLost, ReplicaUnreachable
from gtp_serve.cluster.settings import FleetConfig, Scale
from gtp_serve.cluster.states import ReplicaStatus
from gtp_serve.config import CacheConfig, EngineConfig, ModelConfig
from gtp_serve.errors import UpdateFailed, UpdateRefused
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    Checksum,
    Commit,
    Control,
    DiskOrder,
    Pause,
    Relabel,
    Resume,
    RollBack,
    UpdateRecord,
    WeightsStatus,
)
from gtp_serve.server.launch import Launch
from gtp_serve.server.options import SavedGrid

INITIAL = "as loaded"


@dataclass
class Chance:
    """When replicas die: before or after a call takes effect, with this probability each."""

    dice: random.Random = field(default_factory=lambda: random.Random(0))
    death: float = 0.0

    def dies(self) -> bool:
        return self.dice.random() < self.death


class FakeReplica:
    """A Port over an engine that is three strings: what serves, what is staged, what was before."""

    def __init__(self, name: str, world: FakeWorld) -> None:
        self.name, self.world = name, world
        self.dead = self.paused = self.unreachable = False
        self.node = f"node-of-{name}"
        self.drains: list[float] = []
        self.streams = asyncio.Event()
        """Set when what it streams has ended."""
        self.streams.set()
        self.version, self.holds = "0", INITIAL
        self.before: tuple[str, str] | None = None
        self.update: UpdateRecord | None = None
        self.staged = ""
        self.auto = False
        self.history: list[UpdateRecord] = []
        self.refuses_commit = False
        self.relayed: list[int] = []
        self._changed = asyncio.Event()

    async def _enter(self) -> None:
        await asyncio.sleep(0)
        if self.world.chance.dies():
            self.dead = True
        self._alive()

    def _alive(self) -> None:
        if self.dead:
            self._changed.set()
            raise ReplicaLost(f"{self.name} is gone")

    async def _leave(self) -> None:
        """The call has taken effect; the answer may be lost all the same."""
        await asyncio.sleep(0)
        if self.world.chance.dies():
            self.dead = True
        self._alive()

    async def start(self) -> ReplicaStatus:
        await self._enter()
        return await self.status()

    async def status(self) -> ReplicaStatus:
        await self._enter()
        if self.unreachable:
            raise ReplicaUnreachable(f"{self.name} does not answer")
        weights = WeightsStatus(
            version=self.version,
            digest=self.holds,
            paused=self.paused,
            rollback_version=None if self.before is None else self.before[0],
            update=self.update,
            history=tuple(self.history),
        )
        return ReplicaStatus(name=self.name, node=self.node, engine="ready", weights=weights, facts={"max_running": 4})

    async def control(self, command: Control) -> Any:
        await self._enter()
        answer = self._control(command)
        await self._leave()
        return answer

    def _control(self, command: Control) -> Any:
        match command:
            case Begin(request=request):
                order = request.order
                assert isinstance(order, DiskOrder)
                return self._begin(command, order.path)
            case Commit(id=update):
                if self.refuses_commit:
                    self._end("aborted", "update-deadline")
                elif self.update is not None and self.update.id == update:
                    self._swap()
                elif not any(record.id == update for record in self.history):
                    raise UpdateRefused("there is none", code="unknown-update")
                return None
            case AbortUpdate(id=update):
                if self.update is not None and self.update.id == update:
                    self._end("aborted", "aborted")
                return None
            case RollBack():
                if self.before is None:
                    raise UpdateRefused("nothing", code="nothing-to-roll-back")
                (self.version, self.holds), self.before = self.before, (self.version, self.holds)
                return {"id": "rollback", "version": self.version, "base": "", "state": "committed", "kind": "rollback"}
            case Relabel(version=version):
                self.version = version
                return None
            case Pause() | Resume():
                self.paused = isinstance(command, Pause)
                return {}
            case Checksum():
                return {"digest": self.holds}
        raise AssertionError(command)

    def _begin(self, begin: Begin, holds: str) -> Any:
        if self.update is not None:
            raise UpdateRefused("one is under way", code="update-under-way")
        request = begin.request
        self.update = UpdateRecord(id=begin.id, version=request.version, base=self.version, state="staging", kind="x")
        self.staged, self.auto = holds, request.commit == "auto"
        self.before = None
        if holds.startswith("bad"):
            self._end("aborted", "digest-mismatch")
        else:
            self.update = UpdateRecord(
                id=begin.id, version=request.version, base=self.version, state="verified", kind="x", source_bytes=8
            )
            if self.auto:
                self._swap()
        self._note()
        return {"id": begin.id, "version": request.version, "base": "", "state": "staging", "kind": "x"}

    def _swap(self) -> None:
        assert self.update is not None
        self.before = (self.version, self.holds)
        self.version, self.holds = self.update.version, self.staged
        self._end("committed", "")

    def _end(self, state: Any, code: str) -> None:
        if self.update is not None:
            record = UpdateRecord(
                id=self.update.id, version=self.update.version, base="", state=state, kind="x", code=code, message=code
            )
            self.history.insert(0, record)
            self.update = None
        self._note()

    def _note(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def bring(self, begin: Begin, bundles: Sequence[Bundle]) -> UpdateRecord:
        await self._enter()
        for bundle in bundles:
            self.world.read(bundle)
        self._begin(begin, bundles[0].data[1])
        await self._leave()
        return UpdateRecord(id=begin.id, version=begin.request.version, base="", state="staging", kind="x")

    async def settled(self, update: str, *, ended: bool) -> UpdateRecord:
        while True:
            await self._enter()
            if self.update is not None and self.update.id == update and not ended:
                return self.update
            found = next((record for record in self.history if record.id == update), None)
            if found is not None:
                return found
            if self.update is None:
                raise UpdateFailed("there is no such update", code="unknown-update")
            await asyncio.sleep(0.001)

    async def relay(self, bundles: Sequence[Bundle]) -> list[Bundle]:
        await self._enter()
        for bundle in bundles:
            self.world.read(bundle)
            self.relayed.append(bundle.data[2])
        await self._leave()
        return [bundle.at((self, *bundle.data[1:])) for bundle in bundles]

    async def export(self, update: str) -> tuple[str, list[Bundle]]:
        await self._enter()
        holds = self.staged if update else self.holds
        bundle = Bundle(shards=(), size=8, data=(self, holds, -1))
        await self._leave()
        return self.version, [bundle]

    async def release(self) -> None:
        await self._enter()

    async def forget(self, front: str) -> None:
        await self._enter()

    async def stop(self, drain_seconds: float) -> None:
        self.drains.append(drain_seconds)
        with suppress(TimeoutError):
            await asyncio.wait_for(self.streams.wait(), drain_seconds)
        self.dead = True

    def kill(self) -> None:
        self.dead = True
        self.streams.set()
        self._changed.set()


class FakeWorld:
    """Replicas that live on while fleets come and go."""

    def __init__(self, seed: int = 0, death: float = 0.0, *, rolling: bool = False, replicas: int = 2) -> None:
        self.chance = Chance(random.Random(seed), death)
        self.store = InMemory()
        self.replicas: dict[str, FakeReplica] = {}
        self.config = fake_config(replicas, rolling=rolling)
        self.trainer_reads: list[int] = []
        self.avoided: dict[str, list[Sequence[str]]] = {}
        """By the replica that was to be placed: what it was to avoid, each time."""
        self.full = False
        """No new replica has a place."""

    def read(self, bundle: Bundle) -> None:
        """Somebody takes a bundle's bytes from whoever holds them."""
        holder = bundle.data[0]
        if holder == "trainer":
            self.trainer_reads.append(bundle.data[2])
        elif holder.dead:
            raise ReplicaLost("an object was lost with its maker")

    async def launch(self, name: str, avoid: Sequence[str] = ()) -> FakeReplica:
        self.avoided.setdefault(name, []).append(tuple(avoid))
        await asyncio.sleep(0)
        while self.full:  # noqa: ASYNC110 (as a placement group, which is asked again and again)
            await asyncio.sleep(0.001)
        self.replicas[name] = FakeReplica(name, self)
        return self.replicas[name]

    async def adopt(self, name: str) -> FakeReplica | None:
        await asyncio.sleep(0)
        found = self.replicas.get(name)
        return None if found is None or found.dead else found

    def fleet(self) -> Fleet:
        return Fleet(self.config, Journal(self.store), self, log=lambda *_: None)

    def bundles(self, holds: str, count: int = 3) -> list[Bundle]:
        return [Bundle(shards=(), size=8 + index, data=("trainer", holds, index)) for index in range(count)]


def fake_config(replicas: int, *, rolling: bool = False) -> FleetConfig:
    model = ModelConfig(
        family="llama", num_layers=1, hidden_size=4, num_heads=1, num_kv_heads=1, head_dim=4, ffn_size=4,
        vocab_size=4, vocab_rows=4,
    )  # fmt: skip
    engine = EngineConfig(model=model, cache=CacheConfig(num_blocks=4), dtype="float32")
    launch = Launch(ckpt="x", iteration=None, saved=SavedGrid(), engine=engine, threads=1, first_prompt=(0,))
    return FleetConfig(
        name="test",
        launch=launch,
        scale=Scale(low=replicas, high=replicas),
        rolling=rolling,
        poll_seconds=0.001,
        silent_seconds=5,
        backoff_seconds=(0.0,),
        restarts=1000,
    )
