"""How a command ends badly: the exit codes and the one form in which an error is printed.

Exit codes: 0 stopped as asked, 1 a bug of ours, 2 usage, 3 checkpoint, 4 does not fit, 5 environment, 6 engine, 7 new
weights that were not taken; 128 + signal (130 for Ctrl-C, 143 for SIGTERM) when running requests were cut short.
"""

from __future__ import annotations

import os
from typing import TextIO

from gtp_serve.errors import GtpServeError

EXIT_OK = 0
EXIT_BUG = 1
EXIT_SIGNAL_BASE = 128

_RED, _BOLD, _PLAIN = "\x1b[31m", "\x1b[1m", "\x1b[0m"


def wants_colour(stream: TextIO) -> bool:
    """Colour only on a terminal that did not ask for none (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def one_line(text: str) -> str:
    """Keep a message from breaking the log's lines or the terminal: control characters become spaces."""
    return "".join(char if char.isprintable() else " " for char in text)


def format_error(error: GtpServeError, *, colour: bool = False) -> str:
    """``error[code] message`` and one aligned line for each detail; ends without a newline."""
    head = f"error[{error.code}]"
    if colour:
        head = f"{_RED}{_BOLD}{head}{_PLAIN}"
    width = max((len(label) for label, _ in error.details), default=0)
    lines = [f"{head} {one_line(error.message)}"]
    for label, text in error.details:
        rows = text.splitlines() or [""]
        labels = [label] + [""] * (len(rows) - 1)
        lines += [f"  {name:<{width}}  {one_line(row)}" for name, row in zip(labels, rows, strict=True)]
    return "\n".join(lines)


def as_known_error(error: BaseException) -> GtpServeError:
    """Our own errors as they are; anything else as an ``internal`` one that names its type."""
    if isinstance(error, GtpServeError):
        return error
    if isinstance(error, MemoryError):
        return GtpServeError("this process ran out of memory", code="out-of-memory")
    return GtpServeError(
        f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
        [("this is", "a bug in gtp-serve"), ("try", "the same command with -v, and report what it prints")],
    )


def print_failure(error: BaseException, stream: TextIO, *, verbose: bool = False) -> int:
    """Print an error for a person and return the exit code; the stack is shown only when ``verbose``."""
    known = as_known_error(error)
    if verbose:
        import traceback  # late: every command imports this module, and hardly one needs that

        stream.write("".join(traceback.format_exception(error)))
    stream.write(format_error(known, colour=wants_colour(stream)) + "\n")
    stream.flush()
    return known.exit_code
