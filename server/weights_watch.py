"""Tells the log and the metrics of every weight update that ends, whoever asked for it."""

from __future__ import annotations

from typing import Any

from gtp_serve.errors import EngineFault
from gtp_serve.refit.orders import UpdateRecord, WeightsStatus
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.startup import Reporter
from gtp_serve.server.state import Client


async def watch_weights(client: Client, metrics: Metrics, reporter: Reporter) -> None:
    """Until the engine is gone."""
    status = client.weights
    known: frozenset[str] = frozenset()
    while True:
        new = [record for record in reversed(status.history) if record.id not in known]
        known = frozenset(record.id for record in status.history)
        for record in new:
            metrics.update_ended(record)
            level = "WARNING" if record.state in ("aborted", "torn") else "INFO"
            reporter.line(level, "weights", update_fields(record))
        try:
            status = await _next(client, status)
        except EngineFault:
            return


async def _next(client: Client, last: WeightsStatus) -> WeightsStatus:
    return await client.wait_weights(lambda now: now is not last)


def update_fields(record: UpdateRecord) -> dict[str, Any]:
    """An ended update as words of a log line."""
    total = record.seconds.get("total")
    return {
        "state": "dry_run" if record.state == "verified" else record.state,
        "version": record.version,
        "base": record.base,
        "kind": record.kind,
        "id": record.id,
        "seconds": None if total is None else round(total, 3),
        "stall_ms": round(1000 * record.stall_seconds, 2) if record.state == "committed" else None,
        "mib": round(record.source_bytes / (1 << 20), 1) if record.source_bytes else None,
        "code": record.code or None,
        "says": record.message or None,
    }
