"""A checkpoint for the page: facts without paths, and how one layer's stored tensors lie, padding included."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gtp_serve.layout.spans import Shard, Span
from gtp_serve.loaders.checkpoint import Checkpoint
from gtp_serve.loaders.facts import TensorPadding

MAX_TENSORS = 10
MAX_PIECES = 64
MAX_SPANS = 96
"""Of one piece; fine interleavings (a query group each) are told up to here."""

_PLACE = re.compile(r"\.(?:layers|experts)\.(\d+)\.")
"""Which layer, which expert."""


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """JSON values of ``GET /checkpoint``."""
    facts, model = checkpoint.facts, checkpoint.config
    experts = None if model.moe is None else {"count": model.moe.num_experts, "per_token": model.moe.top_k}
    return {
        "format": facts.format,
        "format_text": facts.format_text,
        "layout": facts.layout,
        "saved": asdict(facts.saved) if facts.format == "megatron" else None,
        "fc1_permuted": facts.fc1_permuted,
        "iteration": facts.iteration,
        "iterations": len(facts.iterations),
        "parameters": facts.parameters,
        "tensors": facts.num_tensors,
        "weight_bytes": facts.weight_bytes,
        "weight_bytes_by_dtype": dict(facts.dtypes),
        "optimizer_bytes": facts.optimizer_bytes,
        "notes": list(facts.notes),
        "model": {
            "family": model.family,
            "layers": model.num_layers,
            "hidden": model.hidden_size,
            "heads": model.num_heads,
            "kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "ffn": model.ffn_size if model.moe is None else model.moe.ffn_size,
            "experts": experts,
            "vocab": model.vocab_size,
            "vocab_rows": model.vocab_rows,
            "tied": model.tied,
        },
        "padding": [asdict(one) for one in facts.padding],
        "pictures": pictures(checkpoint.source.shards(), facts.padding),
    }


def pictures(shards: Sequence[Shard], padding: Iterable[TensorPadding] = ()) -> list[dict[str, Any]]:
    """Row by row, the matrices outside the layers and those of the first layer and expert; padded ones come first.

    Shards that are nothing but padding are not among those that a checkpoint offers; the facts know of them.
    """
    rows = {one.key: one.stored_rows - one.real_rows for one in padding}
    by_key: dict[str, list[Shard]] = {}
    for shard in shards:
        if len(shard.shape) == 2 and shard.spans and not set(_PLACE.findall(shard.spans[0].name)) - {"0"}:
            by_key.setdefault(shard.key, []).append(shard)
    found = [_picture(key, pieces, rows.get(key, 0)) for key, pieces in by_key.items()]
    found.sort(key=lambda one: (one["padding_rows"] == 0, len(one["pieces"]) == 1))
    return found[:MAX_TENSORS]


def _picture(key: str, pieces: list[Shard], padding: int) -> dict[str, Any]:
    shown = [_piece(piece) for piece in pieces[:MAX_PIECES]]
    cuts = len({span.logical.start[1] for piece in pieces for span in piece.spans})
    absent = padding - sum(one["padding"] for one in shown) // max(1, cuts)
    if absent > 0 and len(shown) == len(pieces):
        rows, columns = pieces[0].shape
        count = absent // rows if absent % rows == 0 else 1
        empty = {"rows": absent // count, "columns": columns, "padding": absent // count, "spans": [], "spans_total": 0}
        shown += [empty] * min(count * cuts, MAX_PIECES)
    return {
        "key": key,
        "dtype": pieces[0].dtype,
        "pieces": shown,
        "pieces_total": max(len(pieces), len(shown)),
        "padding_rows": padding or sum(one["padding"] for one in shown),
    }


def _piece(shard: Shard) -> dict[str, Any]:
    rows, columns = shard.shape
    spans = sorted(shard.spans, key=lambda span: (span.local.start, span.name))
    return {
        "rows": rows,
        "columns": columns,
        "padding": rows - _covered(spans),
        "spans": [_span(span) for span in spans[:MAX_SPANS]],
        "spans_total": len(spans),
    }


def _covered(spans: Iterable[Span]) -> int:
    """Rows with at least one element that a span covers."""
    covered, end = 0, 0
    for first, stop in sorted((span.local.start[0], span.local.stop[0]) for span in spans):
        covered += max(0, stop - max(first, end))
        end = max(end, stop)
    return covered


def _span(span: Span) -> Mapping[str, Any]:
    return {
        "name": span.name,
        "start": span.local.start[0],
        "rows": span.local.shape[0],
        "of_row": span.logical.start[0],
        "of_column": span.logical.start[1],
    }
