"""Answers on the port while the HTTP server itself is being imported: 503 and the phase, whatever was asked.

Standard library only and one thread, so that a probe is answered a tenth of a second after the command began.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

_POLL_SECONDS = 0.02
_CLIENT_SECONDS = 0.25
_HEAD_BYTES = 8192


class Porch:
    """Takes connections from a listening socket until ``close``; each gets one answer and is closed.

    Connections that arrive after ``close`` wait in the socket for the next server.
    """

    def __init__(self, listener: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        self._listener = listener
        self._tls = tls
        self._started = time.monotonic()
        self._closing = threading.Event()
        listener.settimeout(_POLL_SECONDS)
        self._thread = threading.Thread(target=self._run, name="porch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop taking connections; returns when the last answer is out."""
        self._closing.set()
        self._thread.join()
        self._listener.setblocking(False)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_CLIENT_SECONDS)
        try:
            if self._tls is None:
                self._talk(connection)
                return
            with self._tls.wrap_socket(connection, server_side=True) as secure:
                self._talk(secure)
        except OSError:
            return  # a client that is slow or gone costs nobody else anything

    def _talk(self, connection: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head and len(head) < _HEAD_BYTES:
            chunk = connection.recv(_HEAD_BYTES)
            if not chunk:
                return
            head += chunk
        connection.sendall(self._response(with_body=not head.startswith(b"HEAD ")))

    def _response(self, *, with_body: bool) -> bytes:
        error = {
            "code": "not-ready",
            "message": "the server is starting: import",
            "param": None,
            "did_you_mean": None,
            "type": "unavailable_error",
        }
        seconds = round(time.monotonic() - self._started, 3)
        body = json.dumps({"status": "starting", "phase": "import", "seconds": seconds, "error": error}).encode()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        return head.encode() + (body if with_body else b"")
