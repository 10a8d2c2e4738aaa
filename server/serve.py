"""The serve command's first tenth of a second: take the port, answer probes, import the rest meanwhile."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from gtp_serve.errors import GtpServeError
from gtp_serve.server.failures import print_failure
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.porch import Porch
from gtp_serve.server.ports import bind

if TYPE_CHECKING:
    import ssl


class _Supervise(Protocol):
    def run(
        self,
        options: ServeOptions,
        listener: object,
        porch: Porch,
        tls: ssl.SSLContext | None,
        started: float,
        make: Callable[[], Any] | None = None,
    ) -> int: ...

    def report(self, options: ServeOptions, error: GtpServeError) -> int: ...


def run(options: ServeOptions, make: Callable[[], Any] | None = None) -> int:
    """Serve until told to stop; returns the exit code.

    :param make: gives the start of something else than one engine on this machine.
    """
    started = time.monotonic()
    try:
        tls = _tls(options)
        listener = bind(options.host, options.port)
    except GtpServeError as error:
        if options.log == "text":
            return print_failure(error, sys.stderr)
        return _supervise().report(options, error)
    with contextlib.closing(listener):
        porch = Porch(listener, tls)
        with contextlib.ExitStack() as keep:
            try:
                if make is None:
                    make = _start_early(options, keep)
                supervise = _supervise()
            except BaseException:
                porch.close()
                raise
            return supervise.run(options, listener, porch, tls, started, make)


def _start_early(options: ServeOptions, keep: contextlib.ExitStack) -> Callable[[], Any] | None:
    """The engine process at once, since it needs longer than all else; None where it is not one process."""
    early_engine = importlib.import_module("gtp_serve.server.early_engine")
    if not early_engine.can_start_early(options.tp):
        return None
    try:
        early = early_engine.EarlyEngine(warnings=options.verbosity > 0)
    except OSError:
        return None  # if it fails once more when its turn has come, the error says why
    keep.callback(early.close)
    return lambda: partial(importlib.import_module("gtp_serve.server.bringup").Bringup, early=early)


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
    """Imported only where it is wanted: most servers are plain http behind a proxy."""
    if options.tls_cert is None:
        return None
    return cast("ssl.SSLContext", importlib.import_module("gtp_serve.server.tls").tls_context(options))


def _supervise() -> _Supervise:
    """Imported now, behind the open port: it takes longer than a probe should wait."""
    return cast(_Supervise, importlib.import_module("gtp_serve.server.supervise"))
