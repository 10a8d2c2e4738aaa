"""The folder of the socket between HTTP process and engine: its owner's only, gone once both are connected.

A server that is killed before that leaves its folder behind; the next one that starts removes it.  A lock, which
goes with its holder, tells the folders that are left behind from those of servers that are just starting.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from gtp_serve.errors import EnvironmentFault

SOCKET = "engine"
_PREFIX = "gtp-serve-ipc_"
_LOCK = "lock"
_NAMES = {_LOCK, SOCKET}
_FRESH_SECONDS = 60.0
"""A folder without a lock may be one whose owner is about to make it."""


class SocketFolder:
    """A new folder.

    :raises EnvironmentFault: when there is no place for one.
    """

    def __init__(self) -> None:
        self._lock = -1
        try:
            _remove_abandoned(Path(tempfile.gettempdir()))
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
            self._lock = os.open(self.path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            self.remove()
            raise EnvironmentFault(
                f"no folder for the engine's socket can be made: {error}",
                [("try", "TMPDIR set to a folder that can be written")],
            ) from error

    path = Path()

    def remove(self) -> None:
        """Remove it.  May be called again."""
        if self.path.name:
            _remove(self.path)
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


def _remove_abandoned(place: Path) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone in the meantime
            if folder.stat().st_uid == os.geteuid() and _is_abandoned(folder):
                _remove(folder)


def _remove(folder: Path) -> None:
    """Only what is made here is ever removed."""
    for name in _NAMES:
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):
        folder.rmdir()


def _is_abandoned(folder: Path) -> bool:
    if not {entry.name for entry in folder.iterdir()} <= _NAMES:
        return False
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return not any(folder.iterdir()) and time.time() - folder.stat().st_mtime > _FRESH_SECONDS
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
