"""Safetensors files as bytes, right ones and wrong ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Any

from gtp_serve.layout.spans import Shape

WIDTHS = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "U8": 1}


def entries(shapes: Mapping[str, Shape], kind: str = "F32") -> dict[str, dict[str, Any]]:
    """What a header says of tensors that lie one behind the other."""
    made: dict[str, dict[str, Any]] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * WIDTHS[kind]
        made[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    return made


def file_bytes(header: Mapping[str, Any], data: bytes | None = None, *, length: int | None = None) -> bytes:
    """A file; without ``data`` its tensors are as many bytes as the header says, all different from their neighbours.

    :param length: of the header, if it is to lie.
    """
    raw = json.dumps(header).encode()
    if data is None:
        size = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        data = bytes(range(1, 252)) * (size // 251 + 1)
        data = data[:size]
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data
