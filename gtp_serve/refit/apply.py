"""Carrying a plan out: bytes from a source's memory into live tensors, in place.

Threads read and copy side by side (both let go of the interpreter's lock).  A tensor's address never changes.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gtp_serve.errors import CheckpointCorrupt, LayoutMismatch, UsageError
from gtp_serve.layout.spans import Box, Shape, Shard
from gtp_serve.refit.plan import Copy, RefitPlan, item_bytes
from gtp_serve.refit.source import WeightSource

#: Bytes of one piece of work: small enough to share out evenly and to bound what a conversion stages.
PIECE_BYTES = 16 << 20

Bytes = npt.NDArray[np.uint8]
Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A live, contiguous tensor and what it must hold.  ``tensor`` may be a part of a larger parameter."""

    shard: Shard
    tensor: Tensor

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.shard.shape or dtype_name(self.tensor) != self.shard.dtype:
            raise ValueError(
                f"{self.shard.key}: the tensor is {dtype_name(self.tensor)} {list(self.tensor.shape)}, "
                f"the shard {self.shard.dtype} {list(self.shard.shape)}"
            )
        if not self.tensor.is_contiguous():
            raise ValueError(f"{self.shard.key}: the tensor is not contiguous")


def dtype_name(tensor: Tensor) -> str:
    """torch's name of the element type without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def apply_plan(
    plan: RefitPlan,
    source: WeightSource,
    targets: Sequence[Target],
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Fill ``targets`` as ``plan`` says; padding becomes zero, dtypes convert by value.

    :param source: as the plan was built from; ``read`` is called once for each shard used, one at a time.
    :param targets: in the order of ``plan.want``.
    :param progress: called from this thread with each number of source bytes that has been copied.
    :return: bytes read from the source.
    :raises LayoutMismatch: before anything is written, when source or targets are not those of the plan.
    :raises CheckpointCorrupt: when a shard's bytes are not there; targets are then partly written.
    """
    if threads < 1:
        raise UsageError(f"threads is {threads}; at least one is needed")
    _check_parties(plan, source, targets)
    for fill in plan.fills:
        targets[fill.target].tensor.detach()[_slices(fill.box)].zero_()
    pieces = deque(piece for copy in plan.copies for piece in _cut(copy, item_bytes(plan.have[copy.source])))
    work = _Work(pieces, _Reader(source, plan.have, pieces), _Writer(plan.have, targets))
    return _run(work, min(threads, max(1, len(pieces))), progress)


def _check_parties(plan: RefitPlan, source: WeightSource, targets: Sequence[Target]) -> None:
    if tuple(source.shards()) != plan.have:
        raise LayoutMismatch("the source offers other shards than those the plan was made for")
    if tuple(target.shard for target in targets) != plan.want:
        raise LayoutMismatch("the parameters are not those the plan was made for")


