"""``gtp-serve push URL --ckpt PATH``: new weights for a running server, from its disk or sent from here.

Exit code 0 when they serve (or a dry run found them good), 7 when the server did not take them.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import msgspec

from gtp_serve.errors import EnvironmentFault, GtpServeError, UpdateFailed, UpdateRefused, UsageError
from gtp_serve.refit.client import WeightsClient, has_ended
from gtp_serve.refit.orders import InFlight, Memory, UpdateRecord
from gtp_serve.refit.versions import next_label
from gtp_serve.server.admin_key import API_KEY_VARIABLE, find_admin_key
from gtp_serve.sizes import format_gib, parse_size

_ITERATION = re.compile(r"iter_0*(\d+)")
_POLL_SECONDS = 0.2
_STREAM_SECONDS = 3600.0
"""For the server to say something while it takes a body."""
_PHASES = ("open", "plan", "transfer", "verify")


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Which server, and the key to it."""
    parser.add_argument("url", metavar="URL", help="of the server, for example http://127.0.0.1:30000")
    parser.add_argument("--admin-key-file", metavar="FILE", help="file with the server's admin key")
    parser.add_argument("--admin-key", "--key", metavar="KEY", help="the key itself (or GTP_SERVE_ADMIN_KEY)")


def client_of(args: argparse.Namespace) -> WeightsClient:
    """The client that those arguments ask for."""
    url = args.url if "//" in args.url else f"http://{args.url}"
    key = find_admin_key(args.admin_key, args.admin_key_file, os.environ)
    # A server without an admin key may still have one for all routes.
    return WeightsClient(url, key or os.environ.get(API_KEY_VARIABLE) or None)


@contextmanager
def as_command_errors() -> Iterator[None]:
    """A server's refusal as what the command fails with: a refused request is no bug of the command."""
    try:
        yield
    except UpdateRefused as error:
        hint = [("try", "--admin-key-file FILE, with the server's key")] if error.http_status == 401 else []
        raise UpdateFailed(error.message, [*error.details, *hint], code=error.code) from None
    except UpdateFailed as error:
        if error.code != "server-unreachable":
            raise
        raise EnvironmentFault(error.message, error.details, code=error.code) from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = "Have a running server take new weights. The old ones serve until the new ones are verified."
    add_connection_arguments(parser)
    parser.add_argument("--ckpt", metavar="PATH", required=True, help="checkpoint, as the server's machine sees it")
    parser.add_argument("--stream", action="store_true", help="read the checkpoint here and send it over HTTP")
    parser.add_argument("--iteration", metavar="N", type=int, help="of a Megatron checkpoint (newest)")
    parser.add_argument("--version", metavar="LABEL", help="of the new weights (the iteration, or the next number)")
    parser.add_argument("--base", metavar="LABEL", help="refuse unless this version serves")
    parser.add_argument("--in-flight", metavar="HOW", help="running requests: keep, recompute, wait, abort (keep)")
    parser.add_argument("--memory", metavar="HOW", help="staged or inplace (the server's)")
    parser.add_argument("--deadline", metavar="S", type=float, help="seconds (the server's --refit-timeout)")
    parser.add_argument("--max-rate", metavar="SIZE", help="read at most so much a second, for example 500MiB")
    parser.add_argument("--dry-run", action="store_true", help="load and verify, then drop it again")
    parser.add_argument("--json", action="store_true", help="print the update's record")


def run(args: argparse.Namespace) -> int:
    """Push, wait until the update has ended, print what came of it."""
    _check(args)
    client = client_of(args)
    with as_command_errors():
        live = str(client.status()["version"])
        fields = _fields(args, live)
        record = _begin_stream(client, args, fields) if args.stream else _begin_disk(client, args, fields)
        record = _wait(client, record, quiet=args.json)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(record)).decode() + "\n")
    if record.state not in ("committed", "verified"):
        raise UpdateFailed(
            f"version {record.version} was not taken: {record.message or record.state}",
            [*record.details, ("serves", _serving_now(client, live))],
            code=record.code or None,
        )
    if not args.json:
        sys.stdout.write("\n".join(report(record)) + "\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    for option, given, words in (
        ("--in-flight", args.in_flight, get_args(InFlight)),
        ("--memory", args.memory, get_args(Memory)),
    ):
        if given is not None and given not in words:
            raise UsageError(f"{option} '{given}' is not possible", [("possible", ", ".join(words))])
    if args.stream and args.max_rate:
        raise UsageError("--max-rate is for a checkpoint on the server's disk", [("try", "without --stream")])


