"""Many clients at once, most of them good: streams, cancels, nonsense, slow readers, half-open sockets, bodies that
come byte by byte.  Each good answer is compared with what the server says to nobody else.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PATIENCE = 240.0
NEW = 24
"""Tokens of the longest answer."""
KINDS = {
    # what a client does: how often
    "stream": 60,
    "whole": 17,
    "cancel": 10,
    "bad": 5,
    "slow": 3,
    "half_open": 2,
    "bytewise": 3,
}
BAD = (
    b"{",
    b"[]",
    b'{"input_ids":[3],"sampling_params":{"max_new_tokens":-1}}',
    b'{"input_ids":[999999]}',
    b'{"input_ids":[]}',
    b'{"input_ids":[3],"no_such_field":1}',
    b'{"input_ids":[3],"sampling_params":{"temperature":1e999}}',
    b'{"x":' + b"[" * 1000 + b"]" * 1000 + b"}",
    b"\xff\xfe",
)

Expected = Mapping[str, Mapping[tuple[int, ...], Sequence[int]]]
"""By weight version and prompt."""


def body_of(prompt: Sequence[int], count: int, **fields: Any) -> bytes:
    """A greedy request."""
    sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return json.dumps({"input_ids": prompt, "sampling_params": sampling, **fields}).encode()


def ask_alone(url: str, prompts: Sequence[tuple[int, ...]]) -> dict[tuple[int, ...], list[int]]:
    """What the server says to each prompt when nothing else runs."""
    found = {}
    for prompt in prompts:
        reply = httpx.post(f"{url}/generate", content=body_of(prompt, NEW), trust_env=False, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        found[prompt] = reply.json()["output_ids"]
    return found


@dataclass
class Tally:
    """What came of everything."""

    done: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    crossed: int = 0
    """Answers of more than one version."""
    open_now: int = 0
    most_open: int = 0
    wrong: list[str] = field(default_factory=list)


class Storm:
    """Clients of one server.

    :param expected: may grow while the storm lasts.
    """

    def __init__(self, url: str, expected: Expected, seed: int) -> None:
        host, _, port = url.rpartition("//")[2].partition(":")
        self._place = (host, int(port))
        self._expected = expected
        self._rng = random.Random(seed)
        self.tally = Tally()

    def run(self, clients: int, *, rounds: int | None = None, seconds: float | None = None) -> Tally:
        """So many clients, each for so many requests or so long."""
        asyncio.run(self._all(clients, rounds, seconds))
        return self.tally

    async def _all(self, clients: int, rounds: int | None, seconds: float | None) -> None:
        end = time.monotonic() + seconds if seconds is not None else None
        await asyncio.gather(*(self._client(rounds, end) for _ in range(clients)))

    async def _client(self, rounds: int | None, end: float | None) -> None:
        done = 0
        while (rounds is None or done < rounds) and (end is None or time.monotonic() < end):
            done += 1
            kind = self._rng.choices(list(KINDS), list(KINDS.values()))[0]
            self.tally.open_now += 1
            self.tally.most_open = max(self.tally.most_open, self.tally.open_now)
            try:
                async with asyncio.timeout(PATIENCE):
                    await self._one(kind)
            except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
                self.tally.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            self.tally.open_now -= 1
            self.tally.done[kind] += 1

    async def _one(self, kind: str) -> None:
        prompts = list(next(iter(self._expected.values())))
        prompt, count = self._rng.choice(prompts), self._rng.choice((4, 12, NEW))
        if kind == "bad":
            await self._bad(self._rng.choice(BAD))
        elif kind == "half_open":
            await self._half_open()
        else:
            await self._good(kind, prompt, count)

    async def _open(self, small: bool = False) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not small:
            return await asyncio.open_connection(*self._place)
        end = socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        end.setblocking(False)
        await asyncio.get_running_loop().sock_connect(end, self._place)
        return await asyncio.open_connection(sock=end, limit=256)

    def _head(self, length: int) -> bytes:
        return (
            f"POST /generate HTTP/1.1\r\nhost: {self._place[0]}\r\ncontent-type: application/json\r\n"
            f"content-length: {length}\r\nconnection: close\r\n\r\n"
        ).encode()

    async def _good(self, kind: str, prompt: tuple[int, ...], count: int) -> None:
        reader, writer = await self._open(small=kind == "slow")
        try:
            body = body_of(prompt, count, stream=False if kind == "whole" else "delta")
            writer.write(self._head(len(body)))
            for piece in [body[at : at + 1] for at in range(len(body))] if kind == "bytewise" else [body]:
                writer.write(piece)
                await writer.drain()
                if kind == "bytewise":
                    await asyncio.sleep(0.001)
            if kind == "cancel":
                for _ in range(self._rng.randrange(6)):
                    await reader.readline()
                return
            raw = await self._read(reader, slow=kind == "slow")
        finally:
            writer.close()
        self._judge(kind, prompt, count, raw)

    async def _read(self, reader: asyncio.StreamReader, *, slow: bool) -> bytes:
        found = b""
        while chunk := await reader.read(64 if slow else 1 << 16):
            found += chunk
            if slow:
                await asyncio.sleep(0.01)
        return found

    def _judge(self, kind: str, prompt: tuple[int, ...], count: int, raw: bytes) -> None:
        head, _, rest = raw.partition(b"\r\n\r\n")
        if b" 200 " not in head.partition(b"\r\n")[0]:
            self.tally.wrong.append(f"{kind}: {raw[:300]!r}")
            return
        if kind == "whole":
            reply = json.loads(rest)
            ids, meta = reply["output_ids"], reply["meta_info"]
        else:
            parts = [json.loads(line[6:]) for line in rest.splitlines() if line.startswith(b"data: {")]
            if rest.count(b"data: [DONE]") != 1 or not parts or "meta_info" not in parts[-1]:
                self.tally.wrong.append(f"{kind}: it has not one end: {rest[-300:]!r}")
                return
            ids, meta = [token for part in parts for token in part["output_ids"]], parts[-1]["meta_info"]
        self.tally.tokens += len(ids)
        self._compare(kind, prompt, count, ids, meta)

    def _compare(self, kind: str, prompt: tuple[int, ...], count: int, ids: list[int], meta: Any) -> None:
        spans, reason = meta["weight_versions"], meta["finish_reason"]
        first = spans[0]["version"]
        sure = spans[0]["end"]  # what follows other weights' tokens is nobody's answer to the prompt
        self.tally.crossed += len(spans) > 1
        expected = self._expected.get(first, {}).get(prompt)
        if expected is None or list(expected[:sure]) != ids[:sure] or len(ids) != count or reason["type"] != "length":
            self.tally.wrong.append(f"{kind}: {prompt} of {first}: {ids} {reason}, alone {expected}")

    async def _bad(self, body: bytes) -> None:
        reader, writer = await self._open()
        try:
            writer.write(self._head(len(body)) + body)
            raw = await reader.read()
        finally:
            writer.close()
        status = raw[9:12]
        if not status.startswith(b"4") or b'"error"' not in raw:
            self.tally.wrong.append(f"bad: {body[:60]!r} was answered with {raw[:300]!r}")

    async def _half_open(self) -> None:
        _, writer = await self._open()
        try:
            head = self._head(100)
            writer.write(head[: self._rng.randrange(len(head) + 1)])
            await asyncio.sleep(self._rng.choice((0.1, 1.0, 3.0)))
        finally:
            writer.close()


# -- what a process holds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """Of one process."""

    rss: int
    threads: int
    descriptors: int


def held_by(pid: int) -> Held:
    """Memory (bytes), threads and descriptors."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return Held(int(fields["VmRSS"].split()[0]) << 10, int(fields["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))


def children_of(pid: int) -> list[int]:
    """Processes that it has started, and theirs."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
        found += [int(child), *children_of(int(child))]
    return found
