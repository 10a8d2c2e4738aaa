"""A server's weight routes as calls: what it serves, what it wants, begin an update and see how it ends.

Only the standard library's HTTP; no torch.  A server's refusal is raised in its own words.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from gtp_serve.errors import Details, UnknownUpdate, UpdateFailed, UpdateRefused, UsageError
from gtp_serve.layout.spans import Shape, Shard
from gtp_serve.refit.orders import UpdateRecord

ANSWER_SECONDS = 30.0
"""For one answer; a begun update is asked for again and again rather than waited for in one call."""
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.02, 0.5
_MAX_BODY_BYTES = 1 << 30
_HIDDEN_BYTES = frozenset("\r\n\0")

_T = TypeVar("_T")


class ServedLayout(msgspec.Struct, frozen=True, kw_only=True):
    """What a server wants: its logical tensors and where they lie."""

    version: str
    dtype: str = ""
    tensors: dict[str, Shape]
    ranks: tuple[tuple[Shard, ...], ...]
    """Each engine rank's parameters."""

    def dtypes(self) -> dict[str, frozenset[str]]:
        """Types of the parameters that each logical tensor goes to."""
        found: dict[str, set[str]] = {}
        for shards in self.ranks:
            for shard in shards:
                for span in shard.spans:
                    found.setdefault(span.name, set()).add(shard.dtype)
        return {name: frozenset(types) for name, types in found.items()}


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: Any


class WeightsClient:
    """One server's weight routes.

    :param url: ``http://host:port`` or ``https://...``, with a path in front of the routes if there is one.
    :param key: the admin key, if the server has one.
    :raises UsageError: for a URL or a key that cannot be.
    """

    def __init__(self, url: str, key: str | None = None, *, answer_seconds: float = ANSWER_SECONDS) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no URL of a server", [("needed", "http://host:port")])
        if key is not None and (not key or not key.isascii() or _HIDDEN_BYTES & set(key)):
            raise UsageError("the admin key must be one line of ASCII")
        self.url, self.host = url, parts.hostname
        self._parts, self._seconds = parts, answer_seconds
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def status(self) -> dict[str, Any]:
        """``GET /weights`` as it is: what serves, what is under way, what has been."""
        return self._read(self._ask("GET", "/weights"), dict[str, Any])

    def layout(self) -> ServedLayout:
        """What the server wants."""
        return self._read(self._ask("GET", "/weights/layout"), ServedLayout)

    def begin(self, fields: Mapping[str, Any], *, seconds: float | None = None) -> UpdateRecord:
        """Start an update.

        :param fields: of ``POST /weights/updates``.
        :raises UpdateRefused: when it cannot begin; nothing has changed.
        """
        return self._read(self._ask("POST", "/weights/updates", fields, seconds=seconds), UpdateRecord)

    def begin_stream(
        self, fields: Mapping[str, str], body: Iterable[bytes], length: int, *, seconds: float
    ) -> UpdateRecord:
        """Start an update from a safetensors file that is sent along.

        :param length: of the whole body.
        """
        path = f"/weights/updates?{urlencode(fields)}"
        headers = {"content-type": "application/octet-stream", "content-length": str(length)}
        return self._read(self._send("POST", path, body, headers, seconds), UpdateRecord)

    def update(self, update: str) -> UpdateRecord:
        """How an update is.

        :raises UnknownUpdate: when the server knows none of this id.
        """
        return self._read(self._ask("GET", f"/weights/updates/{quote(update, safe='')}"), UpdateRecord)

    def abort(self, update: str, reason: str, *, seconds: float) -> None:
        """Drop an update, if it can still be dropped; no answer is no error."""
        with contextlib.suppress(UpdateRefused, UpdateFailed):
            path = f"/weights/updates/{quote(update, safe='')}/abort"
            self._ask("POST", path, {"reason": reason[:200]}, seconds=seconds)

    def wait(self, update: str, deadline: float) -> UpdateRecord:
        """The record once the update has ended.

        :param deadline: instant of ``time.monotonic``.
        :raises UpdateFailed: when it has not ended by then.
        """
        pause = _FIRST_POLL_SECONDS
        while True:
            record = self.update(update)
            if has_ended(record):
                return record
            left = deadline - time.monotonic()
            if left <= 0:
                raise UpdateFailed(
                    f"the server has not ended update {update} in time", [("its state", record.state)],
                    code="update-deadline",
                )  # fmt: skip
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, _LAST_POLL_SECONDS)

    # -- one call ----------------------------------------------------------------------------------

    def _ask(
        self, method: str, path: str, fields: Mapping[str, Any] | None = None, *, seconds: float | None = None
    ) -> _Answer:
        body = None if fields is None else msgspec.json.encode(fields)
        headers = {} if body is None else {"content-type": "application/json", "content-length": str(len(body))}
        return self._send(method, path, () if body is None else (body,), headers, seconds or self._seconds)

    def _send(
        self, method: str, path: str, body: Iterable[bytes], headers: Mapping[str, str], seconds: float
    ) -> _Answer:
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self.host, self._parts.port, timeout=seconds)
        try:
            connection.putrequest(method, self._parts.path.rstrip("/") + path)
            for name, value in {**self._headers, **headers}.items():
                connection.putheader(name, value)
            connection.endheaders()
            # A server that refuses early answers before it has read everything.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for piece in body:
                    if not secure and select.select([connection.sock], [], [], 0)[0]:
                        break
                    connection.send(piece)
            response = connection.getresponse()
            raw = response.read(_MAX_BODY_BYTES)
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise UpdateFailed(
                f"the server at {self._place()} does not answer", [("error", reason)], code="server-unreachable"
            ) from None
        finally:
            connection.close()
        return self._judge(response.status, raw)

    def _place(self) -> str:
        """Host and port; a URL may hold a password."""
        return self.host if self._parts.port is None else f"{self.host}:{self._parts.port}"

    def _judge(self, status: int, raw: bytes) -> _Answer:
        try:
            body = msgspec.json.decode(raw) if raw else None
        except msgspec.DecodeError:
            body = None
        if 200 <= status < 300:
            return _Answer(status, body)
        raise _error_of(status, body)

    def _read(self, answer: _Answer, kind: type[_T]) -> _T:
        try:
            return msgspec.convert(answer.body, kind)
        except msgspec.ValidationError as error:
            raise UpdateFailed(
                f"the server at {self._place()} answers something else than expected",
                [("error", str(error)), ("needed", "the same release of gtp-serve on both sides")],
                code="server-answer",
            ) from None


