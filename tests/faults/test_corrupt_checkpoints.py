"""Hostile and damaged checkpoints: nothing runs; each ends in one sentence or loads what it always was."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import COMMON_KEY, SMALL, append_item, drop_key, edit_metadata, write_hf, write_megatron
from gadgets import GADGETS, archive, gadget
from torch import Tensor

from gtp_serve.errors import CheckpointCorrupt, CheckpointError, PickleRefused
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.spans import Shard
from gtp_serve.loaders import Checkpoint, open_checkpoint
from gtp_serve.loaders.files import FileViews
from gtp_serve.refit.digest import combine, digest_parameter

torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10.0


def load(path: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(path)
    try:
        return dict(checkpoint.tensors())
    finally:
        checkpoint.close()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


def refused_or_same(path: Path, truth: dict[str, Tensor], what: str) -> str:
    """How a load ended: the sentence, or nothing when the right tensors came."""
    started = time.monotonic()
    loaded: dict[str, Tensor] | None = None
    message = ""
    try:
        loaded = load(path)
    except CheckpointError as error:
        message = error.message
    assert time.monotonic() - started < SECONDS, what
    assert "\n" not in message, what
    assert loaded is None or same(loaded, truth), f"{what}: loaded something else"
    return message


# gadgets


@pytest.mark.parametrize("name", GADGETS)
def test_d1_a_gadget_as_the_metadata_runs_nothing(name: str, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    marker = tmp_path / "marker"
    (folder / ".metadata").write_bytes(gadget(name, marker))

    with pytest.raises(PickleRefused, match=r"\.metadata"):
        load(folder)

    assert not marker.exists()


class Calls:
    """Pickles as a call."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


