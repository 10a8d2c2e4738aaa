"""Linear layers over shards: cut by output rows (with or without a norm before) or by input columns.

Legend: I input features, O output features of this TP rank.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gtp_serve.layout.rows import RowMap
from gtp_serve.training.layer import ShardedLayer, parts_of, suffixed, whole_vector
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.products import Call, LinearFunction
from gtp_serve.training.shards import Content, GTPShard


class ColumnParallelLinear(ShardedLayer):
    """``[.., I] -> [.., O]``: each TP rank has its own outputs; the input is the same on all of them.

    :param name: of the module; logical tensors are ``{name}.weight`` and ``{name}.bias``.
    :param out_features: of all TP ranks together.
    :param parts: the modules whose rows the TP-local matrix is made of, where it is not equal shares of one.
    """

    weight: GTPShard

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        placement: TrainPlacement,
        *,
        bias: bool = False,
        parts: RowMap | None = None,
    ) -> None:
        super().__init__(placement)
        first, count = placement.cut(out_features, f"rows of {name}")
        self.in_features, self.out_features, self.local_out_features = in_features, out_features, count
        held = parts_of(name, count, first, parts)
        content = Content(key=f"{name}.weight", rows=suffixed(held, "weight"))
        self.weight = placement.weight(content, (count, in_features), partition_dim=0)
        self.bias: torch.nn.Parameter | None
        if bias:
            self.add_vector("bias", Content(key=f"{name}.bias", rows=suffixed(held, "bias")))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """[.., O]."""
        return multiply(self, x, self.weight, self.bias, sum_input_grad=True)


class RowParallelLinear(ShardedLayer):
    """``[.., I of this TP rank] -> [.., O]``, summed over TP ranks; the first rank adds the bias to its summand.

    :param in_features: of all TP ranks together.
    """

    weight: GTPShard

    def __init__(
        self, name: str, in_features: int, out_features: int, placement: TrainPlacement, *, bias: bool = False
    ) -> None:
        super().__init__(placement)
        first, count = placement.cut(in_features, f"columns of {name}")
        self.in_features, self.out_features, self.local_in_features = in_features, out_features, count
        content = Content.of(f"{name}.weight", out_features, columns=(first, count))
        self.weight = placement.weight(content, (out_features, count), partition_dim=1)
        self.first_rank = first == 0
        self.bias: torch.nn.Parameter | None
        if bias:
            self.add_vector("bias", whole_vector(f"{name}.bias", out_features))
        else:
            self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        """[.., O], the same on all TP ranks."""
        return sum_over_tp(self.placement, self.partial(x))

    def partial(self, x: Tensor) -> Tensor:
        """This TP rank's summand, [.., O]."""
        if self.bias is None or self.first_rank:
            return multiply(self, x, self.weight, self.bias, sum_input_grad=False)
        # The bias is the same parameter on all TP ranks: each must see its gradient, and one may add it.
        y: Tensor = _Touch.apply(multiply(self, x, self.weight, None, sum_input_grad=False), self.bias)  # type: ignore[no-untyped-call]
        return y


class NormColumnLinear(ColumnParallelLinear):
    """RMSNorm and a column-parallel linear.

    :param norm_name: of the norm's module.
    """

    layer_norm_weight: torch.nn.Parameter

    def __init__(
        self,
        name: str,
        norm_name: str,
        in_features: int,
        out_features: int,
        placement: TrainPlacement,
        *,
        eps: float,
        bias: bool = False,
        parts: RowMap | None = None,
    ) -> None:
        super().__init__(name, in_features, out_features, placement, bias=bias, parts=parts)
        self.eps = eps
        self.add_vector("layer_norm_weight", whole_vector(f"{norm_name}.weight", in_features), fill=1.0)

    def forward(self, x: Tensor) -> Tensor:
        """[.., O]."""
        return super().forward(self.placement.ops.rms_norm(x, self.layer_norm_weight, self.eps))

    def after_adding(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """``(linear(norm(x + delta)), x + delta)``; without a delta ``(linear(norm(x)), x)``."""
        if delta is None:
            return self(x), x
        normed, total = self.placement.ops.add_rms_norm(x, delta, self.layer_norm_weight, self.eps)
        return super().forward(normed), total


def multiply(
    layer: ShardedLayer, x: Tensor, weight: Tensor, bias: Tensor | None, *, sum_input_grad: bool, expert: bool = False
) -> Tensor:
    """``x @ weight.T + bias`` of a layer's shard."""
    parameters = (weight,) if bias is None else (weight, bias)
    call = call_of(layer, sum_input_grad=sum_input_grad, expert=expert)
    y: Tensor = LinearFunction.apply(x, call, None, bias is not None, *parameters)  # type: ignore[no-untyped-call]
    return y


def call_of(layer: ShardedLayer, *, sum_input_grad: bool, expert: bool = False) -> Call:
    """How a layer multiplies now."""
    placement = layer.placement
    return Call(
        site=layer,
        chain=placement.chain,
        linear=placement.ops.linear,
        sum_input_grad=partial(placement.sum_over_tp, expert=expert) if sum_input_grad else _as_it_is,
        training=torch.is_grad_enabled(),
    )


def _as_it_is(x: Tensor) -> Tensor:
    return x


def sum_over_tp(placement: TrainPlacement, x: Tensor, *, expert: bool = False) -> Tensor:
    """The sum over TP ranks of summands that each has one of; every rank's gradient is that of the sum."""
    y: Tensor = _SumOverTp.apply(x, placement, expert)  # type: ignore[no-untyped-call]
    return y


class _SumOverTp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, placement: TrainPlacement, expert: bool) -> Tensor:
        group = placement.tp(expert=expert)
        if group is None or group.size() == 1:
            return x.view_as(x)
        return placement.sum_over_tp(x.clone(), expert=expert)

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy, None, None


class _Touch(torch.autograd.Function):
    """``y`` as it is; the bias gets the gradient that adding it would have given it."""

    @staticmethod
    def forward(ctx: object, y: Tensor, bias: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, dy.reshape(-1, dy.shape[-1]).sum(0)
