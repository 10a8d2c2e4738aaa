"""Optimizer state in a Megatron checkpoint: each slot of it is a set of weights' keys with a prefix, cut, padded and
permuted as the weights themselves are, and is read by the same rules.

State that lies in a run's flat buffers (Megatron's distributed optimizer, unless told to save it fully sharded) says
nothing of parameters and is refused.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gtp_serve.config import ModelConfig
from gtp_serve.errors import CheckpointCorrupt, LayoutMismatch, UnsupportedModel
from gtp_serve.layout.megatron import number_layers, parse_key
from gtp_serve.layout.megatron_grid import DeclaredGrid, StoredTensor, detect_layout
from gtp_serve.layout.megatron_read import map_tensors, parse_keys
from gtp_serve.loaders.facts import SavedGrid
from gtp_serve.loaders.files import FileViews
from gtp_serve.loaders.megatron import MegatronSource
from gtp_serve.loaders.pickle_values import Persistent, Record
from gtp_serve.loaders.torch_dist import Index, IndexedTensor, read_index
from gtp_serve.loaders.torch_zip import Archive

_STATE = "optimizer.state."
_FLAT = ("optimizer.distributed", "optimizer.buffer", "chained_")
_COMMON = "common_state/"


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    """What a checkpoint holds of an optimizer: its slots, and the numbers that Megatron keeps with it.

    ``steps`` is None where nothing says it.
    """

    folder: Path
    weights: Mapping[str, IndexedTensor]
    slots: Mapping[str, Mapping[str, IndexedTensor]]
    steps: int | None
    sizes: Mapping[Path, int]

    def source(self, slot: str, config: ModelConfig, grid: SavedGrid) -> MegatronSource:
        """A slot as a source of shards with the weights' logical names; ``close`` it.

        :raises LayoutMismatch: when its tensors are not cut as the grid says.
        """
        weights, tensors = parse_keys(self.weights), dict(self.slots[slot])
        names = parse_keys(tensors)
        if any(a != b for a, b in number_layers(weights.values()).items()) and set(names) != set(weights):
            raise LayoutMismatch(f"{self.folder}: {slot} has only some of a hybrid model's layers")
        declared = DeclaredGrid(tp=grid.tp, gtp=grid.gtp, etp=grid.etp, egtp=grid.egtp)
        # How the weights lie decides: a slot may lack the tensors that would tell.
        saved = detect_layout(_stored(self.weights), weights, config, declared)
        pieces, _ = map_tensors(_stored(tensors), names, config, saved)
        return MegatronSource(pieces, tensors, FileViews(self.sizes))


def read_optimizer(folder: Path) -> SavedOptimizer:
    """What an iteration's folder holds of an optimizer.

    :raises UnsupportedModel: for state in flat buffers.
    :raises CheckpointCorrupt: for an entry that is not what it must be.
    """
    index = read_index(folder, folder.resolve().parent)
    flat = next((key for key in [*index.tensors, *index.blobs] if key.startswith(_FLAT)), None)
    if flat is not None:
        raise UnsupportedModel(
            f"{folder} keeps its optimizer state in flat buffers ({flat})",
            [("needed", "state by parameter"), ("try", "save with --dist-ckpt-optim-fully-reshardable")],
        )
    slots: dict[str, dict[str, IndexedTensor]] = {}
    for key, tensor in index.tensors.items():
        if key.startswith(_STATE):
            slot, _, weight = key.removeprefix(_STATE).partition(".")
            if parse_key(weight) is None:
                raise LayoutMismatch(f"{key} belongs to no weight that is known")
            slots.setdefault(slot, {})[weight] = tensor
    weights = {key: tensor for key, tensor in index.tensors.items() if parse_key(key) is not None}
    return SavedOptimizer(folder, weights, slots, _steps(index), index.sizes)


def _stored(tensors: Mapping[str, IndexedTensor]) -> dict[str, StoredTensor]:
    return {key: StoredTensor(t.shape, t.dtype, tuple(c.box for c in t.chunks)) for key, t in tensors.items()}


def _steps(index: Index) -> int | None:
    """From the parameter groups, or from the step that all parameters have in common."""
    place = next((place for key, place in index.blobs.items() if key.startswith(_COMMON)), None)
    if place is None:
        return None
    views = FileViews(index.sizes)
    try:
        archive = Archive(views.view(place.path, place.offset, place.length), f"{place.path}: common state")
        value = archive.value()
        state = value[0] if isinstance(value, list) and value else value
        optimizer = state.get("optimizer") if isinstance(state, dict) else None
        if not isinstance(optimizer, dict):
            return None
        groups = optimizer.get("param_groups")
        for group in groups if isinstance(groups, list) else ():
            step = group.get("step") if isinstance(group, dict) else None
            if type(step) is int and step >= 0:
                return step
        inner = optimizer.get("state")
        return _scalar(archive, inner.get("common_step")) if isinstance(inner, dict) else None
    finally:
        views.close()


def _scalar(archive: Archive, value: object) -> int | None:
    """A float32 tensor of one element, as torch's optimizers keep their step."""
    if type(value) is int:
        return value
    if not isinstance(value, Record) or value.name != "torch._utils._rebuild_tensor_v2" or not value.args:
        return None
    storage = value.args[0]
    reference = storage.reference if isinstance(storage, Persistent) else None
    if not isinstance(reference, tuple) or len(reference) != 5 or getattr(reference[1], "name", "") != _FLOATS:
        return None
    data = bytes(archive.member(f"data/{reference[2]}"))
    if len(data) != 4:
        raise CheckpointCorrupt(f"the optimizer's step has {len(data)} bytes")
    (step,) = struct.unpack("=f", data)
    return int(step) if 0 <= step < 2**31 else None


_FLOATS = "torch.FloatStorage"
