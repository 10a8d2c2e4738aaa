"""OpenTelemetry spans of finished requests, sent by OTLP over HTTP; the packages are an extra, imported on demand."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from gtp_serve import __version__
from gtp_serve.errors import EnvironmentFault, UsageError

_TRACES_PATH = "/v1/traces"
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_CLOSE_MILLISECONDS = 2000
"""At exit, for spans that were not sent yet; a collector that is gone must not hold the exit up."""
_NEED = "pip install 'gtp-serve[otel]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestSpan:
    """One finished sequence; times are nanoseconds since the epoch."""

    name: str
    start: int
    end: int
    first_token: int | None = None
    failed: bool = False
    parent: Mapping[str, str] = field(default_factory=dict)
    """``traceparent`` and ``tracestate`` as they came with the request."""
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Tracer(Protocol):
    """Where spans go."""

    def ended(self, span: RequestSpan) -> None:
        """A request is over.  Does not wait for the network."""
        ...

    def close(self) -> None:
        """Send what is left, for two seconds at most."""
        ...


def open_tracer(url: str | None, environ: Mapping[str, str], log: logging.Logger) -> Tracer | None:
    """A tracer when one is asked for, by ``--otlp`` or by OpenTelemetry's own variables; None otherwise.

    :raises UsageError: the URL is none.
    :raises EnvironmentFault: ``--otlp`` without the extra; a variable, which others may have set, only warns.
    """
    variable = next((name for name in _ENDPOINTS if environ.get(name)), None)
    if url is None and (variable is None or environ.get("OTEL_SDK_DISABLED", "").lower() == "true"):
        return None
    endpoint = None if url is None else traces_url(url)
    try:
        return _Otlp(endpoint, environ, log)
    except ImportError:
        if endpoint is None:
            log.warning("no traces", extra={"fields": {"variable": variable, "needs": _NEED}})
            return None
        raise EnvironmentFault("--otlp needs OpenTelemetry, which is an extra", [("try", _NEED)]) from None


def traces_url(url: str) -> str:
    """The collector's address for spans; one without a path gets the usual path.

    :raises UsageError: when it is not http or https.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        good = False
    if not good:
        raise UsageError(f"--otlp '{url}' is not a URL for OTLP over HTTP", [("for example", "http://localhost:4318")])
    return url if parts.path not in ("", "/") else url.rstrip("/") + _TRACES_PATH


class _Otlp:
    """Spans in batches, from a thread of OpenTelemetry's own."""

    def __init__(self, endpoint: str | None, environ: Mapping[str, str], log: logging.Logger) -> None:
        load = importlib.import_module
        sdk = load("opentelemetry.sdk.trace")
        batch = load("opentelemetry.sdk.trace.export").BatchSpanProcessor
        exporter = load("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter
        resource = load("opentelemetry.sdk.resources").Resource
        context = load("opentelemetry.trace.propagation.tracecontext")
        self._trace = load("opentelemetry.trace")
        _lead_logs(log)
        named = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": "gtp-serve"}
        self._provider = sdk.TracerProvider(
            resource=resource.create({**named, "service.version": __version__}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(batch(exporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("gtp_serve", __version__)
        self._propagator = context.TraceContextTextMapPropagator()

    def ended(self, span: RequestSpan) -> None:
        """Begun and ended in one go, with the times that were measured."""
        made = self._tracer.start_span(
            span.name,
            context=self._propagator.extract(span.parent),
            kind=self._trace.SpanKind.SERVER,
            attributes=dict(span.attributes),
            start_time=span.start,
        )
        if span.first_token is not None:
            made.add_event("first token", timestamp=span.first_token)
        if span.failed:
            made.set_status(self._trace.StatusCode.ERROR)
        made.end(end_time=span.end)

    def close(self) -> None:
        """As the protocol says."""
        self._provider.force_flush(_CLOSE_MILLISECONDS)


def _lead_logs(log: logging.Logger) -> None:
    """What OpenTelemetry has to complain about goes where our own lines go."""
    theirs = logging.getLogger("opentelemetry")
    theirs.handlers, theirs.propagate = list(log.handlers), False
    theirs.setLevel(logging.WARNING)
