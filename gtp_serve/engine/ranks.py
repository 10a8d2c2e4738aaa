"""Tensor-parallel ranks, one process each: rank 0 (``Leader``) schedules and samples, the others follow.

    Leader: start the others -> join -> each fills its own weights -> { one Step to each, forward together } -> close
    Follower: arrive -> join -> build -> { Step: the same Batch, the same forward } -> StopRank

A rank that dies or falls silent ends all of them: the first reason is kept, the others are killed, which breaks
whatever rank 0 waits in.  No torch: the ranks' processes are on their way before rank 0 imports it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar, assert_never

from gtp_serve.engine.messages import fatal
from gtp_serve.engine.peer import Patience, Peer
from gtp_serve.engine.rank_messages import (
    Arrived,
    Beat,
    Built,
    Command,
    Link,
    Loading,
    LostGroup,
    Step,
    StopRank,
    frame_of,
)
from gtp_serve.engine.step import StepPlan
from gtp_serve.errors import EngineFault, GtpServeError

_BEAT_SECONDS = 1.0
_POLL_SECONDS = 0.1

Forward = Callable[[StepPlan], object]


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
    """

    def __init__(self, argv: Sequence[str], size: int, *, patience: Patience | None = None) -> None:
        self.size = size
        self._patience = patience or Patience()
        self._changed = threading.Condition()
        self._fault: GtpServeError | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._meeting = os.memfd_create("gtp-serve-ranks")
        self.peers = [self._peer(rank, argv) for rank in range(1, size)]

    def _peer(self, rank: int, argv: Sequence[str]) -> Peer:
        return Peer(
            rank,
            argv,
            self._meeting,
            self._patience,
            on_change=self._note_change,
            on_fault=self._note_fault,
            is_lost=self._wait_for_fault,
        )

    # -- start -------------------------------------------------------------------------------------

    def join(self, connect: Callable[[Meeting], C]) -> C:
        """Wait for the others' processes and connect to them.

        :raises GtpServeError: naming the rank that is late or has ended.
        """
        self._wait_until(lambda: all(peer.arrived for peer in self.peers))
        try:
            self._connection = connection = connect(_meeting(self._meeting, 0, self.size, self._patience))
        except GtpServeError as error:
            raise self._reason(error) from error
        return connection

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
                self._changed.wait(_POLL_SECONDS)
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
    def step(self, plan: StepPlan) -> Iterator[None]:
        """Tell the others to run a plan; inside, rank 0 runs it too.

        :raises GtpServeError: when a rank is gone; an exception of rank 0's own is an EngineFault, since the
            others are in the middle of the step.
        """
        self.check()
        try:
            frame = frame_of(Step(plan=plan.for_followers()))
            for peer in self.peers:
                peer.link.send_frame(frame)
            yield
        except Exception as error:
            raise self._reason(error) from error

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
        for peer in self.peers:
            peer.stop()
        for peer in self.peers:
            peer.join(self._patience.stop)
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
        for peer in self.peers:
            peer.kill()
        if self._connection is not None:
            self._connection.abort()

    def _wait_for_fault(self, seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._fault is not None, seconds)


def _meeting(descriptor: int, rank: int, size: int, patience: Patience) -> Meeting:
    return Meeting(descriptor=descriptor, rank=rank, size=size, form_seconds=patience.form, step_seconds=patience.step)


class Follower:
    """This process as a rank that is told what to do; make one with ``run_follower``."""

    def __init__(self, link: int, meeting: int, rank: int, size: int, patience: Patience) -> None:
        for descriptor in (link, meeting):
            os.set_inheritable(descriptor, False)
        self.rank = rank
        self.doing = "starting"
        self._loading_told = 0.0
        self._meeting = _meeting(meeting, rank, size, patience)
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
        if done >= total or now - self._loading_told >= _POLL_SECONDS:
            self._loading_told = now
            self._link.send(Loading(done=done, total=total))

    def note_built(self, weight_bytes: int, kv_bytes: int) -> None:
        """Tell rank 0 that this rank waits for steps."""
        self.doing = "serving"
        self._link.send(Built(weight_bytes=weight_bytes, kv_bytes=kv_bytes))

    def note_failure(self, error: GtpServeError) -> None:
        """Tell rank 0 why this rank ends."""
        self._link.send(fatal(error))

    def follow(self, forward: Forward) -> int:
        """Run what rank 0 says until it says stop; returns the process's exit code."""
        while True:
            command = self._link.receive()
            match command:
                case Step(plan=plan):
                    self._run(forward, plan)
                case StopRank():
                    return 0
                case None:
                    return EngineFault.exit_code
                case _:
                    assert_never(command)

    def _run(self, forward: Forward, plan: StepPlan) -> None:
        try:
            forward(plan)
        except Exception as error:
            # Rank 0 knows better who is to blame, and ends this process.
            self._link.send(LostGroup(error=f"{type(error).__name__}: {error}", stack=traceback.format_exc()))

    def _beat(self) -> None:
        pause = threading.Event()
        with suppress(OSError):
            while True:
                self._link.send(Beat(doing=self.doing))
                pause.wait(_BEAT_SECONDS)


def run_follower(
    link: int,
    meeting: int,
    rank: int,
    size: int,
    build: Callable[[Follower], Forward],
    *,
    patience: Patience | None = None,
) -> int:
    """Be one rank until rank 0 says stop or is gone; returns the process's exit code.

    The process is tied to its parent (see ``engine.lifeline``) and leaves signals to it already.

    :param link: descriptor of this rank's end of the sockets.
    :param meeting: descriptor of the file where the ranks meet.
    :param build: joins the group, loads this rank's weights and returns what runs a plan.
    """
    follower = Follower(link, meeting, rank, size, patience or Patience())
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
