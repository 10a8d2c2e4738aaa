"""Gradients of whole weights to their shards: summed over the GTP group, finished one step late.

The reduction of one weight is started before that of the weight before it is waited for, so that it runs beside the
next weight's arithmetic.  The last of a step is finished by ``finish``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gtp_serve.errors import UsageError
from gtp_serve.training.pool import BufferPool, Ticket
from gtp_serve.training.shards import GTPShard
from gtp_serve.training.wire import Pending, wire_of

Reduction = Literal["mean", "sum"]
Accumulation = Literal["native", "float32"]


@dataclass(slots=True, eq=False)
class _Flight:
    """One weight's gradient under way."""

    shard: GTPShard
    work: Pending
    full: Ticket
    received: Ticket


class GradientReducer:
    """
    :param reduction: ``mean`` over the axis (a loss averaged on each rank) or ``sum`` (a loss divided by all ranks'
        tokens, Megatron's per-token loss).
    :param accumulation: ``native`` is the backend's reduce-scatter in the gradient's dtype and the backend's order;
        ``float32`` sends all summands to their shard's rank, which adds them in rank order in float32: as many bytes
        on the wire, G times a shard's memory, and the same bits on every backend.
    """

    def __init__(self, pool: BufferPool, *, reduction: Reduction = "mean", accumulation: Accumulation = "native"):
        if reduction not in ("mean", "sum") or accumulation not in ("native", "float32"):
            raise UsageError(f"reduction {reduction!r} with accumulation {accumulation!r} is not known")
        self.pool, self.reduction, self.accumulation = pool, reduction, accumulation
        self._flying: list[_Flight] = []
        self._memory: dict[int, Ticket] = {}

    def memory(self, shard: GTPShard, dtype: torch.dtype) -> Tensor:
        """Memory for the gradient of the whole weight, padding cut off; ``start`` recognises it."""
        ticket = self.pool.take(shard.padded_shape, dtype, shard.local.device)
        rows = ticket.tensor[: shard.logical_shape[0]]
        self._memory[rows.data_ptr()] = ticket
        return rows

    def start(self, shards: Sequence[GTPShard], wgrads: Sequence[Tensor]) -> None:
        """Start the reductions of whole gradients and finish those started by the call before."""
        before, self._flying = self._flying, []
        for shard, wgrad in zip(shards, wgrads, strict=True):
            self._start(shard, wgrad)
        self._finish(before)

    def finish(self) -> None:
        """Wait for whatever is under way; memory that was lent and not reduced is taken back."""
        before, self._flying = self._flying, []
        self._finish(before)
        while self._memory:
            self.pool.give_back(self._memory.popitem()[1])

    def _start(self, shard: GTPShard, wgrad: Tensor) -> None:
        if tuple(wgrad.shape) != shard.logical_shape:
            raise UsageError(
                f"{shard.state.content.key}: a gradient of shape {list(wgrad.shape)}",
                [("needed", f"{list(shard.logical_shape)}, the whole weight's")],
            )
        if shard.group is None or shard.gtp_remat_size == 1:
            shard.add_gradient(self._averaged(shard, wgrad))
            self._release(wgrad)
            return
        full = self._padded(shard, wgrad)
        wire, count = wire_of(shard.group), shard.gtp_remat_size
        shape = tuple(shard.local.shape)
        if self.accumulation == "float32":
            received = self.pool.take((count * shape[0], *shape[1:]), wgrad.dtype, wgrad.device)
            work = wire.all_to_all(received.tensor, full.tensor)
        else:
            received = self.pool.take(shape, wgrad.dtype, wgrad.device)
            work = wire.reduce_scatter(received.tensor, full.tensor)
        shard.state.reductions_pending += 1
        self._flying.append(_Flight(shard, work, full, received))

    def _padded(self, shard: GTPShard, wgrad: Tensor) -> Ticket:
        """The gradient in memory of the padded shape; padding rows are zero."""
        ticket = self._memory.pop(wgrad.data_ptr(), None)
        if ticket is None:
            ticket = self.pool.take(shard.padded_shape, wgrad.dtype, wgrad.device)
            ticket.tensor[: wgrad.shape[0]].copy_(wgrad)
        ticket.tensor[wgrad.shape[0] :].zero_()
        return ticket

    def _release(self, wgrad: Tensor) -> None:
        ticket = self._memory.pop(wgrad.data_ptr(), None)
        if ticket is not None:
            self.pool.give_back(ticket)

    def _finish(self, flights: list[_Flight]) -> None:
        for flight in flights:
            flight.work.wait()
            self.pool.give_back(flight.full)
            flight.shard.state.reductions_pending -= 1
            flight.shard.add_gradient(self._averaged(flight.shard, self._summed(flight)))
            self.pool.give_back(flight.received)

    def _summed(self, flight: _Flight) -> Tensor:
        received = flight.received.tensor
        if self.accumulation == "native":
            return received
        first, *others = received.chunk(flight.shard.gtp_remat_size)
        total = first.to(torch.float32, copy=True)
        for summand in others:
            total.add_(summand)
        return total

    def _averaged(self, shard: GTPShard, total: Tensor) -> Tensor:
        divisor = shard.state.mean_divisor
        return total if self.reduction == "sum" or divisor == 1 else total / divisor
