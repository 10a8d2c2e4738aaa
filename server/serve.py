"""The serve command's first tenth of a second: take the port, answer probes, import the rest meanwhile."""

from __future__ import annotations

import contextlib
import importlib
import sys
import time
from typing import TYPE_CHECKING, Protocol, cast

from gtp_serve.errors import GtpServeError
from gtp_serve.server.failures import print_failure
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.porch import Porch
from gtp_serve.server.ports import bind

if TYPE_CHECKING:
    import ssl


class _Supervise(Protocol):
    def run(
        self, options: ServeOptions, listener: object, porch: Porch, tls: ssl.SSLContext | None, started: float
    ) -> int: ...

    def report(self, options: ServeOptions, error: GtpServeError) -> int: ...


def run(options: ServeOptions) -> int:
    """Serve until told to stop; returns the exit code."""
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
        try:
            supervise = _supervise()
        except BaseException:
            porch.close()
            raise
        return supervise.run(options, listener, porch, tls, started)


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
    """Imported only where it is wanted: most servers are plain http behind a proxy."""
    if options.tls_cert is None:
        return None
    return cast("ssl.SSLContext", importlib.import_module("gtp_serve.server.tls").tls_context(options))


def _supervise() -> _Supervise:
    """Imported now, behind the open port: it takes longer than a probe should wait."""
    return cast(_Supervise, importlib.import_module("gtp_serve.server.supervise"))
