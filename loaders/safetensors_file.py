"""The header of a safetensors file, parsed and checked without any library.

A file is 8 bytes of header length, a JSON header and the tensors' bytes.  Accepted are files whose tensors
fill the data exactly, in any order: no hole, no overlap, no byte after the end, each range as long as shape
and type say.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TypeGuard

from gtp_serve.errors import CheckpointCorrupt
from gtp_serve.layout.spans import Shape
from gtp_serve.loaders.files import file_size, parse_json, reading, shown

#: Largest header that is read: room for about 200,000 tensors.
MAX_HEADER_BYTES = 32 * 1024**2
MAX_AXES = 8
#: Before the header: its length, little-endian.
LENGTH_BYTES = 8

#: Bytes of an element by the name that the format gives its type; half a byte is written as None and not
#: read.
TYPE_BYTES: dict[str, int | None] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
    **dict.fromkeys(("F4", "F6_E2M3", "F6_E3M2"), None),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: ``start`` counts from the beginning of the file."""

    path: Path
    name: str
    kind: str
    shape: Shape
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Header:
    """What one file holds."""

    path: Path
    size: int
    tensors: dict[str, StoredTensor]


def read_header(path: Path, root: Path) -> Header:
    """Read and check a file's header.

    :param root: resolved folder that the file, links followed, must lie in.
    :raises CheckpointCorrupt: naming the file, with expected and actual size where a size is wrong.
    """
    size = file_size(path, root)
    if size < LENGTH_BYTES:
        raise CheckpointCorrupt(
            f"{path} has {size} bytes", [("needed", f"at least {LENGTH_BYTES}, of a safetensors file")]
        )
    with reading(path) as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > MAX_HEADER_BYTES:
            raise CheckpointCorrupt(
                f"{path} is not a safetensors file, or is damaged: it claims a header of {length} bytes",
                [("limit", f"{MAX_HEADER_BYTES} bytes")],
            )
        if LENGTH_BYTES + length > size:
            raise CheckpointCorrupt(
                f"{path} is cut short: it has {size} bytes",
                [("expected", f"at least {LENGTH_BYTES + length}, its header")],
            )
        raw = file.read(length)
    header = parse_header(path, raw)
    if header.size != size:
        raise CheckpointCorrupt(
            f"{path} is {'cut short' if size < header.size else 'longer than its tensors'}: it has {size} bytes",
            [("expected", f"{header.size} bytes")],
        )
    return header


def parse_header(path: Path, raw: bytes) -> Header:
    """What a header says, and the size that its file must have.

    :param path: of the file, or a word for it in messages.
    :param raw: the JSON text, without the length before it.
    :raises CheckpointCorrupt: when it is none, or its tensors do not fill the data exactly.
    """
    if raw[:1] != b"{":
        raise CheckpointCorrupt(f"{path} is not a safetensors file, or is damaged: its header is not a JSON object")
    entries = parse_json(raw, f"{path}: the header")
    base = LENGTH_BYTES + len(raw)
    tensors = {name: _tensor(path, name, entry, base) for name, entry in entries.items() if name != "__metadata__"}
    return Header(path, _filled_to(path, tensors, base), tensors)


def _tensor(path: Path, name: str, entry: object, base: int) -> StoredTensor:
    fields = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(kind, str) or kind not in TYPE_BYTES:
        raise CheckpointCorrupt(f"{path}: {shown(name)} has the element type {shown(kind)}")
    if not _counts(shape) or len(shape) > MAX_AXES:
        raise CheckpointCorrupt(f"{path}: {shown(name)} has a shape that is not a few numbers")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointCorrupt(f"{path}: {shown(name)} has data offsets that are not a range")
    width, length = TYPE_BYTES[kind], offsets[1] - offsets[0]
    if width is not None and length != prod(shape) * width:
        raise CheckpointCorrupt(
            f"{path}: {shown(name)} has {length} bytes",
            [("expected", f"{prod(shape) * width} for {kind} {list(shape)}")],
        )
    return StoredTensor(path, name, kind, tuple(shape), base + offsets[0], length)


def _counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _filled_to(path: Path, tensors: dict[str, StoredTensor], base: int) -> int:
    """One past the last byte of tensors that lie one behind the other."""
    end = base
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.length)):
        if tensor.start != end:
            what = "overlaps the one before it" if tensor.start < end else "leaves a hole before it"
            raise CheckpointCorrupt(f"{path}: {shown(tensor.name)} {what}, at byte {tensor.start}")
        end = tensor.start + tensor.length
    return end
