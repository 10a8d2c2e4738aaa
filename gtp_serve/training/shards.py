"""A weight parameter that holds one rank's rows: the TP-local matrix, cut over a GTP group and padded at its tail.

It is a tensor with memory of its own, so that optimizers, ``state_dict`` and kernels see an ordinary parameter.
Detaching it (as nn.Parameter, saved-tensor hooks and activation checkpointing do) gives another ``GTPShard`` over the
same memory and the same state; every other operation on it gives a plain tensor of the shard's shape.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import real_rows, shard_rows
from gtp_serve.layout.rows import clip, spans
from gtp_serve.layout.spans import Shape, Shard
from gtp_serve.refit.apply import Target, dtype_name
from gtp_serve.training.groups import AxisGroup, size_of
from gtp_serve.training.shard_state import Content, ShardState

if TYPE_CHECKING:
    from gtp_serve.training.gather import GatherChain

__all__ = ["Content", "GTPShard", "ShardState", "as_parameter", "live_parameter", "shard_parameter"]

_ALIASING = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_BASE: Any = torch.Tensor  # its stubs leave out the descriptors of ``grad`` and ``data``


class GTPShard(torch.Tensor):
    """One rank's padded rows of a TP-local weight.

    Its gradient is reduced over the group and arrives through its gather chain, in ``main_grad`` or ``grad``, once
    ``GatherChain.finish_gradients`` has been called; ``torch.autograd.grad`` has none for it.

    Attribute names that Megatron's GTP parameters have too mean the same here: ``group``, ``gtp_remat_size``,
    ``pad_length``, ``partition_dim``, ``partition_stride``, ``tensor_model_parallel``, ``main_grad``.
    """

    state: ShardState
    _parameter: bool

    is_gtp_weight_remat = True
    is_distributed_weight = True
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own subclasses

    @staticmethod
    def __new__(cls, local: Tensor, state: ShardState, requires_grad: bool = False) -> GTPShard:
        """Over the memory of ``local``, which must be this rank's rows."""
        if not isinstance(local, GTPShard):
            state.local = local.detach()
        made: GTPShard = _BASE._make_subclass(cls, state.local, requires_grad)
        made.state, made._parameter = state, False
        return made

    def __init__(self, local: Tensor, state: ShardState, requires_grad: bool = False) -> None:
        del local, state, requires_grad  # __new__ has used them

    # What it is a piece of

    @property
    def local(self) -> Tensor:
        """The same memory as a plain tensor, without gradients."""
        return self.state.local

    @property
    def group(self) -> AxisGroup | None:
        """The GTP group."""
        return self.state.group

    @property
    def gtp_remat_size(self) -> int:
        """Ranks that share the TP-local weight."""
        return self.state.size

    @property
    def gtp_rank(self) -> int:
        """This rank among them."""
        return self.state.rank

    @property
    def padded_shape(self) -> Shape:
        """Of all ranks' shards together: what a gather gives."""
        return (self.state.size * self.local.shape[0], *self.local.shape[1:])

    @property
    def logical_shape(self) -> Shape:
        """Of the TP-local weight, padding left out."""
        return (self.state.local_rows, *self.local.shape[1:])

    @property
    def pad_length(self) -> int:
        """Padding rows of all ranks' shards together."""
        return self.padded_shape[0] - self.state.local_rows

    @property
    def row_range(self) -> tuple[int, int]:
        """(first row of the TP-local weight, number of real rows) that this rank holds; the number may be 0."""
        return real_rows(self.state.local_rows, self.local.shape[0], self.state.rank)

    @property
    def partition_dim(self) -> int:
        """Axis that tensor parallelism cuts."""
        return self.state.partition_dim

    @property
    def partition_stride(self) -> int:
        """Pieces that lie one below another in the TP-local weight and are each cut."""
        return self.state.partition_stride

    @property
    def tensor_model_parallel(self) -> bool:
        """Whether tensor parallelism cuts it at all."""
        return self.state.tensor_model_parallel

    @property
    def expert_idx(self) -> int | None:
        """Number among the rank's own experts; None for a dense weight."""
        return self.state.expert_idx

    @property
    def is_routed_expert(self) -> bool:
        """Whether it is one expert's weight."""
        return self.state.expert_idx is not None

    def shard(self) -> Shard:
        """Its spans; padding is what none covers."""
        content, shape = self.state.content, tuple(self.local.shape)
        rows = clip(content.rows, self.state.rank * shape[0], shape[0])
        columns = None if len(shape) == 1 else content.columns or (0, shape[1])
        return Shard(content.key, shape, dtype_name(self.local), spans(rows, columns))

    def target(self) -> Target:
        """For a plan that fills it in place."""
        return Target(self.shard(), self.local)

    def trimmed(self, of: Tensor | None = None) -> Tensor:
        """The real rows, as a plain view that ``live_parameter`` leads back from.

        :param of: a tensor of the shard's shape to trim instead of the weight: optimizer state, a gradient.
        """
        whole_shard = self.local if of is None else of
        if whole_shard.shape[0] != self.local.shape[0]:
            raise UsageError(f"{self.state.content.key}: {whole_shard.shape[0]} rows are not the shard's")
        view = whole_shard.detach()[: self.row_range[1]]
        link: Any = view
        link.live_gtp_shard = self.live
        return view

    @property
    def live(self) -> GTPShard:
        """The parameter that optimizers and modules hold; this object itself where none was made."""
        found = None if self.state.live is None else self.state.live()
        return self if found is None else found

    # Gradients

    @property
    def main_grad(self) -> Tensor | None:
        """Where reduced gradients are added, in its own dtype; None: they go to ``grad``.

        :raises UsageError: while a reduction of this weight's gradient is under way.
        """
        self._check_reduced()
        return self.state.main_grad

    @main_grad.setter
    def main_grad(self, buffer: Tensor | None) -> None:
        if buffer is not None and buffer.shape != self.local.shape:
            raise UsageError(f"{self.state.content.key}: main_grad {list(buffer.shape)} has not the shard's shape")
        self.state.main_grad = buffer

    @property
    def grad(self) -> Tensor | None:
        """As of any parameter.

        :raises UsageError: while a reduction of this weight's gradient is under way.
        """
        self._check_reduced()
        found: Tensor | None = _BASE.grad.__get__(self)
        return found

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _BASE.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _BASE.grad.__set__(self, None)

    def add_gradient(self, reduced: Tensor) -> None:
        """Add a reduced gradient of the shard's shape to ``main_grad`` or, where there is none, to ``grad``."""
        live = self.live
        if self.state.main_grad is not None:
            self.state.main_grad.add_(reduced)
            # Megatron's data parallelism gives its parameters this flag.  It is never made here: where a parameter
            # has it, TransformerEngine hands autograd a gradient of uninitialised memory for Megatron to drop.
            if hasattr(live, "grad_added_to_main_grad"):
                live.grad_added_to_main_grad = True
            return
        held: Tensor | None = _BASE.grad.__get__(live)
        if held is None:
            live.grad = reduced.to(self.local.dtype, copy=True)
        else:
            held.add_(reduced)

    def _check_reduced(self) -> None:
        if self.state.reductions_pending:
            raise UsageError(
                f"the gradient of {self.state.content.key} is still being reduced over its GTP group",
                [("try", "finish_gradients() after the last backward pass and before the optimizer")],
            )

    # TransformerEngine's DistributedWeight protocol: asked of a group's first weight, answered for all of it

    def materialize_group_for_forward(self) -> Tensor | list[Tensor]:
        """The whole weights, padding stripped, valid until the second next weight is asked for."""
        return self._bare(self._chain().lend(self._group_members(), backward=False))

    def materialize_group_for_backward(self) -> Tensor | list[Tensor]:
        """The same, in the backward pass."""
        return self._bare(self._chain().lend(self._group_members(), backward=True))

    def finalize_group_grads(self, wgrads: Tensor | Sequence[Tensor]) -> Tensor | list[Tensor | None] | None:
        """Start the reduction of whole gradients; they arrive in ``main_grad`` or ``grad`` one step later."""
        given = [wgrads] if isinstance(wgrads, Tensor) else list(wgrads)
        members = self._group_members()
        self._chain().reduce(members, given)
        return None if len(members) == 1 else [None] * len(members)

    def grad_buffer(self) -> Tensor:
        """Memory of the whole weight's shape for its gradient, in ``main_grad``'s dtype."""
        return self._chain().gradient_memory(self)

    def _chain(self) -> GatherChain:
        if self.state.chain is None:
            raise UsageError(f"{self.state.content.key} is in no gather chain", [("try", "GatherChain.adopt")])
        return self.state.chain

    def _group_members(self) -> Sequence[GTPShard]:
        return [self] if self.state.members is None else self.state.members()

    @staticmethod
    def _bare(weights: list[Tensor]) -> Tensor | list[Tensor]:
        return weights[0] if len(weights) == 1 else weights

    # What makes it a parameter

    @property
    def _is_param(self) -> bool:
        return self._parameter

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        # nn.Parameter marks what it makes by this attribute: that object is the live one.
        self._parameter = value
        self.state.live = weakref.ref(self)

    @property
    def data(self) -> Tensor:
        """The memory as a plain tensor; setting it moves the parameter to other memory of the same rows."""
        return self.local

    @data.setter
    def data(self, value: Tensor) -> None:
        plain = value.local if isinstance(value, GTPShard) else value.detach()
        if plain.shape != self.local.shape:
            raise UsageError(f"{self.state.content.key}: {list(plain.shape)} is not the shard's shape")
        _BASE.data.__set__(self, plain)
        self.state.local = plain  # aliases work with it too

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its stub takes it for an instance's method
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ALIASING:
            return cls(args[0], args[0].state)
        # An operation in place gives its caller the shard back without our help: torch returns what it was given.
        return func(*_plain(args), **_plain(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> GTPShard:
        if id(self) in memo:
            found: GTPShard = memo[id(self)]
            return found
        twin = GTPShard(self.local.clone(), self.state.copy(), self.requires_grad)
        if self._parameter:
            twin._is_param = True
        memo[id(self)] = twin
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as its rows: a process group cannot be."""
        plain: Any = self.local
        return plain.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # as torch's own takes it
        state = self.state
        return (
            f"GTPShard({state.content.key}, {state.rank} of {state.size}, {list(self.local.shape)} of "
            f"{list(self.logical_shape)}, {dtype_name(self.local)})"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, GTPShard):
        return value.local
    if isinstance(value, (list, tuple)):
        return type(value)([_plain(x) for x in value])
    if isinstance(value, dict):
        return {k: _plain(x) for k, x in value.items()}
    return value


def live_parameter(trimmed: Tensor) -> GTPShard | None:
    """The live parameter that a tensor made by ``GTPShard.trimmed`` belongs to; None for any other tensor."""
    return getattr(trimmed, "live_gtp_shard", None)


def shard_parameter(
    content: Content,
    logical_shape: Shape,
    group: AxisGroup | None,
    *,
    alignment: int,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    partition_dim: int = 0,
    partition_stride: int = 1,
    tensor_model_parallel: bool = False,
    expert_idx: int | None = None,
    mean_divisor: int | None = None,
    memory: Tensor | None = None,
) -> GTPShard:
    """A parameter with memory for this rank's rows only, zeroed; on an axis of one rank there is no padding.

    :param logical_shape: of the TP-local weight.
    :param memory: what to use instead of new memory, as it is; its dtype and device are the shard's.
    :raises UsageError: for memory that has not the shard's shape.
    """
    shape = (rows_of_shard(logical_shape[0], group, alignment), *logical_shape[1:])
    if memory is None:
        memory = torch.zeros(shape, dtype=dtype, device=device)
    elif tuple(memory.shape) != shape:
        raise UsageError(f"{content.key} has {list(memory.shape)}", [("needed", f"{list(shape)}, the shard's shape")])
    state = ShardState(
        content=content,
        local_rows=logical_shape[0],
        group=group,
        partition_dim=partition_dim,
        partition_stride=partition_stride,
        tensor_model_parallel=tensor_model_parallel,
        expert_idx=expert_idx,
        mean_divisor=mean_divisor,
    )
    return as_parameter(GTPShard(memory, state))


def rows_of_shard(local_rows: int, group: AxisGroup | None, alignment: int) -> int:
    """Rows that each rank of a GTP group holds of a TP-local weight; on an axis of one rank there is no padding."""
    return local_rows if size_of(group) == 1 else shard_rows(local_rows, size_of(group), alignment)


def as_parameter(shard: GTPShard, requires_grad: bool = True) -> GTPShard:
    """The live parameter over a shard's memory."""
    made: Any = torch.nn.Parameter(shard, requires_grad)
    live: GTPShard = made
    return live
