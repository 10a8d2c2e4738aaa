"""Another rank as rank 0 sees it: its process, what it last said, and how it ended.

Each has a thread that starts the process, listens to it and waits for it; the kernel ends the process with that
thread.  Whatever goes wrong is given to ``on_fault`` once, in words.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import IO, assert_never

from gtp_serve.engine.far import Door
from gtp_serve.engine.messages import Fatal, fault_of
from gtp_serve.engine.process import LINES_KEPT, death_of, line_text, pass_on
from gtp_serve.engine.rank_messages import (
    Answered,
    Arrived,
    Beat,
    Built,
    Captured,
    Link,
    Loading,
    LostGroup,
    Report,
    Reported,
    StopRank,
)
from gtp_serve.engine.rank_tasks import Answer
from gtp_serve.errors import EngineFault, EnvironmentFault, GtpServeError
from gtp_serve.refit import orders

_EXIT_SECONDS = 1.0
"""From the end of the connection to the end of the process."""
_LAST_WORDS_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """Seconds until something that has not happened is an error."""

    start: float = 120.0
    """From starting a rank's process to its first message."""
    silence: float = 15.0
    """Without a message (a rank sends one a second)."""
    form: float = 60.0
    """To connect all ranks with each other."""
    step: float = 300.0
    """For one collective operation."""
    cause: float = 1.0
    """From a broken operation to the news of who broke it."""
    stop: float = 2.0
    """From being told to stop to being killed."""


