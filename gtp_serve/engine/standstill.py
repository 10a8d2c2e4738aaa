"""When an engine runs no steps, and what becomes of its requests: pauses, commits, torn weights.  No torch."""

from __future__ import annotations

from collections.abc import Callable

from gtp_serve.engine.engine import Engine
from gtp_serve.errors import RequestRejected, UpdateRefused, WeightsTorn
from gtp_serve.refit.orders import InFlight, PauseMode, WeightsStatus
from gtp_serve.refit.update import UpdateMachine


class Standstill:
    """Freezes one engine and lets it run again.

    :param deadline_seconds: for a pause that waits for requests to end.
    """

    def __init__(
        self, engine: Engine, machine: UpdateMachine, *, clock: Callable[[], float], deadline_seconds: float
    ) -> None:
        self._engine = engine
        self._machine = machine
        self._clock = clock
        self._seconds = deadline_seconds
        self._pausing: float | None = None
        self._draining = False
        self._writing = ""
        self._since: float | None = None
        self._torn = ""

    @property
    def since(self) -> float | None:
        """When the engine was stopped for an update in place; None when it was not."""
        return self._since

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs: the engine is paused, or has nothing to do."""
        return self._machine.paused or not self._engine.has_requests()

    # -- pause and resume --------------------------------------------------------------------------

    def pause(self, mode: PauseMode) -> Callable[[], WeightsStatus | None]:
        """Stop, or begin to; returns what tells whether it has come about."""
        if mode == "wait" and self._engine.num_started:
            self._machine.paused = False  # what is frozen could not end
            if self._pausing is None:
                self._pausing = self._clock() + self._seconds
            return self._paused
        if mode == "recompute":
            self._engine.preempt_all()
        if mode == "abort":
            self._engine.abort_all("the server was paused, and what ran was to be ended", "paused")
        self._machine.paused, self._pausing = True, None
        return self._paused

    def resume(self) -> None:
        """Run again; a pause that is still waiting is given up."""
        self._machine.paused, self._pausing = False, None

    def _paused(self) -> WeightsStatus | None:
        if self._machine.paused:
            return self._machine.status()
        if self._pausing is None:
            raise UpdateRefused("the pause was taken back before all requests had ended", code="resumed")
        if self._clock() < self._pausing:
            return None
        running = self._engine.num_started
        self._pausing = None
        raise UpdateRefused(
            f"{running} requests were still running after {self._seconds:g} s, so the engine was not paused",
            [("try", "mode abort, keep or recompute")],
            code="pause-deadline",
        )

    # -- for updates -------------------------------------------------------------------------------

    def quiet(self, in_flight: InFlight) -> bool:
        """Have running requests be as an update wants them; whether they are and no step is under way."""
        match in_flight:
            case "wait":
                self._draining = True
                self._engine.hold_admissions(True)
                if self._engine.num_started:
                    return False
            case "recompute":
                self._engine.preempt_all()
            case "abort":
                message = "the weights were replaced, and what ran was to be ended"
                self._engine.abort_started(message, "weights-replaced")
            case "keep":
                pass
        self._engine.settle()
        return True

    def stop_for(self, update: str) -> None:
        """No step runs until this update, which writes into the live weights, has ended."""
        self._writing, self._since = update, self._clock()
        self._engine.freeze(True)

    def settle(self) -> None:
        """Bring the engine into line with what the machine says now; after each look at it."""
        if self._pausing is not None and not self._engine.num_started:
            self._machine.paused, self._pausing = True, None
        if self._writing and not self._machine.is_current(self._writing):
            self._writing, self._since = "", None
        self._note_torn(self._machine.live.torn)
        machine = self._machine
        self._engine.freeze(bool(machine.paused or machine.live.torn or machine.live.sleeping or self._writing))
        self._engine.hold_admissions(self._pausing is not None or self._draining)
        self._draining = False  # whoever still waits says so again

    def _note_torn(self, torn: str) -> None:
        if torn == self._torn:
            return
        self._torn = torn
        self._engine.refuse = None
        if torn:
            self._engine.refuse = lambda: _refusal(torn)
        if torn and "weights" not in self._machine.live.sleeping:
            self._engine.abort_all(f"there are no whole weights any more: {torn}", WeightsTorn.default_code)


def _refusal(torn: str) -> RequestRejected:
    return WeightsTorn(
        f"there are no whole weights to answer with: {torn}", [("try", "again when an update has landed")]
    )
