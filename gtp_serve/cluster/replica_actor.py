"""A replica: an actor of Ray's that runs one engine, of one rank or several, for all fronts and for the fleet.

The engine is the one of a server on one machine, seen through the same client.  A replica that no fleet asks about
any more ends itself: nobody would know of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

import msgspec
import ray

from gtp_serve.cluster.awake import within
from gtp_serve.cluster.bundles import Bundle
from gtp_serve.cluster.outbox import Outbox
from gtp_serve.cluster.replica_ranks import ReplicaRanks
from gtp_serve.cluster.settings import FleetConfig
from gtp_serve.cluster.states import ReplicaStatus
from gtp_serve.cluster.wire import failed, pack, unpack_down
from gtp_serve.engine.client import EngineClient
from gtp_serve.engine.far import KEY_VARIABLE
from gtp_serve.engine.messages import Abort, ControlCall, Phase, Stats, Submit, decode_to_worker, rejected
from gtp_serve.errors import EngineFault, GtpServeError, RequestRejected
from gtp_serve.refit.client import ServedLayout
from gtp_serve.refit.orders import Begin, Export, Exported, Layout, UpdateRecord, WeightsStatus
from gtp_serve.refit.transports.shares import sole_owners
from gtp_serve.request import Request
from gtp_serve.server.launch import launch_argv

BEAT_SECONDS = 1.0
_LEASE_LOOK_SECONDS = 1.0
_TELL_SECONDS = 4.0
"""Until a front that does not say that it has heard all counts as gone."""


class Replica:
    """One engine."""

    def __init__(self, config: bytes, name: str, group: Any) -> None:
        self._config = msgspec.json.decode(config, type=FleetConfig)
        self._name = name
        self._address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._ranks = ReplicaRanks(self._config, group, self._address)
        self._client: EngineClient | None = None
        self._starting: asyncio.Task[EngineClient] | None = None
        self._boxes: dict[str, Outbox] = {}
        self._alone = asyncio.Event()
        """Set while no front listens."""
        self._alone.set()
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._unasked = 0.0
        """Seconds that this process has run since the fleet last asked."""
        self._doing = "starting"
        threading.Thread(target=self._watch_lease, name="watch-lease", daemon=True).start()
        self._keepers: set[asyncio.Task[None]] = set()

    # -- life ----------------------------------------------------------------------------------------

    async def start(self) -> bytes:
        """Start the engine, once; its status when it serves."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)
        return await self.status()

    async def _start(self) -> EngineClient:
        await self._ranks.start()
        os.environ[KEY_VARIABLE] = self._ranks.key  # for rank 0's process
        self._client = await EngineClient.start(launch_argv(self._ranks.launch), on_phase=self._note_phase)
        await self._client.wait_ready()
        return self._client

    def _note_phase(self, phase: Phase) -> None:
        self._doing = phase.name

    async def status(self) -> bytes:
        """How it is; whoever asks is the fleet."""
        self._unasked = 0.0
        client = self._client
        status = ReplicaStatus(name=self._name, node=ray.get_runtime_context().get_node_id(), address=self._address)
        if client is not None:
            facts = (await client.wait_ready()).facts if client.state == "ready" else {}
            status = msgspec.structs.replace(
                status,
                pid=client.pid,
                engine=client.state,
                stats=client.stats(),
                weights=client.weights,
                fault=str(client.fault or ""),
                facts=facts,
            )
        return msgspec.msgpack.encode(status)

    async def stop(self, drain_seconds: float) -> None:
        """Let running requests end for so long, then end the engine."""
        if self._client is not None:
            await self._client.stop(drain_seconds)
        await self._until_told()
        self._ranks.stop()

    async def _until_told(self) -> None:
        """Fronts have the last tokens of what was drained, and have said so: this process may be killed right after."""
        with suppress(TimeoutError):
            await within(_TELL_SECONDS, self._alone.wait())

    def _watch_lease(self) -> None:
        pause = threading.Event()
        while not pause.wait(_LEASE_LOOK_SECONDS):
            starting = self._client is None or self._client.state == "starting"
            patience = self._config.lease_seconds + (self._config.start_seconds if starting else 0.0)
            self._unasked += _LEASE_LOOK_SECONDS
            if self._unasked > patience:
                break
        print(f"{self._name}: no fleet has asked for too long, ending", file=sys.stderr, flush=True)
        os._exit(0)

    def _engine(self) -> EngineClient:
        if self._client is None:
            raise EngineFault(f"{self._name} is still starting: {self._doing}", code="not-ready")
        return self._client

    # -- requests ------------------------------------------------------------------------------------

    async def listen(self, front: str) -> AsyncGenerator[bytes, None]:
        """All that comes of a front's requests, until the front or this actor is gone."""
        await self.forget(front)  # it has given this replica up before, and all that it had asked for with it
        box = self._boxes[front] = Outbox()
        self._alone.clear()
        while self._boxes.get(front) is box:
            yield pack(await box.take(BEAT_SECONDS, Stats(stats=self._engine().stats())))

    async def send(self, front: str, frame: bytes) -> None:
        """A front's requests, and its wish to end some."""
        for message in unpack_down(frame):
            match message:
                case Submit(requests=requests):
                    for request in requests:
                        self._run(front, request)
                case Abort(rids=rids):
                    for rid in rids:
                        task = self._running.get((front, rid))
                        if task is not None:
                            await self._engine().abort(f"{front}/{rid}")

    def _run(self, front: str, request: Request) -> None:
        key = (front, request.rid)
        task = asyncio.create_task(self._follow(front, request))
        self._running[key] = task
        task.add_done_callback(lambda _: self._running.pop(key, None))

    async def _follow(self, front: str, request: Request) -> None:
        box = self._boxes.get(front) or Outbox()
        began, tokens, reason = time.monotonic(), 0, "front-gone"
        inner = msgspec.structs.replace(request, rid=f"{front}/{request.rid}")
        try:
            async with aclosing(self._engine().submit(inner)) as events:
                async for event in events:
                    tokens += len(event.token_ids)
                    if event.finish is not None:
                        reason = event.finish.type
                    box.put_event(msgspec.structs.replace(event, rid=request.rid))
        except RequestRejected as error:
            reason = error.code
            box.put(rejected(request.rid, error))
        except GtpServeError as error:
            reason = error.code
            box.put(failed(request.rid, error))
        finally:
            line = {
                "event": "request", "rid": request.rid, "replica": self._name, "reason": reason, "tokens": tokens,
                "seconds": round(time.monotonic() - began, 4),
            }  # fmt: skip
            print(json.dumps(line), file=sys.stderr, flush=True)

    async def forget(self, front: str) -> None:
        """A front is gone, or has all that it waited for: its requests end."""
        self._boxes.pop(front, None)
        if not self._boxes:
            self._alone.set()
        for (owner, _), task in list(self._running.items()):
            if owner == front:
                task.cancel()

    # -- weights -------------------------------------------------------------------------------------

    async def control(self, command: bytes) -> bytes:
        """A ControlCall of the engine's; its answer as JSON."""
        call = decode_to_worker(command)
        if not isinstance(call, ControlCall):
            raise EngineFault("only commands about weights are taken here", code="internal")
        return msgspec.json.encode(await self._engine().control(call.command))

    async def bring(self, begin: bytes, bundles: Sequence[Bundle]) -> bytes:
        """Begin an update whose bytes are in bundles; its record."""
        asked = msgspec.json.decode(begin, type=Begin)
        order = await self._ranks.fetch(asked.id, bundles)
        request = msgspec.structs.replace(asked.request, order=order)
        try:
            body = await self._engine().control(Begin(request=request, id=asked.id))
        except BaseException:
            await self._ranks.drop(asked.id)
            raise
        keeper = asyncio.create_task(self._keep(asked.id))
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)
        return msgspec.json.encode(body)

    async def _keep(self, update: str) -> None:
        """Let an update's memory go as soon as its bytes have been copied."""
        try:
            await self._wait(update, ended=False)
        except EngineFault:
            pass
        finally:
            await self._ranks.drop(update)

    async def settled(self, update: str, ended: bool) -> bytes:
        """An update's record once it is verified, or has ended."""
        return msgspec.json.encode(await self._wait(update, ended=ended))

    async def _wait(self, update: str, *, ended: bool) -> UpdateRecord:
        def record_in(status: WeightsStatus) -> UpdateRecord | None:
            current = status.update
            if current is not None and current.id == update:
                return current if current.state == "verified" and not ended else None
            return next((record for record in status.history if record.id == update), None)

        status = await self._engine().wait_weights(lambda now: record_in(now) is not None)
        record = record_in(status)
        assert record is not None  # it was waited for
        return record

    async def relay(self, bundles: Sequence[Bundle]) -> list[Bundle]:
        """Take bundles and offer them again from this node."""
        return await self._ranks.host.relay(bundles)

    async def export(self, update: str) -> tuple[str, list[Bundle]]:
        """The live weights, or a verified update's: their version and bundles."""
        layout = msgspec.convert(await self._engine().control(Layout()), ServedLayout)
        owned = tuple(sole_owners(layout.ranks, layout.tensors))
        body = await self._engine().control(Export(owned=owned, update=update))
        exported = msgspec.convert(body, Exported)
        try:
            return exported.version, await self._ranks.publish(exported.ranks)
        finally:
            await self._engine().control(Export(owned=()))

    async def release(self) -> None:
        """Let go of what updates have left here."""
        self._ranks.host.drop_all()
