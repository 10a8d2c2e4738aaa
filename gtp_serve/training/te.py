"""TransformerEngine's linear layers over shards: its modules and kernels, this package's gathers and reductions.

A layer is built by TransformerEngine with the rows of one shard and then attached: its weights become ``GTPShard``s,
which TransformerEngine asks for whole weights and hands whole gradients (its DistributedWeight protocol, from 2.19 on);
its biases get their full length, its ``out_features`` the whole layer's.  A gathered weight is in the shard's dtype; a
layer that computes in FP8 quantises it at each use.

This module needs TransformerEngine only when one of its functions is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from types import MethodType
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.layout.rows import RowMap, Rows
from gtp_serve.training.groups import axis, rank_of, size_of
from gtp_serve.training.init import refresh_high_precision
from gtp_serve.training.layer import ShardedLayer, parts_of, suffixed, whole_vector
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.replicated import restore_full_length
from gtp_serve.training.shards import Content, GTPShard, rows_of_shard

#: The first TransformerEngine that asks weights for themselves.
OLDEST = (2, 19)


class TELayer(ShardedLayer):
    """What ``attach`` adds to a TransformerEngine module: it states its spans and can be copied."""

    def reset_parameters(self, defer_init: bool | None = False) -> NoReturn:
        """Refused: TransformerEngine would wrap the shards anew and draw the same rows on every rank."""
        raise UsageError(
            f"reset_parameters of {type(self).__name__} would take its shards away",
            [("try", "gtp_serve.training.init.initialise")],
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's weights are a group of their own in the chain."""
        super().__setstate__(state)
        self.placement.chain.adopt(*shards_of(self))


def column_linear(
    name: str,
    in_features: int,
    out_features: int,
    placement: TrainPlacement,
    *,
    bias: bool = False,
    parts: RowMap | None = None,
    fuse_wgrad_accumulation: bool = False,
) -> nn.Module:
    """``te.Linear`` with outputs of its own on each TP rank; parameters as of ``ColumnParallelLinear``.

    Weights start zeroed: fill them with ``init.initialise`` or from a checkpoint.
    """
    first, count = placement.cut(out_features, f"rows of {name}")
    held = parts_of(name, count, first, parts)
    module = _te().Linear(
        in_features,
        _column_rows(count, placement),
        bias=bias,
        parallel_mode="column",
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        **_common(placement),
        **_tensor_parallel(placement),
    )
    vectors = {"bias": Content(key=f"{name}.bias", rows=suffixed(held, "bias"))} if bias else {}
    weight = Content(key=f"{name}.weight", rows=suffixed(held, "weight"))
    return attach(module, placement, out_features=count, weights=[weight], vectors=vectors)


def row_linear(
    name: str,
    in_features: int,
    out_features: int,
    placement: TrainPlacement,
    *,
    bias: bool = False,
    fuse_wgrad_accumulation: bool = False,
) -> nn.Module:
    """``te.Linear`` with inputs of its own on each TP rank; TransformerEngine sums the outputs and adds the bias.

    Parameters as of ``RowParallelLinear``; weights start zeroed.
    """
    first, count = placement.cut(in_features, f"columns of {name}")
    module = _te().Linear(
        in_features,
        rows_of_shard(out_features, placement.gtp(), placement.alignment),
        bias=bias,
        parallel_mode="row",
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        **_common(placement),
        **_tensor_parallel(placement),
    )
    vectors = {"bias": whole_vector(f"{name}.bias", out_features)} if bias else {}
    weight = Content.of(f"{name}.weight", out_features, columns=(first, count))
    return attach(module, placement, out_features=out_features, weights=[weight], vectors=vectors)


def norm_column_linear(
    name: str,
    norm_name: str,
    in_features: int,
    out_features: int,
    placement: TrainPlacement,
    *,
    eps: float,
    normalization: Literal["LayerNorm", "RMSNorm"] = "RMSNorm",
    bias: bool = False,
    parts: RowMap | None = None,
    fuse_wgrad_accumulation: bool = False,
) -> nn.Module:
    """``te.LayerNormLinear``: a norm, then a column-parallel linear; parameters as of ``NormColumnLinear``.

    Weights start zeroed, the norm's at one.
    """
    first, count = placement.cut(out_features, f"rows of {name}")
    held = parts_of(name, count, first, parts)
    module = _te().LayerNormLinear(
        in_features,
        _column_rows(count, placement),
        eps=eps,
        normalization=normalization,
        bias=bias,
        parallel_mode="column",
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        **_common(placement),
        **_tensor_parallel(placement),
    )
    vectors = {"layer_norm_weight": whole_vector(f"{norm_name}.weight", in_features)}
    if normalization == "LayerNorm":
        vectors["layer_norm_bias"] = whole_vector(f"{norm_name}.bias", in_features)
    if bias:
        vectors["bias"] = Content(key=f"{name}.bias", rows=suffixed(held, "bias"))
    weight = Content(key=f"{name}.weight", rows=suffixed(held, "weight"))
    return attach(module, placement, out_features=count, weights=[weight], vectors=vectors)


