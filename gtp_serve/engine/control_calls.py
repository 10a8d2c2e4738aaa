"""The client's side of what is asked about weights: open calls, and the last that the engine said.  No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import msgspec

from gtp_serve.engine.messages import (
    ControlCall,
    ControlDone,
    ControlRefused,
    decode_to_worker,
    encode,
    refusal_of,
)
from gtp_serve.errors import GtpServeError, UpdateRefused
from gtp_serve.refit.orders import Control, WeightsStatus


class ControlCalls:
    """Calls that are not answered yet, and the weights' status; all of it belongs to one event loop."""

    def __init__(self) -> None:
        self.status = WeightsStatus(version="")
        self._serial = count()
        self._open: dict[int, asyncio.Future[Any]] = {}
        self._waiters: set[asyncio.Event] = set()
        self._failure: Callable[[], GtpServeError] | None = None

    async def ask(self, command: Control, send: Callable[[bytes], Awaitable[None]]) -> Any:
        """The engine's answer as plain JSON values.

        :raises GtpServeError: the engine's own error, or what ``fail`` was given.
        """
        call = next(self._serial)
        frame = _checked_frame(ControlCall(call=call, command=command))
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._open[call] = future
        try:
            await send(frame)
            return await future
        finally:
            self._open.pop(call, None)

    def answer(self, message: ControlDone | ControlRefused) -> None:
        """The engine has answered; nobody may be waiting any more."""
        future = self._open.get(message.call)
        if future is None or future.done():
            return
        if isinstance(message, ControlDone):
            future.set_result(msgspec.json.decode(message.body))
        else:
            future.set_exception(refusal_of(message))

    def note(self, status: WeightsStatus) -> None:
        """The engine has said how things stand."""
        self.status = status
        for waiter in self._waiters:
            waiter.set()

    async def wait(self, holds: Callable[[WeightsStatus], bool], seconds: float | None) -> WeightsStatus:
        """The first status for which something holds, the present one included.

        :raises TimeoutError: when it does not come about in so many seconds.
        :raises GtpServeError: what ``fail`` was given.
        """
        changed = asyncio.Event()
        self._waiters.add(changed)
        try:
            async with asyncio.timeout(seconds):
                while not holds(status := self.status):
                    if self._failure is not None:
                        raise self._failure()
                    await changed.wait()
                    changed.clear()
                return status
        finally:
            self._waiters.discard(changed)

    def fail(self, failure: Callable[[], GtpServeError]) -> None:
        """The engine is gone: nothing will be answered.

        :param failure: makes an exception, for each who waits one of its own.
        """
        self._failure = failure
        for future in self._open.values():
            if not future.done():
                future.set_exception(failure())
        for waiter in self._waiters:
            waiter.set()


def _checked_frame(message: ControlCall) -> bytes:
    """Encode a command so that the worker is certain to decode it: one bad value must not cost the engine."""
    try:
        frame = encode(message)
        decode_to_worker(frame)
    except (msgspec.DecodeError, OverflowError, TypeError, ValueError) as error:
        raise UpdateRefused(f"the command has a value that cannot be passed on: {error}", code="bad-command") from error
    return frame
