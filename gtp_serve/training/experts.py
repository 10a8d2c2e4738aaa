"""The expert-parallel rank's experts as one layer: a block of tokens for each, weights gathered together.

Legend: T tokens in the order of experts, I input features, O output features of this expert-TP rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn

from gtp_serve.errors import UsageError
from gtp_serve.layout.rows import RowMap, Rows
from gtp_serve.training.groups import axis, rank_of, size_of
from gtp_serve.training.layer import ShardedLayer, parts_of, suffixed
from gtp_serve.training.linear import call_of, sum_over_tp
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.products import LinearFunction
from gtp_serve.training.shards import Content, GTPShard


class GroupedExpertLinear(ShardedLayer):
    """``weight0``, ``weight1`` .. (and ``bias0`` ..): one linear for each expert that this rank holds.

    :param name: of the experts' modules, with ``{e}`` for the expert's number in the model.
    :param num_experts: of the model; expert-parallel ranks hold equal shares, in order.
    :param cut: ``column``: expert TP ranks have outputs of their own; ``row``: inputs of their own, outputs are summed.
    :param parts: as for ``ColumnParallelLinear``, names with ``{e}``.
    """

    def __init__(
        self,
        name: str,
        num_experts: int,
        in_features: int,
        out_features: int,
        placement: TrainPlacement,
        *,
        cut: Literal["column", "row"],
        bias: bool = False,
        parts: RowMap | None = None,
    ) -> None:
        super().__init__(placement)
        ep = axis(placement.groups, "ep")
        if num_experts % size_of(ep):
            raise UsageError(f"{num_experts} experts cannot be shared out to {size_of(ep)} expert-parallel ranks")
        self.num_local_experts = num_experts // size_of(ep)
        self.first_expert = rank_of(ep) * self.num_local_experts
        self.in_features, self.out_features, self.cut = in_features, out_features, cut
        what = f"{'rows' if cut == 'column' else 'columns'} of {name}"
        first, count = placement.cut(out_features if cut == "column" else in_features, what, expert=True)
        self.first_rank = first == 0
        self.local_shape = (count, in_features) if cut == "column" else (out_features, count)
        columns = None if cut == "column" else (first, count)
        held = parts_of(name, self.local_shape[0], first if cut == "column" else 0, parts)
        for index in range(self.num_local_experts):
            number = self.first_expert + index
            rows = tuple(Rows(r.start, r.length, r.name.format(e=number), r.target) for r in held)
            content = Content(key=f"{name.format(e=number)}.weight", rows=suffixed(rows, "weight"), columns=columns)
            shard = placement.weight(
                content, self.local_shape, partition_dim=0 if cut == "column" else 1, expert_idx=index
            )
            setattr(self, f"weight{index}", shard)
            if bias:
                bias_content = Content(key=f"{name.format(e=number)}.bias", rows=suffixed(rows, "bias"))
                self.add_vector(f"bias{index}", bias_content, expert=True)
        self.has_bias = bias
        placement.chain.adopt(*self.weights)

    @property
    def weights(self) -> list[GTPShard]:
        """The experts' weights, in order."""
        return [getattr(self, f"weight{index}") for index in range(self.num_local_experts)]

    @property
    def biases(self) -> list[nn.Parameter]:
        """The experts' biases, in order; none where the layer has none."""
        return [getattr(self, f"bias{i}") for i in range(self.num_local_experts)] if self.has_bias else []

    def forward(self, x_TI: Tensor, counts: Sequence[int]) -> Tensor:
        """[T, O]; every rank of the GTP group must call it, also with no tokens.

        :param counts: tokens of each of this rank's experts, T together.
        """
        partial_TO = self.partial(x_TI, counts)
        return partial_TO if self.cut == "column" else sum_over_tp(self.placement, partial_TO, expert=True)

    def partial(self, x_TI: Tensor, counts: Sequence[int]) -> Tensor:
        """This expert-TP rank's summand (``row``) or outputs (``column``), [T, O]."""
        if len(counts) != self.num_local_experts or sum(counts) != x_TI.shape[0]:
            raise UsageError(f"{x_TI.shape[0]} tokens in blocks of {list(counts)} for {self.num_local_experts} experts")
        call = call_of(self, sum_input_grad=self.cut == "column", expert=True)
        y: Tensor = LinearFunction.apply(x_TI, call, tuple(counts), self.has_bias, *self.weights, *self.biases)  # type: ignore[no-untyped-call]
        return y
