"""The mixture-of-experts feed-forward of a training model: router, token exchange, routed experts, shared expert.

Expert-parallel ranks have tokens of their own; each token's copies travel to the ranks of its experts and back, and
are added up at home in the order of experts, as the server does.
Legend: T tokens, D hidden, X experts, C chosen experts, N = T x C copies of tokens, M copies on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gtp_serve.config import MoeConfig
from gtp_serve.errors import UsageError
from gtp_serve.layout.rows import Rows, spans
from gtp_serve.layout.spans import Shard
from gtp_serve.refit.apply import Target, dtype_name
from gtp_serve.training.experts import GroupedExpertLinear
from gtp_serve.training.groups import AxisGroup, axis, size_of
from gtp_serve.training.layer import ShardedLayer, whole_vector
from gtp_serve.training.linear import ColumnParallelLinear, RowParallelLinear, sum_over_tp
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.tensor_parallel import same_on_tp
from gtp_serve.training.wire import wire_of


class ReplicatedLinear(ShardedLayer):
    """A matrix that every rank holds whole, as routers are.

    :param name: of the module; the logical tensor is ``{name}.weight``.
    """

    weight: nn.Parameter

    def __init__(self, name: str, in_features: int, out_features: int, placement: TrainPlacement) -> None:
        super().__init__(placement)
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=placement.dtype, device=placement.device))
        placement.replicate(self.weight)
        self._vectors["weight"] = (whole_vector(f"{name}.weight", out_features), False)

    def forward(self, x: Tensor) -> Tensor:
        """[.., O]."""
        return self.placement.ops.linear(x, self.weight, None)

    def targets(self) -> list[Target]:
        """The weight."""
        content, _ = self._vectors["weight"]
        shape = (self.weight.shape[0], self.weight.shape[1])
        shard = Shard(content.key, shape, dtype_name(self.weight), spans(content.rows, (0, shape[1])))
        return [Target(shard, self.weight.data)]


class TrainMlp(nn.Module):
    """The two matrices of SwiGLU around it, without the norm before."""

    def __init__(self, prefix: str, hidden_size: int, ffn_size: int, placement: TrainPlacement) -> None:
        super().__init__()
        self.ops = placement.ops
        first, count = placement.cut(ffn_size, f"rows of {prefix}.gate_proj")
        parts = (Rows(0, count, f"{prefix}.gate_proj", first), Rows(count, count, f"{prefix}.up_proj", first))
        self.gate_up = ColumnParallelLinear(f"{prefix}.gate_up_proj", hidden_size, 2 * ffn_size, placement, parts=parts)
        self.down = RowParallelLinear(f"{prefix}.down_proj", ffn_size, hidden_size, placement)

    def partial(self, x_TD: Tensor) -> Tensor:
        """This TP rank's summand, [T, D]."""
        return self.down.partial(self.ops.swiglu(self.gate_up(x_TD)))


class TrainMoe(nn.Module):
    """Router, routed experts and, where the model has one, the shared expert.

    :raises UsageError: unless experts are cut over as many TP ranks as everything else.
    """

    def __init__(self, prefix: str, hidden_size: int, moe: MoeConfig, placement: TrainPlacement) -> None:
        super().__init__()
        tp, expert_tp = size_of(placement.tp()), size_of(placement.tp(expert=True))
        if tp != expert_tp:
            raise UsageError(
                f"experts are cut over {expert_tp} tensor-parallel ranks and the rest over {tp}",
                [("needed", "expert tensor parallelism of the same size")],
            )
        self.moe, self.placement = moe, placement
        self.ep = axis(placement.groups, "ep")
        self.router = ReplicatedLinear(f"{prefix}.gate", hidden_size, moe.num_experts, placement)
        first, count = placement.cut(moe.ffn_size, f"rows of {prefix}.experts.*.gate_proj", expert=True)
        name = f"{prefix}.experts.{{e}}"
        parts = (Rows(0, count, f"{name}.gate_proj", first), Rows(count, count, f"{name}.up_proj", first))
        self.gate_up = GroupedExpertLinear(
            f"{name}.gate_up_proj", moe.num_experts, hidden_size, 2 * moe.ffn_size, placement, cut="column", parts=parts
        )
        self.down = GroupedExpertLinear(
            f"{name}.down_proj", moe.num_experts, moe.ffn_size, hidden_size, placement, cut="row"
        )
        shared = f"{prefix}.shared_expert"
        self.shared = TrainMlp(shared, hidden_size, moe.shared_ffn_size, placement) if moe.shared_ffn_size else None
        self.shared_gate = (
            ReplicatedLinear(f"{prefix}.shared_expert_gate", hidden_size, 1, placement)
            if moe.shared_ffn_size and moe.shared_gate
            else None
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D]."""
        ops = self.placement.ops
        weights_TC, experts_TC = ops.route(self.router(x_TD), self.moe.top_k, self.moe.normalise_top_k)
        out_TD = self._experts(x_TD, same_on_tp(self.placement, weights_TC), experts_TC)
        if self.shared is not None:
            shared_TD = self.shared.partial(x_TD)
            if self.shared_gate is not None:
                shared_TD = same_on_tp(self.placement, ops.sigmoid(self.shared_gate(x_TD))) * shared_TD
            out_TD = out_TD + shared_TD
        return sum_over_tp(self.placement, out_TD)

    def _experts(self, x_TD: Tensor, weights_TC: Tensor, experts_TC: Tensor) -> Tensor:
        """This TP rank's summand, [T, D]."""
        order_N = experts_TC.flatten().argsort(stable=True)
        tokens_N = order_N // experts_TC.shape[1]
        counts_X: list[int] = torch.bincount(experts_TC.flatten(), minlength=self.moe.num_experts).tolist()
        travel = plan_travel(self.ep, counts_X, self.placement.device)
        copies_MD = travel.there(x_TD[tokens_N])
        hidden = self.placement.ops.swiglu(self.gate_up(copies_MD, travel.local_counts))
        y_ND = travel.back(self.down.partial(hidden, travel.local_counts))
        weights_N = weights_TC.flatten()[order_N]
        out_TD: Tensor = _Combine.apply(y_ND, weights_N, tokens_N, tuple(counts_X), x_TD.shape[0])  # type: ignore[no-untyped-call]
        return out_TD.to(x_TD.dtype)


