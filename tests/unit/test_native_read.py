"""The compiled library's reader and verifier: the same bytes, digests and errors as without them."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gtp_serve.errors import CheckpointCorrupt, UpdateFailed
from gtp_serve.layout.spans import Box, Shape, Shard, Span
from gtp_serve.loaders import files, scatter
from gtp_serve.loaders.file_source import FileRange, FileSource
from gtp_serve.loaders.files import FileViews
from gtp_serve.native_library import open_library
from gtp_serve.refit import native_copy, verify, writers
from gtp_serve.refit.apply import Target, apply_plan
from gtp_serve.refit.digest import Digest
from gtp_serve.refit.native_copy import CONVERSIONS, MEMORY, Checks, Job, NativeReader, native_reader
from gtp_serve.refit.native_verify import ELEMENTS, NativeVerifier, native_verifier
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.source import Rows

SIZE = 1_000_000
DATA = random.Random(0).randbytes(SIZE)
Pread = Callable[[int, int, int, int], int]
_PREAD = ctypes.CFUNCTYPE(
    ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, use_errno=True
)


@pytest.fixture
def reader() -> NativeReader:
    """Skips where the package was built without a compiler; ``open_library`` tells."""
    found = native_reader()
    if found is None:
        pytest.skip("the native CPU ops were not built")
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def descriptor(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY)
    yield number
    os.close(number)


def with_pread(pread: Pread) -> NativeReader:
    """A reader whose reads go through a function of descriptor, address, size and offset: bytes, or -1 and errno."""
    library = open_library()
    assert library is not None
    kept = _PREAD(pread)
    found = NativeReader(library, ctypes.cast(kept, ctypes.c_void_p))
    found.kept = kept  # type: ignore[attr-defined]
    return found


class Memory:
    """Memory to read into; every byte is 0xff at first."""

    def __init__(self, size: int) -> None:
        self.buffer = ctypes.create_string_buffer(b"\xff" * size, size)
        self.address = ctypes.addressof(self.buffer)


def some_rows(rng: random.Random, base: int, memory: Memory) -> list[Rows]:
    """Rows inside file and memory: long and short, apart, near, overlapping in the file, never in memory."""
    rows: list[Rows] = []
    at = rng.randrange(64)
    for _ in range(rng.randint(1, 6)):
        size = rng.choice((1, 3, 30, 64, 300, 1024, 4097, 70_000, 200_000))
        count = rng.choice((1, 1, 2, 7, 40))
        source_stride = rng.choice((0, size // 2, size, size + 5, size + 5000, size + 20_000))
        stride = size + rng.choice((0, 1, 64, 100))
        start = rng.choice((rows[-1].end if rows else 0, rng.randrange(SIZE - base)))
        end = start + (count - 1) * source_stride + size
        if end > SIZE - base or at + (count - 1) * stride + size > len(memory.buffer):
            continue
        rows.append(Rows(start, source_stride, size, count, memory.address + at, stride))
        at += count * stride + rng.randrange(70)
    return rows


def test_random_rows_are_filled_as_without_the_library(reader: NativeReader, descriptor: int) -> None:
    rng = random.Random(1)
    for _ in range(150):
        base, ours, theirs = rng.choice((0, 3, 4096, 5001)), Memory(1_200_000), Memory(1_200_000)
        rows = some_rows(rng, base, ours)
        moved = [row._replace(address=row.address - ours.address + theirs.address) for row in rows]

        assert reader.read([Job(descriptor, "weights", base, rows)]) == 1
        scatter._scatter(descriptor, "weights", base, moved)

        assert ours.buffer.raw == theirs.buffer.raw, rows


def test_memory_is_copied_as_a_file_is_read(reader: NativeReader, descriptor: int) -> None:
    rng, source = random.Random(2), ctypes.create_string_buffer(DATA, SIZE)
    for _ in range(50):
        ours, theirs = Memory(1_200_000), Memory(1_200_000)
        rows = some_rows(rng, 0, ours)
        moved = [row._replace(address=row.address - ours.address + theirs.address) for row in rows]

        reader.read([Job(MEMORY, "memory", ctypes.addressof(source), rows)])
        reader.read([Job(descriptor, "weights", 0, moved)])

        assert ours.buffer.raw == theirs.buffer.raw, rows


def test_reads_that_are_short_or_interrupted_are_taken_up_again(reader: NativeReader, descriptor: int) -> None:
    rng, interrupted = random.Random(3), 0

    def a_few(number: int, address: int, size: int, offset: int) -> int:
        nonlocal interrupted
        if rng.random() < 0.3:
            interrupted += 1
            ctypes.set_errno(errno.EINTR)
            return -1
        data = os.pread(number, min(size, rng.randint(1, 9000)), offset)
        ctypes.memmove(address, data, len(data))
        return len(data)

    hindered = with_pread(a_few)
    for _ in range(15):
        ours, theirs = Memory(1_200_000), Memory(1_200_000)
        rows = some_rows(rng, 7, ours)
        moved = [row._replace(address=row.address - ours.address + theirs.address) for row in rows]

        hindered.read([Job(descriptor, "weights", 7, rows)])
        reader.read([Job(descriptor, "weights", 7, moved)])

        assert ours.buffer.raw == theirs.buffer.raw, rows
    assert interrupted


def test_jobs_that_follow_one_another_share_what_was_read(descriptor: int) -> None:
    """Small items are read on across their borders; what lacks behind the last one is nobody's."""
    reads: list[tuple[int, int]] = []

    def noted(number: int, address: int, size: int, offset: int) -> int:
        data = os.pread(number, size, offset)
        reads.append((offset, size))
        ctypes.memmove(address, data, len(data))
        return len(data)

    reader, rng, item = with_pread(noted), random.Random(6), 10_000
    for first in (0, 777, SIZE - 20 * item):
        memory = Memory(20 * item)
        jobs = [
            Job(
                descriptor, "weights", first + i * item + 100,
                [Rows(0, 0, item - 200, 1, memory.address + i * item, 0)], check_base=-100, whole=item - 100,
            )
            for i in range(20)
        ]  # fmt: skip
        reads.clear()
        assert reader.read(jobs) == 20
        assert len(reads) <= -(-20 * item // (60 << 10)) < 20
        assert max(offset + size for offset, size in reads) == first + 20 * item
        for i in range(20):
            start = first + i * item + 100
            assert memory.buffer.raw[i * item : (i + 1) * item - 200] == DATA[start : start + item - 200]

    shuffled = rng.sample(jobs, 20)
    memory.buffer.raw = b"\xff" * (20 * item)
    assert reader.read(shuffled) == 20  # whatever their order, and with others between
    for i in range(20):
        start = first + i * item + 100
        assert memory.buffer.raw[i * item : (i + 1) * item - 200] == DATA[start : start + item - 200]

    reads.clear()
    beyond = jobs[-1]._replace(base=SIZE + 100, rows=[Rows(0, 0, 5, 1, memory.address, 0)])
    with pytest.raises(CheckpointCorrupt, match=f"nothing is left at byte {SIZE}"):
        reader.read([*jobs, beyond])  # the last item was read with too much asked for, and is whole
    assert memory.buffer.raw[19 * item : 20 * item - 200] == DATA[SIZE - item + 100 : SIZE - 100]


@pytest.mark.parametrize("kinds", CONVERSIONS)
def test_elements_are_converted_as_torch_does(kinds: tuple[str, str], reader: NativeReader, tmp_path: Path) -> None:
    have, want = kinds
    words = torch.randint(-(2**31), 2**31 - 1, (70_001,), dtype=torch.int64).to(torch.int32)
    words[::7] = (words[::7] & ~0xFFFF) | 0x8000  # half way between two bfloat16
    given = words.view(torch.float32) if have == "float32" else words.view(torch.int16).view(torch.bfloat16)
    made, item = torch.zeros(given.shape, dtype=getattr(torch, want)), given.element_size()
    (tmp_path / "weights").write_bytes(b"x" + given.view(torch.uint8).numpy().tobytes())
    number, rows = os.open(tmp_path / "weights", os.O_RDONLY), list[Rows]()
    cuts = [0, 1, 2, 700, 701, 40_000, len(given)]
    for first, last in pairwise(cuts):
        size, to = (last - first) * item, made.data_ptr() + first * made.element_size()
        rows.append(Rows(first * item, size, size, 1, to, 0, CONVERSIONS[kinds]))

    reader.read([Job(number, "weights", 1, rows)])
    os.close(number)

    expected, numbers = given.to(made.dtype), ~given.isnan()
    assert torch.equal(made[numbers].view(torch.uint8), expected[numbers].view(torch.uint8))
    assert bool(made.isnan().eq(given.isnan()).all())


def a_source(path: Path, counts: dict[str, Shape], dtype: str = "float32") -> FileSource:
    """Tensors that lie in a file one behind the other, from byte 5 on."""
    ranges, at = [], 5
    for name, shape in counts.items():
        span = Span(name, Box.whole(shape), Box.whole(shape))
        length = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        ranges.append(FileRange(Shard(name, shape, dtype, (span,)), path, at, length))
        at += length
    return FileSource(ranges, FileViews({path: path.stat().st_size}))


def targets_of(source: FileSource, dtype: str) -> list[Target]:
    shards = [Shard(shard.key, shard.shape, dtype, shard.spans) for shard in source.shards()]
    return [Target(shard, torch.full(shard.shape, -1, dtype=getattr(torch, dtype))) for shard in shards]


COUNTS: dict[str, Shape] = {"a": (100, 300), "b": (7,), "c": (300, 500), "d": (1, 1)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_plan_is_carried_out_as_without_the_library(
    dtype: str, reader: NativeReader, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_it, without = list[torch.Tensor](), list[torch.Tensor]()
    for found, results in ((reader, with_it), (None, without)):
        monkeypatch.setattr(scatter, "native_reader", lambda found=found: found)
        monkeypatch.setattr(files, "native_reader", lambda found=found: found)
        monkeypatch.setattr(writers, "native_reader", lambda found=found: found)
        source = a_source(path, COUNTS)
        assert source.batches == (found is not None)
        targets = targets_of(source, dtype)
        plan = build_plan(source.shards(), [target.shard for target in targets], COUNTS)
        done: list[int] = []
        assert apply_plan(plan, source, targets, progress=done.append) == sum(done) == plan.source_bytes
        results += [target.tensor.nan_to_num(7.0) for target in targets]

    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_a_file_cut_short_in_the_middle_of_reading_is_one_error_that_names_the_tensor(
    reader: NativeReader, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(number: int, address: int, size: int, offset: int) -> int:
        os.truncate(path, 300_000)  # after the file was opened and its size compared
        data = os.pread(number, size, offset)
        ctypes.memmove(address, data, len(data))
        return len(data)

    hindered = with_pread(cut)
    source = a_source(path, COUNTS)
    targets = targets_of(source, "float32")
    plan = build_plan(source.shards(), [target.shard for target in targets], COUNTS)
    monkeypatch.setattr(files, "native_reader", lambda: hindered)

    with pytest.raises(CheckpointCorrupt, match="weights ends early: nothing is left at byte 300000") as caught:
        apply_plan(plan, source, targets, threads=1)
    assert ("tensor", "c") in caught.value.details


def test_the_error_names_the_tensor_without_the_library_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter, "native_reader", lambda: None)
    monkeypatch.setattr(files, "native_reader", lambda: None)
    source = a_source(path, COUNTS)
    targets = targets_of(source, "float32")
    plan = build_plan(source.shards(), [target.shard for target in targets], COUNTS)
    apply_plan(plan, source, targets)
    os.truncate(path, 300_000)

    with pytest.raises(CheckpointCorrupt, match="weights ends early: nothing is left at byte 300000") as caught:
        apply_plan(plan, source, targets, threads=1)
    assert ("tensor", "c") in caught.value.details


def test_what_the_system_says_is_passed_on(reader: NativeReader, path: Path) -> None:
    memory = Memory(10)
    rows = [Rows(0, 10, 10, 1, memory.address, 10)]

    def fail(*_: int) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    with pytest.raises(CheckpointCorrupt, match="weights cannot be read: Input/output error") as caught:
        with_pread(fail).read([Job(3, "weights", 0, rows, "some.weight")])
    assert caught.value.details == (("tensor", "some.weight"),)
    folder = os.open(path.parent, os.O_RDONLY)
    with pytest.raises(CheckpointCorrupt, match="weights cannot be read: Is a directory"):
        reader.read([Job(folder, "weights", 0, rows)])
    os.close(folder)
    assert memory.buffer.raw == b"\xff" * 10


def test_jobs_end_at_the_first_whose_bytes_are_not_as_checked(reader: NativeReader, descriptor: int) -> None:
    value, mask = bytearray(DATA[900:1000]), bytearray(b"\xff" * 100)
    value[3], mask[3] = 0, 0  # not looked at
    last = (99_000, b"\xff\x00\xf0", bytes([DATA[99_900], 0, DATA[99_902] & 0xF0]))
    checks = Checks([(0, bytes(mask), bytes(value)), last])
    assert checks.count == 2
    memory = Memory(90_000)
    rows = [Rows(0, 30_000, 30_000, 1, memory.address, 0)]
    good = Job(descriptor, "weights", 1500, rows, "a", checks, -600, 100_000)

    for whole in (0, 100_000):
        assert reader.read([good._replace(whole=whole)] * 3) == 3
    assert memory.buffer.raw[:30_000] == DATA[1500:31_500]
    assert reader.read([good, good._replace(base=1501), good]) == 1
    value[50] ^= 4
    wrong = Checks([(0, bytes(mask), bytes(value))])
    assert reader.read([good, good, good._replace(checks=wrong)]) == 2
    with pytest.raises(CheckpointCorrupt, match="ends early"):
        reader.read([good, good._replace(base=SIZE - 50_000)])


@pytest.mark.parametrize("plain", [False, True])
def test_digests_are_those_of_the_package(plain: bool, reader: NativeReader) -> None:
    library = open_library()
    assert library is not None
    verifier, rng, looked_at = NativeVerifier(library, plain=plain), random.Random(4), 0
    buffer = ctypes.create_string_buffer(DATA, SIZE)
    sizes = (1, 127, 128, 240, 241, 300, 1023, 1024, 1025, 2048, 16_384, 65_536, 99_999)
    for _ in range(400):
        head, start = rng.randbytes(rng.choice((0, 1, 47, 63, 64, 65, 300))), rng.randrange(9)
        size = rng.choice((*sizes, rng.randrange(100_000)))
        found = verifier.look(head, ctypes.addressof(buffer) + start, size, None)
        expected = Digest()
        expected.add(head)
        expected.add(DATA[start : start + size])
        if found is not None:
            looked_at += 1
            assert found == (expected.text(), True), (len(head), start, size)
    assert looked_at > 250


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("dtype", ELEMENTS)
def test_one_element_that_is_not_finite_is_seen_wherever_it_is(dtype: str, plain: bool, reader: NativeReader) -> None:
    library = open_library()
    assert library is not None
    verifier = NativeVerifier(library, plain=plain)
    tensor = torch.full((40_001,), 60_000.0, dtype=getattr(torch, dtype))
    tensor[::3] = torch.finfo(tensor.dtype).min

    def finite(head: bytes) -> bool:
        found = verifier.look(head, tensor.data_ptr(), tensor.nbytes, dtype)
        assert found is not None
        return found[1]

    assert finite(b"head")
    assert finite(b"")
    for at in (0, 1, 2, 15, 29, 31, 32, 33, 8191, 8192, 20_000, 39_999, 40_000):
        for wrong in (float("inf"), float("-inf"), float("nan")):
            kept, tensor[at] = tensor[at].clone(), wrong
            assert not finite(b"h" * (at % 70)), at
            tensor[at] = kept


def test_verify_is_the_same_with_and_without_the_library(reader: NativeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"large": torch.randn(300, 500).bfloat16(), "small": torch.randn(3).half(), "none": torch.zeros(0, 4)}
    targets = []
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        whole = Span(name, Box.whole(shape), Box.whole(shape))
        targets.append(Target(Shard(name, shape, str(tensor.dtype).removeprefix("torch."), (whole,)), tensor))
    asked: list[bool] = []
    ours = verify.verify(targets, threads=2, keep_on=lambda: asked.append(True))
    live = verify.rank_digest(targets)
    tensors["large"][17, 3] = float("nan")
    with pytest.raises(UpdateFailed, match=r"large: row 17 \(element \[17, 3\]\) is not a finite number"):
        verify.verify(targets)
    with_nan = verify.rank_digest(targets)
    monkeypatch.setattr(verify, "native_verifier", lambda: None)

    assert with_nan == verify.rank_digest(targets)
    tensors["large"][17, 3] = 0
    assert asked
    assert ours == live != with_nan
    assert verify.verify(targets) == verify.rank_digest(targets)


def test_a_library_that_does_not_fit_is_left_alone(reader: NativeReader, tmp_path: Path) -> None:
    class Other:
        @staticmethod
        def gtp_read_sizes(sizes: ctypes.Array[ctypes.c_int64]) -> None:
            sizes[0] = struct.calcsize("q")

    assert native_copy._fits(open_library())
    assert not native_copy._fits(Other)
    assert not native_copy._fits(object())
    assert open_library(tmp_path / "none.so") is None
    (tmp_path / "text.so").write_text("no library")
    assert open_library(tmp_path / "text.so") is None
    assert native_verifier() is not None
