"""The start-up for a person at a terminal: a line for each finished phase, a bar for the running one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from gtp_serve.engine.messages import Phase
from gtp_serve.errors import GtpServeError
from gtp_serve.server.failures import format_error, one_line, wants_colour
from gtp_serve.server.startup import ReadyNote, format_fields
from gtp_serve.sizes import GIB

_WIDTH = 80


class Terminal:
    """For a person: a line for each finished phase, a bar for the running one."""

    def __init__(
        self,
        stream: TextIO,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        self._stream = stream
        self._quiet = quiet
        self._clock = clock
        self._now = now
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._phase_started = 0.0

    def title(self, words: Sequence[str]) -> None:
        """Name, version, machine."""
        self._print("   ".join(words) + "\n")

    def fact(self, label: str, lines: Sequence[str]) -> None:
        """A label in the first column, the lines in the second."""
        for index, line in enumerate(lines):
            self._print(f"{label if index == 0 else '':<12}{line}")

    def phase(self, phase: Phase) -> None:
        """The bar while it runs, one line when it is over."""
        if phase.state == "running":
            self._show_bar(phase)
            return
        seconds = phase.seconds or (self._clock() - self._phase_started if self._progress is not None else 0.0)
        self._hide_bar()
        mark = "ok" if phase.state == "ok" else "!!"
        left = f"  {mark}  {phase.name:<24}{phase.detail}"
        self._print(f"{left:<{_WIDTH - 10}} {seconds:>7.1f} s")

    def tick(self) -> None:
        """The bar moves by itself."""

    def ready(self, note: ReadyNote) -> None:
        """The addresses that exist, and a command to paste."""
        self._hide_bar()
        self._print(f"\nready in {note.seconds:.1f} s      weights version {note.weight_version}")
        for label, path, words in (
            ("generate", "/generate", "      (SGLang-compatible)"),
            ("openai", "/v1", ""),
            *([("page", "/", "")] if note.page else []),
            ("metrics", "/metrics", ""),
        ):
            self._print(f"  {label:<10} {note.url}{path}{words}")
        self._print(f"  {'try':<10} {note.example}")
        self._print(f"  {'measure':<10} gtp-serve bench {note.url}")
        self._print(f"Ctrl-C drains for up to {note.drain_seconds:g} s; press it twice to stop now.")

    def line(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """One line of the log, with the local time."""
        if self._quiet and level in ("INFO", "DEBUG"):
            return
        clock = self._now().strftime("%H:%M:%S")
        mark = "" if level == "INFO" else f"{level} "
        self._write(one_line(f"{clock}  {mark}{event}  {format_fields(fields)}"))

    def failure(self, error: GtpServeError) -> None:
        """The last thing that is printed."""
        self._hide_bar()
        self._write(format_error(error, colour=wants_colour(self._stream)))

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._write(text)

    def _write(self, text: str) -> None:
        if self._progress is not None:
            self._progress.console.print(text, markup=False)
            return
        self._stream.write(text + "\n")
        self._stream.flush()

    def _show_bar(self, phase: Phase) -> None:
        if self._quiet:
            return
        if self._progress is None:
            self._phase_started = self._clock()
            columns = (
                TextColumn("  >>  {task.description:<24}"),
                BarColumn(bar_width=28),
                TextColumn("{task.fields[sizes]}"),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task(phase.name, total=None, sizes="")
            self._progress.start()
        seconds = self._clock() - self._phase_started
        self._progress.update(
            self._task,
            description=phase.name,
            total=phase.total or None,
            completed=phase.done,
            sizes=_sizes(phase, seconds),
        )

    def _hide_bar(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _sizes(phase: Phase, seconds: float) -> str:
    if not phase.total:
        return phase.detail
    done, total = phase.done / GIB, phase.total / GIB
    return f"{done:.1f}/{total:.1f} GiB  {done / max(seconds, 1e-3):.1f} GiB/s"
