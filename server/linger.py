"""An answer to a request whose body is not read to its end.

Closing a connection on which bytes still arrive can cost the client the answer, so what comes is thrown away
for a moment first.
"""

from __future__ import annotations

import asyncio
import contextlib

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

LINGER_SECONDS = 2.0


class Lingering(Response):
    """The given answer, whole, and then the connection's end once the client has stopped or the time has passed."""

    def __init__(self, answer: Response, seconds: float = LINGER_SECONDS) -> None:
        super().__init__()
        self._answer = answer
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer as it is but for its last event, which comes after the wait."""

        async def hold(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name.lower() != b"connection"]
                await send({**message, "headers": [*kept, (b"connection", b"close")]})
                return
            await send({**message, "more_body": True})

        await self._answer(scope, receive, hold)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                while (message := await receive())["type"] == "http.request" and message.get("more_body"):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})
