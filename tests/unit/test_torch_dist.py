from __future__ import annotations

import io
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SMALL, drop_key, edit_metadata, saved, write_megatron
from torch.distributed.checkpoint.metadata import MetadataIndex

from gtp_serve.errors import CheckpointCorrupt, CheckpointError, UnsupportedModel
from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.torch_dist import read_index
from gtp_serve.loaders.torch_zip import Archive, find_tensor


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def raw(value: object) -> memoryview:
    return memoryview(saved(value))


# the index


def test_the_index_lists_every_tensor_with_its_chunks(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run", SMALL, Grid(tp=2))

    index = read_index(folder, folder.resolve())

    fc2 = index.tensors["decoder.layers.mlp.linear_fc2.weight"]
    assert (fc2.shape, fc2.dtype) == ((2, 16, 24), "bfloat16")
    assert sorted((c.box.start, c.box.shape) for c in fc2.chunks) == [
        ((0, 0, 0), (1, 16, 12)),
        ((0, 0, 12), (1, 16, 12)),
        ((1, 0, 0), (1, 16, 12)),
        ((1, 0, 12), (1, 16, 12)),
    ]
    assert list(index.blobs) == ["common_state/shard_0_1"]
    assert {path.name for path in index.sizes} == {"__0_0.distcp", "__1_0.distcp"}
    for chunk in fc2.chunks:
        assert chunk.place.offset + chunk.place.length <= index.sizes[chunk.place.path]


def damage(folder: Path, edit: Any) -> str:
    edit_metadata(folder, edit)
    with pytest.raises(CheckpointError) as caught:
        read_index(folder, folder.resolve())
    return str(caught.value)


def first_tensor(metadata: Any) -> Any:
    return metadata.state_dict_metadata["decoder.final_layernorm.weight"]


def test_contradictions_in_the_index_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    good = (folder / ".metadata").read_bytes()
    key = "decoder.final_layernorm.weight"

    def chunk_outside(m: Any) -> None:
        first_tensor(m).chunks[0].offsets = (1,)

    def no_place(m: Any) -> None:
        m.storage_data = {i: info for i, info in m.storage_data.items() if i.fqn != key}

    def place_of_nothing(m: Any) -> None:
        del m.state_dict_metadata[key]

    def chunk_twice(m: Any) -> None:
        first_tensor(m).chunks *= 2

    def other_rank(m: Any) -> None:
        first_tensor(m).size = (16, 1)

    def no_type(m: Any) -> None:
        first_tensor(m).properties.dtype = None

    def number_for_a_tensor(m: Any) -> None:
        m.state_dict_metadata[key] = 7

    def too_few_bytes(m: Any) -> None:
        next(info for i, info in m.storage_data.items() if i.fqn == key).length = 20

    def huge_shape(m: Any) -> None:
        first_tensor(m).size = (2**31, 2**31, 2**31)

    for edit, words in (
        (chunk_outside, "outside its shape"),
        (no_place, "does not say where"),
        (place_of_nothing, "no tensor has"),
        (chunk_twice, "lists it twice"),
        (other_rank, "outside its shape"),
        (no_type, "element type"),
        (number_for_a_tensor, "a int where a TensorStorageMetadata"),
        (too_few_bytes, "20 bytes for bfloat16"),
        (huge_shape, "too large"),
    ):
        (folder / ".metadata").write_bytes(good)
        message = damage(folder, edit)
        assert words in message, message
        assert key in message


def test_metadata_that_is_another_object_is_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    values: tuple[Any, ...] = ({}, [], MetadataIndex("a"), None)
    for value in values:
        (folder / ".metadata").write_bytes(pickle.dumps(value, protocol=4))
        with pytest.raises(CheckpointCorrupt, match="where a Metadata was expected"):
            read_index(folder, folder.resolve())


def test_items_without_offset_and_index_are_found_by_name(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")

    def renumber(m: Any) -> None:
        m.storage_data = {
            MetadataIndex(i.fqn, i.offset, None if i.offset is None else 77): info for i, info in m.storage_data.items()
        }

    edit_metadata(folder, renumber)

    assert "decoder.final_layernorm.weight" in read_index(folder, folder.resolve()).tensors


def test_forgotten_items_leave_their_bytes_unnamed(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    edit_metadata(folder, lambda m: drop_key(m, "output_layer.weight"))

    assert "output_layer.weight" not in read_index(folder, folder.resolve()).tensors


# tensor items


def tensor_bytes(data: memoryview, shape: tuple[int, ...], dtype: str, label: str) -> memoryview:
    found = find_tensor(data, shape, dtype, label)
    return data[found.start : found.start + found.size]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5), (7,), (1, 4, 6), ()])
