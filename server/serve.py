"""The serve command's first tenth of a second: take the port, answer probes, import the rest meanwhile."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from typing import Protocol, cast

from gtp_serve.errors import GtpServeError
from gtp_serve.server.failures import print_failure
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.porch import Porch
from gtp_serve.server.ports import bind


class _Supervise(Protocol):
    def run(self, options: ServeOptions, listener: object, porch: Porch, started: float) -> int: ...

    def report(self, options: ServeOptions, error: GtpServeError) -> int: ...


def run(options: ServeOptions) -> int:
    """Serve until told to stop; returns the exit code."""
    started = time.monotonic()
    try:
        listener = bind(options.host, options.port)
    except GtpServeError as error:
        if options.log == "text":
            return print_failure(error, sys.stderr)
        return _supervise().report(options, error)
    with contextlib.closing(listener):
        porch = Porch(listener)
        try:
            supervise = _supervise()
        except BaseException:
            porch.close()
            raise
        return supervise.run(options, listener, porch, started)


def _supervise() -> _Supervise:
    """Imported now, behind the open port: it takes longer than a probe should wait."""
    return cast(_Supervise, importlib.import_module("gtp_serve.server.supervise"))
