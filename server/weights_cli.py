"""``gtp-serve weights URL``: what a running server serves, what is on its way, what has been."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gtp_serve.server.push import add_connection_arguments, as_command_errors, client_of
from gtp_serve.sizes import format_gib

_HEAD = ("when (UTC)", "version", "from", "kind", "state", "read", "took", "stall", "why")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = "Show which weights a running server serves, and its last updates."
    add_connection_arguments(parser)
    parser.add_argument("--json", action="store_true", help="the server's own words")
    parser.add_argument("--last", metavar="N", type=int, default=10, help="updates to show (10)")


def run(args: argparse.Namespace) -> int:
    """Print it."""
    with as_command_errors():
        status = client_of(args).status()
    text = json.dumps(status, indent=2) if args.json else "\n".join(report(status, last=args.last))
    sys.stdout.write(text + "\n")
    return 0


def report(status: Mapping[str, Any], *, last: int = 10) -> list[str]:
    """The status for a person."""
    lines = [
        f"version   {status['version']}",
        f"state     {status['state']}" + (f": {status['torn']}" if status["torn"] else ""),
        f"digest    {status['digest'] or 'not computed yet (GET /weights/checksum does)'}",
        f"memory    {status['memory']}",
    ]
    if status["rollback_version"] is not None:
        lines.append(f"rollback  {status['rollback_version']}")
    if status["paused"]:
        lines.append("paused    no step runs until POST /resume")
    if status["sleeping"]:
        lines.append(f"released  {', '.join(status['sleeping'])}")
    records = [*([status["update"]] if status["update"] else []), *status["history"]]
    if not records:
        return [*lines, "", "no updates yet"]
    shown = records[: max(0, last)]
    more = len(records) - len(shown)
    return [*lines, "", *_table([_HEAD, *map(_row, shown)]), *([f"and {more} before"] if more else [])]


def _row(record: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        datetime.fromtimestamp(record["began"], UTC).strftime("%Y-%m-%d %H:%M:%S"),
        record["version"],
        record["base"],
        record["kind"],
        "dry run" if record["state"] == "verified" and record["dry_run"] else record["state"],
        format_gib(record["source_bytes"]) if record["source_bytes"] else "-",
        f"{record['seconds']['total']:.2f} s" if "total" in record["seconds"] else "-",
        f"{1000 * record['stall_seconds']:.1f} ms" if record["state"] == "committed" else "-",
        f"{record['code']}: {record['message']}" if record["code"] else "",
    )


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
