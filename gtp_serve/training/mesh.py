"""All ranks of a training run, as optimizers and checkpoints see them: bytes, messages and sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

_DIST: Any = torch.distributed

Message = tuple[int, Tensor]
"""A peer's rank and a contiguous tensor to send it, or to receive from it."""


class Mesh(Protocol):
    """One rank's end.  Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def all_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        ...

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """Send and receive at once; at most one message from a rank to another in one call."""
        ...

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on all; may overwrite ``x``."""
        ...


@dataclass(frozen=True, slots=True)
class SoloMesh:
    """One rank by itself."""

    rank: int = 0
    size: int = 1

    def all_bytes(self, mine: bytes) -> list[bytes]:
        """See ``Mesh``."""
        return [mine]

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """See ``Mesh``: nobody is there."""
        assert not send
        assert not receive

    def total(self, x: Tensor) -> Tensor:
        """See ``Mesh``."""
        return x


@dataclass(frozen=True, slots=True)
class TorchMesh:
    """The ranks of a torch ProcessGroup; of the whole world when it is None."""

    group: Any = None

    @property
    def rank(self) -> int:
        """See ``Mesh``."""
        rank: int = _DIST.get_rank(self.group)
        return rank

    @property
    def size(self) -> int:
        """See ``Mesh``."""
        size: int = _DIST.get_world_size(self.group)
        return size

    def all_bytes(self, mine: bytes) -> list[bytes]:
        """See ``Mesh``."""
        count = torch.tensor([len(mine)], device=self._device())
        counts = [torch.empty_like(count) for _ in range(self.size)]
        _DIST.all_gather(counts, count, group=self.group)
        lengths = [int(one.item()) for one in counts]
        room = torch.zeros(max(1, *lengths), dtype=torch.uint8)
        if mine:
            room[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        room = room.to(self._device())
        everyone = [torch.empty_like(room) for _ in range(self.size)]
        _DIST.all_gather(everyone, room, group=self.group)
        return [one[:n].cpu().numpy().tobytes() for one, n in zip(everyone, lengths, strict=True)]

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        """See ``Mesh``."""
        calls = [_DIST.P2POp(_DIST.irecv, x, self._global(peer), self.group) for peer, x in receive]
        calls += [_DIST.P2POp(_DIST.isend, x, self._global(peer), self.group) for peer, x in send]
        for work in _DIST.batch_isend_irecv(calls) if calls else ():
            work.wait()

    def total(self, x: Tensor) -> Tensor:
        """See ``Mesh``."""
        _DIST.all_reduce(x, group=self.group)
        return x

    def _device(self) -> torch.device:
        """Where messages of this package's own must lie."""
        if "nccl" in _DIST.get_backend(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def _global(self, peer: int) -> int:
        rank: int = peer if self.group is None else _DIST.get_global_rank(self.group, peer)
        return rank


def default_mesh() -> Mesh:
    """The whole world of ``torch.distributed``; one rank by itself where that is not initialised."""
    return TorchMesh() if _DIST.is_initialized() else SoloMesh()