def grouped_linear(
    name: str,
    num_experts: int,
    in_features: int,
    out_features: int,
    placement: TrainPlacement,
    *,
    cut: Literal["column", "row"],
    bias: bool = False,
    parts: RowMap | None = None,
    fuse_wgrad_accumulation: bool = False,
) -> nn.Module:
    """``te.GroupedLinear`` of the experts that this expert-parallel rank holds; parameters as of
    ``GroupedExpertLinear``, weights start zeroed.

    It does not communicate over expert TP: as Megatron's token dispatcher does, the caller sums what ``row`` gives and,
    in the backward pass, the input gradients of ``column``.
    """
    ep = axis(placement.groups, "ep")
    if num_experts % size_of(ep):
        raise UsageError(f"{num_experts} experts cannot be shared out to {size_of(ep)} expert-parallel ranks")
    number = num_experts // size_of(ep)
    column = cut == "column"
    what = f"{'rows' if column else 'columns'} of {name}"
    first, count = placement.cut(out_features if column else in_features, what, expert=True)
    if bias and not column and size_of(placement.tp(expert=True)) > 1:
        raise UsageError(f"{name}: every expert-TP rank would add the bias", [("try", "bias=False or expert TP 1")])
    rows = count if column else out_features
    module = _te().GroupedLinear(
        number,
        in_features if column else count,
        rows_of_shard(rows, placement.gtp(expert=True), placement.alignment),
        bias=bias,
        fuse_wgrad_accumulation=fuse_wgrad_accumulation,
        **_common(placement),
    )
    held = parts_of(name, rows, first if column else 0, parts)
    weights: list[Content] = []
    vectors: dict[str, Content] = {}
    for index in range(number):
        expert = rank_of(ep) * number + index
        own = tuple(Rows(r.start, r.length, r.name.format(e=expert), r.target) for r in held)
        key = name.format(e=expert)
        columns = None if column else (first, count)
        weights.append(Content(key=f"{key}.weight", rows=suffixed(own, "weight"), columns=columns))
        if bias:
            vectors[f"bias{index}"] = Content(key=f"{key}.bias", rows=suffixed(own, "bias"))
    return attach(
        module, placement, out_features=rows, weights=weights, vectors=vectors, partition_dim=0 if column else 1
    )


def attach(
    module: nn.Module,
    placement: TrainPlacement,
    *,
    out_features: int,
    weights: Sequence[Content],
    vectors: Mapping[str, Content],
    partition_dim: int | None = None,
) -> nn.Module:
    """Turn the weights of a TransformerEngine layer into shards, in place; the same module.

    The layer must have been built with the rows of one shard (``shards.rows_of_shard``).  Weights keep their memory,
    their values and the attributes that were set on them; only padding rows are zeroed.  A layer that
    TransformerEngine has initialised from equal seeds has equal rows on all ranks.

    :param out_features: rows of the whole TP-local weight.
    :param weights: what each weight is made of; a GroupedLinear has one for each expert.
    :param vectors: what each bias and norm parameter is made of, by its name in the module.
    :param partition_dim: axis that tensor parallelism cuts, where TransformerEngine does not say (GroupedLinear).
    :raises UsageError: for a layer that cannot be attached, or is not as described.
    """
    te = _te()
    grouped = isinstance(module, te.GroupedLinear)
    _refuse(te, module)
    names = [f"weight{i}" for i in range(module.num_gemms)] if grouped else ["weight"]  # type: ignore[arg-type]
    others = {name for name, p in module.named_parameters(recurse=False) if name not in names}
    if len(weights) != len(names) or others != set(vectors):
        raise UsageError(
            f"{type(module).__name__} has {len(names)} weight(s) and {', '.join(sorted(others)) or 'no vector'}",
            [("described", f"{len(weights)} weight(s) and {', '.join(sorted(vectors)) or 'no vector'}")],
        )
    shards = [
        _shard(module.get_parameter(name), placement, content, out_features, index if grouped else None, partition_dim)
        for index, (name, content) in enumerate(zip(names, weights, strict=True))
    ]
    restore_full_length(module, out_features, [name for name in vectors if name.startswith("bias")])
    for name, content in vectors.items():
        _check_length(module, name, content)
    for name, shard in zip(names, shards, strict=True):
        setattr(module, name, shard)
    placement.chain.adopt(*shards)
    for name in vectors:
        placement.replicate(module.get_parameter(name), expert=grouped)
    held: Any = module
    held.out_features = out_features
    held.placement = placement
    held._vectors = {name: (content, grouped) for name, content in vectors.items()}
    held.__class__ = _attached_class(type(module))
    return module


def shards_of(module: nn.Module) -> list[GTPShard]:
    """A layer's own shards, experts in order."""
    return [p for p in module.parameters(recurse=False) if isinstance(p, GTPShard)]


_CLASSES: dict[type, type] = {}


def _attached_class(kind: type) -> type:
    """The module's class with ``TELayer`` before it, once for each class: ``isinstance`` holds for both."""
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind)(f"GTP{kind.__name__}", (TELayer, kind), {})
    return _CLASSES[kind]


