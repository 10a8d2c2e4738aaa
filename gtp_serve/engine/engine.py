"""The engine: one scheduler, one runner, one step under way.  No torch of its own, no process, no socket.

    step: wait, commit n, schedule n+1, launch n+1 -> events of n     add, abort, send them ...     step ...
                                                |------------ n+1 computes -------------------------|

A recorded step on a CPU computes in ``wait`` instead: the cores are busy with it either way.

A step that raises costs the requests in it and no others; three in a row, or an EngineFault, end the engine.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gtp_serve.config import EngineConfig
from gtp_serve.engine.messages import EngineStats
from gtp_serve.engine.scheduler import Scheduler
from gtp_serve.engine.step import Pending, Runner, StepPlan, StepResult
from gtp_serve.engine.thread import InThread
from gtp_serve.errors import EngineFault, RequestRejected
from gtp_serve.request import Request, TokenEvent

if TYPE_CHECKING:
    from gtp_serve.engine.updates import Updates

MAX_FAILED_STEPS = 3
"""Steps in a row that may raise; the last of them is fatal."""


def to_stderr(text: str) -> None:
    """Let whoever watches this process read it."""
    print(text, file=sys.stderr, flush=True)


@dataclass(kw_only=True, slots=True)
class _UnderWay:
    """A step that was started."""

    plan: StepPlan
    pending: Pending
    started: float
    outcome: StepResult | Exception | None = None
    """None until it was waited for."""


class Engine:
    """Requests in, token events out.  Not thread-safe: one caller drives it.

    :param clock: seconds, monotonic.
    :param draw_seed: seeds for requests that bring none; the scheduler's own choice by default.
    :param log: takes the traceback of a failed step.
    :param check: raises EngineFault when something that the runner needs is gone, for example a rank.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] | None = None,
        log: Callable[[str], None] = to_stderr,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.config = config
        self.check = check
        """For whoever drives the engine to call before each step, and while idle."""
        self.updates: Updates | None = None
        """What changes this engine's weights, if they can be changed; for its driver to poll."""
        self.refuse: Callable[[], RequestRejected] | None = None
        """Why no request is taken now; None: they are."""
        self._frozen = False
        self._runner = InThread(runner) if config.device == "cpu" else runner
        self._clock = clock
        self._log = log
        self._scheduler = (
            Scheduler(config, clock=clock) if draw_seed is None else Scheduler(config, clock=clock, draw_seed=draw_seed)
        )
        self._under_way: _UnderWay | None = None
        self._undelivered: list[TokenEvent] = []
        self._failed_in_a_row = 0
        self._rejected = 0
        self._steps = 0
        self._failed_steps = 0
        self._step_seconds = 0.0
        self._step_tokens = 0

    def add(self, request: Request) -> None:
        """Take a request; its tokens come out of later steps.

        :raises RequestRejected: it can never be answered, its rid is in use, or (QueueFull) too many wait.
        """
        try:
            if self.refuse is not None:
                raise self.refuse()
            self._scheduler.add(request)
        except RequestRejected:
            self._rejected += 1
            raise

    def abort(self, rid: str) -> None:
        """End a request; its last event comes out of the next step.  Unknown rids are ignored."""
        self._abort(rid, "aborted by the client", "aborted")

    def abort_all(self, message: str, code: str) -> None:
        """End every request; their last events come out of the next step."""
        for rid in self._scheduler.rids:
            self._abort(rid, message, code)

    def _abort(self, rid: str, message: str, code: str) -> None:
        event = self._scheduler.abort(rid, message, code)
        if event is not None:
            self._undelivered.append(event)

    def has_work(self) -> bool:
        """Whether ``step`` would do anything."""
        if self._undelivered or self._under_way is not None:
            return True
        return self._scheduler.has_late() if self._frozen else self._scheduler.has_work()

    def has_requests(self) -> bool:
        """Whether a request has not ended, or its end was not told; while frozen, without having work."""
        return self.has_work() or self._scheduler.has_work()

    def wait(self) -> None:
        """Until the step under way, if any, is computed: what is added now takes part in the next one, and
        ``step`` does not block.
        """
        under_way = self._under_way
        if under_way is None or under_way.outcome is not None:
            return
        self._scheduler.prepare()
        try:
            under_way.outcome = under_way.pending.wait()
        except Exception as error:
            under_way.outcome = error
        self._step_seconds += self._clock() - under_way.started

    def step(self) -> list[TokenEvent]:
        """Finish the step under way (one is started if there is none) and start the next.

        Events that are there already do not wait for a step that has only just been started: where weights changed,
        a step was finished before this call.

        :returns: events of all sequences of the finished step that sampled, and the last events of requests
            that were aborted or late.
        :raises EngineFault: when MAX_FAILED_STEPS steps in a row have failed, or the runner cannot go on.
        """
        events, self._undelivered = self._undelivered, []
        if self._under_way is None:
            events += self._start()
            if events:
                return events
        events += self._finish()
        return events + self._start()

    # -- while weights change ----------------------------------------------------------------------

    @property
    def num_started(self) -> int:
        """Requests that have run and have not ended."""
        return self._scheduler.num_started

    @property
    def weight_version(self) -> str:
        """What the next token is made by."""
        return self._scheduler.weight_version

    def settle(self) -> None:
        """Finish the step under way, if there is one; none is until the next call of ``step``."""
        self._undelivered += self._finish()

    def freeze(self, frozen: bool) -> None:
        """Start no step from now on, or start them again; what has been asked for waits, and expires."""
        if frozen:
            self.settle()
        self._frozen = frozen

    def hold_admissions(self, held: bool) -> None:
        """Requests that have not run yet do not start; the others run to their end."""
        self._scheduler.admits = not held

    def set_weight_version(self, version: str) -> None:
        """After the step under way, which is finished first: tokens are made by other weights from now on."""
        self.settle()
        self._scheduler.set_weight_version(version)

    def preempt_all(self) -> None:
        """All KV of running requests is computed again before their next token."""
        self.settle()
        self._scheduler.preempt_all()

    def forget_prefixes(self) -> None:
        """The prefix cache begins anew; running requests keep their KV."""
        self._scheduler.forget_prefixes()

    def abort_started(self, message: str, code: str) -> None:
        """End the requests that have run; those in the queue stay there."""
        self.settle()
        self._undelivered += self._scheduler.abort_started(message, code)

    # -- steps -------------------------------------------------------------------------------------

    def _start(self) -> list[TokenEvent]:
        """Schedule and launch a step if there is work; events of requests that ended by it."""
        events = self._scheduler.expire()
        plan = None if self._frozen else self._scheduler.schedule()
        if plan is None:
            return events
        self._steps += 1
        self._step_tokens += plan.num_tokens
        started = self._clock()
        try:
            self._under_way = _UnderWay(plan=plan, pending=self._runner.launch(plan), started=started)
        except Exception as error:
            self._step_seconds += self._clock() - started
            return events + self._failed(plan, error)
        return events

    def _finish(self) -> list[TokenEvent]:
        """Wait for the step under way, if there is one, and take its tokens."""
        self.wait()
        done, self._under_way = self._under_way, None
        if done is None:
            return []
        try:
            if not isinstance(done.outcome, StepResult):
                raise done.outcome or AssertionError("a step was not waited for")
            events = self._scheduler.commit(done.plan, done.outcome)
        except Exception as error:
            return self._failed(done.plan, error)
        self._failed_in_a_row = 0
        return events

    def _failed(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
        if isinstance(error, EngineFault):
            raise error
        self._log("".join(traceback.format_exception(error)))
        self._failed_in_a_row += 1
        self._failed_steps += 1
        kind = type(error).__name__
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineFault(
                f"{self._failed_in_a_row} steps in a row failed, the last one with {kind}",
                [("error", str(error))],
                code="engine-error",
            ) from error
        message = f"step {plan.step} failed with {kind}; requests outside it go on"
        return self._scheduler.fail(plan, message, "engine-error")

    def stats(self) -> EngineStats:
        """Numbers as of now; ``last_step_age_seconds`` is left to whoever watches from outside."""
        scheduler = self._scheduler
        counters = scheduler.counters
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            kv_blocks_total=scheduler.blocks.num_blocks,
            kv_blocks_used=scheduler.blocks.num_used,
            prompt_tokens_total=counters.prompt_tokens,
            generation_tokens_total=counters.generation_tokens,
            cached_tokens_total=counters.cached_tokens,
            prefix_queries_total=counters.prefix_queries,
            prefix_hits_total=counters.prefix_hits,
            preemptions_total=counters.preemptions,
            non_finite_total=counters.non_finite,
            requests_total={**counters.finished, "rejected": self._rejected},
            steps_total=self._steps,
            failed_steps_total=self._failed_steps,
            step_seconds_total=self._step_seconds,
            step_tokens_total=self._step_tokens,
            weight_version=scheduler.weight_version,
        )

    def check_invariants(self) -> None:
        """See ``Scheduler.check_invariants``."""
        self._scheduler.check_invariants()
