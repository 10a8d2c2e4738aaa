"""Which texts are calls of tools, whole and as they come."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtp_serve.errors import RequestRejected
from gtp_serve.server.openai.tool_choice import read_offer
from gtp_serve.server.openai.tools import ToolText, plain_calls, split_calls

NAMES = {"add", "now"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": [1, "}"]}}\n</tool_call>'
PIECES = ["a", " ", "\n", "<", "<tool_call>", "</tool_call>", CALL, "{", '{"name": "now"', "[1]", "<tool"]


def told(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize(
    ("text", "rest", "calls"),
    [
        ("hello", "hello", []),
        (CALL, "", [("add", {"a": [1, "}"]})]),
        (f"so\n{CALL}\nand {CALL}", "so\n\nand", [("add", {"a": [1, "}"]})] * 2),
        ('<tool_call>[{"name": "now", "arguments": {}}]</tool_call>', "", [("now", {})]),
        ('{"name": "now", "parameters": {}}', "", [("now", {})]),
        ('{"name": "other", "parameters": {}}', '{"name": "other", "parameters": {}}', []),
        ('{"name": ["add"], "parameters": {}}', '{"name": ["add"], "parameters": {}}', []),
        ('{"name": "add", "parameters": 1}', '{"name": "add", "parameters": 1}', []),
        ('[{"name": "add", "arguments": {}}, 1]', '[{"name": "add", "arguments": {}}, 1]', []),
        ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", []),
        ("<tool_call>", "<tool_call>", []),
        ("[]", "[]", []),
    ],
)
def test_calls_are_taken_out_of_a_text(text: str, rest: str, calls: list[Any]) -> None:
    found_rest, found = split_calls(text, NAMES)

    assert (found_rest, told(found)) == (rest, calls)


@given(st.data())
def test_text_that_comes_in_pieces_is_told_once_and_has_the_same_calls(data: Any) -> None:
    parts = st.sampled_from(
        ["a", " ", "\n", "<", "<tool_call>", "</tool_call>", CALL, "{", '{"name": "now"', "[1]", "<tool"]
    )
    text = "".join(data.draw(st.lists(parts, max_size=6)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    held, got = ToolText(NAMES), ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        got += held.push(text[start:end])
    rest, calls = held.finish()

    whole_rest, whole_calls = split_calls(text, NAMES)
    assert told(calls) == told(whole_calls)
    assert (got + rest).strip() == whole_rest.strip()


def test_arguments_reach_the_template_as_objects() -> None:
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}]}

    (call,) = plain_calls(message, "messages[0]")["tool_calls"]

    assert call == {"id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    with pytest.raises(RequestRejected) as caught:
        plain_calls({"tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}, "messages[0]")
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        (1, "tools"),
        ([1], "tools[0]"),
        ([{"type": "code"}], "tools[0].type"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": 1}}], "tools[0].function.name"),
    ],
)
def test_wrong_tools_are_named(tools: Any, param: str) -> None:
    with pytest.raises(RequestRejected) as caught:
        read_offer({"tools": tools})

    assert caught.value.param == param
