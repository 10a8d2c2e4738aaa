"""The parameters of a training model on all ranks: what each rank holds of what, and who answers for which element."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from gtp_serve.errors import UsageError
from gtp_serve.layout.spans import Shard
from gtp_serve.refit.apply import Target
from gtp_serve.training.layer import parameters_with_targets
from gtp_serve.training.mesh import Mesh, default_mesh
from gtp_serve.training.ownership import Owned, owned_boxes, owners, shapes_of
from gtp_serve.training.shards import GTPShard, live_parameter

_SHARDS = msgspec.msgpack.Decoder(list[Shard])


class ShardMap:
    """This rank's parameters with their spans, and every other rank's.  Collective: all ranks make one together.

    :param parameters: live parameters, each with what it holds.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, Target]], mesh: Mesh | None = None) -> None:
        self.mesh = default_mesh() if mesh is None else mesh
        self.parameters = [parameter for parameter, _ in parameters]
        self.shards = [target.shard for _, target in parameters]
        told = self.mesh.all_bytes(msgspec.msgpack.encode(self.shards))
        self.everyone: list[list[Shard]] = [_SHARDS.decode(one) for one in told]
        self.owned: list[Owned] = owners(self.everyone)
        self.owned_boxes = owned_boxes(self.owned, self.mesh.rank)
        self.extents = shapes_of(self.everyone)
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}

    @classmethod
    def of(cls, model: nn.Module, mesh: Mesh | None = None) -> ShardMap:
        """Of every parameter of a model.

        :raises UsageError: for a parameter that states no spans.
        """
        return cls(parameters_with_targets(model), mesh)

    @property
    def device(self) -> torch.device:
        """Where this rank's parameters lie."""
        return self.parameters[0].device if self.parameters else torch.device("cpu")

    def names(self, index: int) -> set[str]:
        """Logical tensors that a parameter holds elements of."""
        return {span.name for span in self.shards[index].spans}

    def find(self, parameter: Tensor) -> int:
        """The index of a parameter; a shard's alias, or its trimmed rows, stand for the live one.

        :raises UsageError: for a tensor that is none of them.
        """
        live = parameter.live if isinstance(parameter, GTPShard) else live_parameter(parameter)
        index = self._index.get(id(parameter if live is None else live))
        if index is None:
            raise UsageError(f"a tensor {list(parameter.shape)} is no parameter of this model")
        return index

    def weights_changed(self) -> None:
        """Nothing that was gathered before is used any more."""
        chains: dict[int, Any] = {
            id(p.state.chain): p.state.chain for p in self.parameters if isinstance(p, GTPShard) and p.state.chain
        }
        for chain in chains.values():
            chain.invalidate()


def as_map(model: nn.Module | ShardMap) -> ShardMap:
    """The map of a model on ``torch.distributed``'s ranks, where none has been made."""
    return model if isinstance(model, ShardMap) else ShardMap.of(model)


def high_precision(parameter: nn.Parameter) -> Tensor:
    """A parameter's rows as plain numbers; those of a quantised weight are dequantised into memory of their own."""
    plain: Tensor = parameter.local if isinstance(parameter, GTPShard) else parameter.data
    return plain.dequantize() if is_quantised(plain) else plain


def is_quantised(tensor: Tensor) -> bool:
    """Whether a tensor's class has a way of its own back to plain numbers (as TransformerEngine's have)."""
    return type(tensor).dequantize is not torch.Tensor.dequantize
