"""What all layers of one training model share: groups, chain, dtype, device, alignment and functions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import alignment_for
from gtp_serve.layout.spans import Shape
from gtp_serve.ops.table import REFERENCE, Ops
from gtp_serve.training.gather import GatherChain
from gtp_serve.training.groups import AxisGroup, ParallelGroups, axis, rank_of, size_of
from gtp_serve.training.shards import Content, GTPShard, shard_parameter
from gtp_serve.training.wire import wire_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainPlacement:
    """
    :param groups: the collection that every layer takes its axes from (see ``groups.axis``).
    :param alignment: rows that each shard is rounded up to (``layout.gtp.alignment_for`` knows the recipes').
    :param sums_in_rank_order: tensor-parallel sums are taken in rank order, as the server does when it is
        deterministic; otherwise as the backend takes them.
    """

    dtype: torch.dtype
    device: str = "cpu"
    groups: object = field(default_factory=ParallelGroups)
    chain: GatherChain = field(default_factory=GatherChain)
    alignment: int = field(default_factory=lambda: alignment_for("bf16"))
    ops: Ops = REFERENCE
    sums_in_rank_order: bool = False

    def __deepcopy__(self, memo: dict[int, object]) -> TrainPlacement:
        """Copies of a layer share groups and chain."""
        return self

    def tp(self, *, expert: bool = False) -> AxisGroup | None:
        """The tensor-parallel axis of dense weights or experts."""
        return axis(self.groups, "expt_tp" if expert else "tp")

    def gtp(self, *, expert: bool = False) -> AxisGroup | None:
        """The GTP axis of dense weights or experts."""
        return axis(self.groups, "expt_gtp_remat" if expert else "gtp_remat")

    def cut(self, total: int, what: str, *, expert: bool = False) -> tuple[int, int]:
        """This TP rank's equal share of ``total``: (first, count).

        :raises UsageError: when the ranks do not divide it.
        """
        group = self.tp(expert=expert)
        if total % size_of(group):
            raise UsageError(f"{total} {what} cannot be shared out to {size_of(group)} tensor-parallel ranks")
        count = total // size_of(group)
        return rank_of(group) * count, count

    def weight(
        self,
        content: Content,
        logical_shape: Shape,
        *,
        partition_dim: int,
        expert_idx: int | None = None,
        partition_stride: int = 1,
        memory: Tensor | None = None,
    ) -> GTPShard:
        """A weight's shard with memory for this rank's rows only, zeroed and in the chain by itself.

        :param logical_shape: of the TP-local weight.
        :param expert_idx: number among the rank's own experts; None for a dense weight.
        :param memory: what to use instead of new memory, as it is.
        """
        expert = expert_idx is not None
        shard = shard_parameter(
            content,
            logical_shape,
            self.gtp(expert=expert),
            alignment=self.alignment,
            dtype=self.dtype,
            device=self.device,
            partition_dim=partition_dim,
            partition_stride=partition_stride,
            tensor_model_parallel=size_of(self.tp(expert=expert)) > 1,
            expert_idx=expert_idx,
            mean_divisor=self.mean_divisor(expert=expert),
            memory=memory,
        )
        self.chain.adopt(shard)
        return shard

    def vector(self, length: int, *, expert: bool = False, fill: float = 0.0) -> nn.Parameter:
        """A replicated parameter: every GTP rank holds all of it, and its gradient is reduced over them."""
        vector = nn.Parameter(torch.full((length,), fill, dtype=self.dtype, device=self.device))
        self.replicate(vector, expert=expert)
        return vector

    def replicate(self, parameter: nn.Parameter, *, expert: bool = False) -> None:
        """Reduce the gradients of a parameter that every GTP rank holds whole (a router, a bias)."""
        divisor = self.mean_divisor(expert=expert)
        self.chain.replicated.register(parameter, self.gtp(expert=expert), mean_divisor=divisor)

    def mean_divisor(self, *, expert: bool) -> int:
        """Number of ranks with data of their own whose gradients meet in one shard.

        An expert has got tokens of all its expert-parallel peers already, so a mean divides by them too.
        """
        size = size_of(self.gtp(expert=expert))
        return size * size_of(axis(self.groups, "ep")) if expert else size

    def sum_over_tp(self, x: Tensor, *, expert: bool = False) -> Tensor:
        """The sum over tensor-parallel ranks, without gradients; may overwrite and return ``x``."""
        group = self.tp(expert=expert)
        if group is None or group.size() == 1:
            return x
        x, wire = x.contiguous(), wire_of(group)
        if not self.sums_in_rank_order:
            wire.all_reduce(x).wait()
            return x
        everyone = x.new_empty((group.size(), *x.shape))
        wire.all_gather(everyone.view(-1), x.view(-1)).wait()
        total = everyone[0].clone()
        for summand in everyone[1:]:
            total += summand
        return total