def _shard(
    weight: nn.Parameter,
    placement: TrainPlacement,
    content: Content,
    out_features: int,
    expert_idx: int | None,
    partition_dim: int | None,
) -> GTPShard:
    """The shard that takes a weight's place, over its memory."""
    given: Any = weight
    shard = placement.weight(
        content,
        (out_features, *weight.shape[1:]),
        partition_dim=getattr(given, "partition_dim", 0) if partition_dim is None else partition_dim,
        partition_stride=getattr(given, "partition_stride", 1),
        expert_idx=expert_idx,
        memory=weight.detach(),
    )
    shard.requires_grad_(weight.requires_grad)
    real = shard.row_range[1]
    with torch.no_grad():
        shard.local[real:].zero_()
    _carry_over(weight, shard)
    exact: Tensor | None = getattr(given, "_high_precision_init_val", None)
    if exact is not None:
        exact = exact.clone()
        exact[real:].zero_()
        refresh_high_precision(shard, exact)
    return shard


def _carry_over(weight: nn.Parameter, shard: GTPShard) -> None:
    """Attributes that TransformerEngine or the caller has set on the parameter object; what a shard knows itself is
    left, and methods that were bound to the old object are bound to the new one."""
    for name, value in vars(weight).items():
        known = getattr(GTPShard, name, None)
        if isinstance(known, property) and known.fset is None:
            continue
        if isinstance(value, MethodType) and value.__self__ is weight:
            value = MethodType(value.__func__, shard)
        setattr(shard, name, value)


def _refuse(te: Any, module: Any) -> None:
    """
    :raises UsageError: naming what of the layer cannot be sharded.
    """
    kind = type(module).__name__
    if isinstance(module, TELayer):
        raise UsageError(f"this {kind} has been attached before")
    if not isinstance(module, (te.Linear, te.LayerNormLinear, te.GroupedLinear)):
        raise UsageError(
            f"{kind} cannot be sharded: it never asks a weight for itself",
            [("needed", "te.Linear, te.LayerNormLinear or te.GroupedLinear")],
        )
    if getattr(module, "single_grouped_weight", False) or getattr(module, "single_grouped_bias", False):
        raise UsageError(
            f"{kind} packs all experts into one parameter",
            [("needed", "single_grouped_weight=False and single_grouped_bias=False")],
        )
    if len(getattr(module, "weight_names", ("weight",))) > 1:
        raise UsageError(
            f"{kind} splits its weight into {', '.join(module.weight_names)}", [("needed", "no parameters_split")]
        )
    if module.need_backward_dw():
        raise UsageError(
            f"{kind} delays weight gradients past the backward pass", [("needed", "delay_wgrad_compute=False")]
        )
    for option, wanted in (("use_grouped_tensor", False), ("sequence_parallel", False), ("zero_centered_gamma", False)):
        if getattr(module, option, wanted) != wanted:
            raise UsageError(f"{kind} with {option}=True cannot be sharded", [("needed", f"{option}=False")])
    for name, parameter in module.named_parameters(recurse=False):
        if type(parameter) is not nn.Parameter:
            raise UsageError(
                f"{name} of {kind} is a {type(parameter).__name__}",
                [("needed", "a plain parameter; a layer built outside quantized_model_init quantises at each use")],
            )


def _check_length(module: nn.Module, name: str, content: Content) -> None:
    length = max((rows.start + rows.length for rows in content.rows), default=0)
    vector = module.get_parameter(name)
    if tuple(vector.shape) != (length,):
        raise UsageError(f"{name} has {list(vector.shape)}", [("described", f"[{length}]")])


def _common(placement: TrainPlacement) -> dict[str, Any]:
    # TransformerEngine's own random values would be equal on all ranks, and are overwritten in any case.
    return {"params_dtype": placement.dtype, "device": placement.device, "init_method": nn.init.zeros_}


def _tensor_parallel(placement: TrainPlacement) -> dict[str, Any]:
    size = size_of(placement.tp())
    return {"tp_group": placement.tp(), "tp_size": size} if size > 1 else {}


def _column_rows(count: int, placement: TrainPlacement) -> int:
    """``out_features`` that leaves each TP rank the rows of one shard."""
    return rows_of_shard(count, placement.gtp(), placement.alignment) * size_of(placement.tp())


def _te() -> Any:
    """``transformer_engine.pytorch``.

    :raises EnvironmentFault: when it is missing, too old or not whole, in a sentence that says what to install.
    """
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        raise EnvironmentFault("TransformerEngine is not installed", [("try", 'pip install "gtp-serve[te]"')]) from None
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < OLDEST:
        raise EnvironmentFault(
            f"TransformerEngine {version} cannot shard weights",
            [("needed", ".".join(map(str, OLDEST)) + " or newer"), ("try", 'pip install "gtp-serve[te]"')],
        )
    try:
        return import_module("transformer_engine.pytorch")
    except Exception as fault:  # a missing library is an OSError, a missing part of it a RuntimeError
        raise EnvironmentFault(
            f"TransformerEngine {version} is installed and cannot be imported: {str(fault).strip()}",
            [("try", f'pip install --no-build-isolation "transformer-engine[core_cu13,pytorch]=={version}"')],
        ) from fault
