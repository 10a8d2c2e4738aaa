"""The server with a heartbeat in its event loop: run as ``python -m``, with a file's name before the server's words.

It begins when a file ``*.begin`` appears beside that one, and costs next to nothing before.  After each beat that was
later than all before it, the file has how late it was, and how much processor time the loop's thread had used since the
beat before: what the loop itself did, not what it waited for a core.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from gtp_serve.server import cli, supervise

BEAT_SECONDS = 0.002
_LOOK_SECONDS = 0.1


class Worst:
    """The latest beat and the longest computation so far, kept in a file."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.late = self.busy = 0.0

    def note(self, late: float, busy: float) -> None:
        """One beat."""
        if late > self.late or busy > self.busy:
            self.late, self.busy = max(self.late, late), max(self.busy, busy)
            words = json.dumps({"late_seconds": self.late, "busy_seconds": self.busy})
            self._out.write_text(words, encoding="utf-8")


async def beat(out: Path) -> None:
    """Until cancelled."""
    while not out.with_suffix(".begin").exists():  # noqa: ASYNC110 (another process makes the file)
        await asyncio.sleep(_LOOK_SECONDS)
    worst = Worst(out)
    while True:
        began, used = time.perf_counter(), time.thread_time()
        await asyncio.sleep(BEAT_SECONDS)
        worst.note(time.perf_counter() - began - BEAT_SECONDS, time.thread_time() - used)


def watch(out: Path) -> None:
    """Let every server of this process have a heartbeat."""
    server: Any = supervise._Server
    plain = server.run

    async def run(self: Any) -> int:
        beating = asyncio.create_task(beat(out))
        try:
            code: int = await plain(self)
            return code
        finally:
            beating.cancel()

    server.run = run


if __name__ == "__main__":
    watch(Path(sys.argv[1]))
    sys.exit(cli.main(sys.argv[2:]))
