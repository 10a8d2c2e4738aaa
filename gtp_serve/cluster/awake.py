"""Time in which this process could run: being stopped itself is no silence of the others.

A machine that is paused (a virtual machine that moves, a frozen container) finds all its deadlines over when it goes
on, before it has read what came meanwhile.  Whoever gives others up by the clock must not count that stretch: a fleet
would lose every replica at once, and each replica its fleet.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")
SLICE_SECONDS = 1.0
_MOST_SECONDS = 2.0


class AwakeClock:
    """Seconds, as a steady clock's, but a gap between two calls counts for no more than ``most``.

    Somebody must ask more often than that.

    :param source: a steady clock.
    """

    def __init__(self, most: float = _MOST_SECONDS, source: Callable[[], float] = time.monotonic) -> None:
        self._most, self._source = most, source
        self._seen = source()
        self._passed = 0.0

    def __call__(self) -> float:
        """Seconds since this clock was made."""
        now = self._source()
        self._passed += min(now - self._seen, self._most)
        self._seen = now
        return self._passed


async def within(seconds: float, call: Awaitable[_T]) -> _T:
    """What a call gives, if it does so in this many seconds in which this event loop ran.

    :raises TimeoutError: it does not; it is cancelled then.
    """
    task = asyncio.ensure_future(call)
    try:
        left = seconds
        while left > 0:
            pause = min(left, SLICE_SECONDS)
            done, _ = await asyncio.wait({task}, timeout=pause)
            if done:
                return task.result()
            left -= pause  # however late it is
        raise TimeoutError
    finally:
        task.cancel()
