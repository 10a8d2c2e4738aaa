"""One page that a test and the processes it may kill have in common: who is whom, and where somebody is to end.

A process that comes to the armed point sends the signal there and then, from inside the product's own call, so that
a case is the same each time it is run.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path

PROCESSES = ("http", "engine0", "engine1", "trainer0", "trainer1")
POINTS = (
    "begin",
    "store open",
    "joined",
    "shards exchanged",
    "first bucket",
    "middle bucket",
    "last bucket",
    "verifying",
    "verified",
    "commit",
    "committed",
    "rollback",
)
_ARMED = struct.Struct("iiii")
"""Point, the process that watches for it, the one that gets the signal, the signal; the point is -1 when not armed."""
_FIRED = struct.Struct("d")
_PIDS = struct.Struct(f"{len(PROCESSES)}i")
_FIRED_AT, _PIDS_AT = 64, 128
_SIZE = 4096


class Board:
    """:param path: of the file; it is made if it is not there."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _SIZE)
        self.me = -1

    # -- the test's side

    def arm(self, point: str, *, at: str, victim: str, number: signal.Signals) -> None:
        """From now on: when process ``at`` comes to the point, ``victim`` gets the signal."""
        _FIRED.pack_into(self._page, _FIRED_AT, 0.0)
        armed = (POINTS.index(point), PROCESSES.index(at), PROCESSES.index(victim), number)
        _ARMED.pack_into(self._page, 0, -1, *armed[1:])
        struct.pack_into("i", self._page, 0, armed[0])

    def disarm(self) -> None:
        struct.pack_into("i", self._page, 0, -1)

    @property
    def fired(self) -> float:
        """When the signal was sent, by the monotonic clock; 0: not yet."""
        return float(_FIRED.unpack_from(self._page, _FIRED_AT)[0])

    def pid(self, name: str) -> int:
        """0: not started."""
        return int(_PIDS.unpack_from(self._page, _PIDS_AT)[PROCESSES.index(name)])

    def forget(self, *names: str) -> None:
        for name in names:
            self._set_pid(PROCESSES.index(name), 0)

    # -- the processes' side

    def enter(self, name: str) -> None:
        """This process is that one from now on."""
        self.me = PROCESSES.index(name)
        self._set_pid(self.me, os.getpid())

    def reach(self, point: str) -> None:
        """This process is at a point."""
        armed, at, victim, number = _ARMED.unpack_from(self._page, 0)
        if armed < 0 or at != self.me or POINTS[armed] != point:
            return
        self.disarm()
        pid = _PIDS.unpack_from(self._page, _PIDS_AT)[victim]
        _FIRED.pack_into(self._page, _FIRED_AT, time.monotonic())
        if pid == os.getpid():
            signal.pthread_kill(threading.get_ident(), number)  # this thread takes not one step more
        elif pid:
            os.kill(pid, number)

    def _set_pid(self, place: int, pid: int) -> None:
        struct.pack_into("i", self._page, _PIDS_AT + 4 * place, pid)
