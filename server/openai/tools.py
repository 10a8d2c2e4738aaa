"""Calls of tools that a chat's messages and its reply hold as JSON.

Two forms are known: JSON inside ``<tool_call>`` tags, and a reply that is nothing but JSON, one call or a list.  Any
other form stays text.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator
from typing import Any

import orjson

from gtp_serve.errors import RequestRejected
from gtp_serve.server.schemas import describe

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


def plain_calls(message: dict[str, Any], path: str) -> dict[str, Any]:
    """A message with the arguments of its tool calls as objects, which is what templates are written for."""
    calls = message.get("tool_calls")
    if calls is None:
        return message
    if not isinstance(calls, list):
        raise RequestRejected(f"{path}.tool_calls must be a list, not {describe(calls)}", param=f"{path}.tool_calls")
    return {**message, "tool_calls": [_plain_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]}


def _plain_call(call: Any, path: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise RequestRejected(f"{path}.function must be an object, not {describe(function)}", param=f"{path}.function")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            param = f"{path}.function.arguments"
            raise RequestRejected(f"{param} must be JSON", code="invalid-json", param=param) from None
    return {**call, "function": {**function, "arguments": arguments}}


def split_calls(text: str, names: Collection[str]) -> tuple[str, list[dict[str, Any]]]:
    """(the text without its calls, the calls as OpenAI writes them).

    Arguments are told as they stand in the text: no number is rounded, no key is moved.
    """
    rest, calls = _tagged(text, names)
    if calls:
        return rest.strip(), calls
    calls = _bare(text, names)
    return ("", calls) if calls else (text, [])


def _tagged(text: str, names: Collection[str]) -> tuple[str, list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []
    kept: list[str] = []
    at = 0
    while (begin := text.find(_OPEN, at)) >= 0:
        found, end = _values(text, begin + len(_OPEN), names)
        end = _skip(text, end)
        if not found or not text.startswith(_CLOSE, end):  # not one of ours, as it seems: it stays
            kept.append(text[at : begin + len(_OPEN)])
            at = begin + len(_OPEN)
            continue
        kept.append(text[at:begin])
        calls += found
        at = end + len(_CLOSE)
    return "".join([*kept, text[at:]]), calls


def _bare(text: str, names: Collection[str]) -> list[dict[str, Any]]:
    """Calls of a text that is JSON; none unless all of it is calls of known tools."""
    found, end = _values(text, 0, names)
    return found if _skip(text, end) == len(text) else []


def _values(text: str, at: int, names: Collection[str]) -> tuple[list[dict[str, Any]], int]:
    """(the call or the list of calls that begins there, where it ends); none when it is anything else."""
    at = _skip(text, at)
    try:
        if not text.startswith("[", at):
            call, at = _call(text, at, names)
            return [call], at
        found: list[dict[str, Any]] = []
        while not found or text.startswith(",", at):
            call, at = _call(text, _skip(text, at + 1), names)
            found.append(call)
            at = _skip(text, at)
        return (found, at + 1) if text.startswith("]", at) else ([], at)
    except (ValueError, RecursionError):
        return [], at


def _call(text: str, at: int, names: Collection[str]) -> tuple[dict[str, Any], int]:
    """:raises ValueError: when no call begins there."""
    members, end = _members(text, at)
    name = members.get("name", ("", None))[1]
    raw, arguments = members.get("arguments", members.get("parameters", ("", None)))
    if not isinstance(name, str) or name not in names or not isinstance(arguments, dict):
        raise ValueError("not a call")
    function = {"name": name, "arguments": raw}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}, end


def _members(text: str, at: int) -> tuple[dict[str, tuple[str, Any]], int]:
    """Of the object that begins there, each value as it is written and as it is read.

    :raises ValueError: when none does.
    """
    if not text.startswith("{", at):
        raise ValueError("not an object")
    found: dict[str, tuple[str, Any]] = {}
    while not found or text.startswith(",", at):
        key, at = _JSON.raw_decode(text, _skip(text, at + 1))
        at = _skip(text, at)
        if not isinstance(key, str) or not text.startswith(":", at):
            raise ValueError("not a member")
        begin = _skip(text, at + 1)
        value, end = _JSON.raw_decode(text, begin)
        found[key] = (text[begin:end], value)
        at = _skip(text, end)
    if not text.startswith("}", at):
        raise ValueError("not an object")
    return found, at + 1


def _skip(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_JSON = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_no_constant)
"""Numbers are not looked at, so that none is too long."""


class ToolText:
    """A reply's text as it comes: what may be the beginning of a call is held until the reply is over."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._told = False

    def push(self, text: str) -> str:
        """Text that is certainly no call."""
        self._held += text
        start = self._held.lstrip()
        if not self._told and (not start or start[0] in "{["):
            return ""
        at = self._held.find(_OPEN)
        safe = at if at >= 0 else len(self._held) - next(self._overlaps())
        told, self._held = self._held[:safe], self._held[safe:]
        self._told = self._told or bool(told)
        return told

    def _overlaps(self) -> Iterator[int]:
        """Lengths of the text's ends that begin a tag, longest first; 0 at last."""
        for length in range(min(len(_OPEN) - 1, len(self._held)), 0, -1):
            if self._held.endswith(_OPEN[:length]):
                yield length
        yield 0

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """(the rest of the text, the calls)."""
        return (_tagged if self._told else split_calls)(self._held, self._names)
