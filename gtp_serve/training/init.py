"""First values of weights: the same bits on any grid, or drawn on the device, different on every rank.

On a CPU each logical tensor has a random stream of its own, drawn in float32 row block by row block; a rank keeps
the rows that its spans name and drops the rest, so the whole tensor is never there.  Padding is zero.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.spans import Box, Shape, Span, intersect
from gtp_serve.training.layer import parameters_with_targets
from gtp_serve.training.shards import GTPShard

#: Rows of one block.  torch draws normal numbers in groups of 16 elements, so blocks of a multiple of 16 rows give what
#: one draw of the whole tensor gives.
BLOCK_ROWS = 256
_GROUP = 16


class Init(Protocol):
    """How a tensor's numbers are drawn, element after element, from a generator."""

    def fill(self, block: Tensor, generator: torch.Generator) -> None:
        """Overwrite a float32 block with the next numbers."""
        ...


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal numbers around 0."""

    std: float

    def fill(self, block: Tensor, generator: torch.Generator) -> None:
        """See ``Init``."""
        block.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform numbers from ``-bound`` to ``bound``."""

    bound: float

    def fill(self, block: Tensor, generator: torch.Generator) -> None:
        """See ``Init``."""
        block.uniform_(-self.bound, self.bound, generator=generator)


@dataclass(frozen=True, slots=True)
class Constant:
    """One number everywhere."""

    value: float

    def fill(self, block: Tensor, generator: torch.Generator) -> None:
        """See ``Init``."""
        block.fill_(self.value)


def usual_init(name: str, *, std: float = 0.02) -> Init:
    """By a logical tensor's name: matrices normal, norms 1, biases 0."""
    if name.endswith("bias"):
        return Constant(0.0)
    return Constant(1.0) if name.endswith("norm.weight") else Normal(std)


def initialise(
    model: nn.Module, shapes: Mapping[str, Shape], *, seed: int, choose: Callable[[str], Init] = usual_init
) -> None:
    """Fill every parameter from the streams of its logical tensors: the bits depend on seed and name, and on no grid.

    :param shapes: of all logical tensors (``layout.huggingface.logical_tensors``).
    :raises LayoutMismatch: for a span outside the logical tensors.
    """
    for parameter, target in parameters_with_targets(model):
        exact = torch.float32 if _keeps_high_precision(parameter) else target.tensor.dtype
        values = torch.zeros_like(target.tensor, dtype=exact) if exact != target.tensor.dtype else target.tensor.zero_()
        for span in target.shard.spans:
            shape = shapes.get(span.name)
            if shape is None or not span.logical.inside(shape):
                raise LayoutMismatch(f"{target.shard.key} names {span.name} {span.logical}, which the model lacks")
            _fill_span(values, span, shape, choose(span.name), seed)
        if values is not target.tensor:
            target.tensor.copy_(values)
        refresh_high_precision(parameter, values)


def _fill_span(values: Tensor, span: Span, shape: Shape, init: Init, seed: int) -> None:
    first, last = span.logical.start[0], span.logical.stop[0]
    for box, block in draw_blocks(shape, init, stream(seed, span.name)):
        if box.start[0] >= last:
            return
        common = intersect(box, span.logical) if box.stop[0] > first else None
        if common is not None:
            offset = tuple(a - b for a, b in zip(span.local.start, span.logical.start, strict=True))
            there = common.shifted(offset)
            here = common.shifted(tuple(-a for a in box.start))
            values[_slices(there)].copy_(block[_slices(here)])


def draw_blocks(shape: Shape, init: Init, generator: torch.Generator) -> Iterator[tuple[Box, Tensor]]:
    """A whole tensor's numbers as float32 blocks of rows; together they are what one draw of it gives."""
    width = prod(shape[1:])
    first = 0
    while first < shape[0]:
        count = min(BLOCK_ROWS, shape[0] - first)
        if 0 < (shape[0] - first - count) * width < _GROUP:
            count = shape[0] - first  # fewer than a group's numbers are drawn in another way
        block = torch.empty((count, *shape[1:]))
        init.fill(block, generator)
        yield Box((first, *(0 for _ in shape[1:])), tuple(block.shape)), block
        first += count


def stream(seed: int, name: str, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator of its own for a name."""
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator


def initialise_on_device(shard: GTPShard, init: Init, *, seed: int) -> None:
    """Draw a shard's rows where it lies, from a stream that no other rank's shard has; padding is zero.

    The numbers depend on the grid: two grids give two models.
    """
    spans = shard.shard().spans
    values = torch.zeros(shard.local.shape, device=shard.local.device)
    if spans:
        place = " ".join(f"{span.name}{span.logical}" for span in spans)
        init.fill(values[: shard.row_range[1]], stream(seed, place, values.device))
    shard.local.copy_(values)
    refresh_high_precision(shard, values)


def slice_rows(master: Tensor, shard: GTPShard) -> Tensor:
    """This rank's rows of a TP-local master weight, its padding (zero) included.

    :raises LayoutMismatch: when the master has not the shard's logical shape.
    """
    if tuple(master.shape) != shard.logical_shape:
        raise LayoutMismatch(
            f"{shard.state.content.key}: a master weight of {list(master.shape)}",
            [("needed", f"{list(shard.logical_shape)}")],
        )
    first, count = shard.row_range
    rows = master.new_zeros(shard.local.shape)
    rows[:count] = master[first : first + count]
    return rows


def load_master(shard: GTPShard, master: Tensor) -> None:
    """Give a shard its rows of a master weight that the caller has drawn on a CPU."""
    rows = slice_rows(master, shard)
    shard.local.copy_(rows)
    refresh_high_precision(shard, rows)


def refresh_high_precision(parameter: Tensor, value: Tensor) -> None:
    """Keep a quantised primary weight's stored initial value in step: an optimizer takes its master weight from it.

    Nothing happens for a parameter that stores none.
    """
    held: Any = parameter
    if _keeps_high_precision(held):
        before: Tensor = held._high_precision_init_val
        held._high_precision_init_val = value.detach().to(device=before.device, dtype=before.dtype, copy=True)


def _keeps_high_precision(parameter: Any) -> bool:
    return getattr(parameter, "_high_precision_init_val", None) is not None


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
