"""Writes a Hugging Face folder's weights: safetensors files of bounded size and their index, a tensor at a time.

Torch-free: tensors come from whoever calls.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gtp_serve.config import DTYPE_BYTES
from gtp_serve.layout.huggingface import stored_name
from gtp_serve.layout.spans import Shape
from gtp_serve.loaders.huggingface import INDEX, SINGLE

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written."""

    name: str
    shape: Shape
    dtype: str

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def write_weights(
    folder: Path,
    entries: list[Entry],
    read: Callable[[str], Tensor],
    *,
    family: str,
    shard_bytes: int,
    progress: Callable[[int], None],
) -> list[Path]:
    """Write every tensor, in order.

    :param read: a tensor by its logical name, contiguous; called once for each, and its result is dropped at once.
    :param family: names the tensors as its folders do.
    :param shard_bytes: of tensors in one file, unless a single tensor has more.
    :param progress: told the bytes of each piece as it is written.
    :returns: the files, weights first.
    """
    groups = _groups(entries, shard_bytes)
    names = [SINGLE]
    if len(groups) > 1:
        names = [f"model-{i:05d}-of-{len(groups):05d}.safetensors" for i in range(1, len(groups) + 1)]
    paths = []
    for name, group in zip(names, groups, strict=True):
        paths.append(folder / name)
        _write_file(folder / name, group, read, family, progress)
    if len(groups) > 1:
        where = {stored_name(e.name, family): name for name, group in zip(names, groups, strict=True) for e in group}
        paths.append(_write_index(folder, where, sum(entry.size for entry in entries)))
    return paths


def _groups(entries: list[Entry], limit: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        if groups[-1] and used + entry.size > limit:
            groups.append([])
            used = 0
        groups[-1].append(entry)
        used += entry.size
    return groups


def _write_file(
    path: Path,
    entries: list[Entry],
    read: Callable[[str], Tensor],
    family: str,
    progress: Callable[[int], None],
) -> None:
    with path.open("xb") as file:
        file.write(_header(entries, family))
        for entry in entries:
            _write_tensor(file, read(entry.name), progress)


def _write_tensor(file: BinaryIO, tensor: Tensor, progress: Callable[[int], None]) -> None:
    """A function of its own, so that nothing holds the tensor while the next is read."""
    for piece in pieces(tensor):
        file.write(piece)
        progress(len(piece))


def _header(entries: list[Entry], family: str) -> bytes:
    values: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + entry.size
        values[stored_name(entry.name, family)] = {
            "dtype": _KINDS[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(values, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # so that tensors lie aligned in a mapped file
    return len(raw).to_bytes(8, "little") + raw


def pieces(tensor: Tensor) -> list[memoryview]:
    """The bytes of a contiguous tensor in its own memory, which must outlive them."""
    size = tensor.nbytes
    if not size:
        return []
    # There is no other form of a bfloat16 tensor that is bytes and needs no torch.
    block = (ctypes.c_ubyte * size).from_address(tensor.data_ptr())
    block._tensor = tensor  # type: ignore[attr-defined]  # kept alive by the views of it
    view = memoryview(block).cast("B")
    return [view[start : start + _CHUNK_BYTES] for start in range(0, size, _CHUNK_BYTES)]


def _write_index(folder: Path, where: Mapping[str, str], total: int) -> Path:
    path = folder / INDEX
    values = {"metadata": {"total_size": total}, "weight_map": dict(where)}
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return path
