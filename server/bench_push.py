"""Pushes new weights every so often while ``bench`` runs, and keeps what each cost."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from dataclasses import dataclass

from gtp_serve.errors import GtpServeError
from gtp_serve.refit.client import WeightsClient, has_ended
from gtp_serve.refit.versions import next_label

_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """One update; times in seconds since the run began."""

    version: str
    began: float
    ended: float
    stall_seconds: float = 0.0
    """In which no step ran."""
    error: str = ""


async def push_repeatedly(
    client: WeightsClient, path: str, every: float, began: float, pushes: list[Push], stop: asyncio.Event
) -> None:
    """Wait, push, note, again, until told to stop; a push that is under way then ends first."""
    while True:
        with suppress(TimeoutError):
            async with asyncio.timeout(every):
                await stop.wait()
        if stop.is_set():
            return
        pushes.append(await asyncio.to_thread(_push, client, path, began))


def _push(client: WeightsClient, path: str, began: float) -> Push:
    start = time.monotonic() - began
    version = ""
    try:
        version = next_label(str(client.status()["version"]))
        record = client.begin({"version": version, "source": {"kind": "disk", "path": os.path.abspath(path)}})
        while not has_ended(record):
            time.sleep(_POLL_SECONDS)
            record = client.update(record.id)
    except GtpServeError as error:
        return Push(version=version, began=start, ended=time.monotonic() - began, error=str(error))
    return Push(
        version=version,
        began=start,
        ended=time.monotonic() - began,
        stall_seconds=record.stall_seconds,
        error="" if record.state == "committed" else record.message or record.state,
    )
