"""The table of fuzz targets, and how inputs are changed when no fuzzer with coverage is at hand."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_files import Check, Files, Seeds
from fuzz_wire import wire_targets

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"
"""Inputs that have once reached something new or broken something, a folder for each target."""

NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**40)
VALUES: tuple[Any, ...] = (*NUMBERS, None, True, "", "a", [], {}, 0.5, 1e308, "\u6f22" * 40, [[]], {"a": {}})


def make_targets(root: Path) -> dict[str, tuple[Check, Seeds]]:
    """All targets; their files are put into a folder of their own."""
    return Files(root).targets() | wire_targets()


def kept_inputs(name: str) -> Seeds:
    """The kept corpus of a target."""
    folder = CORPUS / name
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def mutate(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """One to four changes; JSON, after a prefix that is none, is mostly changed as a tree."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        tree = _json_part(data) if rng.random() < 0.6 else None
        data = _change_tree(*tree, rng) if tree is not None else rng.choice(_CHANGES)(data, rng, others)
    return data


def _json_part(data: bytes) -> tuple[bytes, Any, bytes] | None:
    start = data.find(b"{")
    if start < 0 or len(data) > 1 << 17:
        return None
    text = data[start:].decode("latin-1")
    try:
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return None
    return data[:start], value, text[end:].encode("latin-1")


def _change_tree(head: bytes, value: Any, tail: bytes, rng: random.Random) -> bytes:
    places = _places(value)
    if not places:
        return head + b"[]" + tail
    owner, key = rng.choice(places)
    kind = rng.randrange(5)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, dict):
        owner[rng.choice(("a", "", "__proto__", str(key) + "x", "lm_head.weight"))] = owner[key]
    elif kind == 2 and type(owner[key]) is int:
        owner[key] = owner[key] + rng.choice((-1, 1, 8, -owner[key] * 2))
    elif kind == 3:
        other, name = rng.choice(places)
        owner[key] = json.loads(json.dumps(other[name])) if name in other or isinstance(other, list) else None
    else:
        owner[key] = rng.choice(VALUES)
    raw = json.dumps(value).encode("latin-1", "replace")
    if len(head) == 8:  # a safetensors file: mostly the length is kept right
        head = len(raw).to_bytes(8, "little") if rng.random() < 0.9 else head
    return head + raw + tail


def _places(value: Any) -> list[tuple[Any, Any]]:
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level:
        one = level.pop()
        keys: Any = one.keys() if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        level += [one[key] for key in keys]
    return found


def _flip(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    if not data:
        return b"\0"
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def _drop(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + data[at + rng.choice((1, 2, 8, 64, len(data))) :]


def _double(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    at, count = rng.randrange(len(data) + 1), rng.choice((1, 4, 16, 64, 256))
    return data[:at] + data[at : at + count] * rng.choice((2, 2, 3, 50)) + data[at + count :]


def _number(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    at, form = rng.randrange(len(data) + 1), rng.choice(("<B", "<H", "<I", "<Q"))
    raw = struct.pack(form, rng.choice(NUMBERS) % 256 ** struct.calcsize(form))
    return data[:at] + raw + data[at + len(raw) :]


def _splice(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    other = rng.choice(others)
    start = rng.randrange(len(other) + 1)
    at = rng.randrange(len(data) + 1)
    return data[:at] + other[start : start + rng.choice((4, 32, 256))] + data[at:]


def _text(data: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    at = rng.randrange(len(data) + 1)
    word = rng.choice((b'"', b"\\", b"{", b"}", b"[", b",", b"\xff", b"\0", b"\\ud800", b"\xef\xbb\xbf", b"{%", b"}}"))
    return data[:at] + word + data[at:]


_CHANGES: tuple[Callable[[bytes, random.Random, list[bytes]], bytes], ...] = (
    _flip,
    _flip,
    _drop,
    _double,
    _number,
    _splice,
    _text,
)
