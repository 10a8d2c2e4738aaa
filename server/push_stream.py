"""A checkpoint of any layout as one safetensors file that is made while it is sent: one tensor in memory at a time."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

from gtp_serve.errors import CheckpointCorrupt
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Shape
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.checkpoint import Checkpoint

_CHUNK_BYTES = 1 << 20
_KINDS = {"float32": ("F32", 4), "bfloat16": ("BF16", 2), "float16": ("F16", 2)}


class CheckpointStream:
    """The file: how long it is, and its bytes.

    :param dtypes: of each tensor, as ``Checkpoint.tensors`` gives it.
    """

    def __init__(self, checkpoint: Checkpoint, shapes: Mapping[str, Shape], dtypes: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        self._sizes = {name: prod(shape) * _KINDS[dtypes[name]][1] for name, shape in shapes.items()}
        entries: dict[str, object] = {}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + self._sizes[name]
            entries[name] = {"dtype": _KINDS[dtypes[name]][0], "shape": list(shape), "data_offsets": [start, end]}
        raw = json.dumps(entries).encode()
        self._head = len(raw).to_bytes(8, "little") + raw
        self.length = len(self._head) + end

    def chunks(self) -> Iterator[bytes]:
        """All bytes, in order.

        :raises CheckpointError: when the checkpoint is not what it said it is.
        """
        yield self._head
        wanted = iter(self._sizes.items())
        for name, tensor in self._checkpoint.tensors():
            expected, size = next(wanted)
            if name != expected or tensor.nbytes != size:
                raise CheckpointCorrupt(f"{name} has {tensor.nbytes} bytes in memory, {expected} was to have {size}")
            # The tensor's own memory: there is no other form of a bfloat16 tensor that is bytes.
            view = memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")
            for start in range(0, size, _CHUNK_BYTES):
                yield bytes(view[start : start + _CHUNK_BYTES])


@contextmanager
def open_stream(path: Path, iteration: int | None = None) -> Iterator[CheckpointStream]:
    """A checkpoint, ready to be sent.

    :raises CheckpointError: as ``open_checkpoint``.
    """
    checkpoint = open_checkpoint(path, iteration=iteration)
    try:
        shapes = logical_tensors(checkpoint.config)
        yield CheckpointStream(checkpoint, shapes, checkpoint.dtypes())
    finally:
        checkpoint.close()
