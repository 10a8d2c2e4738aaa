"""What a Megatron trainer on a given grid leaves on disk: every chunk with its place and its spans.

The inverse of ``megatron_read``, built on the same rules: tests, ``demo`` and ``convert`` write with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import Grid, real_rows, shard_rows
from gtp_serve.layout.megatron import (
    LAYER_RULES,
    OUTPUT_LAYER,
    TOP_RULES,
    Rule,
    full_rows,
    full_shape,
    logical_names,
    padded_rows,
)
from gtp_serve.layout.rows import RowMap, clip, compose, spans
from gtp_serve.layout.spans import Box, Shape, Shard

Layout = Literal["padded", "logical"]


@dataclass(frozen=True, slots=True)
class SavedChunk:
    """One chunk: ``box`` in the stored tensor (leading stack axes included), what it holds, and whose file it is in.

    ``shard.shape`` leaves the leading axes of size 1 out; ``rank`` numbers files from 0.
    """

    box: Box
    shard: Shard
    rank: int


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One key of ``.metadata``."""

    key: str
    shape: Shape
    chunks: tuple[SavedChunk, ...]


@dataclass(frozen=True, slots=True)
class _Cut:
    """One rank's piece of one matrix: rows and columns in the file, and the (t, g) that holds it."""

    start: Shape
    shape: Shape
    tp_rank: int
    gtp_rank: int


def plan_save(
    config: ModelConfig,
    grid: Grid,
    layout: Layout,
    *,
    per_layer_keys: bool = False,
    norm_keys: Literal["fused", "separate"] = "fused",
) -> list[SavedTensor]:
    """Every tensor that a trainer of ``config`` on ``grid`` saves.

    :param layout: ``padded`` (Megatron 0.19) or ``logical``; they are the same where ``grid.gtp`` is 1.
    :param per_layer_keys: one key per layer instead of stacking all layers on a leading axis.
    :param norm_keys: norms inside the linear that follows them (``fused``) or modules of their own.
    :raises UsageError: for a grid that Megatron could not have: sizes that do not divide, or fc1 shards of odd rows.
    """
    if config.num_layers % grid.pp:
        raise UsageError(f"{config.num_layers} layers do not divide over PP {grid.pp}")
    tensors: list[SavedTensor] = []
    for rule in _rules(config, norm_keys):
        if rule.key in TOP_RULES:
            tensors.append(_top(rule, config, grid, layout))
        elif per_layer_keys:
            tensors += [_layers(rule, config, grid, layout, (n,)) for n in range(config.num_layers)]
        else:
            tensors.append(_layers(rule, config, grid, layout, None))
    return tensors


def _rules(config: ModelConfig, norm_keys: Literal["fused", "separate"]) -> Iterator[Rule]:
    other = {
        "fused": ("input_layernorm.weight", "pre_mlp_layernorm.weight"),
        "separate": ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
    }[norm_keys]
    for rule in (*TOP_RULES.values(), *LAYER_RULES.values()):
        if rule.key in other or rule.key == "decoder.final_norm.weight":
            continue
        if (rule.key == OUTPUT_LAYER and config.tied) or full_shape(rule, config) is None:
            continue
        yield rule


def _shape(rule: Rule, config: ModelConfig) -> Shape:
    shape = full_shape(rule, config)
    if shape is None:
        raise UsageError(f"the model has no {rule.key}")
    return shape


def _top(rule: Rule, config: ModelConfig, grid: Grid, layout: Layout) -> SavedTensor:
    full = _shape(rule, config)
    cuts, stored, rows = _cut_matrix(rule, full, config, grid, layout, rule.names)
    stage = 0 if rule.key.startswith("embedding.") else grid.pp - 1
    chunks = [SavedChunk(Box(c.start, c.shape), _shard(rule.key, c, rows), _rank(grid, stage, c)) for c in cuts]
    return SavedTensor(rule.key, stored, tuple(chunks))


def _layers(rule: Rule, config: ModelConfig, grid: Grid, layout: Layout, only: tuple[int] | None) -> SavedTensor:
    """One rule's tensor, stacked over all layers, or of the one layer in ``only``."""
    full = _shape(rule, config)
    moe = config.moe
    experts = list(range(moe.num_experts)) if moe and rule.space == "expert" else [None]
    key = f"decoder.layers.{only[0]}.{rule.key}" if only else f"decoder.layers.{rule.key}"
    stored: Shape = ()
    chunks: list[SavedChunk] = []
    for layer in only or range(config.num_layers):
        for expert in experts:
            names = logical_names(rule, layer, expert)
            cuts, stored, rows = _cut_matrix(rule, full, config, grid, layout, names)
            lead = (() if only else (layer,)) + (() if expert is None else (expert,))
            stage = layer * grid.pp // config.num_layers
            chunks += [
                SavedChunk(
                    Box((*lead, *c.start), (*(1 for _ in lead), *c.shape)), _shard(key, c, rows), _rank(grid, stage, c)
                )
                for c in cuts
            ]
    sizes = (() if only else (config.num_layers,)) + (() if experts == [None] else (len(experts),))
    return SavedTensor(key, (*sizes, *stored), tuple(chunks))


