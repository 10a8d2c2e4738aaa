"""Applying a plan: the right bytes, in place, whatever the source's memory is like."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from gtp_serve.errors import CheckpointCorrupt, LayoutMismatch, UsageError
from gtp_serve.layout.spans import Box, Shape, Shard, Span
from gtp_serve.refit import apply
from gtp_serve.refit.apply import Target, apply_plan, dtype_name
from gtp_serve.refit.plan import Copy, build_plan
from gtp_serve.refit.writers import ViewWriter


class MemorySource:
    """Shards in one buffer, each at an odd address; read-only unless asked otherwise."""

    def __init__(self, shards: Sequence[tuple[Shard, Tensor]], *, writable: bool = False) -> None:
        self.listed = [shard for shard, _ in shards]
        self.reads: list[int] = []
        self.threads: set[int] = set()
        self.offsets: list[tuple[int, int]] = []
        buffer = bytearray()
        for _, tensor in shards:
            buffer += b"\xff" * (1 + len(buffer) % 2)
            raw = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
            self.offsets.append((len(buffer), len(raw)))
            buffer += raw
        self.buffer = memoryview(buffer) if writable else memoryview(bytes(buffer))

    def shards(self) -> list[Shard]:
        return self.listed

    def read(self, index: int) -> memoryview:
        self.reads.append(index)
        self.threads.add(threading.get_ident())
        start, size = self.offsets[index]
        return self.buffer[start : start + size]

    def close(self) -> None:
        self.buffer.release()


def whole(name: str, tensor: Tensor) -> Shard:
    box = Box.whole(tuple(tensor.shape))
    return Shard(name, tuple(tensor.shape), dtype_name(tensor), (Span(name, box, box),))


def target(key: str, tensor: Tensor, *spans: Span) -> Target:
    return Target(Shard(key, tuple(tensor.shape), dtype_name(tensor), spans), tensor)


def run(source: MemorySource, targets: Sequence[Target], shapes: dict[str, Shape], threads: int = 2) -> int:
    plan = build_plan(source.shards(), [t.shard for t in targets], shapes)
    return apply_plan(plan, source, targets, threads=threads)


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


A, B = numbers(6, 8), numbers(4, 8)
SHAPES: dict[str, Shape] = {"a": (6, 8), "b": (4, 8)}


def fused(dtype: torch.dtype = torch.bfloat16) -> Target:
    """Columns 2 to 7 of a, then of b, then two rows and one column of padding."""
    return target(
        "fused",
        torch.full((12, 6), torch.nan, dtype=dtype),
        Span("a", Box((0, 0), (6, 5)), Box((0, 2), (6, 5))),
        Span("b", Box((6, 0), (4, 5)), Box((0, 2), (4, 5))),
    )


def expected_fused() -> Tensor:
    filled = torch.zeros(12, 6, dtype=torch.bfloat16)
    filled[:6, :5], filled[6:10, :5] = A[:, 2:7], B[:, 2:7]
    return filled


@pytest.mark.parametrize("writable", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_columns_of_unaligned_sources_fill_a_fused_parameter_and_padding_is_zero(threads: int, writable: bool) -> None:
    source, parameter = MemorySource([(whole("a", A), A), (whole("b", B), B)], writable=writable), fused()
    address = parameter.tensor.data_ptr()
    assert run(source, [parameter], SHAPES, threads) == 10 * 5 * 2
    assert torch.equal(parameter.tensor, expected_fused())
    assert parameter.tensor.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_another_dtype_is_converted_by_value(dtype: torch.dtype) -> None:
    source, parameter = MemorySource([(whole("a", A), A), (whole("b", B), B)]), fused(dtype)
    run(source, [parameter], SHAPES)
    assert torch.equal(parameter.tensor, expected_fused().to(dtype))


def test_narrowing_rounds_as_torch_does() -> None:
    wide, narrow = numbers(33, 5, dtype=torch.float32), torch.empty(33, 5, dtype=torch.bfloat16)
    source = MemorySource([(whole("w", wide), wide)])
    box = Box.whole((33, 5))
    run(source, [target("w", narrow, Span("w", box, box))], {"w": (33, 5)})
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_large_tensors_go_in_pieces_and_each_shard_is_read_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(apply, "PIECE_BYTES", 100)
    tensor, out = numbers(101, 7), torch.empty(101, 7, dtype=dtype)
    source = MemorySource([(whole("w", tensor), tensor)])
    box = Box.whole((101, 7))
    targets = [target("w", out, Span("w", box, box))]
    steps: list[int] = []
    plan = build_plan(source.shards(), [t.shard for t in targets], {"w": (101, 7)})
    assert apply_plan(plan, source, targets, threads=3, progress=steps.append) == 1414
    assert torch.equal(out, tensor.to(dtype))
    assert source.reads == [0]
    assert max(steps) <= 100
    assert sum(steps) == 1414
    assert len(steps) == 15


def test_vectors_scalars_and_views_of_a_stack_are_filled() -> None:
    vector, scalar, expert = numbers(9), numbers(), numbers(3, 4)
    stack = torch.zeros(3, 3, 4, dtype=torch.bfloat16)
    outs = [torch.zeros(9, dtype=torch.bfloat16), torch.zeros((), dtype=torch.float32), stack[1]]
    named = {"v": vector, "s": scalar, "e": expert}
    source = MemorySource([(whole(name, tensor), tensor) for name, tensor in named.items()])
    boxes = [Box.whole(tuple(out.shape)) for out in outs]
    targets = [target(name, out, Span(name, box, box)) for name, out, box in zip(named, outs, boxes, strict=True)]
    run(source, targets, {name: tuple(tensor.shape) for name, tensor in named.items()})
    assert torch.equal(outs[0], vector)
    assert outs[1].item() == scalar.item()
    assert torch.equal(stack[1], expert)
    assert torch.count_nonzero(stack[[0, 2]]) == 0


def test_a_parameter_that_trains_is_written_without_autograd() -> None:
    parameter = torch.nn.Parameter(torch.zeros(6, 8))
    source = MemorySource([(whole("a", A), A)])
    box = Box.whole((6, 8))
    run(source, [target("a", parameter, Span("a", box, box))], {"a": (6, 8)})
    assert torch.equal(parameter, A.float())
    assert parameter.requires_grad


def test_shards_that_only_hold_padding_are_never_read() -> None:
    padding = Shard("pad", (4, 8), "bfloat16", ())
    source = MemorySource([(padding, numbers(4, 8)), (whole("a", A), A), (whole("b", B), B)])
    run(source, [fused()], SHAPES)
    assert sorted(source.reads) == [1, 2]


def test_short_bytes_are_refused_and_name_the_shard() -> None:
    source = MemorySource([(whole("a", A), A), (whole("b", B), B[:3])])
    with pytest.raises(CheckpointCorrupt, match="b: 48 bytes are there where 64 were needed"):
        run(source, [fused()], SHAPES)


def in_pieces(monkeypatch: pytest.MonkeyPatch, background: bool, others: threading.Event | None) -> dict[int, int]:
    """The scheduling policy of each thread that wrote a piece; those in the background wait for the others, if told to,
    and these are slow then.
    """
    monkeypatch.setattr(apply, "PIECE_BYTES", 100)
    policies, write = dict[int, int](), ViewWriter.write

    def noting(self: ViewWriter, unit: list[Copy]) -> None:
        policy = policies[threading.get_ident()] = os.sched_getscheduler(0)
        if others is not None and policy == os.SCHED_IDLE:
            assert others.wait(20)
        elif others is not None:
            others.set()
            time.sleep(0.2)
        write(self, unit)

    monkeypatch.setattr(ViewWriter, "write", noting)
    tensor, out = numbers(101, 7), torch.empty(101, 7)
    source, box = MemorySource([(whole("w", tensor), tensor)]), Box.whole((101, 7))
    targets = [target("w", out, Span("w", box, box))]
    plan = build_plan(source.shards(), [t.shard for t in targets], {"w": (101, 7)})
    assert apply_plan(plan, source, targets, threads=1, progress=lambda _: None, background=background) == 1414
    assert torch.equal(out, tensor.float())
    return policies


def test_background_threads_run_only_while_no_other_wants_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = os.sched_getscheduler(0)
    assert list(in_pieces(monkeypatch, True, None).values()) == [os.SCHED_IDLE]
    assert os.sched_getscheduler(0) == mine
    assert list(in_pieces(monkeypatch, False, None).values()) == [mine]


def test_others_join_background_threads_that_get_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_IDLE_SECONDS", 0.1)
    monkeypatch.setattr(apply, "LEAST_IDLE_RATE", 1 << 40)
    begin = Mock(wraps=apply._begin)
    monkeypatch.setattr(apply, "_begin", begin)
    policies = in_pieces(monkeypatch, True, threading.Event())
    assert sorted(policies.values()) == sorted([os.SCHED_IDLE, os.sched_getscheduler(0)])
    assert begin.call_count == 2  # they join once


def test_a_failing_read_ends_all_threads_with_its_error() -> None:
    class Broken(MemorySource):
        def read(self, index: int) -> memoryview:
            if index == 1:
                raise CheckpointCorrupt("the file ends early")
            return super().read(index)

    before = threading.active_count()
    with pytest.raises(CheckpointCorrupt, match="the file ends early"):
        run(Broken([(whole("a", A), A), (whole("b", B), B)]), [fused()], SHAPES, threads=4)
    assert threading.active_count() == before


def test_a_failing_progress_bar_ends_the_work_too() -> None:
    source, parameter = MemorySource([(whole("a", A), A), (whole("b", B), B)]), fused()
    plan = build_plan(source.shards(), [parameter.shard], SHAPES)

    def fail(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply_plan(plan, source, [parameter], progress=fail)


def test_a_plan_for_other_parties_is_refused_before_anything_is_written() -> None:
    source, parameter = MemorySource([(whole("a", A), A), (whole("b", B), B)]), fused()
    plan = build_plan(source.shards(), [parameter.shard], SHAPES)
    with pytest.raises(LayoutMismatch, match="source offers other shards"):
        apply_plan(plan, MemorySource([(whole("a", A), A)]), [parameter])
    with pytest.raises(LayoutMismatch, match="parameters are not those"):
        apply_plan(plan, source, [])
    with pytest.raises(UsageError, match="threads is 0"):
        apply_plan(plan, source, [parameter], threads=0)
    assert parameter.tensor.isnan().all()


def test_a_target_must_be_what_its_shard_says() -> None:
    shard = whole("a", A)
    with pytest.raises(ValueError, match="the shard bfloat16"):
        Target(shard, A.float())
    with pytest.raises(ValueError, match="not contiguous"):
        Target(shard, torch.empty(8, 6, dtype=torch.bfloat16).T)


def test_a_mapped_file_can_be_closed_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"xyz" + bytes(A.view(torch.uint8).numpy()))

    class FileSource:
        def __init__(self) -> None:
            with path.open("rb") as file:
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

        def shards(self) -> list[Shard]:
            return [whole("a", A)]

        def read(self, index: int) -> memoryview:
            return memoryview(self.map)[3:]

        def close(self) -> None:
            self.map.close()  # raises while a view is still held

    source, out = FileSource(), torch.empty_like(A)
    box = Box.whole((6, 8))
    targets = [target("a", out, Span("a", box, box))]
    plan = build_plan(source.shards(), [t.shard for t in targets], {"a": (6, 8)})
    apply_plan(plan, source, targets)
    source.close()
    assert torch.equal(out, A)
