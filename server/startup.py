"""What is said on stderr: phases while the server starts, the addresses, then a line for each request's end.

``Lines`` writes plain or JSON lines for log files; for a person at a terminal there is ``server.terminal``.
"""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TextIO

from gtp_serve.engine.messages import Phase
from gtp_serve.errors import GtpServeError
from gtp_serve.server.failures import format_error
from gtp_serve.sizes import GIB

QUIET_SECONDS = 5.0
"""No longer than this without a line while a phase runs."""
_PROGRESS_STEP = 0.10
_PROGRESS_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyNote:
    """What to say when the server is ready."""

    seconds: float
    weight_version: str
    url: str
    example: str
    """A command to paste."""
    drain_seconds: float
    page: bool = True
    """Whether there is one at ``/``."""


class Reporter(Protocol):
    """Takes reports in the order in which things happen."""

    def title(self, words: Sequence[str]) -> None:
        """Name, version, machine."""
        ...

    def fact(self, label: str, lines: Sequence[str]) -> None:
        """Something that was found or decided."""
        ...

    def phase(self, phase: Phase) -> None:
        """A phase began, went on or ended."""
        ...

    def tick(self) -> None:
        """Called about once a second; keeps a long phase from looking like a hang."""
        ...

    def ready(self, note: ReadyNote) -> None:
        """The server takes requests."""
        ...

    def line(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """One line of the log."""
        ...

    def failure(self, error: GtpServeError) -> None:
        """The last thing that is printed."""
        ...


def format_fields(fields: Mapping[str, Any]) -> str:
    """``key=value`` words; values with spaces or quotes are quoted, None is left out."""
    return " ".join(f"{key}={_word(value)}" for key, value in fields.items() if value is not None)


def _word(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(char in ' "=' for char in text) and bool(text)
    return text if plain else json.dumps(text)


def _key(name: str) -> str:
    return name.lower().replace(" ", "_")


class Lines:
    """One line for each report, for log files and collectors.

    :param clock: monotonic seconds.
    :param now: the time of day, UTC.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        as_json: bool,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._stream = stream
        self._json = as_json
        self._quiet = quiet
        self._clock = clock
        self._now = now
        self._phase: Phase | None = None
        self._phase_started = 0.0
        self._said_at = clock()
        self._said_share = 0.0

    def title(self, words: Sequence[str]) -> None:
        """Name, version, machine."""
        self.line("INFO", "start", {"server": " ".join(words)})

    def fact(self, label: str, lines: Sequence[str]) -> None:
        """Something that was found or decided."""
        self.line("INFO", label, {"is": "; ".join(" ".join(line.split()) for line in lines)})

    def phase(self, phase: Phase) -> None:
        """A line when it begins, ends, has come 10 % further or has been silent for long."""
        began = self._phase is None or self._phase.name != phase.name
        if began:
            self._phase_started, self._said_share = self._clock(), 0.0
        self._phase = None if phase.state != "running" else phase
        if began or phase.state != "running" or self._is_news(phase):
            self._say(phase)

    def tick(self) -> None:
        """A line when a phase has been silent for long."""
        if self._phase is not None and self._clock() - self._said_at >= QUIET_SECONDS - 1.0:
            self._say(self._phase)

    def _is_news(self, phase: Phase) -> bool:
        silent = self._clock() - self._said_at
        further = phase.done / phase.total - self._said_share if phase.total else 0.0
        return silent >= QUIET_SECONDS - 1.0 or (further >= _PROGRESS_STEP and silent >= _PROGRESS_SECONDS)

    def _say(self, phase: Phase) -> None:
        seconds = phase.seconds or self._clock() - self._phase_started
        fields: dict[str, Any] = {"phase": _key(phase.name), "state": phase.state}
        if phase.state == "running" and phase.total:
            self._said_share = phase.done / phase.total
            fields["progress"] = round(self._said_share, 2)
            fields["gib"] = f"{phase.done / GIB:.1f}/{phase.total / GIB:.1f}"
            fields["gib_s"] = round(phase.done / GIB / max(seconds, 1e-3), 1)
        if phase.state != "running" or seconds >= 1.0:
            fields["seconds"] = round(seconds, 1)
        fields["detail"] = phase.detail or None
        self.line("INFO", "phase", fields)

    def ready(self, note: ReadyNote) -> None:
        """The server takes requests."""
        self.line(
            "INFO",
            "ready",
            {"seconds": round(note.seconds, 1), "weight_version": note.weight_version, "url": note.url},
        )

    def line(self, level: str, event: str, fields: Mapping[str, Any]) -> None:
        """One line of the log."""
        if self._quiet and level in ("INFO", "DEBUG"):
            return
        self._said_at = self._clock()
        stamp = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        if self._json:
            kept = {key: value for key, value in fields.items() if value is not None}
            text = json.dumps({"time": stamp, "level": level, "event": event} | kept, default=str)
        else:
            words = fields if event == "phase" else {"event": event, **fields}
            text = f"{stamp} {level} {format_fields(words)}"
        self._stream.write(text + "\n")
        self._stream.flush()

    def failure(self, error: GtpServeError) -> None:
        """The last thing that is printed: one JSON line, or the same block that a terminal shows."""
        if self._json:
            details = dict(error.details)
            self.line("ERROR", "failed", {"code": error.code, "message": error.message, "details": details})
            return
        self._stream.write(format_error(error) + "\n")
        self._stream.flush()


class ReporterHandler(logging.Handler):
    """Sends log records through a reporter; a record's ``fields`` become the line's words."""

    def __init__(self, reporter: Reporter, *, stacks: bool) -> None:
        super().__init__()
        self._reporter = reporter
        self._stacks = stacks

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        fields = dict(getattr(record, "fields", None) or {})
        if record.exc_info is not None and record.exc_info[1] is not None:
            error = record.exc_info[1]
            # An error that nobody expected may quote what a client sent: its words are for -v only.
            fields |= {"kind": type(error).__name__, "at": _place(error)}
            if self._stacks:
                fields["error"] = str(error)[:500]
                fields["stack"] = logging.Formatter().formatException(record.exc_info)
        self._reporter.line(record.levelname, record.getMessage(), fields)


def _place(error: BaseException) -> str | None:
    """Module and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else None