def test_the_bytes_of_a_tensor_are_found_inside_its_archive(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randn(shape).to(dtype)
    name = str(dtype).removeprefix("torch.")

    assert bytes(tensor_bytes(raw(tensor), shape, name, "item")) == bytes_of(tensor.reshape(-1))


def test_a_parameter_saved_as_one_is_read_as_its_tensor() -> None:
    tensor = torch.randn(4, 6)

    found = tensor_bytes(raw(torch.nn.Parameter(tensor)), (4, 6), "float32", "item")

    assert bytes(found) == bytes_of(tensor)


def test_a_part_of_a_larger_storage_is_read_from_its_offset() -> None:
    tensor = torch.arange(24.0).reshape(6, 4)[2:5]

    assert bytes(tensor_bytes(raw(tensor), (3, 4), "float32", "item")) == bytes_of(tensor)


def test_items_that_are_not_the_tensor_they_should_be_are_refused() -> None:
    tensor = torch.randn(4, 6)
    for item, shape, dtype, words in (
        (tensor, (6, 4), "float32", r"holds float32 \[4, 6\]"),
        (tensor, (4, 6), "bfloat16", "the metadata says: bfloat16"),
        (tensor.double(), (4, 6), "float32", "holds float64"),
        (tensor.T, (6, 4), "float32", "not contiguous"),
        ([tensor], (4, 6), "float32", "does not hold a tensor"),
        ({"a": 1}, (4, 6), "float32", "does not hold a tensor"),
        (tensor.to_sparse(), (4, 6), "float32", "item"),
    ):
        with pytest.raises(CheckpointError, match=words):
            tensor_bytes(raw(item), shape, dtype, "item")


def rewrite(data: bytes, change: dict[str, bytes], *, method: int = zipfile.ZIP_STORED) -> memoryview:
    """An archive with some members changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            new.writestr(name, change.get(name.partition("/")[2], old.read(name)))
    return memoryview(out.getvalue())


def test_archives_that_torch_does_not_write_are_refused() -> None:
    tensor = torch.randn(4, 6)
    good = saved(tensor)
    compressed = rewrite(good, {}, method=zipfile.ZIP_DEFLATED)
    for data, words in (
        (compressed, "compressed"),
        (rewrite(good, {"byteorder": b"big"}), "endian"),
        (rewrite(good, {"data/0": b"x" * 95}), "storage of 95 bytes"),
        (rewrite(good, {"data/0": b"x" * 97}), "storage of 97 bytes"),
        (memoryview(good[:-1]), "not a zip archive"),
        (memoryview(good + b"x"), "not a zip archive"),
        (memoryview(b""), "not a zip archive"),
        (memoryview(b"PK"), "not a zip archive"),
    ):
        with pytest.raises(CheckpointCorrupt, match=words):
            tensor_bytes(data, (4, 6), "float32", "item")
    assert bytes(tensor_bytes(rewrite(good, {}), (4, 6), "float32", "item")) == bytes_of(tensor)


def test_storage_names_cannot_leave_the_archive() -> None:
    data = saved(torch.randn(4, 6))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read("archive/data.pkl")
    evil = pickled.replace(b"X\x01\x00\x00\x000", b"X\x04\x00\x00\x00../0")
    assert evil != pickled

    with pytest.raises(CheckpointCorrupt, match="names a storage"):
        tensor_bytes(rewrite(data, {"data.pkl": evil}), (4, 6), "float32", "item")


def test_every_number_of_a_zip_directory_is_checked() -> None:
    tensor = torch.randn(4, 6)
    good = saved(tensor)
    directory = good.index(b"PK\1\2")
    for at in range(directory, len(good) - 3):
        for value in (0, 2**31, 2**32 - 1):
            damaged = bytearray(good)
            struct.pack_into("<I", damaged, at, value)
            try:
                found = tensor_bytes(memoryview(bytes(damaged)), (4, 6), "float32", "item")
            except CheckpointError:
                continue
            assert bytes(found) == bytes_of(tensor), at


def test_the_directory_is_that_of_the_standard_library() -> None:
    data = saved({"a": torch.randn(3), "b": [torch.ones(2, dtype=torch.int64)]})
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        expected = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}

    found = Archive(memoryview(data), "item")

    assert {name: bytes(found.member(name)) for name in found.members} == expected


def test_quantised_weights_are_refused_by_type(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")

    def edit(m: Any) -> None:
        first_tensor(m).properties.dtype = torch.float8_e4m3fn

    edit_metadata(folder, edit)
    with pytest.raises(UnsupportedModel, match=r"final_layernorm.*float8_e4m3fn"):
        open_checkpoint(folder)
