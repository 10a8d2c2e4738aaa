"""Every call that can fail, failed: reading, writing, flushing to disk, memory, new processes.

What must come of it each time: it works all the same, or one error of ours that says what it was; nothing is left
open, running or half-made; and the same thing done again works.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import mmap
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq.asyncio
from checkpoint_files import SMALL, random_tensors, write_hf, write_megatron
from checkpoint_model import dense_config, fill_everything, on_grid_alone
from fuzz_files import check_error, gguf_bytes
from nth_failure import Point, broken, crowded, descriptors, every_failure, few_descriptors, full, small_files
from parity.model_harness import TensorSource
from refit_harness import Rank
from safetensors_bytes import entries, file_bytes
from torch import Tensor

from gtp_serve.engine.client import EngineClient
from gtp_serve.engine.peer import Patience
from gtp_serve.engine.ranks import Leader
from gtp_serve.errors import DoesNotFit, EnvironmentFault, GtpServeError, RequestRejected
from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders import open_checkpoint
from gtp_serve.refit import mapping, staging
from gtp_serve.refit.orders import DiskOrder
from gtp_serve.server import cli
from gtp_serve.server.spool import spool
from gtp_serve.training.checkpoint_load import load
from gtp_serve.training.checkpoint_save import save
from gtp_serve.training.shard_map import ShardMap

torch.set_num_threads(1)

READS = [Point(io, "open", broken), Point(os, "open", broken), Point(os, "pread", broken), Point(mmap, "mmap", broken)]
WRITES = [
    *(Point(os, name, full) for name in ("mkdir", "fsync", "replace", "rename")),
    Point(io, "open", full),
    Point(os, "open", full),
]


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No thread, descriptor or shared memory."""
    before, shared, threads = descriptors(), set(os.listdir("/dev/shm")), threading.active_count()
    yield
    deadline = time.monotonic() + 20
    while threading.active_count() > threads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert threading.active_count() <= threads
    assert descriptors() <= before
    assert set(os.listdir("/dev/shm")) <= shared


# -- reading -----------------------------------------------------------------------------------------------------


def folder_of(kind: str, root: Path) -> Path:
    if kind == "megatron":
        return write_megatron(root)[0]
    root.mkdir()
    if kind == "gguf":
        gguf_bytes(root / "model.gguf")
    else:
        write_hf(root, shards=2)
    return root


