"""Reads a request's body and parses it as JSON, with every limit checked before it costs anything.

Refused: too many bytes, too slow, not UTF-8, NaN and infinities, half surrogates, deep nesting, a double key.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import orjson
from starlette.requests import Request

from gtp_serve.errors import RequestRejected
from gtp_serve.server.json_place import path_at

MAX_BODY_BYTES = 32 << 20
MAX_BODY_STRINGS = 100_000
MAX_BODY_DEPTH = 128
"""Objects and lists inside one another."""
BODY_TIMEOUT_SECONDS = 60.0
_DISCARDED_TIMES = 4
"""A body up to so many times its limit is read to its end before it is refused: closing earlier would lose the
answer.
"""
_LONG_BODY_BYTES = 4 << 20
"""From here on parsing leaves the event loop."""


class BodyTooLarge(RequestRejected):
    """More bytes than a body may have."""

    default_code = "body-too-large"
    http_status = 413


class BodyTooSlow(RequestRejected):
    """The body did not arrive in time."""

    default_code = "body-too-slow"
    http_status = 408


class WrongMediaType(RequestRejected):
    """The body does not claim to be JSON."""

    default_code = "wrong-media-type"
    http_status = 415


async def read_json_object(
    request: Request, *, max_bytes: int = MAX_BODY_BYTES, max_strings: int = MAX_BODY_STRINGS
) -> dict[str, Any]:
    """The body as a JSON object.

    :raises RequestRejected: with the reason; 408, 413 and 415 where they fit, else 400.
    :raises ClientDisconnect: when the client left before the body was complete.
    """
    check_media_type(request.headers.get("content-type", ""))
    check_encoding(request.headers.get("content-encoding", ""))
    raw = await _read_body(request, max_bytes)
    if len(raw) > _LONG_BODY_BYTES:
        return await asyncio.to_thread(parse_json_object, raw, max_strings)
    return parse_json_object(raw, max_strings)


def check_media_type(content_type: str) -> None:
    """JSON or nothing: a browser sends no JSON across origins unasked, so no foreign page can start work.

    :raises WrongMediaType: for anything else.
    """
    media = content_type.partition(";")[0].strip().lower()
    if media in ("", "application/json") or (media.startswith("application/") and media.endswith("+json")):
        return
    raise WrongMediaType(f"content type '{media[:100]}' is not JSON", [("send", "content-type: application/json")])


def check_encoding(content_encoding: str) -> None:
    """As it is, or not at all: what a small packed body unpacks to has no bound.

    :raises WrongMediaType: for anything else.
    """
    name = content_encoding.strip().lower()
    if name not in ("", "identity"):
        raise WrongMediaType(f"content encoding '{name[:100]}' is not taken", [("send", "the JSON as it is")])


async def _read_body(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isdigit() and (len(length) > 18 or int(length) > _DISCARDED_TIMES * limit):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            return await _collect(request, limit)
    except TimeoutError:
        raise BodyTooSlow(f"the body did not arrive within {BODY_TIMEOUT_SECONDS:g} s") from None


async def _collect(request: Request, limit: int) -> bytes:
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > _DISCARDED_TIMES * limit:
            raise _too_large(limit)
        if size <= limit:
            body += chunk
    if size > limit:
        raise _too_large(limit)
    return bytes(body)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit >> 20} MiB")


def parse_json_object(raw: bytes, max_strings: int = MAX_BODY_STRINGS) -> dict[str, Any]:
    """A JSON object, strictly.

    :raises RequestRejected: naming what is wrong; of the body the message has names of fields at most, never values.
    """
    if not raw.strip():
        raise RequestRejected("the body is empty", [("send", "a JSON object")], code="invalid-json")
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _no_json(error) from None
    if not isinstance(value, dict):
        kind = _JSON_NAMES.get(type(value), "something else")
        raise RequestRejected(f"the body is {kind}, not a JSON object", code="invalid-json")
    _refuse_double_keys(raw, value, max_strings)
    return value


def _no_json(error: orjson.JSONDecodeError) -> RequestRejected:
    """Which field it is, and in words what people meet most."""
    text, at = error.doc, error.pos
    place = path_at(text, at) if isinstance(text, str) else None
    where = "" if place is None else f" at {place}"
    reason = str(error)
    if _NO_NUMBER.match(text, at):
        reason = f"NaN and infinities are no numbers in JSON (character {at})"
    elif "surrogate" in reason and "\\u" in text[at : at + 2]:
        reason = f"half of a surrogate pair is no character (character {at})"
    return RequestRejected(f"the body is not valid JSON{where}: {reason}", code="invalid-json", param=place)


_NO_NUMBER = re.compile(r"[+-]?(NaN|nan|Infinity|inf)")
_JSON_NAMES = {
    list: "a list",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def _refuse_double_keys(raw: bytes, value: dict[str, Any], max_strings: int) -> None:
    """Parsers differ on which of two equal keys wins, so neither does.

    The parser keeps one of them, so the body's count of keys is larger than the value's.  ``raw`` is valid
    JSON here: with the escaped backslashes and then the escaped quotes taken out, quotes are exactly the
    borders of strings.
    """
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    if plain.count(b'"') > 2 * max_strings:
        raise BodyTooLarge(f"the body has more than {max_strings} strings")
    parts = plain.split(b'"')
    written = sum(1 for part in parts[2::2] if part.lstrip()[:1] == b":")
    kept = Counter(_keys(value))
    if written != kept.total():
        names = Counter(
            name for name, after in zip(parts[1::2], parts[2::2], strict=False) if after.lstrip()[:1] == b":"
        )
        double = next((n for n, count in names.items() if count > kept[n.decode("utf-8", "replace")]), b"")
        shown = double.decode("utf-8", "replace")[:64]
        raise RequestRejected(f"the key '{shown}' comes twice in one object", code="duplicate-key", param=shown or None)


def _keys(value: Any) -> Iterator[str]:
    """All keys in a value, however they are nested.

    A loop and not a recursion: the parser allows more levels than a call stack that is half used has left.

    :raises RequestRejected: below the deepest level that is taken.
    """
    level: list[Any] = [value]
    for _ in range(MAX_BODY_DEPTH):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                yield from one
                below += one.values()
            elif isinstance(one, list) and not set(map(type, one)).isdisjoint((dict, list)):
                below += one
        level = [one for one in below if isinstance(one, dict | list)]
        if not level:
            return
    raise RequestRejected(f"the body is nested more than {MAX_BODY_DEPTH} levels deep", code="invalid-json")