def has_ended(record: UpdateRecord) -> bool:
    """Whether nothing more will come of an update by itself."""
    return record.state in ("committed", "aborted", "torn") or (record.dry_run and record.state == "verified")


def raise_failure(record: UpdateRecord) -> None:
    """Nothing for an update that ended well.

    :raises UpdateFailed: in the server's words.
    """
    if record.state in ("aborted", "torn"):
        message = record.message or f"the server dropped update {record.id}"
        raise UpdateFailed(message, record.details, code=record.code or None)


def _error_of(status: int, body: Any) -> UpdateRefused | UpdateFailed:
    error = body.get("error") if isinstance(body, dict) else None
    error = error if isinstance(error, dict) else {}
    message = str(error.get("message") or f"the server answered {status}")
    code = str(error["code"]) if error.get("code") else None
    details: Details = [("field", str(error["param"]))] if error.get("param") else []
    if status == 404:
        return UnknownUpdate(message, details, code=code)
    if 400 <= status < 500 and status not in (408, 422):
        refused = UpdateRefused(message, details, code=code)
        refused.http_status = status
        return refused
    record = body.get("update") if isinstance(body, dict) else None
    if isinstance(record, dict):  # the message above joins what the record has apart
        with contextlib.suppress(msgspec.ValidationError):
            known = msgspec.convert(record, UpdateRecord)
            return UpdateFailed(known.message or message, known.details, code=known.code or code)
    return UpdateFailed(message, details, code=code)
