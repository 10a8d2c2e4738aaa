"""Simulated time: a clock that only waiting moves, and an event loop that waits by moving it.  One thread."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Iterable
from typing import Any


class Clock:
    """Stands in for the module ``time`` where the product reads it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.wall_offset = 1.7e9
        """Of the wall clock, which may jump either way; the monotonic one only goes on."""

    def monotonic(self) -> float:
        """Seconds."""
        return self.now

    perf_counter = monotonic

    def time(self) -> float:
        """Seconds since 1970."""
        return self.wall_offset + self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += max(0.0, seconds)


class Stuck(Exception):
    """Nothing will ever happen again, and somebody still waits."""


class _Selector(selectors.BaseSelector):
    """No files: to wait is to let time pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("nothing will ever happen again")
        self._clock.advance(timeout)
        return []

    def register(self, *args: Any) -> Any:
        raise NotImplementedError

    def unregister(self, *args: Any) -> Any:
        raise NotImplementedError

    def get_map(self) -> Any:
        return {}


class SimLoop(asyncio.BaseEventLoop):
    """Timers and callbacks in an order that depends on nothing outside."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock
        self._selector = _Selector(clock)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Simulated seconds."""
        return self._clock.now

    def _process_events(self, events: Iterable[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass
