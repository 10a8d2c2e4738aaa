"""Expert weights that lie in one tensor for all experts of a layer, as Transformers holds them in memory.

Seen as rows of a matrix, such a tensor is an ordinary shard: each expert's gate, up and down projection is a
band of its rows.
"""

from __future__ import annotations

import re

from gtp_serve.layout.spans import Box, Shape, Span

_STACKED = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(gate_up_proj|down_proj)")


def stacked_spans(name: str, shape: Shape) -> tuple[Shape, tuple[Span, ...]] | None:
    """The tensor's shape as a matrix and what its rows are; None when the name or the shape is of another kind.

    :param shape: ``gate_up_proj`` is [experts, 2 x ffn, hidden], gate first; ``down_proj`` [experts, hidden, ffn].
    """
    match = _STACKED.fullmatch(name)
    if match is None or len(shape) != 3:
        return None
    prefix, kind = match.groups()
    experts, rows, columns = shape
    parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    if rows % len(parts):
        return None
    band = rows // len(parts)
    spans = tuple(
        Span(
            f"{prefix}{expert}.{part}.weight",
            Box((expert * rows + index * band, 0), (band, columns)),
            Box.whole((band, columns)),
        )
        for expert in range(experts)
        for index, part in enumerate(parts)
    )
    return (experts * rows, columns), spans
