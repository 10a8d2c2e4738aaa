"""What a shard is a piece of, and what all aliases of one shard share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from gtp_serve.layout.rows import RowMap, Rows
from gtp_serve.training.groups import AxisGroup, rank_of, size_of

if TYPE_CHECKING:
    from gtp_serve.training.gather import GatherChain
    from gtp_serve.training.shards import GTPShard


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a TP-local matrix is made of, before GTP cuts it.

    ``rows`` leads from its rows to rows of logical tensors, ``columns`` is (first logical column, count); None for all
    columns from 0 on.  ``key`` is its name where it lies (for messages and files).
    """

    key: str
    rows: RowMap
    columns: tuple[int, int] | None = None

    @staticmethod
    def of(name: str, rows: int, *, first_row: int = 0, columns: tuple[int, int] | None = None) -> Content:
        """A matrix that is ``rows`` rows of one logical tensor from ``first_row`` on."""
        return Content(key=name, rows=(Rows(0, rows, name, first_row),) if rows else (), columns=columns)


class Members(Protocol):
    """Weights that are gathered together: one, or the experts of a grouped linear."""

    def __call__(self) -> Sequence[GTPShard]: ...


class ShardState:
    """What all aliases of one shard share: its place, its gradient's whereabouts and the live parameter."""

    def __init__(
        self,
        *,
        content: Content,
        local_rows: int,
        group: AxisGroup | None,
        partition_dim: int = 0,
        partition_stride: int = 1,
        tensor_model_parallel: bool = False,
        expert_idx: int | None = None,
        mean_divisor: int | None = None,
    ) -> None:
        self.content, self.local_rows, self.group = content, local_rows, group
        self.size, self.rank = size_of(group), rank_of(group)
        self.partition_dim, self.partition_stride = partition_dim, partition_stride
        self.tensor_model_parallel, self.expert_idx = tensor_model_parallel, expert_idx
        self.mean_divisor = self.size if mean_divisor is None else mean_divisor
        self.local: Tensor
        """This rank's rows as a plain tensor; set when the shard is made."""
        self.chain: GatherChain | None = None
        self.members: Members | None = None
        self.main_grad: Tensor | None = None
        self.reductions_pending = 0
        self.live: weakref.ref[GTPShard] | None = None

    def copy(self) -> ShardState:
        """For a copy of the parameter: the same place and chain, a group by itself, no gradient."""
        twin = ShardState(
            content=self.content,
            local_rows=self.local_rows,
            group=self.group,
            partition_dim=self.partition_dim,
            partition_stride=self.partition_stride,
            tensor_model_parallel=self.tensor_model_parallel,
            expert_idx=self.expert_idx,
            mean_divisor=self.mean_divisor,
        )
        twin.chain = self.chain
        return twin
