"""The zip archives that ``torch.save`` writes, as byte ranges: what lies where, checked, with nothing
unpacked.

Such an archive has one folder, members that are stored and not compressed, and no comment; a directory entry
is believed only as far as the bytes are there and the member's own header says the same name.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeGuard

from gtp_serve.errors import CheckpointCorrupt, CheckpointError, UnsupportedModel
from gtp_serve.loaders.pickle_names import STORAGE_DTYPES
from gtp_serve.loaders.pickle_values import Name, Persistent, Record
from gtp_serve.loaders.pickles import read_pickle

_END = struct.Struct("<4s4H2IH")
_END64_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY_BYTES, _LOCAL_BYTES = 46, 30
# An entry of the directory in the parts that are looked at; what lies between, a checksum among it, is not.
_ENTRY_KIND, _ENTRY_SIZES, _ENTRY_HEADER = struct.Struct("<4s4H"), struct.Struct("<2I3H"), struct.Struct("<I")
_SIZES_AT, _HEADER_AT = 20, 42
_LOCAL_NAMES, _LOCAL_NAMES_AT = struct.Struct("<2H"), 26
_FULL = 0xFFFFFFFF

MAX_MEMBERS = 1_000_000
#: Bytes of each element type that a checkpoint's weights may have.
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


class Readable(Protocol):
    """All that is asked of an archive's bytes: their number, and ranges of them."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: slice, /) -> bytes | bytearray | memoryview: ...


@dataclass(frozen=True, slots=True)
class Member:
    """Where a member's bytes lie in the archive."""

    start: int
    size: int


class Archive:
    """The directory of one archive.

    :param data: all its bytes.
    :param label: what it is, for messages (a file, and an item in it).
    :raises CheckpointCorrupt: when any entry is not what it must be.
    """

    def __init__(self, data: Readable, label: str) -> None:
        self._data = data
        self._label = label
        self.members = self._read_directory()

    def place(self, name: str) -> Member:
        """Where a member's bytes lie.

        :raises CheckpointCorrupt: when there is no such member.
        """
        member = self.members.get(name)
        if member is None:
            raise self._corrupt(f"has no member {name}")
        return member

    def member(self, name: str) -> bytes | bytearray | memoryview:
        """A member's bytes.

        :raises CheckpointCorrupt: when there is no such member.
        """
        member = self.place(name)
        return self._data[member.start : member.start + member.size]

    def check_byte_order(self) -> None:
        """Refuse tensors of the other byte order.  (torch before 2.1 does not say, and wrote little-endian
        files.)"""
        order = bytes(self.member("byteorder")).decode("ascii", "replace") if "byteorder" in self.members else "little"
        if order != sys.byteorder:
            raise self._corrupt(f"holds {order[:16]!r}-endian numbers, this machine is {sys.byteorder}-endian")

    def value(self) -> object:
        """What ``data.pkl`` describes; tensors in it are inert records."""
        return read_pickle(bytes(self.member("data.pkl")), self._label, persistent=True)

    def _corrupt(self, what: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self._label} {what}")

    def _read_directory(self) -> dict[str, Member]:
        start, size, count = self._directory_place()
        if count > MAX_MEMBERS:
            raise self._corrupt(f"claims {count} members")
        if start < 0 or start + size > len(self._data):
            raise self._corrupt("is not a zip archive: its directory lies outside it")
        members: dict[str, Member] = {}
        end = 0
        for name, member in sorted(self._entries(start, size, count), key=lambda entry: entry[1].start):
            if name in members or member.start < end or member.start + member.size > start:
                raise self._corrupt(f"has a member {name!r} that overlaps another or leaves the archive")
            members[name] = member
            end = member.start + member.size
        return members

    def _directory_place(self) -> tuple[int, int, int]:
        """(start, size, number of entries) of the directory."""
        at = len(self._data) - _END.size
        if at < 0 or self._bytes(at, 4) != b"PK\5\6":
            raise self._corrupt("is not a zip archive, or is cut short: it has no end record")
        _, disk, first, here, count, size, start, comment = _END.unpack(self._bytes(at, _END.size))
        locator = at - _END64_LOCATOR.size
        if locator >= 0 and self._bytes(locator, 4) == b"PK\6\7":
            _, _, end64, _ = _END64_LOCATOR.unpack(self._bytes(locator, _END64_LOCATOR.size))
            if end64 + _END64.size > locator or self._bytes(end64, 4) != b"PK\6\6":
                raise self._corrupt("is not a zip archive: its end record is damaged")
            _, _, _, _, disk, first, here, count, size, start = _END64.unpack(self._bytes(end64, _END64.size))
        if disk or first or comment or here != count:
            raise self._corrupt("is a zip archive of a kind that torch does not write")
        return start, size, count

    def _entries(self, start: int, size: int, count: int) -> Iterator[tuple[str, Member]]:
        at, stop, folder = start, start + size, ""
        for _ in range(count):
            if at + _ENTRY_BYTES > stop:
                raise self._corrupt("has a directory that is cut short")
            kind, _, _, flags, method = self._fields(_ENTRY_KIND, at)
            packed, unpacked, name_length, extra_length, comment_length = self._fields(_ENTRY_SIZES, at + _SIZES_AT)
            (header,) = self._fields(_ENTRY_HEADER, at + _HEADER_AT)
            name_end = at + _ENTRY_BYTES + name_length
            if kind != b"PK\1\2" or name_end + extra_length + comment_length > stop:
                raise self._corrupt("has a directory that is damaged")
            raw = self._bytes(at + _ENTRY_BYTES, name_length)
            extra = self._bytes(name_end, extra_length)
            unpacked, packed, header = self._wide(extra, unpacked, packed, header)
            if method or flags & 1 or packed != unpacked:
                raise self._corrupt("has a member that is compressed or encrypted, which torch does not write")
            prefix, _, name = raw.decode("utf-8", "replace").partition("/")
            if not name or (folder and prefix != folder):
                raise self._corrupt("has more than one folder")
            folder = prefix
            yield name, Member(self._payload(header, raw), unpacked)
            at = name_end + extra_length + comment_length

    def _wide(self, extra: bytes, *values: int) -> list[int]:
        """The 64-bit forms of those values that do not fit 32 bits."""
        missing = [i for i, value in enumerate(values) if value == _FULL]
        result = list(values)
        at = 0
        while missing and at + 4 <= len(extra):
            tag, length = struct.unpack_from("<2H", extra, at)
            if tag == 1 and length >= 8 * len(missing) and at + 4 + length <= len(extra):
                for i, value in zip(missing, struct.unpack_from(f"<{len(missing)}Q", extra, at + 4), strict=True):
                    result[i] = value
                missing = []
            at += 4 + length
        return result

    def _payload(self, header: int, name: bytes) -> int:
        if header + _LOCAL_BYTES > len(self._data):
            raise self._corrupt("has a member that lies outside it")
        name_length, extra_length = self._fields(_LOCAL_NAMES, header + _LOCAL_NAMES_AT)
        start = header + _LOCAL_BYTES
        if self._bytes(header, 4) != b"PK\3\4" or self._bytes(start, name_length) != name:
            raise self._corrupt(f"has a damaged header of its member {name.decode('utf-8', 'replace')!r}")
        return start + int(name_length) + int(extra_length)

    def _fields(self, form: struct.Struct, at: int) -> tuple[Any, ...]:
        return form.unpack(self._bytes(at, form.size))

    def _bytes(self, at: int, count: int) -> bytes:
        return bytes(self._data[at : at + count])


