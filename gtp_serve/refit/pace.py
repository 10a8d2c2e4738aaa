"""A limit on bytes per second, shared by the threads that read.  No torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event, Lock

from gtp_serve.errors import UsageError


class Pace:
    """Lets bytes pass at a rate; each thread waits for its turn.

    :param rate: bytes a second; None lets everything pass at once.
    :param clock: seconds, steadily rising.
    """

    def __init__(self, rate: int | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        if rate is not None and rate < 1:
            raise UsageError(f"max_bytes_per_second is {rate}; at least one is needed")
        self.rate = rate
        self._clock = clock
        self._lock = Lock()
        self._stopped = Event()
        self._free_at = clock()

    def wait(self, count: int) -> None:
        """Until ``count`` bytes may be read.  The first are let through at once, and pay afterwards."""
        if self.rate is not None:
            self._stopped.wait(self._book(count))

    def stop(self) -> None:
        """End all waiting, now and later."""
        self._stopped.set()

    def _book(self, count: int) -> float:
        """Seconds to wait; the time that the bytes take is taken from whoever comes next."""
        assert self.rate is not None
        with self._lock:
            now = self._clock()
            turn = max(now, self._free_at)
            self._free_at = turn + count / self.rate
            return turn - now
