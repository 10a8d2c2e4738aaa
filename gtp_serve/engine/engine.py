"""The engine: one scheduler, one runner, one step at a time.  No torch of its own, no process, no socket.

    add, abort ...   step: schedule -> launch -> wait -> commit -> events   add, abort ...   step ...

A step that raises costs the requests in it and no others; three in a row end the engine.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable

from gtp_serve.config import EngineConfig
from gtp_serve.engine.messages import EngineStats
from gtp_serve.engine.scheduler import Scheduler
from gtp_serve.engine.step import Runner, StepPlan
from gtp_serve.errors import EngineFault, RequestRejected
from gtp_serve.request import Request, TokenEvent

MAX_FAILED_STEPS = 3
"""Steps in a row that may raise; the last of them is fatal."""


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Engine:
    """Requests in, token events out.  Not thread-safe: one caller drives it.

    :param clock: seconds, monotonic.
    :param draw_seed: seeds for requests that bring none; the scheduler's own choice by default.
    :param log: takes the traceback of a failed step.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw_seed: Callable[[], int] | None = None,
        log: Callable[[str], None] = _to_stderr,
    ) -> None:
        self.config = config
        self._runner = runner
        self._clock = clock
        self._log = log
        self._scheduler = Scheduler(config) if draw_seed is None else Scheduler(config, draw_seed=draw_seed)
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
        return bool(self._undelivered) or self._scheduler.has_work()

    def step(self) -> list[TokenEvent]:
        """One pass through the model; events of all sequences, at most one of each that took part.

        :raises EngineFault: when MAX_FAILED_STEPS steps in a row have failed.
        """
        events, self._undelivered = self._undelivered, []
        plan = self._scheduler.schedule()
        if plan is None:
            return events
        started = self._clock()
        events += self._carry_out(plan)
        self._step_seconds += self._clock() - started
        self._steps += 1
        self._step_tokens += plan.num_tokens
        return events

    def _carry_out(self, plan: StepPlan) -> list[TokenEvent]:
        try:
            events = self._scheduler.commit(plan, self._runner.launch(plan).wait())
        except Exception as error:
            return self._failed(plan, error)
        self._failed_in_a_row = 0
        return events

    def _failed(self, plan: StepPlan, error: Exception) -> list[TokenEvent]:
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
