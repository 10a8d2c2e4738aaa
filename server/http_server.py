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
HEAD_SECONDS = 60.0
"""From the first byte of a request, or from a new connection, until its head must have come."""
_CLOSE_SECONDS = 2
"""From the end of serving until connections that still send are cut."""


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol; the parser itself has no limit on the size of URL and headers."""

    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; it is to say something soon."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes, which end the wait between two requests; so the wait for the rest of a head begins."""
        super().data_received(data)
        answered = self.cycle is None or self.cycle.response_complete
        if self._in_head and answered and self._head_timer is None and not self.transport.is_closing():
            self._wait_for_head()

    def on_message_begin(self) -> None:
        """A new request."""
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The whole head is there."""
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The whole request is there; what comes next is another one's head."""
        self._in_head = True
        super().on_message_complete()

    def _wait_for_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()

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
