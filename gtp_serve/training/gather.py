"""The gather chain: whole weights for one step's arithmetic, each fetched while the one before it is in use.

The order in which weights are asked for is recorded in the first pass, apart for training forward, inference forward
and backward (where activation checkpointing asks for forward weights again), and compared in each pass after it.  When
the order changes, what was fetched ahead is dropped and the order is recorded anew from there.  Nothing is fetched
across the end of a pass, where weights may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gtp_serve.training.pool import BufferPool, Ticket
from gtp_serve.training.reduce import Accumulation, GradientReducer, Reduction
from gtp_serve.training.replicated import ReplicatedGradients
from gtp_serve.training.shards import GTPShard
from gtp_serve.training.wire import Pending, wire_of

Phase = Literal["train", "infer", "backward"]


@dataclass(frozen=True, slots=True, eq=False)
class Use:
    """One asking for the weights of one site.  Another site may ask for the same weights: a tied head does."""

    site: object
    shards: tuple[GTPShard, ...]
    backward: bool

    def same(self, other: Use) -> bool:
        """Whether it is the same asking in another pass; a weight that was replaced makes it another one."""
        if self.site is not other.site or self.backward != other.backward or len(self.shards) != len(other.shards):
            return False
        return all(a.state is b.state for a, b in zip(self.shards, other.shards, strict=True))


class UseOrder:
    """The uses of one pass, recorded and then followed."""

    def __init__(self) -> None:
        self._recorded: list[Use] = []
        self._at = 0
        self._recording = True

    @property
    def recorded(self) -> tuple[Use, ...]:
        """The order as it is known now."""
        return tuple(self._recorded)

    def advance(self, use: Use) -> Use | None:
        """Take note of a use; the one that will follow it in this pass, where that is known."""
        if self._recorded and use.same(self._recorded[0]) and (self._recording or self._at == len(self._recorded)):
            self.end_pass()
        if not self._recording and (self._at == len(self._recorded) or not use.same(self._recorded[self._at])):
            del self._recorded[self._at :]
            self._recording = True
        if self._recording:
            self._recorded.append(use)
        self._at += 1
        return self._recorded[self._at] if self._at < len(self._recorded) else None

    def end_pass(self) -> None:
        """The next use is the first of a pass."""
        self._recording = self._recording and not self._recorded
        self._at = 0


@dataclass(slots=True, eq=False)
class _Fetch:
    """Gathers under way of one use's weights; ticket and work are None for a weight that the rank holds whole."""

    use: Use
    parts: list[tuple[Ticket | None, Pending | None]]
    versions: list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Lent:
    """Whole weights, padding stripped, until ``GatherChain.give_back``."""

    weights: list[Tensor]
    tickets: list[Ticket]


