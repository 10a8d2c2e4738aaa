"""uvicorn, held to our limits: bounded heads, our shape for malformed HTTP, signals left to the command."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import orjson
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gtp_serve.server.http_errors import plain_error

MAX_HEADER_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 75
_CLOSE_SECONDS = 2
"""From the end of serving until connections that still send are cut."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol; the parser itself has no limit on the size of URL and headers."""

    _head_bytes = 0

    def on_message_begin(self) -> None:
        """A new request."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the URL."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEADER_BYTES:
            raise ValueError("URL and headers are too large")  # the parser turns this into its own error: a 400

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP gets the one error shape, and the connection is closed."""
        body = orjson.dumps(plain_error(400, "bad-http", "this is not a valid HTTP request, or its head is too large"))
        head = [
            b"HTTP/1.1 400 Bad Request",
            b"content-type: application/json",
            b"content-length: " + str(len(body)).encode(),
            b"connection: close",
        ]
        self.transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
        self.transport.close()


class HttpServer(uvicorn.Server):
    """A uvicorn server that leaves signals alone and says when it accepts."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept."""
        await super().startup(sockets)
        self.up.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the serve command."""
        yield


def build_server(app: ASGIApp, tls: ssl.SSLContext | None = None) -> HttpServer:
    """A server for ``serve(sockets=[...])``; set ``should_exit`` to end it.

    :param tls: https instead of http.
    """
    config = uvicorn.Config(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    if tls is not None:
        config.load()
        config.ssl = tls
    return HttpServer(config)
