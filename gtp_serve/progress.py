"""A progress bar on a terminal, and nothing anywhere else."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn


class Bar:
    """Progress of one piece of work, on standard error.

    :param total: None until ``show`` says.
    :param unit: "bytes", or what is counted.
    """

    def __init__(self, title: str, total: int | None, *, unit: str, wanted: bool = True) -> None:
        count: ProgressColumn = DownloadColumn(binary_units=True) if unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}"), BarColumn(), count, TextColumn("{task.fields[note]}"))
        self._progress: Progress | None = None
        if wanted and sys.stderr.isatty():
            self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._progress.add_task(title, total=total, note="" if unit == "bytes" else unit)

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, stack: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, note: str) -> None:
        """One more is done."""
        if self._progress is not None:
            self._progress.update(self._task, advance=1, note=note)

    def show(self, done: int, total: int) -> None:
        """So much is done of so much."""
        if self._progress is not None:
            self._progress.update(self._task, completed=done, total=total)
