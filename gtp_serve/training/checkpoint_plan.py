"""What a training run's checkpoint holds: Megatron's logical layout, and which rank writes which chunk.

Keys, shapes and chunks are those that a Megatron trainer on the same grid leaves; weights, masters and optimizer
state have one geometry.  Chunks without elements are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.megatron_save import SavedChunk, SavedTensor, plan_save
from gtp_serve.layout.spans import Box, Shape, Shard
from gtp_serve.training.exchange import Item, route
from gtp_serve.training.optimizer import ShardedOptimizer
from gtp_serve.training.shard_map import ShardMap, high_precision

_LAYER = re.compile(r"(decoder\.layers\.)\d+\.")


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key of the file: its whole shape and element type."""

    key: str
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class StoredItem:
    """One chunk of a key, and how it is put together.  ``slot`` is None for the weight itself."""

    stored: StoredKey
    box: Box
    item: Item
    slot: str | None


def slot_prefix(slot: str | None) -> str:
    """What stands before a weight's key for a slot of its optimizer state."""
    return "" if slot is None else f"optimizer.state.{slot}."


def plan_checkpoint(
    shards: ShardMap, config: ModelConfig, grid: Grid, optimizer: ShardedOptimizer | None
) -> list[StoredItem]:
    """Every chunk of every key, the same list on all ranks.  Collective.

    :raises LayoutMismatch: when the ranks together do not hold the model that ``config`` describes.
    :raises UsageError: for a grid that Megatron could not have.
    """
    shapes = logical_tensors(config)
    _check_model(shards, shapes)
    plans = _Plans(config, grid)
    load = [0] * shards.mesh.size
    items = _items(shards, plans, set(shapes), shapes, None, load)
    for slot, names in _slot_names(shards, optimizer):
        items += _items(shards, plans, names, shapes, slot, load)
    return items


def rank_tensor(shards: ShardMap, optimizer: ShardedOptimizer | None, slot: str | None, index: int) -> Tensor:
    """What this rank has of a slot (or weight) of one parameter, in the parameter's own shape.

    Quantised weights are dequantised.
    """
    if slot is None:
        return high_precision(shards.parameters[index])
    assert optimizer is not None  # slots are an optimizer's
    return optimizer.state[index][slot]


class _Plans:
    """Megatron's chunks, stacked over layers where all layers are there, else a key for each layer."""

    def __init__(self, config: ModelConfig, grid: Grid) -> None:
        self.stacked = plan_save(config, grid, "logical")
        self.by_layer: dict[str, list[SavedTensor]] = {}
        for saved in plan_save(config, grid, "logical", per_layer_keys=True):
            self.by_layer.setdefault(_LAYER.sub(r"\1", saved.key), []).append(saved)

    def of(self, names: set[str]) -> Iterator[SavedTensor]:
        """Stored tensors that together hold the named logical ones."""
        for saved in self.stacked:
            here = names_of(saved)
            if here <= names:
                yield saved
            elif here & names:
                yield from self._layers(saved.key, names)

    def _layers(self, key: str, names: set[str]) -> Iterator[SavedTensor]:
        for saved in self.by_layer[key]:
            here = names_of(saved)
            if here <= names:
                yield saved
            elif here & names:
                raise LayoutMismatch(
                    f"{saved.key} is made of {', '.join(sorted(here))}, of which only some are there",
                    [("needed", "all of them to be trained, or none")],
                )


def names_of(saved: SavedTensor) -> set[str]:
    """Logical tensors that a stored one holds."""
    return {span.name for chunk in saved.chunks for span in chunk.shard.spans}


def _items(
    shards: ShardMap, plans: _Plans, names: set[str], shapes: Mapping[str, Shape], slot: str | None, load: list[int]
) -> list[StoredItem]:
    dtypes = _dtypes(shards) if slot is None else {}
    wanted: list[tuple[StoredKey, SavedChunk, Shard]] = []
    for saved in plans.of(names):
        dtype = "float32" if slot is not None else _one_dtype(saved, dtypes)
        stored = StoredKey(slot_prefix(slot) + saved.key, saved.shape, dtype)
        wanted += [(stored, c, replace(c.shard, dtype=dtype)) for c in saved.chunks if c.box.volume]
    here = {name: shapes[name] for name in names}
    routed = route(shards.owned, [shard for _, _, shard in wanted], here, load)
    return [StoredItem(stored, chunk.box, item, slot) for (stored, chunk, _), item in zip(wanted, routed, strict=True)]


def _dtypes(shards: ShardMap) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for one in shards.owned:
        for span in one.shard.spans:
            found.setdefault(span.name, set()).add(one.shard.dtype)
    return found


def _one_dtype(saved: SavedTensor, dtypes: Mapping[str, set[str]]) -> str:
    found = set(chain.from_iterable(dtypes[name] for name in names_of(saved)))
    if len(found) != 1:
        raise LayoutMismatch(
            f"{saved.key} would hold elements of several types: {', '.join(sorted(found))}", [("needed", "one type")]
        )
    return found.pop()


def _slot_names(shards: ShardMap, optimizer: ShardedOptimizer | None) -> list[tuple[str, set[str]]]:
    """Slots of all ranks, and the logical tensors that each is about."""
    mine = [
        f"{slot} {name}"
        for slot, tensors in (optimizer.slots() if optimizer is not None else {}).items()
        for index in tensors
        for name in sorted(shards.names(index))
    ]
    found: dict[str, set[str]] = {}
    for told in shards.mesh.all_bytes("\n".join(mine).encode()):
        for line in told.decode().splitlines():
            slot, _, name = line.partition(" ")
            found.setdefault(slot, set()).add(name)
    return sorted(found.items())


def _check_model(shards: ShardMap, shapes: Mapping[str, Shape]) -> None:
    """The names; shapes and coverage are the route's to check."""
    have = set(shards.extents)
    for what, names in (("lacks", set(shapes) - have), ("has, unknown to its description,", have - set(shapes))):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (", ..." if len(names) > 5 else "")
            raise LayoutMismatch(f"the model {what} {len(names)} tensors: {shown}")
