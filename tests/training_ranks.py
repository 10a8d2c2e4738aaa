"""Ranks for tests of the trainer: threads with groups of their own kind, or a pool of gloo processes.

A thread group can be ``late``: its collectives happen when they are waited for, and what they will fill is NaN until
then.  Whoever reads a weight before its gather has ended, or overwrites what is still to be sent, gets NaN or wrong
numbers instead of luck.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gtp_serve.layout.gtp import Grid
from gtp_serve.training.groups import (
    ParallelGroups,
    build_training_groups,
    dense_sizes,
    expert_sizes,
    ranks_along,
)

SECONDS = 60
T = TypeVar("T")


@dataclass(eq=False)
class Meeting:
    """Where the threads of one group lay down their tensors."""

    size: int
    slots: list[Tensor] = field(default_factory=list)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=SECONDS)
        self.slots = [torch.empty(0)] * self.size

    def exchange(self, rank: int, mine: Tensor) -> list[Tensor]:
        self.slots[rank] = mine.detach().clone()
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


@dataclass(eq=False)
class Later:
    """A collective that happens when it is waited for."""

    act: Callable[[], None] | None

    def wait(self) -> None:
        act, self.act = self.act, None
        if act is not None:
            act()


@dataclass(eq=False)
class ThreadGroup:
    """One thread's end of a group."""

    meeting: Meeting
    me: int
    late: bool = True
    started: list[str] = field(default_factory=list)

    def size(self) -> int:
        return self.meeting.size

    def rank(self) -> int:
        return self.me

    def all_gather(self, out: Tensor, mine: Tensor) -> Later:
        assert out.numel() == self.size() * mine.numel()

        def act() -> None:
            for block, theirs in zip(out.view(self.size(), -1), self.meeting.exchange(self.me, mine), strict=True):
                block.copy_(theirs.reshape(-1))

        return self._start("all_gather", out, act)

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Later:
        assert full.numel() == self.size() * out.numel()

        def act() -> None:
            first, *others = (x.view(self.size(), -1)[self.me] for x in self.meeting.exchange(self.me, full))
            total = first.clone()
            for other in others:
                total += other
            out.view(-1).copy_(total)

        return self._start("reduce_scatter", out, act)

    def all_to_all(self, out: Tensor, full: Tensor) -> Later:
        def act() -> None:
            for block, theirs in zip(out.view(self.size(), -1), self.meeting.exchange(self.me, full), strict=True):
                block.copy_(theirs.view(self.size(), -1)[self.me])

        return self._start("all_to_all", out, act)

    def all_reduce(self, x: Tensor) -> Later:
        def act() -> None:
            first, *others = self.meeting.exchange(self.me, x)
            total = first.clone()
            for other in others:
                total += other
            x.copy_(total)

        return self._start("all_reduce", None, act)

    def _start(self, kind: str, out: Tensor | None, act: Callable[[], None]) -> Later:
        self.started.append(kind)
        if not self.late:
            act()
            return Later(None)
        if out is not None:
            out.fill_(float("nan") if out.is_floating_point() else -1)
        return Later(act)


def thread_groups(grid: Grid, world: int, *, late: bool = True) -> list[ParallelGroups]:
    """Groups of ``world`` thread ranks."""
    fields: list[dict[str, Any]] = [{} for _ in range(world)]
    for sizes in (dense_sizes(grid, world), expert_sizes(grid, world)):
        for name, size in sizes:
            for ranks in ranks_along(sizes, name) if size > 1 else []:
                meeting = Meeting(size)
                for place, rank in enumerate(ranks):
                    fields[rank][name] = ThreadGroup(meeting, place, late)
    return [ParallelGroups(**named) for named in fields]


def on_threads(world: int, act: Callable[[int], T]) -> list[T]:
    """``act(rank)`` of every rank, each on a thread of its own; the first failure is raised."""
    results: list[Any] = [None] * world
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results[rank] = act(rank)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # ranks wait for one another all the time: by default each wait costs 5 ms
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    finally:
        sys.setswitchinterval(before)
    if failures:
        raise next((f for f in failures if not isinstance(f, threading.BrokenBarrierError)), failures[0])
    assert not any(thread.is_alive() for thread in threads), "a rank did not come to an end"
    return results


class ProcessRanks:
    """Processes joined by gloo; each runs functions of importable modules that take (groups, rank, keywords)."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "gtp_serve.training.experts", __name__])
        self._folder = tempfile.TemporaryDirectory()
        self.size = size
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, size, os.path.join(self._folder.name, "meeting")), daemon=True
            )
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, module: str, function: str, grid: Grid, **keywords: Any) -> list[Any]:
        """What the function returned on each rank; a failure anywhere fails with all tracebacks."""
        for pipe in self._pipes:
            pipe.send((module, function, grid, keywords))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(SECONDS), f"rank {rank} gave no answer within {SECONDS} s"
            answers.append(pipe.recv())
        failed = [text for ok, text in answers if not ok]
        assert not failed, "\n".join(failed)
        return [value for _, value in answers]

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


@contextmanager
def gloo_processes(size: int) -> Iterator[ProcessRanks]:
    """A pool for one test file."""
    ranks = ProcessRanks(size)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(pipe: Connection, rank: int, size: int, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=size, timeout=timedelta(seconds=SECONDS)
    )
    made: dict[Grid, ParallelGroups] = {}
    while True:
        try:
            module, function, grid, keywords = pipe.recv()
        except EOFError:
            return
        try:
            if grid not in made:
                made[grid] = build_training_groups(grid)
            act = getattr(importlib.import_module(module), function)
            pipe.send((True, act(made[grid], rank, **keywords)))
        except BaseException:
            pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}"))
