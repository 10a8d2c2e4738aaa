"""Stating what a parameter holds: rows and columns of logical tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.apply import Target, dtype_name


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a logical tensor."""

    name: str
    first: int
    count: int


class Layer(Protocol):
    """Anything with parameters."""

    def targets(self) -> list[Target]:
        """Its parameters with their spans."""
        ...


def targets_of(*layers: Layer | None) -> list[Target]:
    """Parameters of the layers that are there, in order."""
    return [target for layer in layers if layer is not None for target in layer.targets()]


def whole(name: str, tensor: Tensor) -> Target:
    """A parameter that is a logical tensor."""
    box = Box.whole(tuple(tensor.shape))
    return _target(name, tensor, [Span(name, box, box)])


def stacked(key: str, tensor: Tensor, parts: Sequence[Rows]) -> Target:
    """A parameter that is rows of logical tensors, part below part; rows left at the end are padding."""
    rest = tuple(tensor.shape[1:])
    spans: list[Span] = []
    row = 0
    for part in parts:
        shape = (part.count, *rest)
        local, logical = (Box((first, *(0 for _ in rest)), shape) for first in (row, part.first))
        if part.count:
            spans.append(Span(part.name, local, logical))
        row += part.count
    return _target(key, tensor, spans)


def columns(name: str, tensor: Tensor, first: int) -> Target:
    """A parameter [rows, n] that is columns ``first`` to ``first + n`` of a logical matrix."""
    box = Box.whole(tuple(tensor.shape))
    return _target(name, tensor, [Span(name, box, box.shifted((0, first)))])


def _target(key: str, tensor: Tensor, spans: Sequence[Span]) -> Target:
    return Target(Shard(key, tuple(tensor.shape), dtype_name(tensor), tuple(spans)), tensor)
