"""Prints the steps of ``gtp-serve demo``: one line each, with a live percentage on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

_LIVE_SECONDS = 0.1
_LINE_SECONDS = 5.0
_LABEL_WIDTH = 34


def mebibytes(count: int) -> str:
    """A size for people."""
    return f"{count / (1 << 20):.1f} MiB"


class Steps:
    """Runs steps one after another and tells how each goes."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._next_print = 0.0

    def run(self, label: str, step: Callable[[Progress], _T], *, size: int = 0) -> _T:
        """Run a step and print its line; what it raises passes through.

        :param size: bytes that the step handles, where it does not report them itself.
        """
        begun = time.monotonic()
        most = size
        self._next_print = begun + (_LIVE_SECONDS if self._terminal else _LINE_SECONDS)

        def progress(done: int, total: int) -> None:
            nonlocal most
            most = max(most, done)
            self._show(label, done, total)

        result = step(progress)
        amount = mebibytes(most) if most else ""
        self._erase()
        print(f"  ok  {label:<{_LABEL_WIDTH}}{amount:>11}{time.monotonic() - begun:>8.1f} s", flush=True)
        return result

    def _show(self, label: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next_print:
            return
        self._next_print = now + (_LIVE_SECONDS if self._terminal else _LINE_SECONDS)
        line = f"  >>  {label:<{_LABEL_WIDTH}}{mebibytes(done):>11} of {mebibytes(total)}"
        print(f"\r{line}\033[K" if self._terminal else line, end="" if self._terminal else "\n", flush=True)

    def _erase(self) -> None:
        if self._terminal:
            print("\r\033[K", end="")
