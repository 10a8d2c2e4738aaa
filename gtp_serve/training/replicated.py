"""Parameters that every GTP rank holds whole (biases, norms, routers): their length and their gradients.

GTP ranks see different data, so a replicated parameter's gradient is reduced over the group as the shards' are.
A backward pass leaves it in an accumulator; ``finish`` reduces and adds it to ``main_grad`` or ``grad``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gtp_serve.errors import UsageError
from gtp_serve.training.groups import AxisGroup, size_of
from gtp_serve.training.wire import wire_of


class ReplicatedGradients:
    """The replicated parameters of one chain.

    :param reduction: ``mean`` or ``sum`` over the axis, as for shards.
    :param accumulation: ``native`` is the backend's all-reduce; ``float32`` adds the ranks' summands in rank order.
    """

    def __init__(self, *, reduction: str, accumulation: str) -> None:
        self.reduction, self.accumulation = reduction, accumulation
        self._held: list[_Replicated] = []

    def register(self, parameter: nn.Parameter, group: AxisGroup | None, *, mean_divisor: int | None = None) -> None:
        """Reduce the parameter's gradients over ``group`` from now on; registering it again changes nothing.

        :param mean_divisor: what a mean divides by; the group's size when None.
        """
        self._held = [held for held in self._held if held.parameter() is not None or held.waiting is not None]
        if any(held.parameter() is parameter for held in self._held):
            return
        held = _Replicated(parameter, group, size_of(group) if mean_divisor is None else mean_divisor)
        hooked: Any = parameter
        hooked.register_hook(held.before)
        hooked.register_post_accumulate_grad_hook(held.after)
        self._held.append(held)

    def finish(self) -> None:
        """Reduce what the backward passes since the last call have left.  Collective; every rank has the same
        parameters with gradients."""
        by_kind: dict[tuple[int, torch.dtype], list[_Replicated]] = {}
        for held in self._held:
            held.settle()
            if held.waiting is not None:
                by_kind.setdefault((id(held.group), held.waiting.dtype), []).append(held)
        for together in by_kind.values():
            self._reduce(together)

    def _reduce(self, together: Sequence[_Replicated]) -> None:
        """One collective for all parameters of one group and dtype."""
        group = together[0].group
        sums = [held.waiting for held in together if held.waiting is not None]
        if group is not None and group.size() > 1:
            flat = torch.cat([x.flatten() for x in sums])
            total = self._sum(flat, group)
            sums = [
                x.view_as(held) for x, held in zip(torch.split(total, [x.numel() for x in sums]), sums, strict=True)
            ]
        for held, total in zip(together, sums, strict=True):
            held.waiting = None
            held.add(total if self.reduction == "sum" or held.divisor == 1 else total / held.divisor)

    def _sum(self, flat: Tensor, group: AxisGroup) -> Tensor:
        wire = wire_of(group)
        if self.accumulation == "native":
            wire.all_reduce(flat).wait()
            return flat
        everyone = flat.new_empty(group.size() * flat.numel())
        wire.all_gather(everyone, flat).wait()
        first, *others = everyone.chunk(group.size())
        total = first.to(torch.float32, copy=True)
        for summand in others:
            total.add_(summand)
        return total


class _Replicated:
    """One parameter and the gradient that is not reduced yet."""

    def __init__(self, parameter: nn.Parameter, group: AxisGroup | None, divisor: int) -> None:
        self.parameter = weakref.ref(parameter)  # a layer that is dropped takes its parameters with it
        self.group, self.divisor = group, divisor
        self.waiting: Tensor | None = None
        self._reduced: Tensor | None = None

    def before(self, incoming: Tensor | None) -> None:
        """A backward pass is about to add to ``grad``: put away what is reduced already."""
        parameter = self.parameter()
        if incoming is None or parameter is None or not self._is_ours(parameter):
            return
        if parameter.grad is not None:
            self._reduced, parameter.grad = parameter.grad, None

    def after(self, parameter: Tensor) -> None:
        """Move what it has added."""
        grad = parameter.grad
        if grad is not None and self._is_ours(parameter):
            parameter.grad, self._reduced = self._reduced, None
            self.waiting = grad if self.waiting is None else self.waiting.add_(grad)

    def settle(self) -> None:
        """Bring back what was put away for a pass that then added nothing (``torch.autograd.grad``)."""
        parameter = self.parameter()
        if self._reduced is not None and parameter is not None and parameter.grad is None:
            parameter.grad = self._reduced
        self._reduced = None

    def _is_ours(self, parameter: Tensor) -> bool:
        """Whether there is anything to do: otherwise autograd leaves gradients where they belong."""
        return self.divisor > 1 or size_of(self.group) > 1 or getattr(parameter, "main_grad", None) is not None

    def add(self, reduced: Tensor) -> None:
        """Add a reduced gradient where the optimizer looks for it."""
        parameter: Any = self.parameter()
        if parameter is None:
            return
        main_grad: Tensor | None = getattr(parameter, "main_grad", None)
        if main_grad is not None:
            main_grad.add_(reduced)
        elif parameter.grad is None:
            parameter.grad = reduced.to(parameter.dtype, copy=True)
        else:
            parameter.grad.add_(reduced)


def restore_full_length(module: nn.Module, length: int, names: Sequence[str], *, fill: float = 0.0) -> None:
    """Give vectors that were made with a shard's length the whole layer's, in place: the parameter objects survive.

    Layers that are built with a shard's ``out_features`` make their biases as short as the shard, but every rank needs
    all of them.

    :param length: of the whole vector on this TP rank.
    :param names: of parameters (``bias``, ``bias0`` ..); those that the module lacks, or holds empty, are passed over.
    :raises UsageError: for a packed bias of a grouped layer, whose rows are experts and not outputs.
    """
    for name in names:
        vector = getattr(module, name, None)
        if not isinstance(vector, nn.Parameter) or not vector.numel():
            continue
        if vector.dim() != 1:
            raise UsageError(
                f"{name} of {type(module).__name__} is packed: {list(vector.shape)} for all experts",
                [("needed", "one bias for each expert (bias0, bias1, ...)")],
            )
        if vector.shape[0] != length:
            vector.data = vector.data.new_full((length,), fill)
