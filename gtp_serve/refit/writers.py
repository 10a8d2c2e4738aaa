"""The two ways from a source's bytes to tensors: straight there, and through views of the source's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from threading import Lock, local
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gtp_serve.errors import CheckpointCorrupt
from gtp_serve.layout.spans import Box, Shape, Shard
from gtp_serve.refit.geometry import byte_rows, cut
from gtp_serve.refit.native_copy import AS_IS, CONVERSIONS, MEMORY, Job, native_reader
from gtp_serve.refit.plan import ITEM_BYTES, Copy, RefitPlan, item_bytes
from gtp_serve.refit.source import BatchSource, DirectSource, Rows, WeightSource

#: Bytes that are read before they are converted: they are still in the cache then.
STAGED_BYTES = 512 << 10
#: Bytes that are read before they go to a device: enough that starting the transfer costs little.
DEVICE_STAGED_BYTES = 4 << 20

Bytes = npt.NDArray[np.uint8]
Slices = tuple[slice, ...]


class Writer(Protocol):
    """Writes copies into tensors; threads share one."""

    batches: bool
    """Whether a unit may have copies of several shards."""

    def write(self, unit: Sequence[Copy]) -> None:
        """Carry out copies of one shard, in its order; of several shards one after another where ``batches``."""
        ...


def slices(box: Box) -> Slices:
    """The box as indices."""
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


class DirectWriter:
    """Has the source write into the tensors' memory; into a small buffer first where a dtype or device differs.

    A source that takes many shards at a time, and converts, gets whole units.
    """

    def __init__(self, source: DirectSource, plan: RefitPlan, tensors: Sequence[Tensor]) -> None:
        self._source, self._plan, self._tensors = source, plan, tensors
        self._addresses = [t.data_ptr() if t.device.type == "cpu" else None for t in tensors]
        self._mine = local()
        self._many = source if isinstance(source, BatchSource) and source.batches else None
        self.batches = self._many is not None

    def write(self, unit: Sequence[Copy]) -> None:
        """See ``Writer``."""
        if self._many is not None:
            self._write_many(self._many, unit)
            return
        have, rows = self._plan.have[unit[0].source], list[Rows]()
        item = item_bytes(have)
        for copy in unit:
            want, address = self._plan.want[copy.target], self._addresses[copy.target]
            if address is None or want.dtype != have.dtype:
                self._convert(copy, item)
            else:
                rows += byte_rows(have.shape, copy.source_box, want.shape, copy.target_box, item, address)
        if rows:
            self._source.read_into(unit[0].source, rows)

    def _write_many(self, source: BatchSource, unit: Sequence[Copy]) -> None:
        parts: list[tuple[int, list[Rows]]] = []
        offered, wanted, addresses = self._plan.have, self._plan.want, self._addresses
        last = -1
        for copy in unit:  # thousands of small ones in some checkpoints
            index, source_box, target, target_box = copy
            have, want, address = offered[index], wanted[target], addresses[target]
            item = made = ITEM_BYTES[have.dtype]
            convert: int | None = AS_IS
            if have.dtype != want.dtype:
                convert, made = CONVERSIONS.get((have.dtype, want.dtype)), ITEM_BYTES[want.dtype]
            if address is None or convert is None:
                self._convert(copy, item)
                continue
            rows = byte_rows(
                have.shape, source_box, want.shape, target_box, item, address, target_item=made, convert=convert
            )
            if index == last:
                parts[-1][1].extend(rows)
            elif rows:
                parts.append((index, rows))
                last = index
        if parts:
            source.read_many(parts)

    def _convert(self, copy: Copy, item: int) -> None:
        have, target = self._plan.have[copy.source], self._tensors[copy.target]
        kind = target.device.type
        for piece in cut(copy, item, STAGED_BYTES if kind == "cpu" else DEVICE_STAGED_BYTES):
            shape = piece.source_box.shape
            buffer = self._buffer(piece.source_box.volume * item, pinned=kind == "cuda")
            staged = buffer.view(getattr(torch, have.dtype)).reshape(shape)
            rows = byte_rows(have.shape, piece.source_box, shape, Box.whole(shape), item, staged.data_ptr())
            if rows:
                self._source.read_into(piece.source, rows)
                target[slices(piece.target_box)].copy_(staged)

    def _buffer(self, count: int, *, pinned: bool) -> Tensor:
        """Memory of this thread, used again and again: fresh memory costs more than what is copied there.

        :param pinned: memory that a GPU reads by itself; copies from other memory go through one more buffer.
        """
        buffer: Tensor | None = getattr(self._mine, "buffer", None)
        if buffer is None or len(buffer) < count or self._mine.pinned != pinned:
            size = max(count, DEVICE_STAGED_BYTES if pinned else STAGED_BYTES)
            self._mine.buffer = buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            self._mine.pinned = pinned
        return buffer[:count]


class ViewWriter:
    """Copies out of views of the source's memory.

    All bytes go through numpy: it takes read-only and unaligned memory, and a tensor never sees either.

    :param uses: in how many units each shard comes.
    """

    batches = False

    def __init__(
        self, source: WeightSource, plan: RefitPlan, tensors: Sequence[Tensor], uses: Mapping[int, int]
    ) -> None:
        self._views = _Views(source, plan, uses)
        self._plan, self._tensors = plan, tensors

    def write(self, unit: Sequence[Copy]) -> None:
        """See ``Writer``."""
        raw = self._views.take(unit[0].source)
        for copy in unit:
            self._copy(copy, raw)
        self._views.give_back(unit[0].source)

    def _copy(self, copy: Copy, raw: Bytes) -> None:
        have, want, tensor = self._plan.have[copy.source], self._plan.want[copy.target], self._tensors[copy.target]
        item = item_bytes(have)
        if tensor.device.type == "cpu" and self._copy_native(copy, raw, have, want, tensor):
            return
        taken = raw[_byte_slices(copy.source_box, item)]
        if have.dtype == want.dtype and tensor.device.type == "cpu":
            np.copyto(_as_bytes(tensor)[_byte_slices(copy.target_box, item)], taken)
            return
        staged = torch.empty(copy.source_box.shape, dtype=getattr(torch, have.dtype))
        np.copyto(_as_bytes(staged), taken)
        tensor[slices(copy.target_box)].copy_(staged)

    def _copy_native(self, copy: Copy, raw: Bytes, have: Shard, want: Shard, tensor: Tensor) -> bool:
        """Whether the compiled library did it."""
        reader, same = native_reader(), have.dtype == want.dtype
        convert = AS_IS if same else CONVERSIONS.get((have.dtype, want.dtype))
        if reader is None or convert is None:
            return False
        item = ITEM_BYTES[have.dtype]
        boxes = (have.shape, copy.source_box, want.shape, copy.target_box)
        made = ITEM_BYTES[want.dtype]
        rows = byte_rows(*boxes, item, tensor.data_ptr(), target_item=made, convert=convert)
        reader.read([Job(MEMORY, have.key, raw.ctypes.data, rows)])
        return True


class _Views:
    """Reads each shard once, however many units use it, and lets go of it after the last one."""

    def __init__(self, source: WeightSource, plan: RefitPlan, uses: Mapping[int, int]) -> None:
        self._source, self._shards = source, plan.have
        self._uses = dict(uses)
        self._open: dict[int, Bytes] = {}
        self._lock = Lock()

    def take(self, index: int) -> Bytes:
        """The bytes of a shard, shaped as the shard with the last axis in bytes."""
        with self._lock:
            if index not in self._open:
                self._open[index] = self._read(index)
            return self._open[index]

    def give_back(self, index: int) -> None:
        """Tell that one unit is done."""
        with self._lock:
            self._uses[index] -= 1
            if not self._uses[index]:
                del self._open[index]

    def _read(self, index: int) -> Bytes:
        shard = self._shards[index]
        shape = _byte_shape(shard.shape, item_bytes(shard))
        raw = np.frombuffer(self._source.read(index), dtype=np.uint8)
        needed = int(np.prod(shape, dtype=np.int64))
        if raw.size != needed:
            raise CheckpointCorrupt(f"{shard.key}: {raw.size} bytes are there where {needed} were needed")
        return raw.reshape(shape)


def _byte_shape(shape: Shape, item: int) -> Shape:
    return (*shape[:-1], shape[-1] * item) if shape else (item,)


def _byte_slices(box: Box, item: int) -> Slices:
    if not box.shape:
        return (slice(0, item),)
    *outer, last = slices(box)
    return (*outer, slice(last.start * item, last.stop * item))


def _as_bytes(tensor: Tensor) -> Bytes:
    """A contiguous CPU tensor's own memory."""
    shaped = tensor if tensor.dim() else tensor.reshape(1)
    array: Bytes = shaped.view(torch.uint8).numpy()
    return array