def _fields(args: argparse.Namespace, live: str) -> dict[str, Any]:
    fields = {
        "version": args.version or default_version(args.ckpt, args.iteration, live),
        "base": args.base,
        "in_flight": args.in_flight,
        "memory": args.memory,
        "deadline_seconds": args.deadline,
        "dry_run": args.dry_run or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def default_version(path: str, iteration: int | None, live: str) -> str:
    """The iteration that is pushed, if it is told and above what serves; else the number after what serves."""
    match = _ITERATION.fullmatch(Path(path).name)
    number = iteration if iteration is not None else int(match.group(1)) if match is not None else None
    if number is not None and (not live.isdecimal() or number > int(live)):
        return str(number)
    return next_label(live)


def _begin_disk(client: WeightsClient, args: argparse.Namespace, fields: dict[str, Any]) -> UpdateRecord:
    source: dict[str, Any] = {"kind": "disk", "path": os.path.abspath(args.ckpt)}
    if args.iteration is not None:
        source["iteration"] = args.iteration
    if args.max_rate is not None:
        source["max_bytes_per_second"] = parse_size(args.max_rate)
    return client.begin({**fields, "source": source})


def _begin_stream(client: WeightsClient, args: argparse.Namespace, fields: dict[str, Any]) -> UpdateRecord:
    # Reading a checkpoint needs the loaders, which the other way does not wait for.
    from gtp_serve.server.push_stream import open_stream

    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in fields.items()}
    with open_stream(Path(args.ckpt), args.iteration) as stream:
        return client.begin_stream(texts, stream.chunks(), stream.length, seconds=_STREAM_SECONDS)


def _wait(client: WeightsClient, record: UpdateRecord, *, quiet: bool) -> UpdateRecord:
    """The record once the update has ended; an interrupted wait aborts it."""
    said = ""
    try:
        while not has_ended(record):
            if record.state != said and not quiet and sys.stderr.isatty():
                said = record.state
                sys.stderr.write(f"{said} version {record.version} ...\n")
            time.sleep(_POLL_SECONDS)
            record = client.update(record.id)
    except KeyboardInterrupt:
        client.abort(record.id, "gtp-serve push was interrupted", seconds=5.0)
        raise
    return record


def _serving_now(client: WeightsClient, live: str) -> str:
    with suppress(GtpServeError):
        now = client.status()
        return f"nothing: {now['torn']}" if now["torn"] else f"version {now['version']}, as before"
    return f"version {live}, when last seen"


def report(record: UpdateRecord) -> list[str]:
    """An update that was good, for a person."""
    done = "would be taken" if record.state == "verified" else "serves"
    lines = [f"version {record.version} {done} (before: {record.base})"]
    seconds = record.seconds
    transfer = seconds.get("transfer", 0.0)
    if record.source_bytes:
        rate = f" ({format_gib(int(record.source_bytes / transfer))}/s)" if transfer > 0 else ""
        lines.append(f"  read    {format_gib(record.source_bytes)}{rate}")
    words = [f"{phase} {seconds[phase]:.2f} s" for phase in (*_PHASES, "wait") if phase in seconds]
    lines.append(f"  took    {seconds.get('total', 0.0):.2f} s" + (f": {', '.join(words)}" if words else ""))
    if record.state == "committed":
        lines.append(f"  stall   {1000 * record.stall_seconds:.1f} ms")
    if record.digest:
        lines.append(f"  digest  {record.digest}")
    return lines
