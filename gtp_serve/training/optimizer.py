"""What the optimizers over shards have in common: state of the shards' own shape, masters, steps.

State is made with the optimizer, one tensor a slot and parameter, and only for this rank's rows: as much of it falls
on a rank as weights do.  Slots have Megatron's names and are saved and loaded by the weights' own spans.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gtp_serve.errors import UsageError
from gtp_serve.training.gradients import gradient_of
from gtp_serve.training.shard_map import ShardMap, as_map, high_precision, is_quantised
from gtp_serve.training.shards import GTPShard

#: The float32 copy of a weight of another type, which is what an optimizer changes.
MASTER = "fp32_param"


class ShardedOptimizer(ABC):
    """An optimizer of a model's parameters that require gradients.

    :param model: or a map of it, where the ranks are not ``torch.distributed``'s.
    :raises UsageError: for a learning rate that is none.
    """

    def __init__(self, model: nn.Module | ShardMap, lr: float) -> None:
        if not (math.isfinite(lr) and lr >= 0):
            raise UsageError(f"lr is {lr}", [("needed", "a finite number from 0 on")])
        self.shards = as_map(model)
        self.lr = lr
        self.steps = 0
        self.state: dict[int, dict[str, Tensor]] = {}
        for index, parameter in enumerate(self.shards.parameters):
            if parameter.requires_grad:
                self.state[index] = {slot: _zeros(parameter) for slot in self.slots_of(index)}
                if parameter.dtype != torch.float32 or is_quantised(_plain(parameter)):
                    self.state[index][MASTER] = _first_master(parameter)

    @abstractmethod
    def slots_of(self, index: int) -> tuple[str, ...]:
        """Slots of one parameter, masters left out."""

    @abstractmethod
    def update(self) -> None:
        """Change the working values of all parameters by their gradients."""

    def step(self) -> None:
        """One step.  Collective where the optimizer is; gradients must be finished.

        :raises UsageError: for a shard whose gradient is still being reduced.
        """
        self.steps += 1
        with torch.no_grad():
            self.update()
            for index, slots in self.state.items():
                if MASTER in slots:
                    self.shards.parameters[index].copy_(slots[MASTER])
        self.shards.weights_changed()

    def zero_gradients(self) -> None:
        """Set every ``main_grad`` to zero and let go of every ``grad``."""
        for parameter in self.shards.parameters:
            held: Any = parameter
            main_grad = getattr(held, "main_grad", None)
            if main_grad is not None:
                main_grad.zero_()
                if hasattr(held, "grad_added_to_main_grad"):
                    held.grad_added_to_main_grad = False
            held.grad = None

    def working(self, index: int) -> Tensor:
        """What a step changes: the master, or the parameter itself."""
        return self.state[index].get(MASTER, self.shards.parameters[index])

    def gradient(self, index: int) -> Tensor | None:
        """A parameter's gradient in float32."""
        grad = gradient_of(self.shards.parameters[index])
        return None if grad is None else grad.to(torch.float32)

    def state_of(self, parameter: Tensor) -> Mapping[str, Tensor]:
        """State tensors of a parameter by slot; a trimmed shard leads to its live parameter's.

        They have the shard's own shape, padding included: it is what collectives go by.

        :raises UsageError: for a tensor that is none of the model's.
        """
        return self.state.get(self.shards.find(parameter), {})

    def slots(self) -> dict[str, dict[int, Tensor]]:
        """Slot -> parameter index -> state tensor, in a fixed order."""
        found: dict[str, dict[int, Tensor]] = {}
        for index, slots in self.state.items():
            for slot, tensor in slots.items():
                found.setdefault(slot, {})[index] = tensor
        return found

    def masters_from_weights(self) -> None:
        """Start from the weights as they are now: what was lost in rounding stays lost."""
        for index, slots in self.state.items():
            if MASTER in slots:
                slots[MASTER].copy_(high_precision(self.shards.parameters[index]))

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Numbers that a checkpoint keeps, under Megatron's names."""


def _plain(parameter: nn.Parameter) -> Tensor:
    return parameter.local if isinstance(parameter, GTPShard) else parameter.data


def _zeros(parameter: nn.Parameter) -> Tensor:
    return torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)


def _first_master(parameter: nn.Parameter) -> Tensor:
    """From the value that a quantised weight was made from, where it is still there."""
    before: Tensor | None = getattr(parameter, "_high_precision_init_val", None)
    value = high_precision(parameter) if before is None else before
    return value.to(device=parameter.device, dtype=torch.float32, copy=True)
