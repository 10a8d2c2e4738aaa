"""An engine client that answers from a script, and a real HTTP server around it on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import msgspec

from gtp_serve.config import CacheConfig, EngineConfig, ModelConfig, MoeConfig
from gtp_serve.engine.messages import EngineStats
from gtp_serve.errors import EngineFault, GtpServeError, RequestRejected, UnknownUpdate
from gtp_serve.loaders.tokenizer import Tokenizer, load_tokenizer
from gtp_serve.loaders.tokenizer_files import tokenizer_at
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    Commit,
    Control,
    RollBack,
    UpdateRecord,
    WeightsStatus,
)
from gtp_serve.request import FinishReason, Request, TokenEvent
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.app import build_app
from gtp_serve.server.http_server import build_server
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.ports import bind, url_of
from gtp_serve.server.state import Grammars, ServerState, Serving

DATA = Path(__file__).parent / "data"
EOS = 2

Script = Callable[[Request], Sequence[int]]


def byte_tokenizer() -> Tokenizer:
    """256 bytes (ids 3 to 258), a few merges, special ids 0, 1, 2 (2 ends a sequence)."""
    return load_tokenizer(tokenizer_at(DATA / "tokenizer"))


def byte_ids(data: bytes) -> list[int]:
    """Ids of single bytes in that tokenizer, whatever character they are in."""
    return [3 + byte for byte in data]


def echo(request: Request) -> Sequence[int]:
    """A reply that repeats the prompt."""
    return request.input_ids


@dataclass(kw_only=True)
class FakeClient:
    """Answers by script: a token a step, an end token or the length ends it."""

    script: Script = echo
    delay: float = 0.0
    """Seconds before each token."""
    hold: bool = False
    """Never answer."""
    die_after: int | None = None
    """Tokens until the engine is gone."""
    reject: RequestRejected | None = None
    finish: FinishReason | None = None
    """Instead of the natural end."""
    logprob: float = -0.5
    made_by: Callable[[Request, int], str] = lambda request, index: "0"
    """Which weights make a token."""
    state: Literal["starting", "ready", "stopping", "dead"] = "ready"
    age: float = 0.0
    requests: list[Request] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    weights: WeightsStatus = field(default_factory=lambda: WeightsStatus(version="0"))
    unheard: UpdateRecord | None = None
    """An update under way that another front has begun, until ``refresh``."""
    commands: list[Control] = field(default_factory=list)
    """What was asked about the weights."""
    refuse: GtpServeError | None = None
    """The answer to any command."""
    body: Any = None
    """The answer to commands that are not about one update."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def control(self, command: Control) -> Any:
        """An engine that begins and ends updates when the test says so, and answers everything else at once."""
        self.commands.append(command)
        await asyncio.sleep(0)
        if self.refuse is not None:
            raise self.refuse
        match command:
            case Begin(request=request, id=name):
                kind = type(request.order).__struct_config__.tag
                record = UpdateRecord(
                    id=name, version=request.version, base=self.weights.version, state="staging", kind=str(kind)
                )
                self.set_weights(update=record)
            case Commit(id=name) | AbortUpdate(id=name):
                return msgspec.to_builtins(self.record(name))
            case RollBack():
                record = UpdateRecord(id="rollback-1", version="0", base="1", state="verified", kind="rollback")
                self.set_weights(update=record)
            case _:
                return self.body
        return msgspec.to_builtins(record)

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    def record(self, name: str) -> UpdateRecord:
        found = [*filter(None, [self.weights.update]), *self.weights.history]
        record = next((one for one in found if one.id == name), None)
        if record is None:
            raise UnknownUpdate(f"there is no update {name!r}")
        return record

    def end_update(self, state: Any, **fields: Any) -> UpdateRecord:
        """The update under way ends."""
        assert self.weights.update is not None
        record = msgspec.structs.replace(self.weights.update, state=state, **fields)
        version = record.version if state == "committed" else self.weights.version
        torn = record.message if state == "torn" else self.weights.torn
        self.set_weights(update=None, history=(record, *self.weights.history), version=version, torn=torn)
        return record

    def set_weights(self, **fields: Any) -> None:
        self.weights = msgspec.structs.replace(self.weights, **fields)
        self.changed.set()
        self.changed = asyncio.Event()

    async def wait_weights(self, holds: Callable[[WeightsStatus], bool], seconds: float | None = None) -> WeightsStatus:
        async with asyncio.timeout(seconds):
            while not holds(self.weights):
                if self.state == "dead":
                    raise EngineFault("the engine process (pid 1) got signal 9 while serving")
                await self.changed.wait()
        return self.weights

    async def wait_update(self, update: str, seconds: float | None = None) -> UpdateRecord:
        status = await self.wait_weights(lambda now: any(one.id == update for one in now.history), seconds)
        return next(one for one in status.history if one.id == update)

    async def refresh(self) -> None:
        if self.unheard is not None:
            self.set_weights(update=self.unheard)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running), kv_blocks_total=10, kv_blocks_used=1, last_step_age_seconds=self.age
        )

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        if self.reject is not None:
            raise self.reject
        self.running.add(request.rid)
        ended = False
        try:
            async for event in self._events(request):
                ended = event.finish is not None
                yield event
        finally:
            self.running.discard(request.rid)
            if not ended:
                self.aborted.append(request.rid)

    async def _events(self, request: Request) -> AsyncIterator[TokenEvent]:
        sampling = request.sampling
        tokens = list(self.script(request))[: sampling.max_new_tokens]
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}
        if sampling.max_new_tokens == 0:  # as an engine: the end alone, and what is told of the prompt
            yield TokenEvent(rid=request.rid, weight_version="0", finish=FinishReason(type="length"))
            return
        for index, token in enumerate(tokens):
            await asyncio.sleep(3600 if self.hold else self.delay)
            if self.die_after == index:
                self.state = "dead"
                raise EngineFault("the engine process (pid 1) got signal 9 while serving")
            finish = self._finish(request, index, token in ends, index == len(tokens) - 1)
            yield TokenEvent(
                rid=request.rid,
                token_ids=(token,),
                logprobs=(self.logprob,),
                weight_version=self.made_by(request, index),
                finish=finish,
                **_told(request, index, self.logprob),
            )
            if finish is not None:
                return

    def _finish(self, request: Request, index: int, stops: bool, last: bool) -> FinishReason | None:
        if last and self.finish is not None:
            return self.finish
        if stops and index >= request.sampling.min_new_tokens:
            return FinishReason(type="stop", matched=self.script(request)[index])
        return FinishReason(type="length") if last else None


