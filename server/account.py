"""What is kept of a finished request: its log line, its counters, its trace span.  Never a word of its text."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import Scope

from gtp_serve.errors import GtpServeError
from gtp_serve.server.metrics import Metrics, Outcome
from gtp_serve.server.prepare import Job
from gtp_serve.server.run import Run
from gtp_serve.server.state import ServerState
from gtp_serve.server.tracing import RequestSpan

_NANOSECONDS = 1e9
_CARRIED = (b"traceparent", b"tracestate")
_BAD_ENDS = ("error", "refused")


def account(run: Run, state: ServerState, metrics: Metrics, log: logging.Logger, scope: Scope) -> None:
    """One log line, one count and (when traced) one span for each sequence of a call that is over."""
    for job in run.jobs:
        outcome = run.outcome(job)
        seconds = run.seconds(job)
        metrics.ended(outcome, seconds if outcome in ("stop", "length") else None)
        state.by_version.note(job.reply.spans())
        if not run.call.no_logs:
            log.info("request", extra={"fields": log_fields(run, job, outcome, scope)})
        if state.tracer is not None:
            state.tracer.ended(request_span(run, job, outcome, _model(state), scope))
    if run.error is not None and not isinstance(run.error, GtpServeError):
        log.error("a request met a bug", exc_info=run.error)


def log_fields(run: Run, job: Job, outcome: Outcome, scope: Scope) -> dict[str, Any]:
    """The words of the log line: names, counts and seconds."""
    reply = job.reply
    spans = reply.spans()
    fields: dict[str, Any] = {
        "rid": job.request.rid,
        "route": scope["path"],
        "reason": outcome,
        "prompt": reply.num_prompt,
        "cached": reply.cached_tokens,
        "tokens": len(reply.ids),
        "seconds": round(run.seconds(job), 3),
        "ttft": _rounded(run.first_token_seconds(job)),
        "queue": _rounded(run.queue_seconds(job)),
        "weights": ",".join(span["version"] for span in spans) or None,
    }
    if "request_id" in scope.get("state", {}):
        fields["request_id"] = scope["state"]["request_id"]
    if outcome == "error":
        fields["code"] = run.error_code(job)
    return fields


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _model(state: ServerState) -> str:
    return "" if state.serving is None else state.serving.name


def request_span(run: Run, job: Job, outcome: Outcome, model: str, scope: Scope) -> RequestSpan:
    """The sequence as a span; attributes are those of OpenTelemetry's conventions for generative models."""
    reply, sampling = job.reply, job.request.sampling
    operation = "chat" if scope["path"].startswith("/v1/chat/") else "text_completion"
    seconds, first, queue = run.seconds(job), run.first_token_seconds(job), run.queue_seconds(job)
    # Spans want the time of day; only durations were measured, so that a clock that is set cannot bend them.
    start = time.time() - run.age
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "gtp-serve",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": job.request.rid,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.usage.input_tokens": reply.num_prompt,
        "gen_ai.usage.cache_read.input_tokens": reply.cached_tokens,
        "gen_ai.usage.output_tokens": len(reply.ids),
        "gen_ai.response.finish_reasons": (outcome,),
        "gtp_serve.weight_versions": tuple(span["version"] for span in reply.spans()),
        "gtp_serve.queue_seconds": queue,
        "gtp_serve.ttft_seconds": first,
        "http.route": scope["path"],
        "error.type": run.error_code(job) if outcome in _BAD_ENDS else None,
    }
    return RequestSpan(
        name=f"{operation} {model}",
        start=int(start * _NANOSECONDS),
        end=int((start + seconds) * _NANOSECONDS),
        first_token=None if first is None else int((start + first) * _NANOSECONDS),
        failed=outcome in _BAD_ENDS,
        parent={name.decode("latin-1"): value.decode("latin-1") for name, value in _carried(scope)},
        attributes={key: value for key, value in attributes.items() if value is not None},
    )


def _carried(scope: Scope) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in scope["headers"] if name in _CARRIED]
