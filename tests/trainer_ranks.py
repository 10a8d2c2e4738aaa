"""What each rank of a Megatron trainer holds in memory, from first principles: TP cut, then GTP shards with padding.

Padding holds NaN, so that a copy of it is found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid, shard_rows
from gtp_serve.layout.megatron import LAYER_RULES, TOP_RULES, Rule, full_rows, full_shape, logical_names
from gtp_serve.layout.rows import RowMap, Rows, clip, compose, spans
from gtp_serve.layout.spans import Box, Shard

#: Two names for one tensor; trainers have one of them.
_OTHER_NAMES = {"self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"}

Place = tuple[int, int, int, int]
"""Pipeline stage, expert-parallel, tensor-parallel and GTP rank."""


@dataclass(frozen=True, slots=True)
class Held:
    """A parameter (or shard of one) of one rank."""

    place: Place
    shard: Shard
    tensor: Tensor


class TrainerRanks:
    """All ranks' shards as one source, rank by rank in a random order."""

    def __init__(self, held: Sequence[Held], seed: int = 0) -> None:
        places = sorted({one.place for one in held})
        random.Random(seed).shuffle(places)
        self.held = [one for place in places for one in held if one.place == place]

    def shards(self) -> tuple[Shard, ...]:
        return tuple(one.shard for one in self.held)

    def read(self, index: int) -> memoryview:
        return self.held[index].tensor.contiguous().view(-1).view(torch.uint8).numpy().data

    def close(self) -> None:
        pass


def trainer_ranks(config: ModelConfig, grid: Grid, tensors: Mapping[str, Tensor]) -> TrainerRanks:
    """Each logical row once: replicas (norms, biases) are their group's first rank's."""
    held = [
        _hold(config, tensors, place, key, local, columns)
        for rule in _rules(config)
        for key, stage, expert_rank, names in _copies(rule, config, grid)
        for place, local, columns in _pieces(rule, config, grid, names, stage, expert_rank)
    ]
    return TrainerRanks(held)


def _rules(config: ModelConfig) -> Iterator[Rule]:
    for rule in (*TOP_RULES.values(), *LAYER_RULES.values()):
        if rule.key in _OTHER_NAMES or rule.key == "decoder.final_norm.weight":
            continue
        if full_shape(rule, config) is not None and not (rule.key == "output_layer.weight" and config.tied):
            yield rule


def _copies(rule: Rule, config: ModelConfig, grid: Grid) -> Iterator[tuple[str, int, int, tuple[str, ...]]]:
    """(key, pipeline stage, expert rank, logical names) of each parameter that the rule describes."""
    if rule.key in TOP_RULES:
        stage = 0 if rule.key.startswith("embedding") else grid.pp - 1
        yield rule.key, stage, 0, rule.names
        return
    for layer in range(config.num_layers):
        stage = layer * grid.pp // config.num_layers
        if rule.space == "dense" or config.moe is None:
            yield f"layers.{layer}.{rule.key}", stage, 0, logical_names(rule, layer, None)
            continue
        for expert in range(config.moe.num_experts):
            rank = expert * grid.ep // config.moe.num_experts
            yield f"layers.{layer}.{rule.key}.{expert}", stage, rank, logical_names(rule, layer, expert)


def _pieces(
    rule: Rule, config: ModelConfig, grid: Grid, names: tuple[str, ...], stage: int, expert_rank: int
) -> Iterator[tuple[Place, tuple[RowMap, int], tuple[int, int] | None]]:
    """(place, (rows, number of rows), columns) of each rank's piece."""
    full = full_shape(rule, config)
    assert full is not None
    rows = full_rows(rule, config, names, full[0])
    if rule.cut == "none":
        yield (stage, expert_rank, 0, 0), (rows, full[0]), _all_columns(full)
        return
    tp, gtp = grid.sizes(expert=rule.space == "expert")
    for t in range(tp):
        local, count, columns = rows, full[0], _all_columns(full)
        if rule.cut == "row":
            columns = (t * (full[1] // tp), full[1] // tp)
        else:
            count = full[0] // tp
            local = _tensor_parallel_rows(rule, rows, full[0], tp, t)
        if not rule.gtp:
            yield (stage, expert_rank, t, 0), (local, count), columns
            continue
        shard = shard_rows(count, gtp, grid.alignment)
        for g in range(gtp):
            yield (stage, expert_rank, t, g), (clip(local, g * shard, shard), shard), columns


def _tensor_parallel_rows(rule: Rule, rows: RowMap, total: int, tp: int, t: int) -> RowMap:
    if rule.parts != "gate_up":
        return clip(rows, t * (total // tp), total // tp)
    half, piece = total // 2, total // 2 // tp
    return compose((Rows(0, piece, "", t * piece), Rows(piece, piece, "", half + t * piece)), rows)


def _all_columns(full: tuple[int, ...]) -> tuple[int, int] | None:
    return (0, full[1]) if len(full) > 1 else None


def _hold(
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    place: Place,
    key: str,
    local: tuple[RowMap, int],
    columns: tuple[int, int] | None,
) -> Held:
    rows, count = local
    shape = (count,) if columns is None else (count, columns[1])
    shard = Shard(f"{place} {key}", shape, config.dtype, spans(rows, columns))
    tensor = torch.full(shape, torch.nan, dtype=getattr(torch, config.dtype))
    for span in shard.spans:
        tensor[_slices(span.local)] = tensors[span.name][_slices(span.logical)]
    return Held(place, shard, tensor)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
