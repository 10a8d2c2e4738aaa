"""One kept-alive HTTP/1.1 connection that reads server-sent events as they come; standard library only.

Small on purpose: a load generator's own work must not be what it measures.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from gtp_serve.errors import EngineFault, EnvironmentFault, UsageError

_MAX_LINE = 16 << 20
_SHOWN = 300


class Refused(EngineFault):
    """The server answered with an error."""

    default_code = "bench-failed"


def parse_url(url: str) -> SplitResult:
    """A server's address, with ``http://`` in front if nothing is.

    :raises UsageError: when it is none.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"'{url}' is no URL of a server", [("needed", "http://host:port")])
    return parts


class Connection:
    """A connection to one server, opened when it is first used and again when the server has closed it.

    :param seconds: of silence until a request counts as lost.
    """

    def __init__(self, url: SplitResult, key: str | None, seconds: float) -> None:
        self._url = url
        self._seconds = seconds
        self._key = key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get_json(self, path: str) -> Any:
        """The body of a GET.

        :raises EnvironmentFault: when nobody answers.
        :raises Refused: when the answer is an error.
        """
        return json.loads(b"".join([piece async for piece in self._ask("GET", path, b"")]))

    async def post_json(self, path: str, body: Mapping[str, Any]) -> Any:
        """The body of the answer to a POST; raises as ``get_json``."""
        return json.loads(b"".join([piece async for piece in self._ask("POST", path, json.dumps(body).encode())]))

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """The JSON of each event of a streamed answer, until ``[DONE]``."""
        rest = b""
        async for piece in self._ask("POST", path, json.dumps(body).encode()):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])

    def close(self) -> None:
        """Hang up."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def _ask(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Pieces of an answer's body as they come."""
        whole = False
        try:
            reader, writer = await self._open()
            writer.write(self._head(method, path, len(body)) + body)
            status, headers = await self._read_head(reader)
            async for piece in self._read_body(reader, headers):
                if status != 200:
                    raise Refused(f"{method} {path} was answered with {status}", [("answer", _words(piece))])
                yield piece
            whole = headers.get("connection") != "close"
            if status != 200:
                raise Refused(f"{method} {path} was answered with {status}")
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            words = str(error) or type(error).__name__
            raise EnvironmentFault(
                f"the server at {self._url.netloc} does not answer", [("error", words)], code="server-unreachable"
            ) from error
        finally:
            if not whole:
                self.close()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._streams is None or self._streams[0].at_eof():
            self.close()
            tls = ssl.create_default_context() if self._url.scheme == "https" else None
            port = self._url.port or (443 if tls else 80)
            async with asyncio.timeout(self._seconds):
                self._streams = await asyncio.open_connection(self._url.hostname, port, ssl=tls, limit=_MAX_LINE)
        return self._streams

    def _head(self, method: str, path: str, length: int) -> bytes:
        lines = [
            f"{method} {self._url.path.rstrip('/')}{path} HTTP/1.1",
            f"host: {self._url.netloc}",
            "content-type: application/json",
            f"content-length: {length}",
            *([] if self._key is None else [f"authorization: Bearer {self._key}"]),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        async with asyncio.timeout(self._seconds):
            line = await reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the connection was closed in the middle of an answer")
        return line.rstrip(b"\r\n")

    async def _read_head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        words = (await self._line(reader)).split()
        if len(words) < 2 or not words[0].startswith(b"HTTP/1."):
            raise ValueError("what answers does not speak HTTP/1.1")
        headers: dict[str, str] = {}
        while line := await self._line(reader):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip().lower()
        return int(words[1]), headers

    async def _read_body(self, reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        if headers.get("transfer-encoding") != "chunked":
            async with asyncio.timeout(self._seconds):
                yield await reader.readexactly(int(headers.get("content-length", "0")))
            return
        while size := int((await self._line(reader)).partition(b";")[0], 16):
            async with asyncio.timeout(self._seconds):
                yield await reader.readexactly(size)
            await self._line(reader)
        await self._line(reader)


def _words(body: bytes) -> str:
    """The error's own sentence, where it has our shape."""
    with suppress(ValueError, KeyError, TypeError):
        error = json.loads(body)["error"]
        return f"{error['code']}: {error['message']}"
    return body[:_SHOWN].decode("utf-8", "replace")
