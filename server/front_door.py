"""What every request passes before the application: its id, then which web origins may ask, then the API key.

Plain ASGI, outside the application, so that no answer goes out without them, not even that to a bug.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from functools import partial

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gtp_serve.errors import RequestRejected
from gtp_serve.server.http_errors import error_response

REQUEST_ID = b"x-request-id"
#: Paths that answer without a key: probes, and the pages, which ask their reader for one.
PUBLIC = frozenset({"/", "/docs", "/icon.svg", "/health", "/ready"})
_MAX_ID_CHARS = 128
_CORS_SECONDS = 600


class ApiKeyMissing(RequestRejected):
    """The API key is needed and is not there, or is another one."""

    default_code = "api-key-needed"
    http_status = 401


def front_door(app: ASGIApp, *, api_key: str | None, admin_key: str | None, cors: Sequence[str]) -> ASGIApp:
    """The application behind its door.

    :param api_key: None lets everybody to the application, whose weight routes have a guard of their own.
    :param admin_key: opens wherever the API key does.
    :param cors: origins whose pages may read answers; none: no page of another origin may.
    """
    if api_key is not None:
        app = KeyGate(app, [key for key in (api_key, admin_key) if key is not None])
    if cors:
        # Outside the gate: a browser asks before it sends a key, and may read why it was refused.
        app = CORSMiddleware(
            app,
            allow_origins=cors,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID.decode(), "retry-after"],
            max_age=_CORS_SECONDS,
        )
    return RequestIds(app)


class KeyGate:
    """Answers 401 to whoever shows none of the keys; reads no body."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode("ascii")) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and scope["path"] not in PUBLIC:
            reason = self._refusal(scope["headers"])
            if reason is not None:
                error = ApiKeyMissing(reason, [("send", "authorization: Bearer KEY")])
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        given = [value for name, value in headers if name.lower() == b"authorization"]
        if not given:
            return "the API key is missing"
        scheme, _, key = given[0].partition(b" ")
        digest = _digest(key.strip())
        # Digests of every key are compared, so that the time tells neither which one nor how much of it was right.
        same = [hmac.compare_digest(digest, own) for own in self._digests]
        return None if len(given) == 1 and scheme.lower() == b"bearer" and any(same) else "the API key is wrong"


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class RequestIds:
    """Every answer carries ``x-request-id``: the client's, where it sent a usable one, else a new one.

    The application finds it as ``request.state.request_id``.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _usable(scope["headers"]) or secrets.token_hex(16).encode()
        scope.setdefault("state", {})["request_id"] = name.decode()
        await self._app(scope, receive, partial(_with_id, send, name))


async def _with_id(send: Send, name: bytes, message: Message) -> None:
    if message["type"] == "http.response.start":
        message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID, name)]}
    await send(message)


def _usable(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """The client's id: one, short, and nothing in it that could break a log's line."""
    given = [value for name, value in headers if name.lower() == REQUEST_ID]
    if len(given) != 1 or not 1 <= len(given[0]) <= _MAX_ID_CHARS:
        return None
    return given[0] if all(33 <= byte <= 126 for byte in given[0]) else None
