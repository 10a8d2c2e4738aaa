"""The engine process as its parent sees it: started, listened to, waited for, killed.  No torch.

stdout is inherited; stderr is passed on and its last lines are kept for the error that a death turns into.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from asyncio.subprocess import PIPE
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Protocol, Self

from gtp_serve.errors import EngineFault, EnvironmentFault

LINES_KEPT = 50
_LINE_LIMIT = 500
_STDERR = 2
_LIKELY = {
    signal.SIGKILL: "probably the kernel's out-of-memory killer",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a file that it had mapped was cut short, or shared memory ran out",
    signal.SIGABRT: "native code gave up; its last words are below",
}


class _Process(Protocol):
    """The part of asyncio's ``Process`` that is needed."""

    @property
    def pid(self) -> int: ...

    @property
    def stderr(self) -> asyncio.StreamReader | None: ...

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


class _Adopted:
    """A process that was started before there was an event loop."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: asyncio.StreamReader) -> None:
        self.pid = process.pid
        self.stderr: asyncio.StreamReader | None = stderr
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._reap, name="reap-engine", daemon=True).start()

    @classmethod
    async def adopt(cls, process: subprocess.Popen[bytes]) -> Self:
        loop = asyncio.get_running_loop()
        stderr = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stderr), process.stderr)
        return cls(process, stderr)

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def kill(self) -> None:
        self._process.kill()

    def _reap(self) -> None:
        code = self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        with suppress(RuntimeError):  # the loop may be closed by now
            self._loop.call_soon_threadsafe(self._note, code)

    def _note(self, code: int) -> None:
        if not self._code.done():
            self._code.set_result(code)


class WorkerProcess:
    """A child process; make one with ``spawn`` or ``adopt``."""

    def __init__(self, process: _Process) -> None:
        self.killed = False
        """Whether ``kill`` was called: the death is no surprise then."""
        self._process = process
        self._tail: deque[str] = deque(maxlen=LINES_KEPT)
        self._forwarder = asyncio.create_task(self._forward())

    @classmethod
    async def spawn(cls, argv: Sequence[str]) -> WorkerProcess:
        """Start it.

        :raises EnvironmentFault: when the command cannot be run.
        """
        try:
            # stdin is a lifeline: nothing is ever written to it, and it closes when this process is gone.
            process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stderr=PIPE)
        except OSError as error:
            raise EnvironmentFault(
                f"the engine process cannot be started: {error}", [("command", " ".join(argv))]
            ) from error
        return cls(process)

    @classmethod
    async def adopt(cls, process: subprocess.Popen[bytes]) -> WorkerProcess:
        """Take over a process that was started with pipes as stdin and stderr."""
        return cls(await _Adopted.adopt(process))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Until it has ended: its exit code, or minus the signal that ended it."""
        code = await self._process.wait()
        # A grandchild may hold the pipe open for ever.
        await asyncio.wait([self._forwarder], timeout=0.5)
        self._forwarder.cancel()
        return code

    def kill(self) -> None:
        """End it at once; it may have ended already."""
        self.killed = True
        with suppress(ProcessLookupError):
            self._process.kill()

    def fault(self, code: int, doing: str) -> EngineFault:
        """What a death with this exit code means, in words."""
        return death_of(f"the engine process (pid {self.pid})", code, doing, self._tail)

    async def _forward(self) -> None:
        assert self._process.stderr is not None  # it was asked for
        line = b""
        while chunk := await self._process.stderr.read(1 << 16):
            pass_on(chunk)
            *lines, line = (line + chunk).split(b"\n")
            self._tail.extend(map(line_text, lines))
            line = line[-_LINE_LIMIT:]
        if line:
            self._tail.append(line_text(line))


def death_of(who: str, code: int, doing: str, last_lines: Iterable[str]) -> EngineFault:
    """The error for a process that ended with an exit code (minus the signal that ended it)."""
    details: list[tuple[str, str]] = []
    if code >= 0:
        seen = f"{who} ended with exit code {code} while {doing}"
    else:
        seen = f"{who} got signal {-code} while {doing}"
        if -code in _LIKELY:
            details.append(("likely", _LIKELY[signal.Signals(-code)]))
        if -code == signal.SIGKILL:
            details.append(("check", "dmesg -T | grep -i oom"))
    last = "\n".join(last_lines)
    return EngineFault(seen, [*details, ("last output", last)] if last else details)


def line_text(line: bytes) -> str:
    """A line of a process's output as it is kept."""
    return line[-_LINE_LIMIT:].decode("utf-8", "replace").rstrip()


def pass_on(data: bytes) -> None:
    """Write a child's output to our own stderr, which may be gone; the child must not hang on that."""
    with suppress(OSError):
        while data:
            data = data[os.write(_STDERR, data) :]
