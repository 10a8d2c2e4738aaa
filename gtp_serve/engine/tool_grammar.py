"""A reply that is nothing but calls of tools, as a Lark grammar: each call of a known name, with arguments that
match its JSON schema.  No torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

MAX_CALLS = 32
"""Of one reply."""


class Callee(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A function that may be called."""

    name: str
    parameters: dict[str, Any]
    """The JSON schema of its arguments: an object's."""


class ToolCalls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The text of a ``Grammar`` of kind ``tool_calls``, as JSON."""

    callees: tuple[Callee, ...]
    most: int
    """Calls of one reply, from 1 to MAX_CALLS; at least one is made."""
    tagged: bool
    """Each call in ``<tool_call>`` tags; else one JSON object, or a list of them."""
    key: str
    """What a call's arguments are named."""


def calls_lark(calls: ToolCalls, json_rule: Callable[[dict[str, Any]], str]) -> str:
    """The grammar.

    :param json_rule: a JSON schema as the body of a rule.
    :raises ValueError: when there is nothing to call, or a count out of range.
    """
    if not calls.callees:
        raise ValueError("there is no tool to call")
    if not 1 <= calls.most <= MAX_CALLS:
        raise ValueError(f"{calls.most} calls, not 1 to {MAX_CALLS}")
    first, separator = ("tagged", "\\n") if calls.tagged else ("call", ", ")
    several = first if calls.most == 1 else f'{first} ("{separator}" {first}){{0,{calls.most - 1}}}'
    if calls.tagged:
        start = f'{several}\ntagged: "<tool_call>\\n" call "\\n</tool_call>"'
    else:
        start = "call" if calls.most == 1 else f'call | "[" {several} "]"'
    rules = [f"start: {start}", f"call: {_one_of(range(len(calls.callees)))}"]
    for index, callee in enumerate(calls.callees):
        begin = f'{{"name": {_quoted(callee.name)}, {_quoted(calls.key)}: '
        rules.append(f'call{index}: {_quoted(begin)} arguments{index} "}}"')
        body = json_rule({"type": "object", **callee.parameters})
        rules.append(f"arguments{index}: {body}")
    return "\n".join(rules)


def _one_of(indices: Sequence[int]) -> str:
    return " | ".join(f"call{index}" for index in indices)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
