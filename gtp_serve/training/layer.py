"""What the layers of a training model have in common: a placement, shards and vectors, and the spans of both."""

from __future__ import annotations

from typing import Any

from torch import nn

from gtp_serve.errors import UsageError
from gtp_serve.layout.rows import RowMap, Rows, spans, whole
from gtp_serve.layout.spans import Shard
from gtp_serve.refit.apply import Target, dtype_name
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.shards import Content, GTPShard


class ShardedLayer(nn.Module):
    """A layer whose matrices are shards and whose vectors are replicated over GTP."""

    def __init__(self, placement: TrainPlacement) -> None:
        super().__init__()
        self.placement = placement
        self._vectors: dict[str, tuple[Content, bool]] = {}

    def add_vector(self, name: str, content: Content, *, expert: bool = False, fill: float = 0.0) -> None:
        """Give the layer a replicated parameter; its length is that of the content's rows."""
        length = max((rows.start + rows.length for rows in content.rows), default=0)
        self.register_parameter(name, self.placement.vector(length, expert=expert, fill=fill))
        self._vectors[name] = (content, expert)

    def targets(self) -> list[Target]:
        """This layer's own parameters with their spans, in the order in which they were added."""
        found: list[Target] = []
        for name, parameter in self._parameters.items():
            if isinstance(parameter, GTPShard):
                found.append(parameter.target())
            elif parameter is not None:
                content, _ = self._vectors[name]
                shard = Shard(content.key, tuple(parameter.shape), dtype_name(parameter), spans(content.rows, None))
                found.append(Target(shard, parameter.data))
        return found

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy's vectors are parameters of their own, to be reduced as the original's are."""
        restore: Any = super().__setstate__
        restore(state)
        for name, (_, expert) in self._vectors.items():
            self.placement.replicate(self.get_parameter(name), expert=expert)


def targets_of(model: nn.Module) -> list[Target]:
    """Every parameter of a model with its spans, a shared one once.

    :raises UsageError: for a parameter outside the layers of this package, which states no spans.
    """
    return [target for _, target in parameters_with_targets(model)]


def parameters_with_targets(model: nn.Module) -> list[tuple[nn.Parameter, Target]]:
    """The same with the live parameters.

    :raises UsageError: for a parameter outside the layers of this package, which states no spans.
    """
    found: dict[int, tuple[nn.Parameter, Target]] = {}
    for module in model.modules():
        if isinstance(module, ShardedLayer):
            own = [p for p in module._parameters.values() if p is not None]
            for parameter, target in zip(own, module.targets(), strict=True):
                found.setdefault(id(parameter), (parameter, target))
    for name, parameter in model.named_parameters():
        if id(parameter) not in found:
            raise UsageError(f"parameter {name} states no spans", [("needed", "a layer of gtp_serve.training")])
    return list(found.values())


def parts_of(name: str, rows: int, first: int, parts: RowMap | None) -> RowMap:
    """Rows of modules that a TP-local matrix is made of: those given, or ``rows`` of one module from ``first`` on."""
    return (Rows(0, rows, name, first),) if parts is None else parts


def suffixed(parts: RowMap, kind: str) -> RowMap:
    """Rows of modules as rows of their ``weight`` or ``bias``."""
    return tuple(Rows(r.start, r.length, f"{r.name}.{kind}", r.target) for r in parts)


def whole_vector(name: str, length: int) -> Content:
    """A vector that is a logical tensor."""
    return Content(key=name, rows=whole(name, length))
