"""What a replica has for one front: messages until the front takes them, all that there are at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gtp_serve.cluster.wire import Beat, Up
from gtp_serve.engine.messages import Events, Stats
from gtp_serve.request import TokenEvent


class Outbox:
    """Events join into one message as long as nothing else came between."""

    def __init__(self) -> None:
        self._messages: list[Up] = []
        self._events: list[TokenEvent] = []
        self._there = asyncio.Event()
        self._told: Stats | None = None

    @property
    def empty(self) -> bool:
        """All has been taken."""
        return not self._messages and not self._events

    def put(self, message: Up) -> None:
        """To be sent."""
        self._flush()
        self._messages.append(message)
        self._there.set()

    def put_event(self, event: TokenEvent) -> None:
        """To be sent with others."""
        self._events.append(event)
        self._there.set()

    async def take(self, seconds: float, stats: Stats) -> Sequence[Up]:
        """All that there is, once there is something; a beat when there is nothing for so long.

        :param stats: sent along when they have changed.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._there.wait()
        except TimeoutError:
            pass
        self._there.clear()
        self._flush()
        messages, self._messages = self._messages, []
        if stats != self._told:
            self._told = stats
            messages.append(stats)
        return messages or [Beat()]

    def _flush(self) -> None:
        if self._events:
            self._messages.append(Events(events=tuple(self._events)))
            self._events = []
