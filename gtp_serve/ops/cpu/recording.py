"""A step as a flat program of operations with fixed addresses.

What an operation writes gets memory for the recording alone; at the end the places of those that are never needed at
the same time are laid on top of one another, so that a step of many layers stays in the caches.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from ctypes import c_int64
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gtp_serve.errors import EngineFault
from gtp_serve.ops.cpu.joining import join
from gtp_serve.ops.cpu.library import Threads, addresses_of
from gtp_serve.ops.cpu.structs import Op

COUNTERS = 2
"""Numbers of rows that a program may be run with; the second is WANTED."""
_ALIGNMENT = 64


class OnlyRecorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While a step is recorded, refuses every tensor operation that a replay would leave out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch.  Nothing here is ever compiled, and only to make sure of that torch would import its whole
        compiler at the first operation: seconds of the server's start, and 120 MB.
        """
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Views and new memory pass."""
        if not _leaves_data_alone(func):
            raise EngineFault(f"{func} cannot be part of a recorded step", code="internal")
        return func(*args, **(kwargs or {}))


def _leaves_data_alone(func: Any) -> bool:
    if func is torch.ops.aten.empty.memory_format:
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@dataclass(kw_only=True, slots=True, eq=False)
class _Buffer:
    """Memory that operations of the step write."""

    memory: Tensor
    counter: int
    start: int
    size: int
    uses: list[int] = field(default_factory=list)
    """Numbers of the operations that write or read it, ascending."""


class Recording:
    """Operations so far.

    :param counters: which count each of the step's inputs has as its number of rows, by address.
    """

    def __init__(self, counters: Mapping[int, int]) -> None:
        self._counters = dict(counters)
        self._ops: list[Op] = []
        self._kept: list[Tensor] = []
        self._starts: list[int] = []
        self._buffers: dict[int, _Buffer] = {}
        self._results: list[Tensor] = []

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, counter: int) -> Tensor:
        """Memory for a result whose rows this counter counts."""
        memory = torch.empty(tuple(shape), dtype=dtype)
        start = memory.data_ptr()
        self._buffers[start] = _Buffer(memory=memory, counter=counter, start=start, size=memory.nbytes)
        bisect.insort(self._starts, start)
        return memory

    def counter_of(self, tensor: Tensor) -> int:
        """Which count says how many of the tensor's rows there are in a run.

        :raises EngineFault: nothing is known of its rows.
        """
        address = tensor.data_ptr()
        buffer = self._buffer_at(address)
        if buffer is not None:
            return buffer.counter
        if address not in self._counters:
            raise EngineFault("a recorded step reads rows that are none of its inputs", code="internal")
        return self._counters[address]

    def append(self, op: Op, tensors: Sequence[Tensor]) -> None:
        """One more; ``tensors`` stay alive as long as the program."""
        self._ops.append(op)
        self._kept += [tensor for tensor in tensors if self._buffer_at(tensor.data_ptr()) is None]

    def keep(self, result: Tensor) -> None:
        """Let an operation's result be there after a run too."""
        self._results.append(result)

    def _buffer_at(self, address: int) -> _Buffer | None:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        buffer = self._buffers[self._starts[at]]
        return buffer if address < buffer.start + max(buffer.size, 1) else None

    def finish(self, output: Tensor, threads: Threads) -> Program:
        """Everything recorded; the output keeps memory of its own.

        :raises EngineFault: it was not written by what was recorded.
        """
        self.keep(output)
        mine = [self._buffer_at(result.data_ptr()) for result in self._results]
        self._find_uses()
        if any(buffer is None or not buffer.uses for buffer in mine):
            raise EngineFault("a recorded step's result comes from elsewhere", code="internal")
        kept = {id(buffer) for buffer in mine}
        self._ops = join(self._ops, lambda address: self._is_read_once(address, kept))
        self._find_uses()
        arena = self._overlay([b for b in self._buffers.values() if b.uses and id(b) not in kept])
        return Program(self._ops, [*self._kept, *self._results, arena], threads)

    def _find_uses(self) -> None:
        for buffer in self._buffers.values():
            buffer.uses = []
        for number, op in enumerate(self._ops):
            for part, name in _pointers_in(op):
                used = self._buffer_at(getattr(part, name))
                if used is not None and number not in used.uses[-1:]:
                    used.uses.append(number)

    def _is_read_once(self, address: int, kept: Container[int]) -> bool:
        buffer = self._buffer_at(address)
        return buffer is not None and len(buffer.uses) == 2 and id(buffer) not in kept

    def _overlay(self, buffers: list[_Buffer]) -> Tensor:
        """Move these buffers into one piece of memory, and the operations' addresses with them."""
        places = place([(b.uses[0], b.uses[-1], b.size) for b in buffers])
        total = max((at + b.size for at, b in zip(places, buffers, strict=True)), default=0)
        arena = torch.empty(total + _ALIGNMENT, dtype=torch.uint8)
        base = -(-arena.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        moved = {id(b): base + at - b.start for at, b in zip(places, buffers, strict=True)}
        for op in self._ops:
            for part, name in _pointers_in(op):
                address = getattr(part, name)
                buffer = self._buffer_at(address)
                if buffer is not None and id(buffer) in moved:
                    setattr(part, name, address + moved[id(buffer)])
        return arena


class OfThread(threading.local):
    """What this thread records; another one may carry out a step meanwhile."""

    recording: Recording | None = None


def _pointers_in(op: Op) -> Iterator[tuple[Op, str]]:
    for part in op.parts():
        for name in part.POINTERS:
            yield part, name


def place(lives: Sequence[tuple[int, int, int]]) -> list[int]:
    """Offsets for pieces of memory (first use, last use, bytes), so that two that live at one time do not overlap.

    The largest is placed first, each at the lowest offset that is free during its life.
    """
    offsets = [0] * len(lives)
    placed: list[int] = []
    for index in sorted(range(len(lives)), key=lambda i: -lives[i][2]):
        first, last, size = lives[index]
        taken = sorted(
            (offsets[i], offsets[i] + lives[i][2]) for i in placed if lives[i][0] <= last and first <= lives[i][1]
        )
        at = 0
        for start, stop in taken:
            if at + size <= start:
                break
            at = max(at, -(-stop // _ALIGNMENT) * _ALIGNMENT)
        offsets[index] = at
        placed.append(index)
    return offsets


class Program:
    """A recorded step.

    :param kept: what its operations point to.
    """

    def __init__(self, ops: Sequence[Op], kept: Sequence[Tensor], threads: Threads) -> None:
        self._ops, self._kept, self._threads = list(ops), list(kept), threads
        self._array = addresses_of(self._ops)
        self._rows = (c_int64 * COUNTERS)()

    def __len__(self) -> int:
        return len(self._ops)

    def run(self, *rows: int) -> None:
        """Run it on what its inputs hold now.

        :param rows: for each counter, at most as many as were recorded; none for those that are left out.
        """
        self._rows[:] = [*rows, *[0] * (COUNTERS - len(rows))]
        self._threads.run_array(self._array, len(self._ops), self._rows)
