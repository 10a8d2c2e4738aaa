"""One seed's world: the HTTP application, the engine's client, its worker loop, scheduler and updates, all real, on one
thread; around them simulated time, sockets, ranks, clients and an operator, who are nasty where the seed says so.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast
from unittest import mock

from fakes_server import byte_tokenizer
from sim_clock import Clock, SimLoop
from sim_ranks import FAULTS, SimOthers, SimRunner, SimWeights, Wires

from gtp_serve.config import CacheConfig, EngineConfig, ModelConfig
from gtp_serve.engine import client as client_module
from gtp_serve.engine import worker as worker_module
from gtp_serve.engine.client import EngineClient
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.messages import Hello, Ready, Stopped, ToWorker, decode_to_worker, encode, fatal
from gtp_serve.engine.updates import Updates
from gtp_serve.errors import EngineFault, GtpServeError
from gtp_serve.server import answer as answer_module
from gtp_serve.server import run as run_module
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.app import build_app
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.state import ServerState, Serving

TOKENIZER = byte_tokenizer()
MODEL = ModelConfig(
    family="llama",
    num_layers=1,
    hidden_size=8,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    ffn_size=16,
    vocab_size=TOKENIZER.vocab_size,
    vocab_rows=TOKENIZER.vocab_size,
    max_context=64,
    dtype="float32",
    eos_token_ids=(2,),
)
SETTLE_SECONDS = 500.0
"""Simulated; longer than any wait in the product, jumps of the clock apart."""
MOST_TURNS = 6000

SWITCHES = {
    # nasty point: in how many of the seeds it is on
    "slow_link": 0.4,
    "few_blocks": 0.5,
    "short_queue": 0.2,
    "cancels": 0.5,
    "aborts": 0.3,
    "deadlines": 0.3,
    "failed_steps": 0.2,
    "not_finite": 0.2,
    "slow_clients": 0.2,
    "clock_jumps": 0.3,
    "rank_faults": 0.5,
    "rank_dies": 0.08,
    "engine_dies": 0.08,
    "pauses": 0.3,
    "stop_early": 0.1,
    "no_prefix_cache": 0.15,
    "updates": 0.7,
}


@dataclass
class Call:
    """One call of a client and everything that came back."""

    number: int
    body: dict[str, Any]
    stream: Any
    rids: list[str]
    prompts: list[list[int]]
    asked: float = 0.0
    """When it was sent."""
    status: int | None = None
    chunks: list[bytes] = field(default_factory=list)
    finals: int = 0
    """Times that the answer was ended."""
    gone: float | None = None
    """When the client left."""
    broke: bool = False
    """Its connection took no more."""
    over: bool = False
    error: str = ""


class World:
    """Everything of one seed; ``run`` lives it, ``troubles`` are what its parts have noticed on the way."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.on = {name for name, share in SWITCHES.items() if rng.random() < share}
        self.clock = Clock()
        self.troubles: list[str] = []
        self.calls: list[Call] = []
        self.died = ""
        self.jumped = 0.0
        self.wires = Wires(self.clock, rng, 0.1 if "slow_link" in self.on else 0.0)
        self.ranks = [
            SimWeights(rank, self.wires, rng, self._fault, leader=rank == 0) for rank in range(rng.choice((1, 2, 2, 3)))
        ]
        self.runner = SimRunner(
            self.ranks,
            rng,
            self.troubles.append,
            fails=0.02 if "failed_steps" in self.on else 0.0,
            bad=0.02 if "not_finite" in self.on else 0.0,
        )
        blocks = rng.choice((12, 14, 18)) if "few_blocks" in self.on else 64
        self.config = EngineConfig(
            model=MODEL,
            cache=CacheConfig(num_blocks=blocks, block_size=4),
            dtype="float32",
            device="simulated",
            max_context=44,
            max_running=rng.choice((2, 4, 8)),
            max_waiting=2 if "short_queue" in self.on else 50,
            max_step_tokens=rng.choice((5, 16, 64)),
            weight_version="0",
            prefix_cache="no_prefix_cache" not in self.on,
        )
        self.process = SimProcess()
        self.link = SimLink(self)
        self.engine = Engine(
            self.config, self.runner, clock=self.clock.monotonic, draw_seed=lambda: 7, log=lambda text: None
        )
        others = SimOthers(self.ranks[1:], self.wires) if len(self.ranks) > 1 else None
        if others is not None:
            self.engine.check = others.check
        self.updates = Updates(
            self.engine,
            cast(Any, self.ranks[0]),
            cast(Any, self.wires),
            others=others,
            memory=rng.choice(("staged", "staged", "inplace")),
            after_swap=self._note_swap,
            deadline_seconds=rng.choice((5.0, 20.0)),
            clock=self.clock.monotonic,
            wall=self.clock.time,
        )
        self.turns = 0

    def _fault(self, rank: int) -> str:
        return self.rng.choice(FAULTS) if "rank_faults" in self.on and self.rng.random() < 0.25 else ""

    def _note_swap(self) -> None:
        update = self.updates.status().update
        keeps = update is not None and update.in_flight == "keep"
        running = self.engine._scheduler._running
        self.runner.note_swap({seq.rid: seq.num_computed for seq in running} if keeps else {})

    # -- life --------------------------------------------------------------------------------------

    def run(self) -> World:
        """From the start to the end of everything."""
        loop = SimLoop(self.clock)
        patches = [
            mock.patch.object(m, "time", self.clock) for m in (client_module, worker_module, run_module, answer_module)
        ]
        try:
            for patch in patches:
                patch.start()
            loop.run_until_complete(self._live())
        except Exception as error:
            self.troubles.append(f"{type(error).__name__}: {error}")
        finally:
            for patch in patches:
                patch.stop()
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.close()
        return self

    async def _live(self) -> None:
        self.socket = SimSocket(self)
        self.link.socket = self.socket
        self.process.ended = asyncio.get_running_loop().create_future()
        self.client = EngineClient(
            cast(Any, self.process), cast(Any, self.socket), cast(Any, SimContext()), cast(Any, SimFolder()), None
        )
        self.state, self.app = _front(self.clock)
        worker = asyncio.create_task(self._work())
        await self.client.wait_ready()
        self.state.set_serving(Serving(client=self.client, engine=self.config, tokenizer=TOKENIZER, name="sim"))
        tasks = [asyncio.create_task(self._call(number)) for number in range(self.rng.randint(2, 6))]
        tasks += [asyncio.create_task(one) for one in self._others()]
        await asyncio.wait_for(asyncio.gather(*tasks), 40 * SETTLE_SECONDS)
        await self._quiesce()
        await self.client.stop(5.0)
        await asyncio.wait_for(worker, SETTLE_SECONDS)
        await asyncio.sleep(1.0)

    def _others(self) -> Iterator[Any]:
        if "updates" in self.on or "pauses" in self.on:
            yield self._operate()
        if "clock_jumps" in self.on:
            yield self._jump()
        if "rank_dies" in self.on or "engine_dies" in self.on:
            yield self._kill()
        if "stop_early" in self.on:
            yield self._stop_early()

    async def _quiesce(self) -> None:
        """Until the engine has nothing left; what it still has is for the judge."""
        until = self.clock.now + SETTLE_SECONDS
        while self.client.state == "ready" and (self.engine.has_requests() or self.updates.busy):
            if self.clock.now > until:
                return
            await asyncio.sleep(1.0)
        await asyncio.sleep(2.0)

    async def _work(self) -> None:
        """The engine's process, as ``run_worker`` has it."""
        link, loop = self.link, worker_module.Loop(self.engine, self.link)
        link.send(Hello(pid=1))
        link.send(Ready(facts=worker_module._facts(self.engine)))
        code = 0
        try:
            loop.begin()
            while not loop.finished() and not self.died:
                link.waits = 0.0
                loop.turn()
                self._look()
                await self._pause(link.waits)
            if self.died:
                await self.socket.all_read()
                self.process.end(-9)
                return
            loop.end()
            link.send(Stopped())
        except GtpServeError as error:
            self.died = self.died or error.code
            link.send(fatal(error))
            code = error.exit_code
        except Exception as error:
            self.troubles.append(f"the engine met a bug: {type(error).__name__}: {error}")
            link.send(fatal(EngineFault(str(error), code="internal")))
            code = 1
        await self.socket.all_read()
        self.process.end(code)

    async def _pause(self, waits: float) -> None:
        if waits:  # with nothing to do between two polls, the polls in between are left out
            await self.socket.wait(max(waits, min(0.5, self.wires.next_due() - self.clock.now)))
        else:
            await asyncio.sleep(self.rng.random() * 0.02)

    def _look(self) -> None:
        """What must hold between any two turns of the engine."""
        self.turns += 1
        if self.turns > MOST_TURNS:
            raise RuntimeError(f"{self.turns} turns and no end")
        if self.engine.has_requests() or self.turns % 16 == 0:
            self.engine.check_invariants()
        live = {name.partition("#")[0] for name in self.engine._scheduler.rids}
        slack = self.jumped + (10.0 if "slow_link" in self.on else 0.8)
        for call in self.calls:
            if live.isdisjoint(call.rids):
                continue
            if call.gone is not None and self.clock.now - call.gone > slack:
                self._trouble_once(f"call {call.number} is still running long after its client left")
            prompt = 0.06 if not {"slow_link", "pauses", "updates"} & self.on else slack
            if self.clock.now - call.asked > call.body.get("deadline_seconds", 1e9) + self.jumped + prompt:
                self._trouble_once(f"call {call.number} is still running long after its deadline")

    def _trouble_once(self, text: str) -> None:
        if text not in self.troubles:
            self.troubles.append(text)

    # -- clients -----------------------------------------------------------------------------------

    async def _call(self, number: int) -> None:
        rng = self.rng
        await asyncio.sleep(rng.random() * 2)
        call = self._new_call(number)
        call.asked = self.clock.now
        self.calls.append(call)
        leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if "cancels" in self.on and rng.random() < 0.4:
            asyncio.get_running_loop().call_later(rng.random() * 0.3, self._leave, call, leaving)
        if "aborts" in self.on and rng.random() < 0.3:
            asyncio.get_running_loop().call_later(
                rng.random() * 0.3, lambda: asyncio.ensure_future(self.client.abort(call.rids[0]))
            )
        slow = "slow_clients" in self.on and rng.random() < 0.4

        async def send(message: Any) -> None:
            if slow and rng.random() < 0.3:
                await asyncio.sleep(rng.choice((0.1, 1.0, 100.0)))
                if rng.random() < 0.2:
                    call.broke = True
                    raise OSError("the connection is gone")
            if message["type"] == "http.response.start":
                call.status = message["status"]
                return
            call.chunks.append(message.get("body", b""))
            call.finals += not message.get("more_body", False)

        try:
            await self._post("/generate", call.body, send, leaving)
        except OSError:
            call.broke = True
        except Exception as error:
            call.error = f"{type(error).__name__}: {error}"
        call.over = True

    def _leave(self, call: Call, leaving: asyncio.Future[None]) -> None:
        if not leaving.done() and not call.over:
            call.gone = self.clock.now
            leaving.set_result(None)

    def _new_call(self, number: int) -> Call:
        rng = self.rng
        count = rng.choice((1, 1, 1, 2))
        prompts = []
        for _ in range(count):
            base = random.Random(rng.randrange(3)).choices(range(35, 120), k=rng.choice((4, 9, 16)))
            prompts.append([*base, *rng.choices(range(35, 120), k=rng.randint(1, 6))])
        rids = [f"r{number}-{index}" for index in range(count)]
        stream = rng.choice((False, True, "delta", "delta"))
        sampling: dict[str, Any] = {
            "max_new_tokens": rng.randint(1, 14),
            "temperature": rng.choice((0, 1.0)),
            "sampling_seed": rng.randrange(100),
            "ignore_eos": rng.random() < 0.3,
            "stop": rng.sample(["9", "B", "xy", "ab", "a b", "\u00e9"], rng.choice((0, 0, 1, 2))),
        }
        if not sampling["stop"]:
            sampling["min_new_tokens"] = rng.choice((0, 0, 3))
        sampling["max_new_tokens"] = max(sampling["max_new_tokens"], sampling.get("min_new_tokens", 0))
        body: dict[str, Any] = {"sampling_params": sampling, "stream": stream}
        body |= {"input_ids": prompts, "rid": rids} if count > 1 else {"input_ids": prompts[0], "rid": rids[0]}
        if "deadlines" in self.on and rng.random() < 0.4:
            body["deadline_seconds"] = rng.choice((0.01, 0.1, 1.0))
            sampling |= {"max_new_tokens": 20, "ignore_eos": True, "stop": []}
        return Call(number=number, body=body, stream=stream, rids=rids, prompts=prompts)

    async def _post(self, path: str, body: Any, send: Callable[[Any], Any], leaving: asyncio.Future[None]) -> None:
        raw = json.dumps(body).encode()
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if not asked:
                asked = True
                return {"type": "http.request", "body": raw, "more_body": False}
            await asyncio.shield(leaving)
            return {"type": "http.disconnect"}

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(raw)),
            ],
            "client": ("127.0.0.1", 1),
            "server": ("localhost", 80),
        }
        await self.app(scope, receive, send)

    # -- the operator and misfortune ---------------------------------------------------------------

    async def _operate(self) -> None:
        rng = self.rng
        for number in range(1, rng.randint(2, 5)):
            await asyncio.sleep(rng.random())
            if "pauses" in self.on and rng.random() < 0.4:
                await self._ask("/pause", {"mode": rng.choice(("keep", "recompute", "abort", "wait"))})
                await asyncio.sleep(rng.random())
                await self._ask("/resume", {})
            elif rng.random() < 0.2:
                await self._ask("/weights/rollback", {"in_flight": self._policy(), "wait": True})
            elif "updates" in self.on:
                await self._update(number)

    async def _update(self, number: int) -> None:
        rng = self.rng
        manual = rng.random() < 0.3
        body = {
            "source": {"kind": "disk", "path": f"/w{number}"},
            "version": str(number),
            "id": f"u{number}",
            "in_flight": self._policy(),
            "commit": "manual" if manual else "auto",
            "deadline_seconds": rng.choice((1.0, 10.0)),
            "wait": rng.random() < 0.7,
            "dry_run": rng.random() < 0.1,
        }
        await self._ask("/weights/updates", body)
        if manual:
            await asyncio.sleep(rng.random())
            await self._ask(f"/weights/updates/u{number}/{rng.choice(('commit', 'commit', 'abort'))}", {})

    def _policy(self) -> str:
        return self.rng.choice(("keep", "recompute", "wait", "abort"))

    async def _ask(self, path: str, body: Any) -> None:
        statuses: list[int] = []

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        leaving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await asyncio.wait_for(self._post(path, body, send, leaving), 2 * SETTLE_SECONDS)
        except TimeoutError:
            self.troubles.append(f"{path} was not answered")
            return
        if statuses != [200] and (len(statuses) != 1 or statuses[0] == 500) and not self.died:
            self.troubles.append(f"{path} was answered with {statuses}")

    async def _jump(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            await asyncio.sleep(self.rng.random() * 2)
            seconds = self.rng.choice((0.5, 30.0, 400.0))
            self.jumped += seconds
            self.clock.advance(seconds)
            self.clock.wall_offset += self.rng.choice((-1e6, 0.0, 1e6))

    async def _kill(self) -> None:
        await asyncio.sleep(self.rng.random() * 3)
        if "rank_dies" in self.on and len(self.ranks) > 1:
            self.ranks[-1].dead = True
        elif "engine_dies" in self.on:
            self.died = "killed"
            self.socket.wake()

    async def _stop_early(self) -> None:
        await asyncio.sleep(self.rng.random() * 3)
        self.state.stopping = True  # as the server's own end begins
        await self.client.stop(self.rng.choice((0.0, 0.05, 5.0)))


_fronts: list[tuple[ServerState, Any]] = []
_clocks: list[Clock] = []


def _front(clock: Clock) -> tuple[ServerState, Any]:
    """An application; that of the last seed if nothing was left in it, since to make one takes long."""
    _clocks[:] = [clock]
    if not _fronts or _fronts[0][0].num_calls or _fronts[0][0].rids:
        state = ServerState(clock=lambda: _clocks[0].now)
        log = logging.Logger("sim", logging.CRITICAL + 1)
        _fronts[:] = [(state, build_app(state, Metrics(state), log, guard=AdminGuard(), pages=False))]
    _fronts[0][0].stopping = False
    return _fronts[0]


def forget_application() -> None:
    """The next world makes one of its own."""
    _fronts.clear()


class SimContext:
    """As zmq's."""

    def destroy(self, linger: int) -> None:
        """Nothing to free."""


class SimFolder:
    """As SocketFolder."""

    def remove(self) -> None:
        """There is none."""


class SimProcess:
    """As WorkerProcess."""

    pid = 1
    killed = False
    ended: asyncio.Future[int]

    async def wait(self) -> int:
        """Its exit code."""
        return await asyncio.shield(self.ended)

    def end(self, code: int) -> None:
        """It has ended."""
        if not self.ended.done():
            self.ended.set_result(code)

    def kill(self) -> None:
        """It ends at once."""
        self.killed = True
        self.end(-9)

    def fault(self, code: int, doing: str) -> EngineFault:
        """What that means."""
        return EngineFault(f"the engine process ended with {code} while {doing}", code="worker-died")


class SimSocket:
    """The client's end: frames arrive in order, after delays."""

    closed = False

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = asyncio.get_running_loop()
        self._inbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.to_worker: list[tuple[float, bytes]] = []
        self._last = [0.0, 0.0]
        self._woken = asyncio.Event()

    def _arrival(self, way: int) -> float:
        rng = self._world.rng
        delay = rng.random() * 0.002
        if "slow_link" in self._world.on and rng.random() < 0.1:
            delay += rng.random() * 2
        # Never two at one moment: timers of one moment come in no certain order.
        self._last[way] = max(self._last[way] + 1e-6, self._world.clock.now + delay)
        return self._last[way]

    async def send(self, frame: bytes, flags: int = 0) -> None:
        """To the engine's process."""
        at = self._arrival(0)
        self.to_worker.append((at, frame))
        self._loop.call_at(at, self.wake)

    async def recv(self) -> bytes:
        """From the engine's process."""
        return await self._inbox.get()

    def deliver(self, frame: bytes) -> None:
        """The engine's process has sent this."""
        self._loop.call_at(self._arrival(1), self._inbox.put_nowait, frame)

    async def all_read(self) -> None:
        """Until what the engine's process has sent has arrived: it lies in the socket when that process ends."""
        await asyncio.sleep(max(0.0, self._last[1] - self._world.clock.now) + 0.001)

    def wake(self) -> None:
        """The engine's process need not wait any longer."""
        self._woken.set()

    async def wait(self, seconds: float) -> None:
        """Until something has arrived or the time is over."""
        self._woken.clear()
        if any(at <= self._world.clock.now for at, _ in self.to_worker):
            return
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            pass


class SimLink:
    """The engine's end."""

    socket: SimSocket

    def __init__(self, world: World) -> None:
        self._world = world
        self.waits = 0.0

    def send(self, message: Any) -> None:
        """To the HTTP process."""
        if not self._world.died or not isinstance(message, Stopped):
            self.socket.deliver(encode(message))

    def receive(self, wait_ms: int) -> list[ToWorker]:
        """What has arrived, or the first part of it; never waits, but says how long it would have."""
        self.waits = wait_ms / 1000
        arrived = [frame for at, frame in self.socket.to_worker if at <= self._world.clock.now]
        if "slow_link" in self._world.on and len(arrived) > 1:
            arrived = arrived[: self._world.rng.randint(1, len(arrived))]
        del self.socket.to_worker[: len(arrived)]
        return [decode_to_worker(frame) for frame in arrived]


@contextmanager
def planted(what: Any, name: str, replacement: Any) -> Iterator[None]:
    """The product with a fault in it."""
    with mock.patch.object(what, name, replacement):
        yield


__all__ = ["Call", "World", "planted", "replace"]
