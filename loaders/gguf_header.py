"""The header of a GGUF file (versions 2 and 3, little-endian): metadata and where each tensor lies, checked.

Parsed here and not by a library, so that every count and length is held against the real file before it is
used and ``inspect`` needs nothing installed.  Format: ggml's ``docs/gguf.md``.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from gtp_serve.errors import CheckpointCorrupt, EnvironmentFault, UnsupportedModel
from gtp_serve.layout.spans import Shape
from gtp_serve.loaders.files import file_size, shown

MAX_TENSORS = 100_000
MAX_FIELDS = 100_000
MAX_ARRAY = 4_000_000
MAX_AXES = 4
_MAX_KEY_BYTES = 65_536
_FIXED_VALUE = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

#: Element types by number: name, elements in a block, bytes of a block.
BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor: ``shape`` is row-major (GGUF lists axes the other way round); ``start`` counts from the
    file's begin."""

    name: str
    kind: int
    shape: Shape
    start: int
    length: int

    @property
    def kind_name(self) -> str:
        """Name of its element type."""
        return BLOCKS[self.kind][0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the last axis."""
        _, elements, size = BLOCKS[self.kind]
        return self.shape[-1] // elements * size


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What one file holds.  Metadata values are numbers, text, booleans or lists of those."""

    path: Path
    size: int
    fields: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]


def read_gguf_header(path: Path, root: Path) -> GgufHeader:
    """Read and check the header of a file.

    :raises CheckpointCorrupt: naming the file and the tensor or field that cannot be.
    :raises UnsupportedModel: for an element type that is not read.
    """
    size = file_size(path, root)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data, size).parse()
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{path} cannot be mapped: {error}") from error


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.at = 0

    def parse(self) -> GgufHeader:
        if self.take(4) != b"GGUF":
            raise self.corrupt("is not a GGUF file")
        version = self.number("I")
        if version not in (2, 3):
            raise UnsupportedModel(f"{self.path} is GGUF version {version}", [("supported", "2 and 3, little-endian")])
        num_tensors, num_fields = self.number("Q"), self.number("Q")
        if num_tensors > MAX_TENSORS or num_fields > MAX_FIELDS:
            raise self.corrupt(f"claims {num_tensors} tensors and {num_fields} metadata fields")
        fields: dict[str, object] = {}
        for _ in range(num_fields):
            key = self.text(_MAX_KEY_BYTES)
            if key in fields:
                raise self.corrupt(f"has the field {shown(key)} twice")
            fields[key] = self.value(self.number("I"))
        entries = [self.entry() for _ in range(num_tensors)]
        alignment = fields.get("general.alignment", 32)
        if type(alignment) is not int or not 1 <= alignment <= 65536 or alignment & (alignment - 1):
            raise self.corrupt(f"has the alignment {shown(alignment)}")
        base = -(-self.at // alignment) * alignment
        return GgufHeader(self.path, self.size, fields, self.placed(entries, base, alignment))

    def corrupt(self, what: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.path} {what}")

    def take(self, count: int) -> bytes:
        if count > self.size - self.at:
            raise self.corrupt(
                f"is cut short: {count} bytes are needed at byte {self.at}, {self.size - self.at} are there"
            )
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def number(self, form: str) -> int:
        value: int = struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))[0]
        return value

    def text(self, limit: int | None = None) -> str:
        length = self.number("Q")
        if limit is not None and length > limit:
            raise self.corrupt(f"has a name of {length} bytes")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int) -> object:
        if kind in _FIXED_VALUE:
            return self.number(_FIXED_VALUE[kind])
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            raise self.corrupt(f"has a metadata value of the unknown kind {kind}")
        inner, count = self.number("I"), self.number("Q")
        if count > MAX_ARRAY:
            raise self.corrupt(f"has a list of {count} values")
        if inner in _FIXED_VALUE:
            form = f"<{count}{_FIXED_VALUE[inner]}"
            return list(struct.unpack(form, self.take(struct.calcsize(form))))
        if inner != _STRING:
            raise self.corrupt("has a list of lists, or of values of an unknown kind")
        if count * 8 > self.size - self.at:
            raise self.corrupt(f"has a list of {count} texts, more than its bytes")
        return [self.text() for _ in range(count)]

    def entry(self) -> tuple[str, Shape, int, int]:
        name, axes = self.text(_MAX_KEY_BYTES), self.number("I")
        if not 1 <= axes <= MAX_AXES:
            raise self.corrupt(f"has {shown(name)} with {axes} axes")
        shape = tuple(reversed([self.number("Q") for _ in range(axes)]))
        kind, offset = self.number("I"), self.number("Q")
        if kind not in BLOCKS:
            raise UnsupportedModel(f"{self.path}: {shown(name)} has the element type number {kind}, which is not read")
        return name, shape, kind, offset

    def placed(self, entries: list[tuple[str, Shape, int, int]], base: int, alignment: int) -> dict[str, GgufTensor]:
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            _, elements, block = BLOCKS[kind]
            if prod(shape) >= 2**63 or shape[-1] % elements:
                raise self.corrupt(f"has {shown(name)} with the shape {list(shape)}, which cannot be")
            length = prod(shape) // elements * block
            if offset % alignment or base + offset + length > self.size:
                raise self.corrupt(
                    f"is cut short or damaged: {shown(name)} takes bytes {base + offset} to "
                    f"{base + offset + length} of {self.size}"
                )
            if name in tensors:
                raise self.corrupt(f"has {shown(name)} twice")
            tensors[name] = GgufTensor(name, kind, shape, base + offset, length)
        self.check_apart(tensors)
        return tensors

    def check_apart(self, tensors: Mapping[str, GgufTensor]) -> None:
        end = 0
        for tensor in sorted(tensors.values(), key=lambda t: t.start):
            if tensor.start < end:
                raise self.corrupt(f"has {shown(tensor.name)} on the bytes of another tensor")
            end = tensor.start + tensor.length