def all_tensors(path: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(path)
    try:
        return {name: tensor.clone() for name, tensor in checkpoint.tensors()}
    finally:
        checkpoint.close()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("kind", ["megatron", "huggingface", "gguf"])
def test_a_read_that_fails_anywhere_is_one_error_of_the_loader(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "model")
    truth = all_tensors(folder)
    found: list[dict[str, Tensor]] = []

    def judge(where: str, error: BaseException | None) -> None:
        if error is None:
            assert same(found[-1], truth), where
            return
        assert isinstance(error, GtpServeError), (where, error)
        check_error(error)

    assert every_failure(READS, lambda: found.append(all_tensors(folder)), judge, most=400) > 3
    assert same(all_tensors(folder), truth)


@pytest.mark.parametrize("kind", ["megatron", "huggingface", "gguf"])
def test_without_descriptors_a_load_ends_in_one_error(kind: str, tmp_path: Path) -> None:
    folder = folder_of(kind, tmp_path / "model")
    truth = all_tensors(folder)
    refused = 0
    for more in range(8):
        with few_descriptors(more):
            try:
                found: Any = all_tensors(folder)
            except GtpServeError as error:
                found, refused = None, refused + 1
                check_error(error)
        assert found is None or same(found, truth)
    assert refused
    assert same(all_tensors(folder), truth)


# -- convert -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_a_conversion_that_cannot_write_leaves_nothing_and_says_why(
    to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = folder_of("megatron" if to == "hf" else "huggingface", tmp_path / "model")
    out = tmp_path / "out" / "copy"
    codes: list[int] = []
    assert cli.main(["convert", str(source), "--to", to, str(out)]) == 0
    truth = all_tensors(out)
    shutil.rmtree(out)

    def convert() -> None:
        codes.append(cli.main(["convert", str(source), "--to", to, str(out)]))

    def judge(where: str, error: BaseException | None) -> None:
        told = capsys.readouterr().err
        assert error is None, (where, error)
        if codes[-1] == 0:
            assert same(all_tensors(out), truth), where
            shutil.rmtree(out)
        else:
            assert "error[" in told, (where, told)
            assert "Traceback" not in told, (where, told)
            assert not out.exists(), where
        left = list(out.parent.iterdir()) if out.parent.exists() else []
        if "all after" in where or "os.open" in where:  # then a folder may not be removed; under no name that is read
            assert all(path.name.startswith(".copy.partial-") for path in left), (where, left)
            for path in left:
                shutil.rmtree(path)
        else:
            assert left == [], (where, left)

    assert every_failure(WRITES, convert, judge, most=400) > 5
    assert codes[-1] == 0
    shutil.rmtree(out)
    for size in (0, 100, 2000, 6000):
        with small_files(size):
            convert()
        assert codes[-1] != 0
        judge(f"files of {size} bytes", None)


# -- a save from training ----------------------------------------------------------------------------------------


def test_a_save_that_fails_anywhere_leaves_the_one_before_and_the_next_one_works(tmp_path: Path) -> None:
    config, iteration = dense_config(num_layers=1), [0]
    points = [*WRITES, Point(torch, "save", full), Point(fcntl, "flock", broken)]
    grown = {"descriptors": descriptors()}

    def act(shards: ShardMap) -> None:
        fill_everything(shards, None, config)

        def run() -> None:
            iteration[0] += 1
            save(tmp_path, shards, config=config, grid=Grid(), iteration=iteration[0], timeout=5.0).wait()

        def judge(where: str, error: BaseException | None) -> None:
            assert error is None or isinstance(error, GtpServeError), (where, repr(error))
            assert descriptors() <= grown["descriptors"] + 1, where
            newest = open_checkpoint(tmp_path)
            newest.close()
            assert newest.facts.iteration is not None
            if error is not None:  # made, but not announced, is as good as not made
                assert newest.facts.iteration in (done[-1], iteration[0]), where
            done.append(newest.facts.iteration)

        run()
        done = [iteration[0]]
        assert every_failure(points, run, judge, most=200) > 5
        run()
        assert load(tmp_path, shards, config=config, threads=1).iteration == iteration[0]
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".iter")] == []

    on_grid_alone(config, Grid(), act)


# -- updates -----------------------------------------------------------------------------------------------------


class Reads(TensorSource):
    """A source whose reads and whose closing can be made to fail."""


