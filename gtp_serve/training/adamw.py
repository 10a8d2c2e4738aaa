"""AdamW over shards: element by element, so each rank's rows change exactly as they would in the whole matrix."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from torch import Tensor, nn

from gtp_serve.errors import UsageError
from gtp_serve.training.optimizer import ShardedOptimizer
from gtp_serve.training.shard_map import ShardMap


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamWSettings:
    """As torch's AdamW.

    :param decay_vectors: whether biases and norms decay too; Megatron leaves them out.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_vectors: bool = False

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas) or self.eps < 0 or self.weight_decay < 0:
            raise UsageError(f"{self} is no AdamW", [("needed", "betas in [0, 1), eps and weight_decay from 0 on")])


ADAMW_SLOTS = ("exp_avg", "exp_avg_sq")


class AdamW(ShardedOptimizer):
    """AdamW with float32 state and, for weights of another type, float32 masters.

    :param lr: learning rate; the attribute may be set before any step.
    """

    def __init__(self, model: nn.Module | ShardMap, *, lr: float, settings: AdamWSettings | None = None) -> None:
        self.adamw = settings or AdamWSettings()
        super().__init__(model, lr)

    def slots_of(self, index: int) -> tuple[str, ...]:
        """See ``ShardedOptimizer``."""
        return ADAMW_SLOTS

    def update(self) -> None:
        """See ``ShardedOptimizer``."""
        for index in self.state:
            adamw_update(self, index, self.adamw)

    def settings(self) -> dict[str, object]:
        """See ``ShardedOptimizer``."""
        return {"lr": self.lr, **asdict(self.adamw)}


def adamw_update(optimizer: ShardedOptimizer, index: int, settings: AdamWSettings) -> None:
    """One step of one parameter, in the order of operations of torch's own; none without a gradient."""
    grad = optimizer.gradient(index)
    if grad is None:
        return
    value, slots = optimizer.working(index), optimizer.state[index]
    mean, square = (slots[name] for name in ADAMW_SLOTS)
    lr, (beta1, beta2) = optimizer.lr, settings.betas
    decay(value, lr * settings.weight_decay if value.dim() > 1 or settings.decay_vectors else 0.0)
    mean.lerp_(grad, 1 - beta1)
    square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction = 1 - beta2**optimizer.steps
    root = square.sqrt().div_(correction**0.5).add_(settings.eps)
    value.addcdiv_(mean, root, value=-(lr / (1 - beta1**optimizer.steps)))


def decay(value: Tensor, amount: float) -> None:
    """Shrink in place by a share; padding, which is zero, stays so."""
    if amount:
        value.mul_(1 - amount)
