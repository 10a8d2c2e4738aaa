"""What the HTTP process knows about itself: the start-up phase, the engine, the calls in progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from gtp_serve.config import EngineConfig
from gtp_serve.engine.messages import EngineStats, Phase
from gtp_serve.errors import EngineFault, GtpServeError, NotReady, ShuttingDown, WeightsTorn
from gtp_serve.loaders.chat_prompt import ChatTokenizer
from gtp_serve.refit.orders import Control, UpdateRecord, WeightsStatus
from gtp_serve.request import Grammar, Request, TokenEvent
from gtp_serve.server.http_errors import Conflict
from gtp_serve.server.tracing import Tracer
from gtp_serve.server.version_counts import VersionCounts

STALLED_SECONDS = 60.0
"""Without a step for so long while there is work, or without a sign of life, the engine counts as stuck."""


class Client(Protocol):
    """What the routes need of ``engine.client.EngineClient``."""

    @property
    def state(self) -> Literal["starting", "ready", "stopping", "dead"]:
        """Where the engine process is in its life."""
        ...

    def submit(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Start a request; closing the iterator aborts it."""
        ...

    async def abort(self, rid: str) -> None:
        """End a request; unknown names are ignored."""
        ...

    def stats(self) -> EngineStats:
        """The newest numbers."""
        ...

    @property
    def weights(self) -> WeightsStatus:
        """What serves and what is on its way, as the engine last said."""
        ...

    async def control(self, command: Control) -> Any:
        """Ask something about the weights; the answer as plain JSON values."""
        ...

    async def wait_weights(self, holds: Callable[[WeightsStatus], bool], seconds: float | None = None) -> WeightsStatus:
        """The first status for which something holds."""
        ...

    async def wait_update(self, update: str, seconds: float | None = None) -> UpdateRecord:
        """An update's record once it has ended."""
        ...

    async def refresh(self) -> None:
        """Have ``weights`` be no older than this call, where somebody else may have begun an update."""
        ...


class Managed(Client, Protocol):
    """What whoever starts and ends the server needs of it besides."""

    fault: GtpServeError | None
    """Why it is dead; None after a stop that was asked for."""
    died: asyncio.Event
    """Set when it is gone without having been asked to stop."""

    async def stop(self, drain_seconds: float) -> None:
        """Let running requests end for so long, then end it."""
        ...


class Grammars(Protocol):
    """What the routes need of ``server.grammar_check.GrammarChecker``."""

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar in plain form; raises RequestRejected when it is not served."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Everything that a request needs once the engine is ready."""

    client: Client
    engine: EngineConfig
    tokenizer: ChatTokenizer | None
    name: str
    grammars: Grammars | None = None
    """None: no tokenizer, hence no grammars."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further lines of ``/model_info``."""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """``GET /checkpoint``."""


class ServerState:
    """One per process, used only on the event loop.

    starting --set_serving--> ready --begin_stop--> stopping; ``fault`` is set when the engine is lost.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._phase = Phase(name="starting", state="running")
        self._serving: Serving | None = None
        self._rids: set[str] = set()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.stopping = False
        self.fault: GtpServeError | None = None
        self.tracer: Tracer | None = None
        """Takes a span for each finished request; None: nobody asked for them."""
        self.by_version = VersionCounts(clock=clock)

    @property
    def serving(self) -> Serving | None:
        """What serves, also while stopping."""
        return self._serving

    @property
    def rids(self) -> frozenset[str]:
        """Names of the sequences in progress."""
        return frozenset(self._rids)

    @property
    def num_calls(self) -> int:
        """Calls whose answer is not complete."""
        return self._calls

    def set_phase(self, phase: Phase) -> None:
        """A start-up phase made progress."""
        self._phase = phase

    def set_serving(self, serving: Serving) -> None:
        """The engine is ready."""
        self._serving = serving

    def status(self) -> dict[str, Any]:
        """``/ready``'s body: where the server is in its life."""
        if self.fault is not None:
            return {"status": "failed"}
        if self.stopping:  # its engine may have ended by now, as it was asked to
            return {"status": "stopping", "running": self._calls}
        if self._serving is not None and self._serving.client.state == "dead":
            return {"status": "failed"}
        if self._serving is None:
            return {"status": "starting", **self._phase_body()}
        weights = self._serving.client.weights
        if weights.torn:
            return {"status": "torn", "reason": weights.torn}
        return {"status": "ready", "paused": True} if weights.paused else {"status": "ready"}

    def _phase_body(self) -> dict[str, Any]:
        phase = self._phase
        body: dict[str, Any] = {"phase": phase.name, "seconds": round(self._clock() - self._started, 3)}
        if phase.total:
            body |= {"done": phase.done, "total": phase.total}
        return body

    def require_serving(self) -> Serving:
        """What serves.

        :raises NotReady: while starting.
        :raises ShuttingDown: while stopping.
        :raises EngineFault: without an engine.
        """
        status = self.status()["status"]
        if status == "failed":
            raise EngineFault("the engine has ended")
        if status == "stopping":
            raise ShuttingDown("the server is stopping and takes no new requests")
        if self._serving is None:
            raise NotReady(f"the server is starting: {self._phase.name}")
        return self._serving

    def require_whole(self) -> Serving:
        """What serves, to make tokens with.

        :raises WeightsTorn: when its weights are a mix of two versions; and as ``require_serving``.
        """
        serving = self.require_serving()
        torn = serving.client.weights.torn
        if torn:
            raise WeightsTorn(
                f"the weights are not whole: {torn}", [("until", "a good update has landed, nothing is generated")]
            )
        return serving

    def health(self) -> str | None:
        """Why the server cannot make progress, or None when it can; whoever paused it keeps it from making steps."""
        status = self.status()["status"]
        if status == "failed":
            return "the engine has ended"
        if self._serving is None:
            return f"the server is starting: {self._phase.name}"
        age = self._serving.client.stats().last_step_age_seconds
        if age > STALLED_SECONDS and not _is_held(self._serving.client.weights):
            return f"the engine has made no step, and given no sign of life, for {age:.0f} s"
        return None

    @contextmanager
    def call(self, rids: Sequence[str]) -> Iterator[None]:
        """A call in progress, from admission until its answer is complete.

        :raises Conflict: when one of the names is in use.
        """
        for rid in rids:
            if rid in self._rids:
                raise Conflict(f"a request with rid '{rid}' is running", code="duplicate-rid", param="rid")
        self._rids.update(rids)
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._rids.difference_update(rids)
            self._calls -= 1
            if self._calls == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Until no call is in progress."""
        await self._idle.wait()


def _is_held(weights: WeightsStatus) -> bool:
    """Whether no step is made because somebody wants it so."""
    update = weights.update
    return weights.paused or bool(weights.torn) or (update is not None and update.memory == "inplace")
