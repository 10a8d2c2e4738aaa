"""Ranks on other machines: they come to rank 0 over TCP instead of being started by it.  No torch.

Whoever places the ranks starts them and gives all of them one secret; rank 0 lets in who proves to have it.  From
then on a rank on another machine is a ``Peer`` like any other, except that rank 0 cannot kill its process: whoever
started it does, and the rank ends by itself when its connection does.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress

import msgspec

from gtp_serve.errors import EngineFault, EnvironmentFault

KEY_VARIABLE = "GTP_SERVE_RANK_KEY"
"""Environment variable with the ranks' secret: a command line can be read by others."""
_NONCE_BYTES = 32
_ANSWER = struct.Struct("<I32s")
_GREETING_SECONDS = 10.0
_RETRY_SECONDS = 0.1


class FarRanks(msgspec.Struct, frozen=True, kw_only=True):
    """Where the ranks of an engine that spans machines come together."""

    host: str
    """Address of rank 0's machine."""
    port: int
    """Where rank 0 listens."""
    store_port: int
    """Where the store of the ranks' collectives listens, on the same machine."""


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank reaches the store of the collectives, and the address of its own that others reach it at."""

    host: str
    port: int
    own_address: str


class Door:
    """Rank 0's listening socket; each rank that proves itself is kept until its Peer asks for it.

    :raises EnvironmentFault: when there is no such address or port here, or no secret.
    """

    def __init__(self, far: FarRanks) -> None:
        self.far = far
        self._key = _key()
        self._came: dict[int, socket.socket] = {}
        self._changed = threading.Condition()
        self._closed = False
        try:
            self._listener = socket.create_server((far.host, far.port), backlog=64)
        except OSError as error:
            raise EnvironmentFault(f"rank 0 cannot listen at {far.host}:{far.port}: {error}") from error
        threading.Thread(target=self._accept, name="ranks-door", daemon=True).start()

    def wait(self, rank: int, seconds: float) -> socket.socket:
        """The connection of a rank.

        :raises TimeoutError: when it has not come in so many seconds, or the door was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: rank in self._came or self._closed, seconds)
            if rank not in self._came:
                raise TimeoutError
            return self._came.pop(rank)

    def close(self) -> None:
        """Let nobody in any more.  May be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return  # closed
            # A stranger that says nothing must not keep a rank waiting.
            threading.Thread(target=self._greet, args=(end,), name="ranks-greet", daemon=True).start()

    def _greet(self, end: socket.socket) -> None:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            end.settimeout(_GREETING_SECONDS)
            end.sendall(nonce)
            rank, proof = _ANSWER.unpack(_exactly(end, _ANSWER.size))
        except OSError:
            end.close()
            return
        if not hmac.compare_digest(proof, _proof(self._key, nonce, rank)):
            end.close()
            return
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            before = self._came.pop(rank, None)
            self._came[rank] = end
            self._changed.notify_all()
        if before is not None:
            before.close()


def knock(far: FarRanks, rank: int, seconds: float) -> tuple[socket.socket, Store]:
    """Connect a rank to rank 0, which may not listen yet; the connection, and how to reach the store.

    :raises EngineFault: when rank 0 cannot be reached in so many seconds.
    """
    key, deadline = _key(), time.monotonic() + seconds
    while True:
        try:
            end = socket.create_connection((far.host, far.port), timeout=_GREETING_SECONDS)
            nonce = _exactly(end, _NONCE_BYTES)
            end.sendall(_ANSWER.pack(rank, _proof(key, nonce, rank)))
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                raise EngineFault(
                    f"rank tp{rank} could not reach rank 0 at {far.host}:{far.port} within {seconds:g} s",
                    [("error", str(error))],
                ) from error
            time.sleep(_RETRY_SECONDS)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.settimeout(None)
    return end, Store(host=far.host, port=far.store_port, own_address=end.getsockname()[0])


def store_of(far: FarRanks) -> Store:
    """Rank 0's own way to the store, which it opens."""
    return Store(host=far.host, port=far.store_port, own_address=far.host)


def _key() -> bytes:
    key = os.environ.get(KEY_VARIABLE, "")
    if not key:
        raise EnvironmentFault(f"ranks on several machines need a secret in {KEY_VARIABLE}")
    return key.encode()


def _proof(key: bytes, nonce: bytes, rank: int) -> bytes:
    return hmac.digest(key, nonce + rank.to_bytes(4, "little"), "sha256")


def _exactly(end: socket.socket, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = end.recv(size - len(parts))
        if not part:
            raise ConnectionError("the other end closed the connection")
        parts += part
    return parts