class SetsState:
    """Pickles with a state that a real reader would hand to __setstate__, or to slots and attributes."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return (argparse.Namespace, (), (None, {"x": Calls(self.marker)}))


@pytest.mark.parametrize("kind", [Calls, SetsState])
@pytest.mark.parametrize("place", ["planner_data", "storage_meta", "all_local_plans"])
def test_a_gadget_inside_good_metadata_runs_nothing(kind: type[Any], place: str, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    marker = tmp_path / "marker"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    setattr(metadata, place, kind(marker))
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))

    with pytest.raises(PickleRefused, match=r"system"):
        load(folder)

    assert not marker.exists()


@pytest.mark.parametrize("wrapped", [True, False], ids=["in an archive", "bare"])
@pytest.mark.parametrize("name", GADGETS)
def test_a_gadget_as_common_state_runs_nothing(name: str, wrapped: bool, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    marker = tmp_path / "marker"
    payload = gadget(name, marker)
    append_item(folder, COMMON_KEY, archive(payload) if wrapped else payload)

    with pytest.raises(PickleRefused):
        load(folder)

    assert not marker.exists()


@pytest.mark.parametrize("wrapped", [True, False], ids=["in an archive", "bare"])
@pytest.mark.parametrize("name", GADGETS)
def test_d3_a_gadget_as_common_pt_runs_nothing(name: str, wrapped: bool, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    edit_metadata(folder, lambda metadata: drop_key(metadata, COMMON_KEY))
    marker = tmp_path / "marker"
    payload = gadget(name, marker)
    (folder / "common.pt").write_bytes(archive(payload) if wrapped else payload)

    with pytest.raises(PickleRefused, match=r"common\.pt"):
        load(folder)

    assert not marker.exists()


@pytest.mark.parametrize("name", GADGETS)
def test_d2_gadgets_in_byte_items_are_never_opened(name: str, tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    marker = tmp_path / "marker"
    payload = gadget(name, marker)
    append_item(folder, "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2", archive(payload))
    append_item(folder, "rng_state/shard_0.0_1.1", payload)

    assert same(load(folder), truth)
    assert not marker.exists()


@pytest.mark.parametrize("name", GADGETS)
def test_a_gadget_as_a_tensors_description_runs_nothing(name: str, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    marker = tmp_path / "marker"
    key = "decoder.final_layernorm.weight"
    data = archive(gadget(name, marker) + bytes(64))
    offset = (folder / "__0_0.distcp").stat().st_size
    with (folder / "__0_0.distcp").open("ab") as out:
        out.write(data)

    def edit(metadata: Any) -> None:
        info = next(info for index, info in metadata.storage_data.items() if index.fqn == key)
        info.offset, info.length = offset, len(data)

    edit_metadata(folder, edit)

    with pytest.raises(CheckpointError) as caught:
        load(folder)

    assert isinstance(caught.value, PickleRefused | CheckpointCorrupt)
    assert not marker.exists()


# numbers


def values_for(size: int) -> tuple[int, ...]:
    return (0, -1, 2**31, 2**32, 2**63, size, size + 1)


Site = tuple[str, Callable[[Any, int], None], int]


def metadata_sites(metadata: Any) -> Iterator[Site]:
    """Every number in the metadata: its name, how to set it, and its value."""
    for key, tensor in metadata.state_dict_metadata.items():
        for axis, value in enumerate(getattr(tensor, "size", ())):
            yield f"{key} size[{axis}]", set_on(key, None, "size", axis), value
        for number, chunk in enumerate(getattr(tensor, "chunks", ())):
            for field in ("offsets", "sizes"):
                for axis, value in enumerate(getattr(chunk, field)):
                    yield f"{key} chunk {number} {field}[{axis}]", set_on(key, number, field, axis), value
    for number, (index, info) in enumerate(metadata.storage_data.items()):
        for field in ("offset", "length"):
            yield f"{index.fqn} item {field}", set_item(number, field), getattr(info, field)


def set_on(key: str, chunk: int | None, field: str, axis: int) -> Callable[[Any, int], None]:
    def change(metadata: Any, value: int) -> None:
        owner = metadata.state_dict_metadata[key]
        owner = owner if chunk is None else owner.chunks[chunk]
        numbers = list(getattr(owner, field))
        numbers[axis] = value
        object.__setattr__(owner, field, tuple(numbers))

    return change


def set_item(number: int, field: str) -> Callable[[Any, int], None]:
    return lambda metadata, value: setattr(list(metadata.storage_data.values())[number], field, value)


def test_f2_single_numbers_of_the_metadata_are_refused_or_do_not_matter(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run", SMALL, Grid(tp=2, gtp=2, alignment=4))
    good = (folder / ".metadata").read_bytes()
    sites = list(metadata_sites(pickle.loads(good)))
    cases = [(site, value) for site in sites for value in values_for(site[2]) if value != site[2]]
    refused = 0
    for (name, change, _), value in random.Random(1).sample(cases, 120):
        metadata = pickle.loads(good)
        change(metadata, value)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))
        refused += bool(refused_or_same(folder, truth, f"{name} = {value}"))
    assert refused > 110


def header_sites(header: dict[str, Any]) -> Iterator[tuple[str, str, int, int]]:
    for name, entry in header.items():
        for field in ("shape", "data_offsets"):
            for position, value in enumerate(entry.get(field, ())):
                yield name, field, position, value


def test_single_numbers_of_a_safetensors_header_are_refused_or_do_not_matter(tmp_path: Path) -> None:
    truth = write_hf(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    header, body = json.loads(good[8 : 8 + length]), good[8 + length :]
    cases = [(*site, v) for site in header_sites(header) for v in values_for(site[3]) if v != site[3]]
    for name, field, position, _, value in random.Random(2).sample(cases, 70):
        changed = json.loads(json.dumps(header))
        changed[name][field][position] = value
        raw = json.dumps(changed).encode()
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)
        assert refused_or_same(tmp_path / "model", truth, f"{name} {field}[{position}] = {value}")
    for claimed in (0, 1, length - 1, length + 1, 2**31, 2**32, 2**63, 2**64 - 1, len(good), len(good) + 1):
        path.write_bytes(claimed.to_bytes(8, "little") + good[8:])
        assert refused_or_same(tmp_path / "model", truth, f"header length {claimed}")


def test_single_numbers_of_index_and_config_are_refused_or_do_not_matter(tmp_path: Path) -> None:
    truth = write_hf(tmp_path / "model", shards=2)
    for file, path in (("model.safetensors.index.json", ("metadata",)), ("config.json", ())):
        good = (tmp_path / "model" / file).read_text(encoding="utf-8")
        document = json.loads(good)
        owner = document[path[0]] if path else document
        numbers = [name for name, value in owner.items() if type(value) is int]
        for name in numbers:
            for value in values_for(owner[name]):
                changed = json.loads(good)
                (changed[path[0]] if path else changed)[name] = value
                (tmp_path / "model" / file).write_text(json.dumps(changed), encoding="utf-8")
                if name not in ("eos_token_id", "max_position_embeddings", "num_key_value_heads"):
                    refused_or_same(tmp_path / "model", truth, f"{file}: {name} = {value}")
        (tmp_path / "model" / file).write_text(good, encoding="utf-8")
    assert same(load(tmp_path / "model"), truth)


def test_random_damage_outside_the_weights_is_refused_or_does_not_matter(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    rng = random.Random(3)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    items = [info for index, info in metadata.storage_data.items() if index.fqn.endswith("layer_norm_weight")]
    path = folder / items[0].relative_path
    good = path.read_bytes()
    payloads = [t.contiguous().view(torch.uint8).numpy().tobytes() for t in truth.values()]
    for _ in range(150):
        item = rng.choice(items)
        data = good[item.offset : item.offset + item.length]
        start = next(data.find(p) for p in payloads if data.find(p) >= 0)
        size = SMALL.hidden_size * 2
        places = [*range(start), *range(start + size, item.length)]
        damaged = bytearray(good)
        damaged[item.offset + rng.choice(places)] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        refused_or_same(folder, truth, "a flipped bit")


# files


def test_files_cut_short_are_refused_with_their_name_and_sizes(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    path = folder / "__0_0.distcp"
    good = path.read_bytes()
    for length in (len(good) - 1, len(good) // 2, 7, 0):
        path.write_bytes(good[:length])
        with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp") as caught:
            load(folder)
        assert str(length) in str(caught.value)


def test_metadata_cut_short_at_any_byte_is_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    good = (folder / ".metadata").read_bytes()
    for length in random.Random(4).sample(range(len(good)), 60):
        (folder / ".metadata").write_bytes(good[:length])
        with pytest.raises(CheckpointCorrupt, match=r"\.metadata"):
            load(folder)


def test_f1_lfs_pointers_folders_and_pipes_are_named(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    path = folder / "__0_0.distcp"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(CheckpointCorrupt, match="LFS pointer"):
        load(folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(CheckpointCorrupt, match="a folder, not a file"):
        load(folder)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(CheckpointCorrupt, match="a pipe, not a file"):
        load(folder)
    path.unlink()
    with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp cannot be read"):
        load(folder)


@pytest.mark.parametrize("name", ["../out/__0_0.distcp", "/dev/null", "..", ".", "", "a/b", "a\\b", "a\0b", 7, None])
def test_f4_file_names_that_leave_the_folder_are_refused(name: Any, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")

    def edit(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    edit_metadata(folder, edit)

    with pytest.raises(CheckpointCorrupt, match=r"\.metadata names the file"):
        load(folder)


def test_links_are_followed_inside_the_root_only(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    path = folder / "__0_0.distcp"
    inside = tmp_path / "run" / "data.distcp"
    path.rename(inside)
    path.symlink_to(inside)
    assert same(load(tmp_path / "run"), truth)
    with pytest.raises(CheckpointCorrupt, match="leaves the checkpoint folder"):
        load(folder)
    outside = tmp_path / "data.distcp"
    inside.rename(outside)
    path.unlink()
    path.symlink_to(outside)
    with pytest.raises(CheckpointCorrupt, match="leaves the checkpoint folder"):
        load(tmp_path / "run")


def test_two_items_on_the_same_bytes_are_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")

    def edit(metadata: Any) -> None:
        items = [info for index, info in metadata.storage_data.items() if index.fqn.endswith("layer_norm_weight")]
        items[1].offset = items[0].offset

    edit_metadata(folder, edit)

    with pytest.raises(CheckpointCorrupt, match="same bytes"):
        load(folder)


def test_bytes_that_no_item_names_do_not_matter(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    with (folder / "__0_0.distcp").open("ab") as out:
        out.write(b"unnamed")

    assert same(load(folder), truth)


def test_a_compressed_item_is_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")

    def edit(metadata: Any) -> None:
        info = next(iter(metadata.storage_data.values()))
        object.__setattr__(info, "transform_descriptors", ["zstd"])

    edit_metadata(folder, edit)

    with pytest.raises(CheckpointError, match="compressed"):
        load(folder)


def test_a_file_that_changes_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    checkpoint = open_checkpoint(folder)
    path = folder / "__0_0.distcp"
    views = FileViews({path: path.stat().st_size + 1})
    with pytest.raises(CheckpointCorrupt, match="bytes now"):
        views.view(path, 0, 1)
    checkpoint.close()
    with pytest.raises(CheckpointError, match="closed"):
        next(iter(checkpoint.tensors()))


def open_folder(kind: str, root: Path) -> tuple[Checkpoint, Path]:
    """A checkpoint, and the file that its weights lie in."""
    if kind == "megatron":
        folder, _ = write_megatron(root)
        return open_checkpoint(folder), folder / "__0_0.distcp"
    write_hf(root)
    return open_checkpoint(root), root / "model.safetensors"


@pytest.mark.parametrize("kind", ["megatron", "huggingface"])
def test_a_file_that_shrinks_while_it_is_read_ends_in_one_error_that_names_it(kind: str, tmp_path: Path) -> None:
    checkpoint, path = open_folder(kind, tmp_path / "run")
    try:
        tensors = checkpoint.tensors()
        next(tensors)  # the file is open now
        os.truncate(path, 100)
        with pytest.raises(CheckpointCorrupt, match=rf"{path.name} ends .*early"):
            list(tensors)
    finally:
        checkpoint.close()


def test_files_are_read_piece_by_piece_where_they_cannot_be_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(19, "No such device")

    folder, truth = write_megatron(tmp_path / "run")
    monkeypatch.setattr("gtp_serve.loaders.files.mmap.mmap", fail)

    assert same(load(folder), truth)


LIMITED = """
import resource, sys
from gtp_serve.loaders import Checkpoint, open_checkpoint
from gtp_serve.errors import CheckpointError
limit = 400 << 20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    open_checkpoint(sys.argv[1])
except CheckpointError as error:
    print(type(error).__name__)
