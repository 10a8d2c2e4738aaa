"""Carrying a plan out: bytes from a source into live tensors, in place.

Threads read and copy side by side (both let go of the interpreter's lock).  A tensor's address never changes.
"""

from __future__ import annotations

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.spans import Shard
from gtp_serve.refit.geometry import cut
from gtp_serve.refit.pace import Pace
from gtp_serve.refit.plan import Copy, RefitPlan, item_bytes
from gtp_serve.refit.source import DirectSource, WeightSource
from gtp_serve.refit.writers import DirectWriter, ViewWriter, Writer, slices

#: Bytes of one piece of work: small enough to share out evenly and to bound what a conversion stages.
PIECE_BYTES = 16 << 20
#: The same where a unit may have copies of many shards and is one call.  A thread that comes back from a call waits for
#: the interpreter's lock, beside a decoding engine for milliseconds; but the last units should end together.
MIN_BATCH_BYTES, MAX_BATCH_BYTES = 2 << 20, 64 << 20
_BATCHES_PER_THREAD = 12
#: Under a limit on bytes per second, a piece is what may be read in this time: no thread then waits long.
PACED_SECONDS = 0.05
MIN_PACED_BYTES = 64 << 10
#: Bytes a second: where threads in the background, which have what others leave of a core, copy less than that after
#: the first _IDLE_SECONDS, as many threads more join them that take their share.
LEAST_IDLE_RATE = 256 << 20
_IDLE_SECONDS = 0.5
#: How often progress is told.  A worker that told each piece itself would wake this thread on a worker's core.
_TELL_SECONDS = 0.05


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A live, contiguous tensor and what it must hold.  ``tensor`` may be a part of a larger parameter."""

    shard: Shard
    tensor: Tensor

    def __post_init__(self) -> None:
        if tuple(self.tensor.shape) != self.shard.shape or dtype_name(self.tensor) != self.shard.dtype:
            raise ValueError(
                f"{self.shard.key}: the tensor is {dtype_name(self.tensor)} {list(self.tensor.shape)}, "
                f"the shard {self.shard.dtype} {list(self.shard.shape)}"
            )
        if not self.tensor.is_contiguous():
            raise ValueError(f"{self.shard.key}: the tensor is not contiguous")


def dtype_name(tensor: Tensor) -> str:
    """torch's name of the element type without the prefix."""
    return str(tensor.dtype).removeprefix("torch.")


