"""Items that are checked once and recognised afterwards: the same verdict as if each were checked."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gtp_serve.errors import CheckpointCorrupt, CheckpointError
from gtp_serve.loaders import items as module
from gtp_serve.loaders.files import FileViews
from gtp_serve.loaders.items import Items
from gtp_serve.loaders.torch_dist import Place
from gtp_serve.loaders.torch_zip import find_tensor


def saved(tensor: Tensor) -> bytes:
    out = io.BytesIO()
    torch.save(tensor, out)
    return out.getvalue()


def bytes_of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy())


class Folder:
    """Items in one file, and what is asked of the full check."""

    def __init__(self, folder: Path, stored: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "__0_0.distcp"
        self.path.write_bytes(b"".join(stored))
        ends = [sum(map(len, stored[: i + 1])) for i in range(len(stored))]
        self.places = [Place(self.path, end - len(item), len(item)) for end, item in zip(ends, stored, strict=True)]
        self.views = FileViews({self.path: ends[-1]})
        self.items, self.checked = Items(self.views), 0

        def counted(*args: object) -> object:
            self.checked += 1
            return find_tensor(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(module, "find_tensor", counted)

    def read(self, index: int, shape: tuple[int, ...], dtype: str = "float32") -> bytes:
        found = self.items.find(self.places[index], shape, dtype, f"item {index}")
        return bytes(self.views.read(found.path, found.offset, found.length))


def test_items_that_differ_in_their_numbers_only_are_checked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [torch.randn(30, 40) for _ in range(5)]
    folder = Folder(tmp_path, [saved(t) for t in tensors], monkeypatch)

    assert [folder.read(i, (30, 40)) for i in range(5)] == [bytes_of(t) for t in tensors]
    assert folder.checked == 1


def test_items_of_several_forms_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(6, 4), torch.arange(48.0).reshape(12, 4)[2:8], torch.nn.Parameter(torch.randn(6, 4))]
    stored = [saved(tensors[i % 3]) for i in range(9)]
    folder = Folder(tmp_path, stored, monkeypatch)

    assert [folder.read(i, (6, 4)) for i in range(9)] == [bytes_of(tensors[i % 3].detach()) for i in range(9)]
    assert folder.checked == 3
    with pytest.raises(CheckpointCorrupt, match=r"item 0 holds float32 \[6, 4\]"):
        folder.read(0, (4, 6))
    with pytest.raises(CheckpointCorrupt, match="the metadata says: bfloat16"):
        folder.read(0, (6, 4), "bfloat16")


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(6, 4)
    folder = Folder(tmp_path, [saved(tensor)] * 3, monkeypatch)
    monkeypatch.setattr(module, "_MAX_PLACES", 10)

    assert [folder.read(i, (6, 4)) for i in range(3)] == [bytes_of(tensor)] * 3
    assert folder.checked == 3


@pytest.mark.parametrize("shape", [(5, 3), (300, 40)])
def test_damage_is_seen_after_a_good_item_as_without_one(
    shape: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte outside the numbers, one after another: recognised or checked, the verdict is that of the check."""
    good = saved(torch.randn(shape))
    start = find_tensor(memoryview(good), shape, "float32", "item").start
    stop = start + 4 * shape[0] * shape[1]
    rng, differ = random.Random(0), 0
    for at in [*range(start), *range(stop, len(good))]:
        damaged = bytearray(good)
        damaged[at] ^= 1 << rng.randrange(8)
        try:
            place = find_tensor(memoryview(bytes(damaged)), shape, "float32", "item 1")
            alone: object = bytes(damaged[place.start : place.start + place.size])
        except CheckpointError as error:
            alone = str(error)
        folder = Folder(tmp_path, [good, bytes(damaged)], monkeypatch)
        folder.read(0, shape)
        try:
            after: object = folder.read(1, shape)
        except CheckpointError as error:
            after = str(error)
        assert after == alone, at
        differ += folder.checked == 2
        folder.views.close()
    assert differ > 300  # bytes that the check looks at, and that were therefore not taken for the first item's
