"""A training model's live shards as what ``refit.Publisher`` sends: this rank's rows, no gather, no padding.

``publish_megatron`` does the same for a real Megatron model, by its parameters' names and attributes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.gtp import real_rows
from gtp_serve.layout.megatron import (
    OUTPUT_LAYER,
    WORD_EMBEDDINGS,
    Rule,
    StoredName,
    full_rows,
    full_shape,
    logical_names,
    number_layers,
    parse_key,
)
from gtp_serve.layout.rows import RowMap, Rows, clip, compose, spans
from gtp_serve.layout.spans import Shape, Shard, Span
from gtp_serve.refit.apply import dtype_name
from gtp_serve.training.groups import AxisGroup, axis, rank_of, size_of
from gtp_serve.training.layer import parameters_with_targets
from gtp_serve.training.shard_map import high_precision, is_quantised

Pairs = list[tuple[Shard, Tensor]]

_LAYER = re.compile(r"(?:.*\.)?(decoder\.layers\.)(\d+)$")
_PARAMETER = re.compile(r"(?:.*\.)?((?:decoder|embedding|output_layer)\..+)")
_IN_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")
_LISTED_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")


def publish(model: nn.Module) -> Pairs:
    """This rank's pieces of all logical tensors, for ``Publisher.push``; every rank of the trainer gives its own.

    They are the live memory, which must not change until the push has ended.  What several ranks hold is offered by
    each of them, and sent once.  Quantised weights are dequantised.

    :raises UsageError: for a parameter outside the layers of this package, which states no spans.
    """
    pairs: Pairs = []
    for parameter, target in parameters_with_targets(model):
        if target.shard.spans:
            values = high_precision(parameter).detach()
            shard = _named_by_place(target.shard.key, tuple(values.shape), dtype_name(values), target.shard.spans)
            pairs.append((shard, values))
    return pairs


def _named_by_place(key: str, shape: Shape, dtype: str, held: tuple[Span, ...]) -> Shard:
    """A shard whose key cannot be taken for the name of a whole tensor."""
    return Shard(f"{key} {held[0].logical}" if held else key, shape, dtype, held)


def publish_megatron(model: nn.Module | Sequence[nn.Module], config: ModelConfig, groups: object) -> Pairs:
    """``publish`` over a Megatron model: GTP-sharded or not, with or without tensor, expert and pipeline parallelism.

    :param model: or the chunks of a virtual pipeline; wrappers around them (``module.``) do not matter.
    :param config: of the model as it is served, for example from ``open_checkpoint(path).config``.
    :param groups: Megatron's ProcessGroupCollection, or anything with ``tp``, ``ep``, ``expt_tp`` and ``pp``.
    :raises LayoutMismatch: for a parameter that is not known, or whose rows are not what its attributes say.
    """
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    found = [one for chunk in chunks for one in _named(chunk, config, groups)]
    blocks = number_layers(name for name, _ in found)
    pairs: Pairs = []
    for name, parameter in found:
        values = _plain(parameter)
        block = None if name.layer is None else blocks[name.layer]
        shard = _Held(name, parameter, values, config, groups).shard(block)
        if shard.spans:
            pairs.append((shard, values))
    return pairs


def _named(model: nn.Module, config: ModelConfig, groups: object) -> Iterator[tuple[StoredName, nn.Parameter]]:
    """Every parameter with its name as if it were saved alone: layers and experts numbered over all ranks."""
    layers = dict(_layer_numbers(model, size_of(axis(groups, "pp")) > 1))
    for name, parameter in model.named_parameters():
        match = _PARAMETER.fullmatch(name)
        key = name if match is None else _global_key(match[1], layers, config, axis(groups, "ep"))
        stored = parse_key(key)
        if stored is not None and stored.rule.key == OUTPUT_LAYER and config.tied:
            continue  # the embedding's copy on the last pipeline stage
        if stored is None or full_shape(stored.rule, config) is None:
            raise LayoutMismatch(
                f"the parameter {name} is not known", [("shape", f"{list(parameter.shape)}"), ("model", config.family)]
            )
        yield stored, parameter


def _layer_numbers(model: nn.Module, cut: bool) -> Iterator[tuple[int, int]]:
    """(number in this rank's list, number in the whole model) of each layer.

    :param cut: the model has other layers on other ranks, so a layer must say its number.
    """
    for name, module in model.named_modules():
        match = _LAYER.fullmatch(name)
        if match is not None:
            number = getattr(module, "layer_number", None)
            if number is None and cut:
                raise UsageError(
                    f"{name} does not say which layer of the model it is", [("needed", "its attribute layer_number")]
                )
            yield int(match[2]), int(match[2]) if number is None else int(number) - 1


def _global_key(key: str, layers: dict[int, int], config: ModelConfig, ep: AxisGroup | None) -> str:
    match = _IN_LAYER.fullmatch(key)
    if match is None:
        return key
    rest = match[3]
    grouped, listed = _GROUPED_EXPERT.fullmatch(rest), _LISTED_EXPERT.fullmatch(rest)
    if grouped is not None or listed is not None:
        if grouped is not None:
            local, part = int(grouped[2]), grouped[1]
        else:
            assert listed is not None
            local, part = int(listed[1]), listed[2]
        experts = config.moe.num_experts if config.moe else 0
        held = experts // size_of(ep)
        rest = f"mlp.experts.experts.{rank_of(ep) * held + local}.{part}.weight"
    return f"{match[1]}{layers.get(int(match[2]), int(match[2]))}.{rest}"


def _plain(parameter: Any) -> Tensor:
    plain: Tensor = parameter.dequantize() if is_quantised(parameter) else parameter.data
    return plain.detach()


@dataclass(frozen=True, slots=True)
class _Held:
    """One parameter of a Megatron model and what its attributes say of it."""

    name: StoredName
    parameter: Any
    values: Tensor
    config: ModelConfig
    groups: object

    def shard(self, block: int | None) -> Shard:
        """What it holds.

        :param block: number of the decoder block, for a parameter in one.
        """
        rule = self.name.rule
        names = logical_names(rule, block, self.name.expert)
        full = full_shape(rule, self.config)
        assert full is not None  # _named has asked
        tp = axis(self.groups, "expt_tp" if rule.space == "expert" else "tp")
        self._check_partition(rule, tp)
        rows_held = self._rows_held()
        local = _local_shape(rule, full, size_of(tp), rows_held)
        rows = self._tp_rows(rule, names, full, local, tp)
        first, count = self._check_rows(local, rows_held)
        columns = None
        if len(full) == 2:
            columns = (rank_of(tp) * local[1] if rule.cut == "row" else 0, local[1])
        shape = tuple(self.values.shape)
        held = spans(clip(rows, first, count), columns)
        return _named_by_place(self.name.key, shape, dtype_name(self.values), held)

    def _tp_rows(self, rule: Rule, names: tuple[str, ...], full: Shape, local: Shape, tp: AxisGroup | None) -> RowMap:
        """Rows of the TP-local tensor; gate and up are each cut, anything else as a whole."""
        rows = full_rows(rule, self.config, names, full[0])
        if rule.cut != "column":
            return rows
        if rule.parts != "gate_up":
            return clip(rows, rank_of(tp) * local[0], local[0])
        half, piece = full[0] // 2, local[0] // 2
        mine = rank_of(tp) * piece
        return compose((Rows(0, piece, "", mine), Rows(piece, piece, "", half + mine)), rows)

    def _check_partition(self, rule: Rule, tp: AxisGroup | None) -> None:
        """A parameter that says along which axis it is cut must mean the axis that its name stands for."""
        dim, stride = getattr(self.parameter, "partition_dim", -1), getattr(self.parameter, "partition_stride", 1)
        meant = {"column": 0, "row": 1, "none": -1}[rule.cut]
        cut = size_of(tp) > 1 and getattr(self.parameter, "tensor_model_parallel", False)
        if cut and dim != meant:
            raise LayoutMismatch(f"{self.name.key} is cut along axis {dim}", [("needed", f"axis {meant}")])
        if stride not in ((1, 2) if rule.parts == "gate_up" else (1,)):
            raise LayoutMismatch(f"{self.name.key} is cut with stride {stride}", [("needed", "stride 1")])

    def _rows_held(self) -> int:
        """Rows of the TP-local tensor, by the parameter's own word."""
        size, padding = _gtp(self.parameter)
        return int(self.values.shape[0] * size - padding)

    def _check_rows(self, local: Shape, held: int) -> tuple[int, int]:
        """(first row of the TP-local tensor, rows) that this rank holds."""
        shape, (size, padding) = tuple(self.values.shape), _gtp(self.parameter)
        if (held, *shape[1:]) != local:
            raise LayoutMismatch(
                f"{self.name.key} is {list(shape)} on each of {size} GTP ranks, {padding} rows of it padding",
                [("needed", f"{list(local)} together, for this model and tensor-parallel size")],
            )
        return real_rows(local[0], shape[0], rank_of(self.parameter.group)) if size > 1 else (0, local[0])


def _gtp(parameter: Any) -> tuple[int, int]:
    """(ranks that share the TP-local tensor, padding rows of all their shards)."""
    if not getattr(parameter, "is_gtp_weight_remat", False):
        return 1, 0
    size = int(parameter.gtp_remat_size)
    return size, int(parameter.pad_length) if size > 1 else 0


def _local_shape(rule: Rule, full: Shape, tp: int, held: int) -> Shape:
    """Of the TP-local tensor.  Vocabularies may have grown by ids that nobody has: their rows are padding too."""
    if rule.key in (WORD_EMBEDDINGS, OUTPUT_LAYER) and held * tp >= full[0]:
        return (held, *full[1:])
    pieces = 2 * tp if rule.parts == "gate_up" else tp
    axis_cut = {"column": 0, "row": 1, "none": None}[rule.cut]
    if axis_cut is None:
        return full
    if full[axis_cut] % (pieces if axis_cut == 0 else tp):
        raise LayoutMismatch(f"{rule.key}: {full[axis_cut]} cannot be shared out to {tp} tensor-parallel ranks")
    return tuple(size // tp if index == axis_cut else size for index, size in enumerate(full))