"""


@pytest.mark.parametrize(
    "bomb",
    [
        b"\x80\x04\x8d" + struct.pack("<Q", 10**12) + b"x.",
        b"\x80\x05\x96" + struct.pack("<Q", 10**12) + b"x.",
        b"\x80\x02Nr" + struct.pack("<I", 2**31 - 1) + b".",
        b"\x80\x02)" + b"\x85" * 10**6 + b".",
        b"\x80\x02" + b"}" * 10**6 + b".",
    ],
    ids=["length", "bytearray", "memo", "nesting", "objects"],
)
def test_f3_bombs_end_in_an_error_under_an_address_space_limit(bomb: bytes, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    (folder / ".metadata").write_bytes(bomb)
    started = time.monotonic()

    result = subprocess.run(
        [sys.executable, "-c", LIMITED, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert result.stdout.strip() in ("CheckpointCorrupt", "PickleRefused"), result.stderr
    assert time.monotonic() - started < 60


def test_f6_a_flipped_bit_is_refused_changes_the_digest_or_does_not_matter(tmp_path: Path) -> None:
    """Nothing in these formats says what the bytes of a weight should be; the digest of what was loaded does."""
    folder, truth = write_megatron(tmp_path / "run")
    rng = random.Random(5)
    files = [folder / ".metadata", folder / "__0_0.distcp", folder / "metadata.json"]
    good = {path: path.read_bytes() for path in files}
    right, ends = digest_of(truth), {"refused": 0, "another digest": 0, "the same": 0}
    for _ in range(300 if os.environ.get("GTP_SERVE_LONG_TESTS") != "1" else 1000):
        path = rng.choice(files)
        damaged = bytearray(good[path])
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(damaged))
        try:
            loaded = load(folder)
        except CheckpointError:
            ends["refused"] += 1
        else:
            equal = same(loaded, truth)
            assert (digest_of(loaded) == right) is equal
            ends["the same" if equal else "another digest"] += 1
        path.write_bytes(good[path])
    assert min(ends.values()) > 10, ends


def digest_of(tensors: dict[str, Tensor]) -> str:
    parts = []
    for name, x in sorted(tensors.items()):
        data = x.contiguous().view(torch.uint8).numpy().tobytes()
        parts.append(digest_parameter(Shard(name, tuple(x.shape), "bfloat16", ()), [data]))
    return combine(parts)
