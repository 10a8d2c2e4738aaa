"""A tensor-parallel rank that follows: it does what rank 0 (``engine.ranks``) says, until it says stop.  No torch."""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar, assert_never

from gtp_serve.engine.far import Store
from gtp_serve.engine.messages import fatal
from gtp_serve.engine.peer import Patience
from gtp_serve.engine.rank_messages import (
    Answered,
    Arrived,
    AskRank,
    Beat,
    Built,
    Captured,
    CaptureStep,
    Command,
    Link,
    Loading,
    LostGroup,
    Reported,
    Step,
    StopRank,
    TellRank,
)
from gtp_serve.engine.rank_tasks import Answer, RankTasks
from gtp_serve.engine.ranks import POLL_SECONDS, Meeting, meeting_of
from gtp_serve.engine.step import StepPlan
from gtp_serve.errors import EngineFault, GtpServeError
from gtp_serve.refit import orders
from gtp_serve.refit.rank_api import RankControl

_BEAT_SECONDS = 1.0

C = TypeVar("C")


class Work(Protocol):
    """What a rank does that is told what to do."""

    def follow(self, plan: StepPlan, bucket: int | None) -> object:
        """Run the model over a plan, in this recorded step or in none."""
        ...

    def capture(self, size: int) -> str:
        """Record the step of this many rows; why it could not be recorded, or nothing."""
        ...

    def check(self) -> None:
        """After new weights: raise EngineFault when recorded steps would read memory that is not in use any more."""
        ...


class Follower:
    """This process as a rank that is told what to do; make one with ``run_follower``."""

    def __init__(
        self, link: int, meeting: int, rank: int, size: int, patience: Patience, store: Store | None = None
    ) -> None:
        for descriptor in (link, meeting):
            if descriptor >= 0:
                os.set_inheritable(descriptor, False)
        self.rank = rank
        self.doing = "starting"
        self.weights: RankControl | None = None
        """What updates are carried out on; whoever builds this rank sets it, with ``report`` as its report."""
        self._steps = 0
        self._loading_told = 0.0
        self._meeting = meeting_of(meeting, rank, size, patience, store)
        self._link: Link[Command] = Link(socket.socket(fileno=link), Command)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def join(self, connect: Callable[[Meeting], C]) -> C:
        """Tell rank 0 that this rank is there, and connect to all ranks."""
        self._link.send(Arrived())
        return connect(self._meeting)

    def note_loading(self, done: int, total: int) -> None:
        """Tell rank 0 how many bytes of this rank's weights are read."""
        self.doing = "loading weights"
        now = time.monotonic()
        if done >= total or now - self._loading_told >= POLL_SECONDS:
            self._loading_told = now
            self._link.send(Loading(done=done, total=total))

    def note_built(self, weight_bytes: int, kv_bytes: int) -> None:
        """Tell rank 0 that this rank waits for steps."""
        self.doing = "serving"
        self._link.send(Built(weight_bytes=weight_bytes, kv_bytes=kv_bytes))

    def note_failure(self, error: GtpServeError) -> None:
        """Tell rank 0 why this rank ends."""
        self._link.send(fatal(error))

    def report(self, report: orders.Report) -> None:
        """Tell rank 0 of an update; from any thread."""
        self._link.send(Reported(report=report))

    def _answer(self, answer: Answer) -> None:
        self._link.send(Answered(answer=answer))

    def follow(self, work: Work) -> int:
        """Run what rank 0 says until it says stop; returns the process's exit code."""
        tasks = None
        if self.weights is not None:
            tasks = RankTasks(self.rank, self.weights, report=self.report, answer=self._answer, after_swap=work.check)
        while True:
            command = self._link.receive()
            match command:
                case Step(plan=plan, bucket=bucket):
                    self._steps += 1
                    self._do(partial(work.follow, plan, bucket))
                case CaptureStep(size=size):
                    self._do(partial(self._capture, work, size))
                case TellRank(what=what):
                    _must_have(tasks).tell(what)
                case AskRank(call=call, steps=steps, what=what):
                    self._check_step(steps)
                    _must_have(tasks).ask(call, what)
                case StopRank():
                    return 0
                case None:
                    return EngineFault.exit_code
                case _:
                    assert_never(command)

    def _check_step(self, steps: int) -> None:
        if steps != self._steps:
            raise EngineFault(
                f"rank tp{self.rank} has run {self._steps} steps where rank 0 has run {steps}", code="out-of-step"
            )

    def _capture(self, work: Work, size: int) -> None:
        self._link.send(Captured(size=size, failure=work.capture(size)))

    def _do(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            # Rank 0 knows better who is to blame, and ends this process.
            self._link.send(LostGroup(error=f"{type(error).__name__}: {error}", stack=traceback.format_exc()))

    def _beat(self) -> None:
        pause = threading.Event()
        with suppress(OSError):
            while True:
                self._link.send(Beat(doing=self.doing))
                pause.wait(_BEAT_SECONDS)


def _must_have(tasks: RankTasks | None) -> RankTasks:
    if tasks is None:
        raise EngineFault("rank 0 updates weights, and this rank was built without a way to", code="internal")
    return tasks


def run_follower(
    link: int,
    meeting: int,
    rank: int,
    size: int,
    build: Callable[[Follower], Work],
    *,
    patience: Patience | None = None,
    store: Store | None = None,
) -> int:
    """Be one rank until rank 0 says stop or is gone; returns the process's exit code.

    The process is tied to its parent (see ``engine.lifeline``) and leaves signals to it already.

    :param link: descriptor of this rank's end of the sockets.
    :param meeting: descriptor of the file where the ranks meet; -1 when they meet in ``store``.
    :param build: joins the group, loads this rank's weights and returns what carries out rank 0's words.
    """
    follower = Follower(link, meeting, rank, size, patience or Patience(), store)
    try:
        return follower.follow(build(follower))
    except GtpServeError as error:
        follower.note_failure(error)
        return error.exit_code
    except OSError as error:
        # Only the connection to rank 0 raises these here: it is gone, and this process is about to be.
        return EngineFault("rank 0 is gone", [("error", str(error))]).exit_code
    except Exception as error:
        traceback.print_exc()
        fault = EngineFault(f"rank tp{rank} failed with {type(error).__name__}: {error}", code="internal")
        follower.note_failure(fault)
        return fault.exit_code