class _Combine(torch.autograd.Function):
    """Weighted copies added to their tokens in float32, expert after expert."""

    @staticmethod
    def forward(
        ctx: Any, y_ND: Tensor, weights_N: Tensor, tokens_N: Tensor, counts_X: Sequence[int], num_tokens: int
    ) -> Tensor:
        out_TD = torch.zeros((num_tokens, y_ND.shape[1]), dtype=torch.float32, device=y_ND.device)
        for y, weights, tokens in zip(
            *(torch.split(x, list(counts_X)) for x in (y_ND, weights_N, tokens_N)), strict=True
        ):
            if tokens.shape[0]:
                out_TD.index_add_(0, tokens, y.float() * weights[:, None])
        ctx.save_for_backward(y_ND, weights_N, tokens_N)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor) -> tuple[Any, ...]:
        y_ND, weights_N, tokens_N = ctx.saved_tensors
        dcopies_ND = dout_TD[tokens_N]
        dy_ND = (dcopies_ND * weights_N[:, None]).to(y_ND.dtype)
        return dy_ND, (dcopies_ND * y_ND.float()).sum(-1).to(weights_N.dtype), None, None, None


@dataclass(frozen=True, slots=True, eq=False)
class Travel:
    """The way of this rank's N copies, which are in the order of experts, to their experts' ranks and back.

    Blocks that go from rank to rank all have the largest one's size, filled up with zeros.
    """

    group: AxisGroup | None
    local_counts: tuple[int, ...]
    """Copies that this rank's experts get, from all ranks together."""
    block: int = 0
    sent_N: Tensor | None = None
    """Where in the blocks each of this rank's copies lies."""
    received_M: Tensor | None = None
    """Where in the received blocks the copies lie, in the order of this rank's experts."""

    def there(self, x_ND: Tensor) -> Tensor:
        """[M, D]."""
        return self._move(x_ND, self.sent_N, self.received_M)

    def back(self, x_MD: Tensor) -> Tensor:
        """[N, D]."""
        return self._move(x_MD, self.received_M, self.sent_N)

    def _move(self, x: Tensor, put: Tensor | None, take: Tensor | None) -> Tensor:
        if self.group is None or put is None or take is None:
            return x
        rows = self.group.size() * self.block
        full = x.new_zeros((rows, x.shape[1])).index_copy(0, put, x)
        moved: Tensor = _Exchange.apply(full, self.group)  # type: ignore[no-untyped-call]
        return moved.index_select(0, take)


class _Exchange(torch.autograd.Function):
    """Block r goes to rank r; its gradient comes back the same way."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return _exchange(full, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return _exchange(dout, ctx.group), None


def _exchange(full: Tensor, group: AxisGroup) -> Tensor:
    full = full.contiguous()
    out = torch.empty_like(full)
    wire_of(group).all_to_all(out, full).wait()
    return out


def plan_travel(group: AxisGroup | None, counts_X: Sequence[int], device: str) -> Travel:
    """Collective over the expert-parallel group, each rank of which holds equally many experts.

    :param counts_X: this rank's copies for each expert of the model.
    """
    if group is None or group.size() == 1:
        return Travel(None, tuple(counts_X))
    ranks, each = group.size(), len(counts_X) // group.size()
    told = torch.zeros(ranks * len(counts_X), dtype=torch.int64, device=device)
    wire_of(group).all_gather(told, torch.tensor(counts_X, device=device)).wait()
    counts: list[list[list[int]]] = told.view(ranks, ranks, each).tolist()
    block = max(sum(to) for sender in counts for to in sender)
    mine = [sender[group.rank()] for sender in counts]
    sent = [to * block + place for to, own in enumerate(counts[group.rank()]) for place in range(sum(own))]
    received = [
        sender * block + sum(own[:expert]) + place
        for expert in range(each)
        for sender, own in enumerate(mine)
        for place in range(own[expert])
    ]
    return Travel(
        group,
        tuple(sum(own[expert] for own in mine) for expert in range(each)),
        block,
        torch.tensor(sent, dtype=torch.int64, device=device),
        torch.tensor(received, dtype=torch.int64, device=device),
    )
