"""Where a layer's parameters live and with whom it shares its work; and the collectives it asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gtp_serve.errors import UsageError
from gtp_serve.ops.table import REFERENCE, Ops


class Collective(Protocol):
    """The tensor-parallel ranks, of which this is one.  Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    @property
    def capturable(self) -> bool:
        """The device does the operations by itself, so that a step with them can be recorded and replayed."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks; may overwrite and return ``x``."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors (of one shape), joined along the last axis in rank order."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank:
    """The collective of a server without tensor parallelism."""

    rank: int = 0
    size: int = 1
    capturable: bool = True

    def all_reduce(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """``x`` itself."""
        return x


@dataclass(frozen=True, slots=True)
class InRankOrder:
    """Another collective, whose sums are taken in the order of the ranks: an element's bits do not depend on where
    in its tensor it lies, as they do where a ring passes pieces around.
    """

    other: Collective

    @property
    def rank(self) -> int:
        """The other's."""
        return self.other.rank

    @property
    def size(self) -> int:
        """The other's."""
        return self.other.size

    @property
    def capturable(self) -> bool:
        """The other's."""
        return self.other.capturable

    def all_reduce(self, x: Tensor) -> Tensor:
        """Gathers all summands and adds them up, the same on every rank."""
        first, *others = self.other.all_gather(x).chunk(self.size, dim=-1)
        total = first.clone()
        for summand in others:
            total += summand
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        """The other's."""
        return self.other.all_gather(x)


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """dtype, device, ranks and functions, common to all layers of a model."""

    dtype: torch.dtype
    device: str = "cpu"
    tp: Collective = field(default_factory=SingleRank)
    ops: Ops = REFERENCE

    def empty(self, *shape: int) -> Tensor:
        """Memory for a parameter; a refit fills it."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def cut(self, total: int, what: str) -> tuple[int, int]:
        """This rank's equal share of ``total``: (first, count).

        :raises UsageError: when the ranks do not divide it.
        """
        if total % self.tp.size:
            raise UsageError(f"{total} {what} cannot be shared out to {self.tp.size} tensor-parallel ranks")
        count = total // self.tp.size
        return self.tp.rank * count, count