def _rank(grid: Grid, stage: int, cut: _Cut) -> int:
    """File number: TP fastest, then GTP, then the pipeline stage; a reader does not care."""
    wide, deep = max(grid.tp, grid.etp), max(grid.gtp, grid.egtp)
    return (stage * deep + cut.gtp_rank) * wide + cut.tp_rank


def _shard(key: str, cut: _Cut, rows: RowMap) -> Shard:
    columns = None if len(cut.shape) == 1 else (cut.start[1], cut.shape[1])
    empty = 0 in cut.shape
    return Shard(key, cut.shape, "", () if empty else spans(clip(rows, cut.start[0], cut.shape[0]), columns))


def _cut_matrix(
    rule: Rule, full: Shape, config: ModelConfig, grid: Grid, layout: Layout, names: tuple[str, ...]
) -> tuple[list[_Cut], Shape, RowMap]:
    """(every rank's piece, stored shape, file rows -> logical rows) of one unstacked tensor."""
    tp, gtp = grid.sizes(expert=rule.space == "expert")
    rows = full_rows(rule, config, names, full[0])
    if rule.cut == "none":
        return [_Cut((0,) * len(full), full, 0, 0)], full, rows
    axis = 0 if rule.cut == "column" else 1
    if full[axis] % tp or (rule.parts == "gate_up" and full[0] // 2 % tp):
        raise UsageError(f"{rule.key}: {full[axis]} does not divide over TP {tp}")
    if not rule.gtp or gtp == 1 or (layout == "logical" and rule.parts == "gate_up"):
        return _cut_plain(rule, full, tp), full, rows
    local = full[0] // tp if rule.cut == "column" else full[0]
    shard = shard_rows(local, gtp, grid.alignment)
    if layout == "logical":
        return _cut_logical(rule, full, tp, gtp, shard), full, rows
    stored = (gtp * shard * (tp if rule.cut == "column" else 1), *full[1:])
    cuts = _cut_padded(rule, stored, tp, gtp, shard)
    return cuts, stored, compose(padded_rows(rule, full[0], tp, gtp, shard), rows)


def _columns(rule: Rule, full: Shape, tp: int, t: int) -> tuple[Shape, Shape]:
    """(start, size) of TP rank t's columns; empty for vectors."""
    if len(full) == 1:
        return (), ()
    if rule.cut == "column":
        return (0,), (full[1],)
    return (t * (full[1] // tp),), (full[1] // tp,)


def _cut_plain(rule: Rule, full: Shape, tp: int) -> list[_Cut]:
    cuts: list[_Cut] = []
    for t in range(tp):
        start, size = _columns(rule, full, tp, t)
        if rule.cut == "row":
            cuts.append(_Cut((0, *start), (full[0], *size), t, 0))
            continue
        halves = 2 if rule.parts == "gate_up" else 1
        piece = full[0] // tp // halves
        cuts += [_Cut(((h * tp + t) * piece, *start), (piece, *size), t, 0) for h in range(halves)]
    return cuts


def _cut_logical(rule: Rule, full: Shape, tp: int, gtp: int, shard: int) -> list[_Cut]:
    """Real rows only.  A shard that is all padding leaves an empty chunk at the end of the tensor; where it would
    share an offset with another chunk, saving cannot keep both and the empty one is left out."""
    cuts: list[_Cut] = []
    for t in range(tp):
        start, size = _columns(rule, full, tp, t)
        local, base = (full[0] // tp, t * (full[0] // tp)) if rule.cut == "column" else (full[0], 0)
        taken = set[int]() if rule.cut == "row" or tp == 1 else {local}
        for g in range(gtp):
            first, count = real_rows(local, shard, g)
            if count or first not in taken:
                cuts.append(_Cut((base + first, *start), (count, *size), t, g))
            taken.add(first)
    return cuts


def _cut_padded(rule: Rule, stored: Shape, tp: int, gtp: int, shard: int) -> list[_Cut]:
    if rule.parts == "gate_up" and shard % 2:
        raise UsageError(
            f"{rule.key}: shards of {shard} rows cannot be halved, and the padded layout halves them",
            [("try", "an even alignment")],
        )
    cuts: list[_Cut] = []
    for t in range(tp):
        start, size = _columns(rule, stored, tp, t)
        for g in range(gtp):
            if rule.cut == "row":
                cuts.append(_Cut((g * shard, *start), (shard, *size), t, g))
            elif rule.parts == "gate_up":
                half, i, n = shard // 2, t * gtp + g, tp * gtp
                cuts += [_Cut(((h * n + i) * half, *start), (half, *size), t, g) for h in range(2)]
            else:
                cuts.append(_Cut(((t * gtp + g) * shard, *start), (shard, *size), t, g))
    return cuts
