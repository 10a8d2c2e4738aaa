"""Fails the n-th call of something, for n = 1, 2, ... until an operation gets through without meeting the failure."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Point:
    """A function that may fail, and how."""

    owner: Any
    name: str
    error: Callable[[], BaseException]

    def __str__(self) -> str:
        return f"{getattr(self.owner, '__name__', self.owner)}.{self.name}"


def full() -> OSError:
    """The disk is full."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def broken() -> OSError:
    """The disk is broken."""
    return OSError(errno.EIO, os.strerror(errno.EIO))


def crowded() -> OSError:
    """No process can be made, or no descriptor."""
    return OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


class Count:
    """Calls so far, and whether one of them has failed."""

    def __init__(self) -> None:
        self.calls = 0
        self.fired = ""
        self._lock = threading.Lock()

    def take(self) -> int:
        """The number of this call."""
        with self._lock:
            self.calls += 1
            return self.calls


@contextmanager
def failing(points: Sequence[Point], number: int, *, ever_after: bool = False) -> Iterator[Count]:
    """The n-th of all calls of these fails; with ``ever_after`` those behind it too."""
    count = Count()

    def wrapped(point: Point, real: Any) -> Any:
        def call(*args: Any, **keywords: Any) -> Any:
            at = count.take()
            if at == number or (ever_after and at > number):
                count.fired = count.fired or f"call {at}, {point}"
                raise point.error()
            return real(*args, **keywords)

        return call

    with ExitStack() as undo:
        for point in points:
            real = getattr(point.owner, point.name)
            undo.enter_context(mock.patch.object(point.owner, point.name, wrapped(point, real)))
        yield count


def every_failure(
    points: Sequence[Point], operation: Callable[[], Any], judge: Callable[[str, BaseException | None], None], most: int
) -> int:
    """Run an operation with its first call failing, then its second, ...; how many there were.

    :param judge: told which call failed and what came of it (None: it went well all the same).
    """
    for number in range(1, most + 1):
        for ever_after in (False, True):
            error: BaseException | None = None
            with failing(points, number, ever_after=ever_after) as count:
                try:
                    operation()
                except Exception as raised:
                    error = raised
            if not count.fired:
                if error is not None:
                    raise error
                return number - 1
            judge(count.fired + (", and all after it" if ever_after else ""), error)
    raise AssertionError(f"more than {most} calls")


def descriptors() -> int:
    """Open ones of this process."""
    return len(os.listdir("/proc/self/fd")) - 1


@contextmanager
def few_descriptors(more: int) -> Iterator[None]:
    """Only so many can be opened beside those that are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}
    free = [number for number in range(len(used) + more + 1) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[more], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file can become larger; whoever writes on is told so, as by a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
