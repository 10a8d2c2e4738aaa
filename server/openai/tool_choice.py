"""Which of a chat's tools a reply may call, whether it must, and the grammar that makes it do so.

A call that must be made is written as the model's template writes calls: in ``<tool_call>`` tags where it knows them,
else as bare JSON.  The whole reply is then one call, or several.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gtp_serve.engine.tool_grammar import MAX_CALLS, Callee, ToolCalls
from gtp_serve.errors import RequestRejected
from gtp_serve.request import Grammar
from gtp_serve.server.fields import check_names, read_choice, read_text
from gtp_serve.server.openai.fields import MAX_TOOLS
from gtp_serve.server.schemas import describe

_WORDS = ("none", "auto", "required")


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """The tools of one chat."""

    tools: tuple[dict[str, Any], ...] = ()
    """As the template gets them."""
    names: frozenset[str] = frozenset()
    """What a reply may call."""
    must: bool = False
    """It has to."""
    single: bool = False
    """One call only, since one function is named."""

    def grammar(self, template: str, *, one_call: bool) -> Grammar | None:
        """What the whole reply must match; None: any text.

        :param template: the chat template's source.
        :param one_call: of several calls only the first is wanted.
        :raises RequestRejected: for parameters that are not those of an object.
        """
        if not self.must:
            return None
        functions = [(f"tools[{at}].function", tool["function"]) for at, tool in enumerate(self.tools)]
        calls = ToolCalls(
            callees=tuple(_callee(one, path) for path, one in functions if one["name"] in self.names),
            most=1 if one_call or self.single else MAX_CALLS,
            tagged="<tool_call>" in template,
            key="parameters" if "<tool_call>" not in template and '"parameters": ' in template else "arguments",
        )
        try:
            told = {name: getattr(calls, name) for name in ("most", "tagged", "key")}
            callees = [{"name": one.name, "parameters": one.parameters} for one in calls.callees]
            text = orjson.dumps({**told, "callees": callees}).decode()
        except (orjson.JSONEncodeError, RecursionError):
            raise RequestRejected("tools are nested too deeply", code="bad-grammar", param="tools") from None
        return Grammar(kind="tool_calls", text=text)


def _callee(function: Mapping[str, Any], path: str) -> Callee:
    parameters = function.get("parameters")
    if parameters is None:
        return Callee(name=function["name"], parameters={"properties": {}, "additionalProperties": False})
    if not isinstance(parameters, dict):
        raise RequestRejected(
            f"{path}.parameters must be a JSON schema, not {describe(parameters)}", param=f"{path}.parameters"
        )
    if parameters.get("type", "object") != "object":
        raise RequestRejected(
            f'{path}.parameters.type must be "object": arguments have names', param=f"{path}.parameters.type"
        )
    return Callee(name=function["name"], parameters=parameters)


def read_offer(given: Mapping[str, Any]) -> Offer:
    """``tools`` and ``tool_choice``.

    :raises RequestRejected: naming the tool or the field at fault.
    """
    tools = given.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise RequestRejected(f"tools must be a list of at most {MAX_TOOLS} tools", param="tools")
    names = [_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    choice = given.get("tool_choice", "auto")
    if isinstance(choice, dict):
        return _read_named(choice, tuple(tools), names)
    word = read_choice({"tool_choice": choice}, "tool_choice", _WORDS, "auto")
    if word == "none":
        return Offer()
    if word == "required" and not tools:
        raise RequestRejected("tool_choice required needs tools", [("send", "tools")], param="tool_choice")
    return Offer(tools=tuple(tools), names=frozenset(names), must=word == "required")


def _read_tool(tool: Any, path: str) -> str:
    if not isinstance(tool, dict):
        raise RequestRejected(f"{path} must be an object, not {describe(tool)}", param=path)
    return _function_name(tool, path)


def _function_name(value: Mapping[str, Any], path: str) -> str:
    if value.get("type") != "function":
        raise RequestRejected(f'{path}.type must be "function"', param=f"{path}.type")
    function = value.get("function")
    if not isinstance(function, dict):
        raise RequestRejected(f"{path}.function must be an object, not {describe(function)}", param=f"{path}.function")
    return read_text(function, "name", prefix=f"{path}.function.", needed=True, limit=256) or ""


def _read_named(choice: Mapping[str, Any], tools: tuple[dict[str, Any], ...], names: Sequence[str]) -> Offer:
    """A function, or the list of those that are allowed."""
    if choice.get("type") != "allowed_tools":
        check_names(choice, ("type", "function"), "tool_choice.")
        name = _function_name(choice, "tool_choice")
        _check_known(name, names, "tool_choice.function.name")
        return Offer(tools=tools, names=frozenset({name}), must=True, single=True)
    check_names(choice, ("type", "allowed_tools"), "tool_choice.")
    allowed, path = choice.get("allowed_tools"), "tool_choice.allowed_tools"
    if not isinstance(allowed, dict):
        raise RequestRejected(f"{path} must be an object, not {describe(allowed)}", param=path)
    check_names(allowed, ("mode", "tools"), f"{path}.")
    mode = read_choice(allowed, "mode", ("auto", "required"), "auto", f"{path}.")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed or not all(isinstance(one, dict) for one in listed):
        raise RequestRejected(f"{path}.tools must be a list of functions that is not empty", param=f"{path}.tools")
    chosen = []
    for index, one in enumerate(listed):
        chosen.append(_function_name(one, f"{path}.tools[{index}]"))
        _check_known(chosen[-1], names, f"{path}.tools[{index}].function.name")
    return Offer(tools=tools, names=frozenset(chosen), must=mode == "required")


def _check_known(name: str, names: Collection[str], param: str) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, sorted(names), n=1)
        raise RequestRejected(
            f"{param} '{name[:64]}' is the name of no tool here", param=param, did_you_mean=near[0] if near else None
        )
