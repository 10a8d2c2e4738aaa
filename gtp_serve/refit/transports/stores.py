"""The store that all participants of a transfer meet at: opened by engine rank 0 on one interface.

A client of a store whose process is stopped would block whatever its timeout says; ``cut_connections`` ends that.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch.distributed

from gtp_serve.errors import UpdateFailed

CONNECT_SECONDS = 5.0
"""The store is open before anybody is told where it is.  (torch asks a name server about each address that it connects
to: one that does not answer takes all of it; RES_OPTIONS=timeout:1 shortens that.)
"""
_DIST: Any = torch.distributed
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What all participants of a transfer know before they meet."""

    host: str
    port: int
    update: str
    """The update's id: its keys lie under it."""
    trainers: int
    engines: int
    backend: Literal["gloo", "nccl"]
    bucket_bytes: int
    silent_seconds: float
    deadline: float
    """Instant of ``time.monotonic``."""
    join_seconds: float = 30.0
    """For all participants to come, if the deadline is not nearer: an engine rank may have memory to find first."""

    @property
    def size(self) -> int:
        """Participants."""
        return self.trainers + self.engines


def open_store(host: str, deadline: float) -> tuple[Any, int]:
    """Open a store on the interface that has this address only; it is closed when the object is let go of.

    :param deadline: instant of ``time.monotonic``.
    :return: torch's TCPStore and its port.
    :raises UpdateFailed: when there is no such address here, or no port.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with contextlib.closing(socket.socket(family, kind, protocol)) as listener:
            listener.bind(address)
            port = int(listener.getsockname()[1])
            store = _DIST.TCPStore(
                host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
                master_listen_fd=os.dup(listener.fileno()),
                use_libuv=True,
            )
    except (OSError, RuntimeError) as error:
        raise UpdateFailed(
            f"no store could be opened at {host} for the trainer to meet this engine at",
            [("error", str(error).splitlines()[0])],
            code="update-store",
        ) from None
    return store, port


def connect(terms: Terms) -> Any:
    """A client of the store, whose keys are those of this update."""
    store = _DIST.TCPStore(
        terms.host,
        terms.port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=CONNECT_SECONDS),
    )
    return _DIST.PrefixStore(terms.update, store)


class MeetingStore(_DIST.Store):  # type: ignore[misc]  # its stubs leave it out
    """A store for gloo to exchange addresses over, whose waits can be ended.

    :param store: whose keys it has.
    :param keep_on: asked often while a key is waited for; raises to end that.
    :param seconds: for one key, whatever the caller's own patience is.
    """

    def __init__(self, store: Any, keep_on: Callable[[], None], seconds: float) -> None:
        super().__init__()
        self._store, self._keep_on, self._seconds = store, keep_on, seconds

    def set(self, key: str, value: Any) -> None:
        """Put."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """What was put."""
        self.wait([key])
        value: bytes = self._store.get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Count."""
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all have been put."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all have been put."""
        deadline = time.monotonic() + self._seconds
        while not self.check(keys):
            self._keep_on()
            if time.monotonic() >= deadline:
                raise TimeoutError(f"a participant told no address within {self._seconds:g} s")
            time.sleep(_LOOK_SECONDS)

    def has_extended_api(self) -> bool:
        """No: the four above are all that gloo needs."""
        return False


def local_address(host: str, port: int) -> str:
    """This machine's address on the way to a host: where connections between participants are bound."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with contextlib.closing(socket.socket(family, kind, protocol)) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def cut_connections(port: int) -> int:
    """Shut this process's connections to a store's port down, so that calls that wait for an answer fail.

    Only for a store that cannot be reached any more; returns how many there were.
    """
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with contextlib.closing(socket.socket(fileno=os.dup(int(name)))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if connection.getpeername()[1] == port:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count