class Peer:
    """One other rank.  Made, it is being started."""

    def __init__(
        self,
        rank: int,
        argv: Sequence[str],
        meeting: int,
        patience: Patience,
        *,
        on_change: Callable[[], None],
        on_fault: Callable[[GtpServeError], None],
        on_news: Callable[[orders.Report | Answer], None],
        is_lost: Callable[[float], bool],
        door: Door | None = None,
    ) -> None:
        """
        :param argv: starts the rank's process; ``--rank``, ``--link`` and ``--meeting`` are added.
        :param on_news: takes what the rank says of its weights.
        :param is_lost: whether the group has a fault already, waiting so many seconds for one.
        :param door: the rank is started by somebody else and comes in here.
        """
        self.rank = rank
        self.doing = "starting"
        self.arrived = False
        self.loading = Loading(done=0, total=0)
        self.built: Built | None = None
        self.captured: dict[int, str] = {}
        """Sizes that it was told to capture and is done with: why that failed, or nothing."""
        self._patience = patience
        self._on_change, self._on_fault, self._is_lost = on_change, on_fault, is_lost
        self._on_news = on_news
        self._stopping = False
        self._is_far = door is not None
        self._process: subprocess.Popen[bytes] | None = None
        self._tail: deque[str] = deque(maxlen=LINES_KEPT)
        ours, theirs = socket.socketpair()
        self.link: Link[Report] = Link(ours, Report, patience=patience.silence)
        live: Callable[[], None]
        if door is None:
            live = partial(self._live, [*argv, "--rank", str(rank)], theirs, meeting)
        else:
            theirs.close()  # nothing can be said before the rank is there
            live = partial(self._live_far, door)
        self._thread = threading.Thread(target=live, name=f"tp{rank}", daemon=True)
        self._thread.start()

    @property
    def who(self) -> str:
        """Its name for a message."""
        return f"tensor-parallel rank tp{self.rank}" + (f" (pid {self._process.pid})" if self._process else "")

    @property
    def pid(self) -> int | None:
        """Its process id, once it has one."""
        return self._process.pid if self._process is not None else None

    @property
    def share_loaded(self) -> float:
        """Of its weights, from 0 to 1."""
        return self.loading.done / self.loading.total if self.loading.total else 0.0

    def kill(self) -> None:
        """End it at once, also when it is stopped by a signal."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
        elif self._is_far:
            self.link.close()

    def stop(self) -> None:
        """Ask it to end; ``join`` sees to it that it does."""
        self._stopping = True
        with suppress(OSError):
            self.link.send(StopRank())

    def join(self, seconds: float) -> None:
        """Until it has ended, killing it after so many seconds."""
        self._stopping = True
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.kill()
            self._thread.join()

    # -- the rank's thread -------------------------------------------------------------------------

    def _live(self, argv: list[str], theirs: socket.socket, meeting: int) -> None:
        with closing(self.link):
            try:
                with theirs:
                    process = self._start(argv, theirs.fileno(), meeting)
            except OSError as error:
                self._report(EnvironmentFault(f"{self.who} cannot be started: {error}", [("command", argv[0])]))
                return
            forwarder = threading.Thread(target=self._forward, args=(process.stderr,), daemon=True)
            forwarder.start()
            fault = self._listen()
            if fault is not None:
                self._report(fault)
            self._wait(process, forwarder)

    def _live_far(self, door: Door) -> None:
        nothing = self.link
        try:
            end = door.wait(self.rank, self._patience.start)
        except TimeoutError:
            self._report(self._silent())
            return
        finally:
            nothing.close()
        self.link = Link(end, Report, patience=self._patience.silence)
        with closing(self.link):
            fault = self._listen()
        self._report(fault or EngineFault(f"{self.who} closed its connection while {self.doing}"))

    def _start(self, argv: list[str], theirs: int, meeting: int) -> subprocess.Popen[bytes]:
        # stdin is a lifeline: nothing is ever written to it, and it closes when this process is gone.
        self._process = subprocess.Popen(
            [*argv, "--link", str(theirs), "--meeting", str(meeting)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs, meeting),
        )
        return self._process

    def _listen(self) -> GtpServeError | None:
        """Until the connection ends (None) or there is a reason to give the rank up."""
        started = time.monotonic()
        while True:
            try:
                message = self.link.receive()
            except TimeoutError:
                if not self.arrived and time.monotonic() - started < self._patience.start:
                    continue
                return self._silent()
            except (OSError, ValueError) as error:
                return EngineFault(f"{self.who} sent what is no message", [("error", str(error))], code="internal")
            if message is None:
                return None
            fault = self._handle(message)
            if fault is not None:
                return fault
            self._on_change()

    def _handle(self, message: Report) -> GtpServeError | None:
        match message:
            case Arrived():
                self.arrived = True
            case Beat(doing=doing):
                self.doing = doing
            case Loading():
                self.doing, self.loading = "loading weights", message
            case Built():
                self.doing, self.built = "serving", message
            case Captured(size=size, failure=failure):
                self.captured[size] = failure
            case LostGroup(error=error, stack=stack):
                return self._lost(error, stack)
            case Reported(report=report):
                self._on_news(report)
            case Answered(answer=answer):
                self._on_news(answer)
            case Fatal():
                fault = fault_of(message)
                return type(fault)(fault.message, [*fault.details, ("on", self.who)], code=fault.code)
            case _:
                assert_never(message)
        return None

    def _lost(self, error: str, stack: str) -> EngineFault | None:
        if self._is_lost(self._patience.cause):
            return None  # somebody else was first
        print(stack, file=sys.stderr, flush=True)
        return EngineFault(f"{self.who} failed in a step", [("error", error)], code="engine-error")

    def _silent(self) -> EngineFault:
        if not self.arrived:
            return EngineFault(f"{self.who} did not start within {self._patience.start:g} s", self._last_output())
        details = [("likely", "it is stopped, or the machine swaps"), *self._last_output()]
        return EngineFault(f"{self.who} has been silent for {self._patience.silence:g} s while {self.doing}", details)

    def _last_output(self) -> list[tuple[str, str]]:
        return [("last output", "\n".join(self._tail))] if self._tail else []

    def _wait(self, process: subprocess.Popen[bytes], forwarder: threading.Thread) -> None:
        try:
            code = process.wait(None if self._stopping else _EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._report(EngineFault(f"{self.who} closed its connection while {self.doing}", self._last_output()))
            process.kill()
            code = process.wait()
        forwarder.join(_LAST_WORDS_SECONDS)
        self._report(death_of(self.who, code, self.doing, list(self._tail)))
        if process.stdin is not None:
            process.stdin.close()

    def _report(self, fault: GtpServeError) -> None:
        if not self._stopping:
            self._on_fault(fault)

    def _forward(self, stream: IO[bytes]) -> None:
        line = b""
        with stream:
            while chunk := os.read(stream.fileno(), 1 << 16):
                pass_on(chunk)
                *lines, line = (line + chunk).split(b"\n")
                self._tail.extend(map(line_text, lines))
        if line:
            self._tail.append(line_text(line))
