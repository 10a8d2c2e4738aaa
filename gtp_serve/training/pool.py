"""Memory for whole weights and their gradients, lent by ticket and used again.

Whatever is being sent, received or computed with holds a ticket, and memory has at most one: two uses that follow
one another can share memory only when the first has given its ticket back.  On a GPU all uses are queued on one
stream or wait for it, so memory that has been given back may be lent out at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from gtp_serve.layout.spans import Shape

_Kind = tuple[int, torch.dtype, torch.device]


@dataclass(slots=True, eq=False)
class Ticket:
    """The right to use one piece of memory until ``BufferPool.give_back``."""

    memory: Tensor | None
    kind: _Kind
    shape: Shape

    @property
    def tensor(self) -> Tensor:
        """The memory, in the shape it was asked for.

        :raises ValueError: after it was given back.
        """
        if self.memory is None:
            raise ValueError("the memory of this ticket has been given back")
        return self.memory.view(self.shape)


@dataclass(slots=True, eq=False)
class BufferPool:
    """Buffers of equal size, dtype and device are interchangeable."""

    _free: dict[_Kind, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    _lent: int = 0
    _bytes: int = 0

    def take(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Ticket:
        """Memory that nobody else uses; what is in it is not defined."""
        kind = (prod(shape), dtype, device)
        free = self._free[kind]
        if free:
            memory = free.pop()
        else:
            memory = torch.empty(kind[0], dtype=dtype, device=device)
            self._bytes += memory.nbytes
        self._lent += 1
        return Ticket(memory, kind, shape)

    def give_back(self, ticket: Ticket) -> None:
        """End a use.

        :raises ValueError: the second time.
        """
        if ticket.memory is None:
            raise ValueError("this ticket has been given back before")
        self._free[ticket.kind].append(ticket.memory)
        ticket.memory = None
        self._lent -= 1

    def clear(self) -> None:
        """Let go of memory that is not lent."""
        self._bytes -= sum(memory.nbytes for free in self._free.values() for memory in free)
        self._free.clear()

    @property
    def lent(self) -> int:
        """Tickets that have not been given back."""
        return self._lent

    @property
    def nbytes(self) -> int:
        """Bytes allocated, lent or not."""
        return self._bytes
