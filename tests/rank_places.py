"""A rank's place among others, for what only asks where it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Absent:
    """The others are not there: nothing can be computed, only cut."""

    rank: int
    size: int
    capturable: bool = False

    def all_reduce(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def all_gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError
