"""A limit on bytes per second."""

from __future__ import annotations

import time
from threading import Event, Thread

import pytest
import torch

from gtp_serve.errors import CheckpointCorrupt, UsageError
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit import apply
from gtp_serve.refit.apply import Target, apply_plan
from gtp_serve.refit.pace import Pace
from gtp_serve.refit.plan import build_plan


class Source:
    """One tensor of 800 bytes; ``broken`` makes its first read fail."""

    def __init__(self, *, broken: bool = False) -> None:
        self.data, self.broken = torch.arange(100, dtype=torch.int64), broken
        box = Box.whole((100,))
        self.shard = Shard("w", (100,), "int64", (Span("w", box, box),))

    def shards(self) -> list[Shard]:
        return [self.shard]

    def read(self, index: int) -> memoryview:
        if self.broken:
            raise CheckpointCorrupt("the file ends early")
        return memoryview(self.data.numpy().data).cast("B")

    def close(self) -> None:
        pass


def fill(source: Source, rate: int | None, threads: int) -> float:
    target = Target(source.shard, torch.zeros(100, dtype=torch.int64))
    plan = build_plan(source.shards(), [source.shard], {"w": (100,)})
    started = time.monotonic()
    apply_plan(plan, source, [target], threads=threads, max_bytes_per_second=rate)
    assert torch.equal(target.tensor, source.data)
    return time.monotonic() - started


def test_bytes_wait_for_those_before_them() -> None:
    now = [10.0]
    pace = Pace(100, clock=lambda: now[0])
    assert [pace._book(50), pace._book(20), pace._book(30)] == pytest.approx([0, 0.5, 0.7])
    now[0] = 10.6
    assert pace._book(10) == pytest.approx(0.4)
    now[0] = 20.0  # time in which nothing was read is not saved up
    assert [pace._book(50), pace._book(50)] == pytest.approx([0, 0.5])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_fill_keeps_to_the_rate_however_many_threads_read(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MIN_PACED_BYTES", 80)

    assert fill(Source(), 2000, threads) >= 0.36 - 0.01  # 800 bytes, of which the first 80 or 100 at once
    assert fill(Source(), None, threads) < 0.3


def test_a_fill_that_fails_does_not_wait_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "MIN_PACED_BYTES", 80)
    started = time.monotonic()
    with pytest.raises(CheckpointCorrupt, match="ends early"):
        fill(Source(broken=True), 1, 4)
    assert time.monotonic() - started < 20  # at this rate, the second piece's turn comes after 80 seconds


def test_stopping_wakes_those_who_wait() -> None:
    pace, passed = Pace(1), Event()
    pace.wait(1000)

    def wait() -> None:
        pace.wait(1)
        passed.set()

    thread = Thread(target=wait)
    thread.start()
    assert not passed.wait(0.05)
    pace.stop()
    thread.join(10)
    assert passed.is_set()


def test_a_rate_that_lets_nothing_pass_is_refused() -> None:
    with pytest.raises(UsageError, match="max_bytes_per_second is 0"):
        Pace(0)
