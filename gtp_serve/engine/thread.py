"""A thread for runners whose ``launch`` computes (a CPU): the engine's caller goes on while a step is under way, unless
the runner has a better way to compute it.

torch lets go of the interpreter's lock inside each operation, so the two run side by side.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future
from queue import SimpleQueue

from gtp_serve.engine.step import Pending, Runner, StepPlan, StepResult, Waiting

_Jobs = SimpleQueue[tuple["Future[StepResult]", StepPlan] | None]


_LAST_STEP_SECONDS = 1.0


class InThread:
    """Another runner, run in one thread of its own; the thread ends with this object."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._ready = runner.ready if isinstance(runner, Waiting) else None
        self._jobs: _Jobs = SimpleQueue()
        self._thread: threading.Thread | None = None

    def launch(self, plan: StepPlan) -> Pending:
        """Hand the plan over; what ``launch`` or ``wait`` of the other runner raise comes out of ``wait``.

        A step that is recorded stays with the caller: to hand it to a thread and its result back, while the caller has
        the interpreter, costs more than goes on beside it.
        """
        if self._ready is not None and (pending := self._ready(plan)) is not None:
            return pending
        if self._thread is None:
            self._thread = _start(self._runner, self._jobs)
            weakref.finalize(self, _end, self._thread, self._jobs)
        future: Future[StepResult] = Future()
        self._jobs.put((future, plan))
        return _Computing(future)


class _Computing:
    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        return self._future.result()


def _start(runner: Runner, jobs: _Jobs) -> threading.Thread:
    # A daemon: a step that never ends must not keep the process from ending.
    thread = threading.Thread(target=_work, args=(runner, jobs), name="model-step", daemon=True)
    thread.start()
    return thread


def _end(thread: threading.Thread, jobs: _Jobs) -> None:
    # Also called when the interpreter ends: a thread of torch's that is cut off there would abort the process.
    jobs.put(None)
    thread.join(_LAST_STEP_SECONDS)


def _work(runner: Runner, jobs: _Jobs) -> None:
    while (job := jobs.get()) is not None:
        future, plan = job
        try:
            future.set_result(runner.launch(plan).wait())
        except BaseException as error:  # whoever waits is to know, whatever it is
            future.set_exception(error)
        del job, future, plan  # nothing of a step outlives it while the thread is idle