def find_tensor(data: Readable, shape: tuple[int, ...], dtype: str, label: str) -> Member:
    """Where the bytes of the one tensor lie that an archive holds.

    :raises CheckpointCorrupt: unless it says that it has this shape and element type, contiguously, and has
        the bytes.
    """
    archive = Archive(data, label)
    archive.check_byte_order()
    key, stored_dtype, numel, offset, stored_shape, strides = _description(archive, label)
    if stored_dtype != dtype or stored_shape != shape:
        raise CheckpointCorrupt(
            f"{label} holds {stored_dtype} {list(stored_shape)}",
            [("the metadata says", f"{dtype} {list(shape)}")],
        )
    count = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != count:
            raise UnsupportedModel(f"{label} is a tensor that is not contiguous: strides {list(strides)}")
        count *= size
    if "/" in key or ".." in key:
        raise CheckpointCorrupt(f"{label} names a storage {key[:40]!r}")
    storage = archive.place(f"data/{key}")
    width = ITEM_BYTES[dtype]
    if storage.size != numel * width or offset + count > numel:
        raise CheckpointCorrupt(
            f"{label} has a storage of {storage.size} bytes",
            [("needed", f"{numel * width} bytes for {numel} elements, {offset + count} of them used")],
        )
    return Member(storage.start + offset * width, count * width)


_Description = tuple[str, str, int, int, tuple[int, ...], tuple[int, ...]]


def _description(archive: Archive, label: str) -> _Description:
    """See ``_described``.  All layers' chunks of one weight are described by the same few bytes: read them once."""
    try:
        return _described_by(bytes(archive.member("data.pkl")))
    except CheckpointError:
        return _described(archive.value(), label)  # again, to say where


@lru_cache(maxsize=256)
def _described_by(pickled: bytes) -> _Description:
    return _described(read_pickle(pickled, "a tensor", persistent=True), "a tensor")


def _described(value: object, label: str) -> _Description:
    """(storage key, dtype, elements in the storage, offset, shape, strides) of a pickled tensor."""
    if isinstance(value, Record) and value.name == "torch._utils._rebuild_parameter" and value.args:
        value = value.args[0]
    if not isinstance(value, Record) or value.name != "torch._utils._rebuild_tensor_v2" or len(value.args) < 4:
        raise CheckpointCorrupt(f"{label} does not hold a tensor")
    storage, offset, shape, strides = value.args[:4]
    reference = storage.reference if isinstance(storage, Persistent) else None
    if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
        raise CheckpointCorrupt(f"{label} holds a tensor without a storage")
    kind, key, numel = reference[1], reference[2], reference[4]
    dtype = STORAGE_DTYPES.get(kind.name) if isinstance(kind, Name) else None
    if dtype is None or not isinstance(key, str):
        raise CheckpointCorrupt(f"{label} holds a tensor of an unknown kind of storage")
    if not _count(numel) or not _count(offset) or not _counts(shape) or not _counts(strides):
        raise CheckpointCorrupt(f"{label} holds a tensor whose sizes are not numbers of elements")
    if len(shape) != len(strides):
        raise CheckpointCorrupt(f"{label} holds a tensor with {len(shape)} axes and {len(strides)} strides")
    return key, dtype, numel, offset, shape, strides


def _count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < 2**63


def _counts(values: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(values, tuple) and len(values) <= 16 and all(_count(v) for v in values)
