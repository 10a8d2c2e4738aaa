"""Where in a JSON text something is: the path of the value that a position lies in, as the API writes paths."""

from __future__ import annotations

import re

_MOST_CHARS, _MOST_PARTS = 256 << 10, 4096
"""Farther in no place is told: it would cost more than it is worth."""
_MOST_PATH = 200
_PART = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[{}\[\],:]', re.DOTALL)
"""A string, which the text may end in, or a sign.  It matches wherever a quote is, so it never looks back."""
_PLAIN = re.compile(r"[\w.-]{1,64}", re.ASCII)


def path_at(text: str, position: int) -> str | None:
    """For example ``sampling_params.temperature`` or ``messages[0].content``.

    :param position: index of a character; what comes before it is valid JSON so far.
    :return: None: the top level, too far in, or below a key that is no plain word.
    """
    if position > _MOST_CHARS:
        return None
    stack: list[str | int] = []
    """Of each open object the key whose value comes, of each open list the index."""
    string = ""
    for count, found in enumerate(_PART.finditer(text[:position])):
        part = found[0]
        if count == _MOST_PARTS:
            return None
        if part == "{":
            stack.append("")
        elif part == "[":
            stack.append(0)
        elif part in "}]":
            if not stack:
                return None
            stack.pop()
        elif part == ":":
            if stack and isinstance(stack[-1], str):
                stack[-1] = string
        elif part == ",":
            if stack:
                stack[-1] = stack[-1] + 1 if isinstance(stack[-1], int) else ""
        else:
            string = part[1:-1]
    return _spelled(stack)


def _spelled(stack: list[str | int]) -> str | None:
    path = ""
    for step in stack:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step == "":
            break  # in a key, or before one
        elif _PLAIN.fullmatch(step) is None:
            return None
        else:
            path += f".{step}" if path else step
    return path if 0 < len(path) <= _MOST_PATH else None