def apply_plan(
    plan: RefitPlan,
    source: WeightSource,
    targets: Sequence[Target],
    *,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
    max_bytes_per_second: int | None = None,
    background: bool = False,
) -> int:
    """Fill ``targets`` as ``plan`` says; padding becomes zero, dtypes convert by value.

    :param source: as the plan was built from.  A ``DirectSource`` writes into the targets itself, from all threads;
        any other's ``read`` is called once for each shard used, one at a time.
    :param targets: in the order of ``plan.want``.
    :param progress: called from this thread with each number of source bytes that has been copied.
    :param max_bytes_per_second: of the source, over all threads.
    :param background: copy only while no other thread wants the core, so that steps go on (on Linux; LEAST_IDLE_RATE
        bounds how slow that may be).
    :return: bytes read from the source.
    :raises LayoutMismatch: before anything is written, when source or targets are not those of the plan.
    :raises CheckpointCorrupt: when a shard's bytes are not there; targets are then partly written.
    """
    if threads < 1:
        raise UsageError(f"threads is {threads}; at least one is needed")
    pace = Pace(max_bytes_per_second)
    _check_parties(plan, source, targets)
    for fill in plan.fills:
        targets[fill.target].tensor.detach()[slices(fill.box)].zero_()
    tensors, sizes = [target.tensor.detach() for target in targets], plan.copy_bytes()
    writer: Writer
    if isinstance(source, DirectSource):
        writer = DirectWriter(source, plan, tensors)
        batch = sum(sizes) // (threads * _BATCHES_PER_THREAD)
        most = min(MAX_BATCH_BYTES, max(MIN_BATCH_BYTES, batch)) if writer.batches else PIECE_BYTES
        limit = _piece_bytes(pace, most)
        work = _Work(_units(plan, sizes, limit, many=writer.batches), writer, pace)
    else:
        limit = _piece_bytes(pace, PIECE_BYTES)
        uses = Counter(unit[0].source for unit, _ in _units(plan, sizes, limit))
        writer = ViewWriter(source, plan, tensors, uses)
        work = _Work(_units(plan, sizes, limit), writer, pace)
    threads = min(threads, 1 + sum(sizes) // limit)
    if threads == 1 and progress is None and not background:  # a thread more would be one to wait for
        done = deque[int]()
        work.drain(done)
        return sum(done)
    least = None if not background else min(LEAST_IDLE_RATE, (pace.rate or 2 * LEAST_IDLE_RATE) // 2)
    return _run(work, threads, progress, least)


def _check_parties(plan: RefitPlan, source: WeightSource, targets: Sequence[Target]) -> None:
    if tuple(source.shards()) != plan.have:
        raise LayoutMismatch("the source offers other shards than those the plan was made for")
    if tuple(target.shard for target in targets) != plan.want:
        raise LayoutMismatch("the parameters are not those the plan was made for")


def _piece_bytes(pace: Pace, most: int) -> int:
    if pace.rate is None:
        return most
    return min(PIECE_BYTES, max(MIN_PACED_BYTES, int(pace.rate * PACED_SECONDS)))


_Unit = tuple[list[Copy], int]
"""Copies, and the bytes of the source that they have together."""


def _units(plan: RefitPlan, sizes: Sequence[int], limit: int, *, many: bool = False) -> Iterator[_Unit]:
    """Copies, in order, that together have at most ``limit`` bytes: what one thread does at a time.

    :param sizes: bytes of each copy of the plan.
    :param many: a unit may have copies of more than one shard.
    """
    unit: list[Copy] = []
    size = 0
    for copy, whole in zip(plan.copies, sizes, strict=True):
        item = item_bytes(plan.have[copy.source])
        for piece in (copy,) if whole <= limit else cut(copy, item, limit):
            count = whole if piece is copy else piece.source_box.volume * item
            if unit and (size + count > limit or not (many or unit[0].source == piece.source)):
                yield unit, size
                unit, size = [], 0
            unit.append(piece)
            size += count
    if unit:
        yield unit, size


class _Work:
    """Units that threads take in turn.  Each is made when it is asked for: the first ones are read meanwhile."""

    def __init__(self, units: Iterator[_Unit], writer: Writer, pace: Pace) -> None:
        self._units, self._writer, self._pace = units, writer, pace
        self._lock = Lock()

    def drain(self, done: deque[int]) -> None:
        """Do units until none is left, and tell each one's bytes."""
        try:
            while (taken := self._take()) is not None:
                unit, count = taken
                self._pace.wait(count)
                self._writer.write(unit)
                done.append(count)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Leave the rest undone."""
        with self._lock:
            self._units = iter(())
        self._pace.stop()

    def _take(self) -> _Unit | None:
        with self._lock:
            return next(self._units, None)


def _stand_back() -> None:
    """Let this thread run only while no other wants the core."""
    with suppress(AttributeError, OSError):  # not everywhere, and not always allowed
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _begin(
    work: _Work, done: deque[int], threads: int, pools: ExitStack, first: Callable[[], None] | None = None
) -> list[Future[None]]:
    """So many threads at work, each of which calls ``first`` before."""
    pool = pools.enter_context(ThreadPoolExecutor(threads, thread_name_prefix="refit", initializer=first))
    return [pool.submit(work.drain, done) for _ in range(threads)]


def _run(work: _Work, threads: int, progress: Callable[[int], None] | None, least: int | None) -> int:
    """Have the work done.

    :param least: bytes a second that threads in the background do, or others join them; None: there are none such.
    """
    done: deque[int] = deque()
    total, began = 0, time.monotonic()
    with ExitStack() as pools:
        futures = _begin(work, done, threads, pools, None if least is None else _stand_back)
        running = set(futures)
        try:
            while running or done:
                if running and least is not None and total < least * (time.monotonic() - began - _IDLE_SECONDS):
                    futures += _begin(work, done, threads, pools)
                    running.update(futures[threads:])
                    least = None
                running = wait(running, _TELL_SECONDS).not_done
                while done:
                    copied = done.popleft()
                    total += copied
                    if progress is not None:
                        progress(copied)
        finally:
            work.stop()
    try:
        for future in futures:
            future.result()
    finally:
        del future, futures  # a failure that they keep has this frame: it would hold itself and the source's memory
    return total
