"""From the chunks of a torch_dist checkpoint to spans: what each stored chunk holds.

``megatron_grid`` has decided how it was saved; padding must explain every difference between stored and real
rows.  Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.gtp import alignments, shard_rows
from gtp_serve.layout.megatron import (
    StoredName,
    full_rows,
    full_shape,
    logical_names,
    number_layers,
    padded_rows,
    parse_key,
)
from gtp_serve.layout.megatron_grid import SavedLayout, Space, SpaceLayout, StoredTensor
from gtp_serve.layout.rows import RowMap, clip, compose, spans
from gtp_serve.layout.spans import Box, Shape, Shard

#: Largest pad_for_alignment that is taken for an explanation; Megatron's recipes need 1 to 32.
MAX_ALIGNMENT = 128


@dataclass(frozen=True, slots=True)
class Piece:
    """One layer's (and expert's) part of one stored chunk.

    ``ordinal`` counts such parts within the chunk: the part's bytes begin at ``ordinal * bytes of shard``.
    """

    key: str
    chunk: int
    ordinal: int
    shard: Shard


@dataclass(frozen=True, slots=True)
class Padding:
    """A stored tensor with padding: rows of one layer's (or expert's) matrix as stored, and the real ones."""

    key: str
    stored_rows: int
    real_rows: int


def parse_keys(keys: Iterable[str]) -> dict[str, StoredName]:
    """Understand every key.

    :raises LayoutMismatch: naming the keys that no rule knows.
    """
    names = {key: parse_key(key) for key in keys}
    unknown = sorted(key for key, name in names.items() if name is None)
    if unknown:
        raise LayoutMismatch(
            f"{len(unknown)} weight key(s) of the checkpoint are not known: {', '.join(unknown[:5])}"
            + (", ..." if len(unknown) > 5 else ""),
            [("needed", "every stored weight to have a place in the model")],
            code="ckpt-unknown-key",
        )
    return {key: name for key, name in names.items() if name is not None}


def map_tensors(
    tensors: Mapping[str, StoredTensor],
    names: Mapping[str, StoredName],
    config: ModelConfig,
    saved: SavedLayout,
) -> tuple[list[Piece], list[Padding]]:
    """Spans of every chunk, and what is padding.

    :raises LayoutMismatch: for a shape that the model and padding do not explain, naming tensor and both shapes.
    """
    blocks = number_layers(names.values())
    for name in names.values():
        block = None if name.layer is None else blocks[name.layer]
        if block is not None and block >= config.num_layers:
            raise LayoutMismatch(
                f"{name.key} belongs to layer {block}, but the model has {config.num_layers} layers",
                [("needed", f"layers 0 to {config.num_layers - 1}, each once")],
            )
    shapes = {key: _file_shape(name, tensors[key], config, saved) for key, name in names.items()}
    _check_alignment(names, tensors, shapes, saved)
    pieces = [
        piece
        for key, name in names.items()
        for piece in _pieces(name, tensors[key], shapes[key], config, saved, blocks)
    ]
    padding = [Padding(key, s.stored, s.real) for key, s in shapes.items() if s.stored != s.real]
    return pieces, padding


@dataclass(frozen=True, slots=True)
class _FileShape:
    """Rows of one matrix as stored and in truth, and rows per GTP shard (0: rows are not laid out by shards)."""

    stored: int
    real: int
    shard: int


def _file_shape(name: StoredName, tensor: StoredTensor, config: ModelConfig, saved: SavedLayout) -> _FileShape:
    rule, where = name.rule, saved.space(name.rule.space)
    full = full_shape(rule, config)
    if full is None:
        raise LayoutMismatch(
            f"{name.key} is stored, but the model that the checkpoint describes has no such weight",
            [("have", str(list(tensor.shape)))],
        )
    lead = name.lead(config)
    wanted = (*lead, *full)
    if (
        len(tensor.shape) != len(wanted)
        or tensor.shape[: len(lead)] != lead
        or tensor.shape[len(lead) + 1 :] != full[1:]
    ):
        raise _shape_mismatch(name.key, tensor.shape, wanted)
    stored, real = tensor.shape[len(lead)], full[0]
    if not rule.gtp or where.kind != "padded":
        if stored != real:
            raise _shape_mismatch(name.key, tensor.shape, wanted)
        return _FileShape(stored, real, 0)
    over = where.gtp * (where.tp if rule.cut == "column" else 1)
    local = real // where.tp if rule.cut == "column" else real
    shard = stored // over
    if stored % over or (rule.cut == "column" and real % where.tp) or not alignments(local, where.gtp, shard):
        raise _shape_mismatch(
            name.key, tensor.shape, wanted, f"and TP {where.tp} GTP {where.gtp} padding does not explain it"
        )
    if rule.parts == "gate_up" and shard % 2:
        raise _shape_mismatch(name.key, tensor.shape, wanted, "and its shards cannot be halved")
    return _FileShape(stored, real, shard)


def _shape_mismatch(key: str, have: Shape, want: Shape, why: str = "") -> LayoutMismatch:
    return LayoutMismatch(
        f"{key} is stored with shape {list(have)}, the model has {list(want)}" + (f" {why}" if why else ""),
        [("needed", "a checkpoint and a model description that belong together")],
    )


def _check_alignment(
    names: Mapping[str, StoredName],
    tensors: Mapping[str, StoredTensor],
    shapes: Mapping[str, _FileShape],
    saved: SavedLayout,
) -> None:
    """One run pads with one alignment: refuse a set of tensors that needs two."""
    spaces: tuple[Space, Space] = ("dense", "expert")
    for space in spaces:
        where = saved.space(space)
        if where.kind == "plain":
            continue
        common = list(range(1, MAX_ALIGNMENT + 1))
        for key, shape in shapes.items():
            rule = names[key].rule
            if rule.space != space or not rule.gtp or (where.kind == "logical" and rule.parts == "gate_up"):
                continue
            local = shape.real // where.tp if rule.cut == "column" else shape.real
            cut = shape.shard or _logical_shard(tensors[key], local)
            common = [a for a in common if _explains(shard_rows(local, where.gtp, a), cut, local)]
            if not common:
                raise LayoutMismatch(
                    f"{key} ({shape.real} real rows, {shape.stored} stored) is cut into shards of {cut} rows, which "
                    f"no alignment at GTP {where.gtp} explains together with the other weights",
                    [("needed", "one pad_for_alignment for the whole checkpoint")],
                )


def _explains(rows: int, cut: int, local: int) -> bool:
    """Whether shards of ``rows`` rows look like shards of ``cut`` rows; a first shard that holds all hides its size."""
    return rows == cut or (cut >= local and rows >= local)


def _logical_shard(tensor: StoredTensor, local: int) -> int:
    """Rows of the first shard of the logical layout, without its padding."""
    return max((box.shape[-2] for box in tensor.chunks if box.volume), default=local)


def _pieces(
    name: StoredName,
    tensor: StoredTensor,
    shape: _FileShape,
    config: ModelConfig,
    saved: SavedLayout,
    blocks: Mapping[int, int],
) -> Iterator[Piece]:
    lead = len(name.lead(config))
    where = saved.space(name.rule.space)
    layout = padded_rows(name.rule, shape.real, where.tp, where.gtp, shape.shard) if shape.shard else None
    maps: dict[tuple[int, ...], RowMap] = {}
    for index, box in enumerate(tensor.chunks):
        if not box.inside(tensor.shape):
            raise LayoutMismatch(f"{name.key} has a chunk {box} outside its shape {list(tensor.shape)}")
        if shape.shard:
            _check_chunk(name, box, lead, shape, where)
        ranges = (range(a, a + n) for a, n in zip(box.start[:lead], box.shape[:lead], strict=True))
        for ordinal, at in enumerate(product(*ranges)):
            if at not in maps:
                maps[at] = _rows_at(name, at, shape.real, config, blocks, layout)
            yield Piece(name.key, index, ordinal, _shard(name.key, tensor.dtype, box, lead, maps[at]))


def _rows_at(
    name: StoredName,
    at: tuple[int, ...],
    total: int,
    config: ModelConfig,
    blocks: Mapping[int, int],
    layout: RowMap | None,
) -> RowMap:
    layer, expert = name.place(at)
    block = layer if layer is None or name.layer is None else blocks[layer]
    full = full_rows(name.rule, config, logical_names(name.rule, block, expert), total)
    return full if layout is None else compose(layout, full)


def _shard(key: str, dtype: str, box: Box, lead: int, rows: RowMap) -> Shard:
    tail = Box(box.start[lead:], box.shape[lead:])
    columns = None if len(tail.shape) == 1 else (tail.start[1], tail.shape[1])
    return Shard(
        key,
        tail.shape,
        dtype,
        spans(clip(rows, tail.start[0], tail.shape[0]), columns) if tail.volume else (),
    )


def _check_chunk(name: StoredName, box: Box, lead: int, shape: _FileShape, where: SpaceLayout) -> None:
    """A chunk of the padded layout is one rank's shard (or half of it, for fc1), nothing else."""
    rows = shape.shard // 2 if name.rule.parts == "gate_up" else shape.shard
    start, count = box.start[lead], box.shape[lead]
    if count != rows or start % rows:
        raise LayoutMismatch(
            f"{name.key} has a chunk of rows {start} to {start + count}",
            [("needed", f"chunks of {rows} rows at TP {where.tp} GTP {where.gtp}")],
        )