def _slices(box: Box) -> Slices:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def _cut(copy: Copy, item: int) -> Iterator[Copy]:
    """The copy in pieces of at most PIECE_BYTES, cut along the first axis."""
    shape = copy.source_box.shape
    if not shape or copy.source_box.volume * item <= PIECE_BYTES:
        yield copy
        return
    step = max(1, PIECE_BYTES * shape[0] // (copy.source_box.volume * item))
    for first in range(0, shape[0], step):
        count = min(step, shape[0] - first)
        yield Copy(
            copy.source,
            _rows(copy.source_box, first, count),
            copy.target,
            _rows(copy.target_box, first, count),
        )


def _rows(box: Box, first: int, count: int) -> Box:
    return Box((box.start[0] + first, *box.start[1:]), (count, *box.shape[1:]))


class _Reader:
    """Reads each shard once, however many pieces use it, and lets go of it after the last one."""

    def __init__(self, source: WeightSource, shards: Sequence[Shard], pieces: Sequence[Copy]) -> None:
        self.source, self.shards = source, shards
        self.uses = Counter(piece.source for piece in pieces)
        self.open: dict[int, Bytes] = {}
        self.lock = Lock()

    def take(self, index: int) -> Bytes:
        """The bytes of a shard, shaped as the shard with the last axis in bytes."""
        with self.lock:
            if index not in self.open:
                self.open[index] = self._read(index)
            return self.open[index]

    def give_back(self, index: int) -> None:
        """Tell that one piece is done."""
        with self.lock:
            self.uses[index] -= 1
            if not self.uses[index]:
                del self.open[index]

    def _read(self, index: int) -> Bytes:
        shard = self.shards[index]
        shape = _byte_shape(shard.shape, item_bytes(shard))
        raw = np.frombuffer(self.source.read(index), dtype=np.uint8)
        needed = int(np.prod(shape, dtype=np.int64))
        if raw.size != needed:
            raise CheckpointCorrupt(f"{shard.key}: {raw.size} bytes are there where {needed} were needed")
        return raw.reshape(shape)


class _Writer:
    """Writes pieces into the targets.

    All bytes go through numpy: it takes read-only and unaligned memory, and a tensor never sees either.
    """

    def __init__(self, have: Sequence[Shard], targets: Sequence[Target]) -> None:
        self.have, self.targets = have, targets

    def write(self, piece: Copy, raw: Bytes) -> None:
        """Copy one piece out of its shard's bytes."""
        have, target = self.have[piece.source], self.targets[piece.target]
        tensor = target.tensor.detach()
        taken = raw[_byte_slices(piece.source_box, item_bytes(have))]
        if have.dtype == target.shard.dtype and tensor.device.type == "cpu":
            np.copyto(_as_bytes(tensor)[_byte_slices(piece.target_box, item_bytes(have))], taken)
            return
        staged = torch.empty(piece.source_box.shape, dtype=getattr(torch, have.dtype))
        np.copyto(_as_bytes(staged), taken)
        tensor[_slices(piece.target_box)].copy_(staged)


def _byte_shape(shape: Shape, item: int) -> Shape:
    return (*shape[:-1], shape[-1] * item) if shape else (item,)


def _byte_slices(box: Box, item: int) -> Slices:
    if not box.shape:
        return (slice(0, item),)
    *outer, last = _slices(box)
    return (*outer, slice(last.start * item, last.stop * item))


def _as_bytes(tensor: Tensor) -> Bytes:
    """A contiguous CPU tensor's own memory."""
    shaped = tensor if tensor.dim() else tensor.reshape(1)
    array: Bytes = shaped.view(torch.uint8).numpy()
    return array


@dataclass(slots=True, eq=False)
class _Work:
    pieces: deque[Copy]
    reader: _Reader
    writer: _Writer

    def drain(self, done: SimpleQueue[int | None]) -> None:
        """Do pieces until none is left; tells each one's bytes, and None at the end."""
        try:
            while True:
                try:
                    piece = self.pieces.popleft()
                except IndexError:
                    return
                done.put(self._do(piece))
        except BaseException:
            self.pieces.clear()
            raise
        finally:
            done.put(None)

    def _do(self, piece: Copy) -> int:
        raw = self.reader.take(piece.source)
        self.writer.write(piece, raw)
        self.reader.give_back(piece.source)
        return piece.source_box.volume * item_bytes(self.reader.shards[piece.source])


def _run(work: _Work, threads: int, progress: Callable[[int], None] | None) -> int:
    done: SimpleQueue[int | None] = SimpleQueue()
    total, running = 0, threads
    with ThreadPoolExecutor(threads, thread_name_prefix="refit") as pool:
        futures = [pool.submit(work.drain, done) for _ in range(threads)]
        try:
            while running:
                copied = done.get()
                running -= copied is None
                total += copied or 0
                if copied and progress is not None:
                    progress(copied)
        finally:
            work.pieces.clear()
    for future in futures:
        future.result()
    return total