ROUTED_ROW = b"\x01\0\0\0\x02\0\0\0"
"""One token's experts: one layer, 1 and 2."""


def _told(request: Request, index: int, logprob: float) -> dict[str, Any]:
    """What an engine adds to event ``index`` for those who ask: the listed and top ids all have one value."""
    found: dict[str, Any] = {}
    if request.return_routed_experts:
        found["routed_experts"] = ROUTED_ROW * (len(request.input_ids) if index == 0 else 1)
    options = request.logprobs
    if options is None:
        return found
    top = tuple((token, logprob) for token in range(3, 3 + options.top_n))
    listed = (logprob,) * len(options.token_ids)
    found["top_logprobs"] = (top,) if options.top_n else ()
    found["listed_logprobs"] = (listed,) if options.token_ids else ()
    if options.prompt_start is not None and index == 0:
        count = len(request.input_ids) - options.prompt_start - 1
        found["prompt_logprobs"] = tuple(-float(at) for at in range(count))
        found["prompt_top_logprobs"] = (top,) * count if options.top_n else ()
        found["prompt_listed_logprobs"] = (listed,) * count if options.token_ids else ()
    return found


def engine_config(*, vocab: int = 273, context: int = 4096, moe: MoeConfig | None = None) -> EngineConfig:
    """A model that does not exist, with the fake tokenizer's vocabulary."""
    model = ModelConfig(
        family="llama",
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        ffn_size=32,
        vocab_size=vocab,
        vocab_rows=vocab,
        eos_token_ids=(EOS,),
        moe=moe,
    )
    return EngineConfig(model=model, cache=CacheConfig(num_blocks=10), dtype="float32", max_context=context)


@dataclass(kw_only=True)
class FakeServer:
    """What a test needs of a running server."""

    http: httpx.AsyncClient
    url: str
    state: ServerState
    client: FakeClient
    log: list[dict[str, Any]]
    logger: logging.Logger

    async def generate(self, **body: Any) -> httpx.Response:
        return await self.http.post("/generate", json=body)


class _Collect(logging.Handler):
    def __init__(self, lines: list[dict[str, Any]]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append({"message": record.getMessage(), **getattr(record, "fields", {})})


@contextlib.asynccontextmanager
async def serving(
    client: FakeClient | None = None,
    *,
    tokenizer: Tokenizer | Literal["bytes"] | None = "bytes",
    ready: bool = True,
    context: int = 4096,
    ping: float = 15.0,
    moe: MoeConfig | None = None,
    grammars: Grammars | None = None,
    guard: AdminGuard | None = None,
) -> AsyncIterator[FakeServer]:
    """A server on a free port around a fake engine."""
    client = client if client is not None else FakeClient()
    state = ServerState()
    lines: list[dict[str, Any]] = []
    log = logging.Logger("test")
    log.addHandler(_Collect(lines))
    if ready:
        loaded = byte_tokenizer() if tokenizer == "bytes" else tokenizer
        state.set_serving(
            Serving(
                client=client,
                engine=engine_config(context=context, moe=moe),
                tokenizer=loaded,
                name="fake",
                grammars=grammars,
            )
        )
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        app = build_app(state, Metrics(state), log, guard=guard or AdminGuard(), ping_seconds=ping)
        server = build_server(app)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await server.up.wait()
        try:
            async with httpx.AsyncClient(base_url=url_of(listener), timeout=10, trust_env=False, verify=False) as http:
                yield FakeServer(http=http, url=url_of(listener), state=state, client=client, log=lines, logger=log)
        finally:
            server.should_exit = True
            await asyncio.wait_for(task, 10)
