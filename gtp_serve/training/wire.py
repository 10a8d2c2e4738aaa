"""Collectives on an axis group, each started at once and waited for later.

A torch ProcessGroup is wrapped; a group that is a ``Wire`` itself is used as it is.  On CUDA, NCCL runs on its own
stream: starting one makes that stream wait for the work that is queued now, waiting makes the current stream wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch.distributed
from torch import Tensor

from gtp_serve.training.groups import AxisGroup

_DIST: Any = torch.distributed
# torch 2.13 gave them new names.
_ALL_GATHER: Any = getattr(_DIST, "all_gather_single", None) or _DIST.all_gather_into_tensor
_REDUCE_SCATTER: Any = getattr(_DIST, "reduce_scatter_single", None) or _DIST.reduce_scatter_tensor


class Pending(Protocol):
    """A collective under way; torch's Work is one."""

    def wait(self) -> object:
        """Return when the result may be used by what is queued from now on."""
        ...


@runtime_checkable
class Wire(Protocol):
    """Collectives over the ranks of one group.  Every rank makes the same calls in the same order."""

    def all_gather(self, out: Tensor, mine: Tensor) -> Pending:
        """``out`` is every rank's ``mine``, one below another in rank order."""
        ...

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        """``out`` is this rank's block of rows of the sum of all ranks' ``full``."""
        ...

    def all_to_all(self, out: Tensor, full: Tensor) -> Pending:
        """Block r of ``out`` is rank r's block for this rank."""
        ...

    def all_reduce(self, x: Tensor) -> Pending:
        """``x`` becomes the sum over ranks, with the same bits on all."""
        ...


@dataclass(frozen=True, slots=True)
class TorchWire:
    """Collectives of a torch ProcessGroup."""

    group: Any

    def all_gather(self, out: Tensor, mine: Tensor) -> Pending:
        """See ``Wire``."""
        work: Pending = _ALL_GATHER(out, mine, group=self.group, async_op=True)
        return work

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Pending:
        """See ``Wire``."""
        work: Pending = _REDUCE_SCATTER(out, full, group=self.group, async_op=True)
        return work

    def all_to_all(self, out: Tensor, full: Tensor) -> Pending:
        """See ``Wire``."""
        work: Pending = _DIST.all_to_all_single(out, full, group=self.group, async_op=True)
        return work

    def all_reduce(self, x: Tensor) -> Pending:
        """See ``Wire``."""
        work: Pending = _DIST.all_reduce(x, group=self.group, async_op=True)
        return work


def wire_of(group: AxisGroup) -> Wire:
    """The collectives of a group."""
    if isinstance(group, _DIST.ProcessGroup):
        return TorchWire(group)
    return group if isinstance(group, Wire) else TorchWire(group)