class GatherChain:
    """The gathers and gradient reductions of one model.

    :param reduction: see ``GradientReducer``.
    :param accumulation: see ``GradientReducer``.
    :param prefetch: False gathers each weight only when it is asked for.
    """

    def __init__(
        self, *, reduction: Reduction = "mean", accumulation: Accumulation = "native", prefetch: bool = True
    ) -> None:
        self.pool = BufferPool()
        self.reducer = GradientReducer(self.pool, reduction=reduction, accumulation=accumulation)
        self.replicated = ReplicatedGradients(reduction=reduction, accumulation=accumulation)
        self.prefetch = prefetch
        self.fetched_ahead = 0
        self.fetched_on_demand = 0
        self._orders: dict[Phase, UseOrder] = {"train": UseOrder(), "infer": UseOrder(), "backward": UseOrder()}
        self._phase: Phase = "train"
        self._ahead: _Fetch | None = None
        self._lent: list[Lent] = []

    def adopt(self, *shards: GTPShard) -> None:
        """Make these weights one group of this chain: they are gathered together, through the first."""
        for shard in shards:
            shard.state.chain = self
            shard.state.members = lambda: shards

    def watch(self, model: nn.Module) -> None:
        """Each forward call of ``model`` is the start of a pass; without it a pass starts at its first weight."""
        model.register_forward_pre_hook(lambda _module, _args: self.begin_pass())

    def begin_pass(self) -> None:
        """A forward pass starts: nothing fetched before is used in it."""
        if not _in_backward():
            self._end_pass()

    def gather(
        self, site: object, shards: Sequence[GTPShard], *, backward: bool = False, training: bool = True
    ) -> Lent:
        """The whole weights of one use, and the start of the next one's gather.

        :param site: what asks; the same object in every pass.
        :param training: whether a backward pass may follow.
        """
        if all(shard.gtp_remat_size == 1 for shard in shards):
            return Lent([shard.local for shard in shards], [])
        self._enter("backward" if backward or _in_backward() else "train" if training else "infer")
        use = Use(site, tuple(shards), backward)
        fetch = self._expected(use)
        if fetch is None:
            self.fetched_on_demand += 1
            fetch = self._fetch(use)
        following = self._orders[self._phase].advance(use)
        if following is not None and self.prefetch:
            self.fetched_ahead += 1
            self._ahead = self._fetch(following)
        return self._landed(fetch)

    def give_back(self, lent: Lent) -> None:
        """The weights have been used: what is queued on the current stream may still read them."""
        tickets, lent.tickets = lent.tickets, []
        for ticket in tickets:
            self.pool.give_back(ticket)

    def lend(self, shards: Sequence[GTPShard], *, backward: bool) -> list[Tensor]:
        """For users that do not say when they are done: valid until the second next ``lend``."""
        lent = self.gather(shards[0].state, shards, backward=backward)
        self._lent.append(lent)
        if len(self._lent) > 1:
            self.give_back(self._lent.pop(0))
        return [
            weight.detach().requires_grad_(shard.live.requires_grad)
            for weight, shard in zip(lent.weights, shards, strict=True)
        ]

    def gradient_memory(self, shard: GTPShard) -> Tensor:
        """Memory for the whole weight's gradient that ``reduce`` sends without a copy."""
        main_grad = shard.state.main_grad
        return self.reducer.memory(shard, shard.local.dtype if main_grad is None else main_grad.dtype)

    def reduce(self, shards: Sequence[GTPShard], wgrads: Sequence[Tensor]) -> None:
        """Start the reduction of whole gradients; they are added to the shards' gradients one call later."""
        self.reducer.start(shards, wgrads)

    def finish_gradients(self) -> None:
        """Finish every reduction of the step, also of replicated parameters; before the optimizer, once all
        micro-batches are through.  Collective."""
        self.reducer.finish()
        self.replicated.finish()
        self._end_pass()

    def invalidate(self) -> None:
        """Weights were written in a way that torch does not see (through numpy, by another process)."""
        self._drop_ahead()

    def order(self, phase: Phase) -> tuple[Use, ...]:
        """The recorded order of a phase."""
        return self._orders[phase].recorded

    def _end_pass(self) -> None:
        self._drop_ahead()
        for order in self._orders.values():
            order.end_pass()
        while self._lent:
            self.give_back(self._lent.pop())

    def _enter(self, phase: Phase) -> None:
        if phase != self._phase:
            self._drop_ahead()
            self._orders[self._phase].end_pass()
            self._orders[phase].end_pass()
            self._phase = phase

    def _expected(self, use: Use) -> _Fetch | None:
        """What was fetched ahead, when it is this use's weights as they are now."""
        ahead = self._ahead
        if ahead is None:
            return None
        if ahead.use.same(use) and ahead.versions == [_version(shard) for shard in use.shards]:
            self._ahead = None
            return ahead
        self._drop_ahead()
        return None

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self.give_back(self._landed(self._ahead))
            self._ahead = None

    def _fetch(self, use: Use) -> _Fetch:
        parts: list[tuple[Ticket | None, Pending | None]] = []
        for shard in use.shards:
            if shard.group is None or shard.gtp_remat_size == 1:
                parts.append((None, None))
                continue
            ticket = self.pool.take(shard.padded_shape, shard.local.dtype, shard.local.device)
            parts.append((ticket, wire_of(shard.group).all_gather(ticket.tensor, shard.local)))
        return _Fetch(use, parts, [_version(shard) for shard in use.shards])

    def _landed(self, fetch: _Fetch) -> Lent:
        weights: list[Tensor] = []
        for shard, (ticket, work) in zip(fetch.use.shards, fetch.parts, strict=True):
            if work is not None:
                work.wait()
            weights.append(shard.local if ticket is None else ticket.tensor[: shard.logical_shape[0]])
        return Lent(weights, [ticket for ticket, _ in fetch.parts if ticket is not None])


def _version(shard: GTPShard) -> tuple[int, int]:
    """Changes when the live parameter is written by torch, or moved."""
    live = shard.live
    return live._version, live.local.data_ptr()


def _in_backward() -> bool:
    """Whether autograd is running a backward pass; forward code that runs in it is a recomputation."""
    engine: Any = torch._C
    task: int = engine._current_graph_task_id()
    return task != -1
