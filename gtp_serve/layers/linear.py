"""Linear layers, cut by output rows (fused where several read one input) or by input columns.

Legend: T tokens, I input features, O output features of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UsageError
from gtp_serve.layers.parameter import Rows, columns, stacked
from gtp_serve.layers.placement import Placement
from gtp_serve.refit.apply import Target


class ColumnLinear:
    """Rows of one or several logical matrices, one below another; each rank computes its own outputs.

    :param parts: rows of each module (its name without ``.weight``) that this rank holds.
    """

    def __init__(self, key: str, parts: Sequence[Rows], in_size: int, *, bias: bool, placement: Placement) -> None:
        self.key, self.parts, self.ops = key, tuple(parts), placement.ops
        rows = sum(part.count for part in parts)
        self.weight = placement.empty(rows, in_size)
        self.bias = placement.empty(rows) if bias else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, O]."""
        return self.ops.linear(x_TI, self.weight, self.bias)

    def targets(self) -> list[Target]:
        """Weight, and bias where there is one."""
        held = [("weight", self.weight), *([("bias", self.bias)] if self.bias is not None else [])]
        return [
            stacked(f"{self.key}.{kind}", tensor, [Rows(f"{p.name}.{kind}", p.first, p.count) for p in self.parts])
            for kind, tensor in held
        ]


def replicated_linear(name: str, out_size: int, in_size: int, placement: Placement) -> ColumnLinear:
    """A matrix that every rank holds whole."""
    return ColumnLinear(name, [Rows(name, 0, out_size)], in_size, bias=False, placement=placement)


def gate_up_linear(prefix: str, ffn_size: int, in_size: int, *, bias: bool, placement: Placement) -> ColumnLinear:
    """Gate above up."""
    first, count = placement.cut(ffn_size, f"rows of {prefix}.gate_proj")
    parts = [Rows(f"{prefix}.{name}", first, count) for name in ("gate_proj", "up_proj")]
    return ColumnLinear(f"{prefix}.gate_up_proj", parts, in_size, bias=bias, placement=placement)


def qkv_linear(prefix: str, config: ModelConfig, placement: Placement) -> ColumnLinear:
    """Query heads, then key heads, then value heads of this rank."""
    size = config.head_dim
    first_q, heads = placement.cut(config.num_heads, "attention heads")
    first_kv, kv_heads = kv_share(config.num_kv_heads, placement)
    parts = [
        Rows(f"{prefix}.q_proj", first_q * size, heads * size),
        Rows(f"{prefix}.k_proj", first_kv * size, kv_heads * size),
        Rows(f"{prefix}.v_proj", first_kv * size, kv_heads * size),
    ]
    return ColumnLinear(f"{prefix}.qkv_proj", parts, config.hidden_size, bias=config.qkv_bias, placement=placement)


def kv_share(num_kv_heads: int, placement: Placement) -> tuple[int, int]:
    """This rank's KV heads: (first, count).  More ranks than heads: each head is held by several ranks.

    :raises UsageError: when neither number divides the other.
    """
    tp = placement.tp
    if tp.size <= num_kv_heads:
        return placement.cut(num_kv_heads, "KV heads")
    if tp.size % num_kv_heads:
        raise UsageError(f"{num_kv_heads} KV heads cannot be repeated evenly on {tp.size} tensor-parallel ranks")
    return tp.rank * num_kv_heads // tp.size, 1


class RowLinear:
    """Columns of a logical matrix; the ranks' results are summed.  The bias is the first rank's."""

    def __init__(self, name: str, out_size: int, in_size: int, *, bias: bool, placement: Placement) -> None:
        self.name, self.tp, self.ops = name, placement.tp, placement.ops
        self.first, count = placement.cut(in_size, f"columns of {name}")
        self.weight = placement.empty(out_size, count)
        self.bias = placement.empty(out_size) if bias and self.tp.rank == 0 else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, O], the same on all ranks."""
        return self.tp.all_reduce(self.partial(x_TI))

    def partial(self, x_TI: Tensor) -> Tensor:
        """This rank's summand, [T, O]."""
        return self.ops.linear(x_TI, self.weight, self.bias)

    def targets(self) -> list[Target]:
        """Weight, and bias where this rank holds it."""
        found = [columns(f"{self.name}.weight", self.weight, self.first)]
        if self.bias is not None:
            name = f"{self.name}.bias"
            found.append(stacked(name, self.bias, [Rows(name, 0, self.bias.shape[0])]))
        return found