MEMORY: list[Point] = [
    Point(mapping, "_reserve", lambda: DoesNotFit("the system gives no address range")),
    Point(torch, "empty", MemoryError),
    Point(torch, "zeros", MemoryError),
    Point(torch, "frombuffer", MemoryError),
    Point(Reads, "read", MemoryError),
    Point(Reads, "shards", MemoryError),
    Point(staging, "verify", MemoryError),
    Point(staging, "apply_plan", lambda: RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")),
]


@pytest.mark.parametrize("memory", ["staged", "inplace"])
def test_out_of_memory_anywhere_in_an_update_is_a_vote_against_it(
    memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = Rank()
    rank.load(1)
    tensors = {seed: random_tensors(SMALL, seed) for seed in (1, 2)}
    state = {"number": 0, "seed": 2, "digest": rank.weights.checksum()}
    first = state["digest"]

    def update() -> None:
        state["number"] += 1  # type: ignore[operator]
        name = f"u{state['number']}"
        rank.disk[name] = lambda: Reads(tensors[2])
        rank.stage(name, DiskOrder(path=name), memory=memory)
        vote = rank.vote(name)
        if vote.error is not None:
            raise EnvironmentFault(f"{vote.error[1]} touched={vote.touched}")
        state["digest"] = rank.weights.commit(name, name)

    def judge(where: str, error: BaseException | None) -> None:
        capsys.readouterr()
        if isinstance(error, MemoryError):  # in the commit, before anything was exchanged; the engine calls it torn
            assert "_reserve" in where, where
            assert rank.weights.checksum() == state["digest"], where
        elif error is not None:
            assert isinstance(error, GtpServeError), (where, error)
            if memory == "inplace" and "touched=True" in error.message:
                rank.load(1)  # torn: the machine has it refuse requests until weights have landed
            else:
                assert rank.weights.checksum() == state["digest"], where
        if state["digest"] != first:
            rank.load(1)
            state["digest"] = rank.weights.checksum()
        assert rank.logits().isfinite().all()

    count = every_failure(MEMORY, update, judge, most=300)
    rank.weights.close()
    assert count > 3
    assert state["digest"] != first


# -- a streamed body ---------------------------------------------------------------------------------------------

SHAPES = {"model.embed_tokens.weight": (7, 4), "model.norm.weight": (4,)}
GOOD = file_bytes(entries(SHAPES))


def test_a_streamed_body_that_cannot_be_kept_is_refused() -> None:
    points = [Point(os, name, full) for name in ("memfd_create", "pwrite")]

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(GOOD), 64):
            yield GOOD[start : start + 64]

    def keep() -> None:
        asyncio.run(spool(pieces(), SHAPES, length=None, digest="", seconds=5.0, available=1 << 30)).close()

    def judge(where: str, error: BaseException | None) -> None:
        # A kernel that does not know one of memfd_create's flags is asked again without it.
        assert error is None or isinstance(error, RequestRejected), (where, error)

    assert every_failure(points, keep, judge, most=50) > 4
    for size in (0, 64, 200):
        with small_files(size), pytest.raises(RequestRejected, match="no shared memory"):
            keep()


# -- starting ----------------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_be_started_is_a_fault_of_the_environment_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = tempfile.mkdtemp(prefix="g", dir="/dev/shm")
    monkeypatch.setenv("TMPDIR", short)
    monkeypatch.setattr(tempfile, "tempdir", short)
    points = [
        Point(tempfile, "mkdtemp", full),
        Point(fcntl, "flock", broken),
        Point(zmq.asyncio, "Context", lambda: zmq.ZMQError(24)),
        Point(asyncio, "create_subprocess_exec", crowded),
    ]

    async def start() -> None:
        client = await EngineClient.start(["/bin/sleep", "600"])
        await client.stop(0)

    def judge(where: str, error: BaseException | None) -> None:
        assert isinstance(error, EnvironmentFault), (where, repr(error))
        assert os.listdir(short) == [], where

    try:
        assert every_failure(points, lambda: asyncio.run(start()), judge, most=20) == 4
        assert os.listdir(short) == []
    finally:
        shutil.rmtree(short)


def test_a_rank_that_cannot_be_started_is_told_and_no_other_one_is_left() -> None:
    points = [Point(subprocess, "Popen", crowded), Point(os, "memfd_create", crowded)]
    points.append(Point(socket, "socketpair", crowded))

    def run() -> None:
        leader = Leader(["/bin/sh", "-c", "exec sleep 600", "x"], 3, patience=Patience(stop=0.2))
        try:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                leader.check()
                if all(one.pid for one in leader.peers):
                    return
                time.sleep(0.01)
        finally:
            leader.close()

    def judge(where: str, error: BaseException | None) -> None:
        assert isinstance(error, GtpServeError), (where, repr(error))
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text(encoding="ascii")
        assert "sleep" not in "".join(map(_name, children.split())), where

    assert every_failure(points, run, judge, most=20) >= 5


def _name(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="ascii")
    except OSError:
        return ""
