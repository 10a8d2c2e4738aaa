"""Tools of a chat: what a client may offer, and the calls of them that a reply holds as JSON.

Two forms are known: JSON inside ``<tool_call>`` tags, and a reply that is nothing but JSON, one call or a list.  Any
other form stays text.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import orjson

from gtp_serve.errors import RequestRejected
from gtp_serve.server.fields import read_text
from gtp_serve.server.openai.fields import MAX_TOOLS
from gtp_serve.server.schemas import describe

_OPEN = "<tool_call>"
_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def read_tools(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], frozenset[str]]:
    """(the tools as the template gets them, names that a reply may call).

    :raises RequestRejected: naming the tool at fault.
    """
    tools = given.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise RequestRejected(f"tools must be a list of at most {MAX_TOOLS} tools", param="tools")
    names = frozenset(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    choice = given.get("tool_choice", "auto")
    if choice not in ("none", "auto"):
        shown = f"'{choice[:64]}'" if isinstance(choice, str) else describe(choice)
        raise RequestRejected(
            f"tool_choice {shown} is not supported",
            [("possible", "none or auto")],
            code="not-supported",
            param="tool_choice",
        )
    return ([], frozenset()) if choice == "none" else (tools, names)


def _read_tool(tool: Any, path: str) -> str:
    if not isinstance(tool, dict):
        raise RequestRejected(f"{path} must be an object, not {describe(tool)}", param=path)
    if tool.get("type") != "function":
        raise RequestRejected(f'{path}.type must be "function"', param=f"{path}.type")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise RequestRejected(f"{path}.function must be an object, not {describe(function)}", param=f"{path}.function")
    return read_text(function, "name", prefix=f"{path}.function.", needed=True, limit=256) or ""


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
    """(the text without its calls, the calls as OpenAI writes them)."""
    rest, calls = _tagged(text, names)
    if calls:
        return rest.strip(), calls
    calls = _parse(text, names)
    return ("", calls) if calls else (text, [])


def _tagged(text: str, names: Collection[str]) -> tuple[str, list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []

    def taken(found: re.Match[str]) -> str:
        parsed = _parse(found[1], names)
        calls.extend(parsed)
        return "" if parsed else found[0]

    return _TAGGED.sub(taken, text), calls


def _parse(text: str, names: Collection[str]) -> list[dict[str, Any]]:
    """Calls of a text that is JSON; none unless all of it is calls of known tools."""
    try:
        value = orjson.loads(text.strip())
    except orjson.JSONDecodeError:
        return []
    found = [_call(one, names) for one in (value if isinstance(value, list) else [value])]
    return [] if None in found else [call for call in found if call is not None]


def _call(value: Any, names: Collection[str]) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": orjson.dumps(arguments).decode()}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


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
