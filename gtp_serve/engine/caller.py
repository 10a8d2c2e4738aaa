"""Control calls made in the engine's own process, by any thread, and answered when the engine is driven.  No torch."""

from __future__ import annotations

from concurrent.futures import Future
from itertools import count
from typing import Any

import msgspec

from gtp_serve.engine.updates import Updates
from gtp_serve.errors import UsageError
from gtp_serve.refit.orders import Control


class Caller:
    """Asks one engine's updates.  All but waiting for an answer is for whoever may drive the engine at the moment."""

    def __init__(self, updates: Updates) -> None:
        self.updates = updates
        self._serial = count()
        self._open: dict[int, Future[Any]] = {}

    def ask(self, command: Control) -> Future[Any]:
        """Its answer, as plain JSON values, or what it failed with, after one of the next polls."""
        call = next(self._serial)
        future = self._open[call] = Future()
        self.updates.control(call, command)
        return future

    def poll(self) -> None:
        """See ``Updates.poll``."""
        for outcome in self.updates.poll():
            future = self._open.pop(outcome.call)
            if outcome.error is None:
                future.set_result(msgspec.json.decode(outcome.body))
            else:
                future.set_exception(outcome.error)

    def close(self) -> None:
        """Give up what is under way; whoever waits is told."""
        self.updates.close()
        for future in self._open.values():
            future.set_exception(UsageError("this LLM is closed"))
        self._open.clear()
