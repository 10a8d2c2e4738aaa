"""Tensor-parallel ranks, one process each: rank 0 (``Leader``) schedules and samples, the others follow.

    Leader: start the others -> join -> each fills its own weights -> { one Step to each, forward together } -> close
    Follower: arrive -> join -> build -> { Step: the same Batch, the same forward | CaptureStep } -> StopRank

A rank that dies or falls silent ends all of them: the first reason is kept, the others are killed, which breaks
whatever rank 0 waits in.  No torch: the ranks' processes are on their way before rank 0 imports it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, TypeVar

from gtp_serve.engine.far import Door, Store, store_of
from gtp_serve.engine.peer import Patience, Peer
from gtp_serve.engine.rank_messages import (
    AskRank,
    CaptureStep,
    Command,
    Step,
    TellRank,
    frame_of,
)
from gtp_serve.engine.rank_tasks import Answer, Ask, Tell
from gtp_serve.engine.step import StepPlan
from gtp_serve.errors import EngineFault, EnvironmentFault, GtpServeError
from gtp_serve.refit import orders

POLL_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Meeting:
    """What a rank needs to connect to the others."""

    descriptor: int
    """Of a file in memory that the ranks, and nobody else, have open; it has no name on disk."""
    rank: int
    size: int
    form_seconds: float
    """Until all must be connected."""
    step_seconds: float
    """Until an operation must be done."""
    store: Store | None = None
    """For ranks on several machines: where they meet instead."""


class Connection(Protocol):
    """What ties the ranks together."""

    @property
    def abort(self) -> Callable[[], None]:
        """End operations under way."""
        ...


C = TypeVar("C", bound=Connection)


class Leader:
    """Rank 0's hold on the other ranks; their processes are being started when it is made.

    :param argv: starts a rank's process; ``--rank``, ``--link`` and ``--meeting`` are added.
    :param size: ranks in all.
    :param door: where the others come in, when somebody else starts them on their machines.
    """

    def __init__(
        self, argv: Sequence[str], size: int, *, patience: Patience | None = None, door: Door | None = None
    ) -> None:
        self.size = size
        self._door = door
        self._patience = patience or Patience()
        self._changed = threading.Condition()
        self._fault: GtpServeError | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._steps = 0
        self.news: SimpleQueue[orders.Report | Answer] = SimpleQueue()
        """What the others say of their weights; rank 0's own is put here too."""
        self.peers: list[Peer] = []
        self._meeting = -1
        try:
            self._meeting = os.memfd_create("gtp-serve-ranks")
            for rank in range(1, size):
                self.peers.append(self._peer(rank, argv))
        except (OSError, RuntimeError) as error:  # no descriptors, or no thread
            self._kill_all()
            self.close()
            raise EnvironmentFault(f"tensor-parallel ranks cannot be started: {error}") from error
        if self._fault is not None:  # told by one of them while the later ones were being made
            self._kill_all()

    def _peer(self, rank: int, argv: Sequence[str]) -> Peer:
        return Peer(
            rank,
            argv,
            self._meeting,
            self._patience,
            on_change=self._note_change,
            on_fault=self._note_fault,
            on_news=self.news.put,
            is_lost=self._wait_for_fault,
            door=self._door,
        )

    # -- start -------------------------------------------------------------------------------------

    def join(self, connect: Callable[[Meeting], C]) -> C:
        """Wait for the others' processes and connect to them.

        :raises GtpServeError: naming the rank that is late or has ended.
        """
        self._wait_until(lambda: all(peer.arrived for peer in self.peers))
        try:
            self._connection = connection = connect(self._own_meeting())
        except GtpServeError as error:
            raise self._reason(error) from error
        return connection

    def _own_meeting(self) -> Meeting:
        store = None if self._door is None else store_of(self._door.far)
        return meeting_of(self._meeting, 0, self.size, self._patience, store)

    def slowest_share(self) -> float:
        """Of the weights that each of the others has loaded, from 0 to 1."""
        return min((peer.share_loaded for peer in self.peers), default=1.0)

    def wait_loaded(self, progress: Callable[[float], None]) -> None:
        """Until the others have their weights.

        :param progress: told the slowest one's share, about ten times a second.
        :raises GtpServeError: what one of them failed with.
        """

        def loaded() -> bool:
            progress(self.slowest_share())
            return all(peer.share_loaded >= 1.0 or peer.built is not None for peer in self.peers)

        self._wait_until(loaded)

    def wait_built(self) -> int:
        """Until the others wait for steps; bytes of their KV caches together.

        :raises GtpServeError: what one of them failed with.
        """
        self._wait_until(lambda: all(peer.built is not None for peer in self.peers))
        return sum(peer.built.kv_bytes for peer in self.peers if peer.built is not None)

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        self.check()
        while not holds():
            with self._changed:
                self._changed.wait(POLL_SECONDS)
            self.check()

    # -- steps -------------------------------------------------------------------------------------

    def check(self) -> None:
        """Look whether all ranks are well.

        :raises GtpServeError: the first reason why they are not.
        """
        fault = self._fault
        if fault is not None:
            raise type(fault)(fault.message, fault.details, code=fault.code)

    @contextmanager
    def step(self, plan: StepPlan, bucket: int | None = None) -> Iterator[None]:
        """Tell the others to run a plan, in a recorded step or in none; inside, rank 0 runs it too.

        :raises GtpServeError: when a rank is gone; an exception of rank 0's own is an EngineFault, since the
            others are in the middle of the step.
        """
        self.check()
        self._steps += 1
        with self._together(Step(plan=plan.for_followers(), bucket=bucket)):
            yield

    @contextmanager
    def capture(self, size: int) -> Iterator[Callable[[], str]]:
        """Tell the others to record the step of this many rows; inside, rank 0 does so too, and then calls what it
        is given: it waits for the others, and returns why one of them could not, or nothing.

        :raises GtpServeError: as ``step``.
        """
        self.check()
        with self._together(CaptureStep(size=size)):
            yield lambda: self._captured(size)

    def _captured(self, size: int) -> str:
        self._wait_until(lambda: all(size in peer.captured for peer in self.peers))
        failures = [f"rank tp{peer.rank}: {peer.captured[size]}" for peer in self.peers if peer.captured[size]]
        return "; ".join(failures)

    @contextmanager
    def _together(self, command: Command) -> Iterator[None]:
        try:
            self._send(command)
            yield
        except Exception as error:
            raise self._reason(error) from error

    def tell(self, what: Tell) -> None:
        """Have the others do something about new weights, at once and beside their steps.

        :raises GtpServeError: when a rank is gone.
        """
        self._order(TellRank(what=what))

    def ask(self, call: int, what: Ask) -> None:
        """Have the others do something between the last step and the next; their answers come as news.

        :raises GtpServeError: when a rank is gone.
        """
        self._order(AskRank(call=call, steps=self._steps, what=what))

    def _order(self, command: Command) -> None:
        self.check()
        try:
            self._send(command)
        except OSError as error:
            raise self._reason(error) from error

    def _send(self, command: Command) -> None:
        frame = frame_of(command)
        for peer in self.peers:
            peer.link.send_frame(frame)

    def _reason(self, error: Exception) -> GtpServeError:
        """Why rank 0 failed: another rank's end when there is news of one, else its own error."""
        if self._wait_for_fault(self._patience.cause + 0.5):
            assert self._fault is not None  # it was waited for
            return type(self._fault)(self._fault.message, self._fault.details, code=self._fault.code)
        if isinstance(error, GtpServeError):
            return error
        others = [(f"tp{peer.rank}", f"pid {peer.pid}, {peer.doing}") for peer in self.peers]
        return EngineFault(
            f"tensor-parallel rank tp0 (pid {os.getpid()}) failed in a step with {type(error).__name__}",
            [("error", str(error)), *others],
            code="engine-error",
        )

    # -- the end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the other ranks: told first, killed when they do not heed.  May be called again."""
        if self._closed:
            return
        self._closed = True
        if self._door is not None:
            self._door.close()
        for peer in self.peers:
            peer.stop()
        for peer in self.peers:
            peer.join(self._patience.stop)
        if self._meeting >= 0:
            os.close(self._meeting)

    def _note_change(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _note_fault(self, fault: GtpServeError) -> None:
        with self._changed:
            if self._fault is not None or self._closed:
                return
            self._fault = fault
            self._changed.notify_all()
        self._kill_all()
        if self._connection is not None:
            self._connection.abort()

    def _kill_all(self) -> None:
        for peer in tuple(self.peers):
            peer.kill()

    def _wait_for_fault(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._fault is not None, seconds)


def meeting_of(descriptor: int, rank: int, size: int, patience: Patience, store: Store | None = None) -> Meeting:
    """Of the ranks that wait as long as that."""
    return Meeting(
        descriptor=descriptor,
        rank=rank,
        size=size,
        form_seconds=patience.form,
        step_seconds=patience.step,
        store=store,
    )
