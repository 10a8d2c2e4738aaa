"""A ``torch.distributed.checkpoint`` folder: the ``.metadata`` file as typed records, each number of it
checked.

Formats: PyTorch's ``.metadata`` (a pickle, read as data) and ``.distcp`` files, in which each item is a whole
``torch.save`` archive.  What is used of the metadata is this index; absolute paths and save plans in it are
ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path

from gtp_serve.errors import CheckpointCorrupt, UnsupportedModel
from gtp_serve.layout.spans import Box, Shape
from gtp_serve.loaders.files import child, file_size, read_whole, shown
from gtp_serve.loaders.pickle_values import Name, Record
from gtp_serve.loaders.pickles import MAX_PICKLE_BYTES, read_pickle
from gtp_serve.loaders.torch_zip import ITEM_BYTES

METADATA = ".metadata"
MAX_AXES = 8
_INT64 = 2**63
_MODULE = "torch.distributed.checkpoint.metadata."
_ROOTS = (_MODULE + "Metadata", "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata")


@dataclass(frozen=True, slots=True)
class Place:
    """A byte range of a file in the folder."""

    path: Path
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.path.name} at byte {self.offset}"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One stored rectangle of a tensor."""

    box: Box
    place: Place


@dataclass(frozen=True, slots=True)
class IndexedTensor:
    """A tensor as the metadata describes it.  ``dtype`` is torch's name without the prefix."""

    key: str
    shape: Shape
    dtype: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Everything in the folder: tensors, opaque byte items, and the size of each file that they lie in."""

    folder: Path
    tensors: Mapping[str, IndexedTensor]
    blobs: Mapping[str, Place]
    sizes: Mapping[Path, int]


def read_index(folder: Path, root: Path) -> Index:
    """Read and check ``folder/.metadata``.

    :param root: resolved folder that every file, links followed, must lie in.
    :raises CheckpointCorrupt: naming the file and the key whose number, path or range cannot be.
    :raises PickleRefused: when the metadata names what it must not.
    """
    path = folder / METADATA
    state = _attributes(read_pickle(read_whole(path, root, MAX_PICKLE_BYTES), str(path)), _ROOTS, f"{path}")
    return _Reader(folder, root, path).read(state)


class _Reader:
    def __init__(self, folder: Path, root: Path, path: Path) -> None:
        self.folder = folder
        self.root = root
        self.path = path
        self.sizes: dict[Path, int] = {}
        self.paths: dict[str, Path] = {}

    def read(self, state: Mapping[object, object]) -> Index:
        places = self.places(state.get("storage_data"))
        tensors: dict[str, IndexedTensor] = {}
        blobs: dict[str, Place] = {}
        described = state.get("state_dict_metadata")
        if not isinstance(described, dict):
            raise self.corrupt("lists no tensors")
        for key, value in described.items():
            if not isinstance(key, str) or not 0 < len(key) <= 1024:
                raise self.corrupt(f"has the key {shown(key)}")
            if isinstance(value, Record) and value.name == _MODULE + "BytesStorageMetadata":
                blobs[key] = self.taken(places, key, None)
            else:
                tensors[key] = self.tensor(key, value, places)
        if places:
            key, offset = next(iter(places))
            raise self.corrupt(f"places an item {key} at {offset} that no tensor has")
        self.check_apart([*blobs.values(), *(c.place for t in tensors.values() for c in t.chunks)])
        return Index(self.folder, tensors, blobs, self.sizes)

    def corrupt(self, what: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"{self.path} {what}")

    def places(self, items: object) -> dict[tuple[str, Shape | None], Place]:
        if not isinstance(items, dict):
            raise self.corrupt("says nothing about where items lie")
        result: dict[tuple[str, Shape | None], Place] = {}
        for index, info in items.items():
            names = _attributes(index, (_MODULE + "MetadataIndex",), str(self.path))
            key, offset = names.get("fqn"), names.get("offset")
            if not isinstance(key, str):
                raise self.corrupt(f"places an item {shown(key)}")
            where = (key, None if offset is None else self.sizes_of(offset, key, "an offset"))
            if where in result:
                raise self.corrupt(f"places {key} at {where[1]} twice")
            result[where] = self.place(info, key)
        return result

    def place(self, info: object, key: str) -> Place:
        fields = _attributes(info, ("torch.distributed.checkpoint.filesystem._StorageInfo",), str(self.path))
        if fields.get("transform_descriptors"):
            raise UnsupportedModel(f"{self.path}: {key} is compressed, which this reader does not know")
        path = self.file(fields.get("relative_path"))
        offset, length = (self.count(fields.get(name), key, name) for name in ("offset", "length"))
        if offset + length > self.sizes[path]:
            raise self.corrupt(
                f"places {key} at bytes {offset} to {offset + length} of {path.name}, "
                f"which has {self.sizes[path]} bytes"
            )
        return Place(path, offset, length)

    def file(self, name: object) -> Path:
        if not isinstance(name, str) or name not in self.paths:
            path = child(self.folder, name, str(self.path))
            self.sizes[path] = file_size(path, self.root)
            self.paths[path.name] = path
            return path
        return self.paths[name]

    def tensor(self, key: str, value: object, places: dict[tuple[str, Shape | None], Place]) -> IndexedTensor:
        fields = _attributes(value, (_MODULE + "TensorStorageMetadata",), f"{self.path}: {key}")
        shape = self.sizes_of(fields.get("size"), key, "a shape")
        dtype = self.dtype(fields.get("properties"), key)
        chunks = fields.get("chunks")
        if not isinstance(chunks, list):
            raise self.corrupt(f"lists no chunks of {key}")
        result = []
        for chunk in chunks:
            box = self.box(chunk, key, shape)
            place = self.taken(places, key, box.start)
            if place.length < box.volume * ITEM_BYTES.get(dtype, 1):
                raise self.corrupt(f"gives {key} {place.length} bytes for {dtype} {list(box.shape)}")
            result.append(Chunk(box, place))
        return IndexedTensor(key, shape, dtype, tuple(result))

    def box(self, chunk: object, key: str, shape: Shape) -> Box:
        fields = _attributes(chunk, (_MODULE + "ChunkStorageMetadata",), f"{self.path}: {key}")
        start = self.sizes_of(fields.get("offsets"), key, "an offset")
        sizes = self.sizes_of(fields.get("sizes"), key, "a chunk shape")
        if len(start) != len(shape) or len(sizes) != len(shape) or not Box(start, sizes).inside(shape):
            raise self.corrupt(
                f"has a chunk of {key} of {list(sizes)} at {list(start)} outside its shape {list(shape)}"
            )
        return Box(start, sizes)

    def dtype(self, properties: object, key: str) -> str:
        if not isinstance(properties, Record) or properties.name != _MODULE + "TensorProperties":
            raise self.corrupt(f"does not say the element type of {key}")
        fields = properties.state if properties.state is not None else properties.args
        first = (
            fields.get("dtype")
            if isinstance(fields, dict)
            else fields[0]
            if isinstance(fields, tuple) and fields
            else None
        )
        if not isinstance(first, Name) or not first.name.startswith("torch."):
            raise self.corrupt(f"does not say the element type of {key}")
        return first.name.removeprefix("torch.")

    def taken(self, places: dict[tuple[str, Shape | None], Place], key: str, offset: Shape | None) -> Place:
        place = places.pop((key, offset), None)
        if place is None:
            at = "" if offset is None else f" at {list(offset)}"
            raise self.corrupt(f"does not say where {key}{at} lies, or lists it twice")
        return place

    def sizes_of(self, values: object, key: str, what: str) -> Shape:
        if isinstance(values, list):
            values = tuple(values)
        if not isinstance(values, tuple) or len(values) > MAX_AXES:
            raise self.corrupt(f"has {what} of {key} that is not a few numbers")
        for value in values:
            if type(value) is not int or not 0 <= value < _INT64:
                raise self.corrupt(f"has {what} of {key} that cannot be: {shown(value)}")
        if prod(values) >= _INT64:
            raise self.corrupt(f"has {what} of {key} that is too large: {list(values)}")
        return values

    def count(self, value: object, key: str, what: str) -> int:
        if type(value) is not int or not 0 <= value < _INT64:
            raise self.corrupt(f"has {what} of {key} that cannot be: {shown(value)}")
        return value

    def check_apart(self, places: Iterable[Place]) -> None:
        """No two items share a byte.  (They need not fill the files: a saver may leave items that nothing
        names.)"""
        filled = [place for place in places if place.length]  # an item that was saved as nothing lies nowhere
        for before, after in pairwise(sorted(filled, key=lambda p: (p.path.name, p.offset))):
            if before.path.name == after.path.name and before.offset + before.length > after.offset:
                raise self.corrupt(
                    f"places two items on the same bytes of {before.path.name}, from byte {after.offset} on"
                )


def _attributes(value: object, names: tuple[str, ...], where: str) -> dict[object, object]:
    if not isinstance(value, Record) or value.name not in names or not isinstance(value.state, dict):
        raise CheckpointCorrupt(f"{where} has {_described(value)} where a {names[0].rpartition('.')[2]} was expected")
    return value.state


def _described(value: object) -> str:
    return value.name if isinstance(value, Record | Name) else f"a {type(value).__name__}"
