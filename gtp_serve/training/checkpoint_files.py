"""The folder of one save: written under a name that no reader looks for, and given its own in one step at the end.

Ranks tell one another how far they are by small files in that folder, so that a save can end in the background.  A
save that is killed leaves the folder behind; the next one removes it.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedWriter
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gtp_serve.errors import CheckpointError, UsageError
from gtp_serve.layout.spans import Box
from gtp_serve.loaders.megatron_folder import BACKEND_FILE, TRACKER
from gtp_serve.loaders.torch_dist import METADATA
from gtp_serve.training.checkpoint_plan import StoredItem, StoredKey

COMMON_KEY = "common_state/shard_0_1"
_LOCK, _FAILED = "lock", "failed"
_POLL_SECONDS = 0.02


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where one item lies in its rank's file; ``start`` is None for the common state."""

    key: str
    start: tuple[int, ...] | None
    offset: int
    length: int


class Vote(msgspec.Struct, frozen=True):
    """What came of one rank's writing."""

    failure: str = ""
    """Empty: it went well."""
    placed: list[Placed] = []


@dataclass(frozen=True, slots=True)
class Attempt:
    """One save of one iteration below ``root``."""

    root: Path
    iteration: int
    ticket: str

    @property
    def folder(self) -> Path:
        """Its final name."""
        return self.root / f"iter_{self.iteration:07d}"

    @property
    def partial(self) -> Path:
        """Its name until it is complete."""
        return self.root / f".iter_{self.iteration:07d}.partial-{self.ticket}"

    def vote_file(self, rank: int) -> Path:
        """Where a rank tells what came of it."""
        return self.partial / f"vote_{rank}"


def begin(root: Path, iteration: int) -> tuple[Attempt, int]:
    """Make the folder of a save and lock it; returns the attempt and the lock's file descriptor.  On one rank only.

    :raises UsageError: for an iteration that is there already, or while another save below ``root`` is under way.
    """
    root.mkdir(parents=True, exist_ok=True)
    for old in sorted(root.glob(".iter_*.partial-*")):
        _remove_abandoned(old)
    attempt = Attempt(root, iteration, os.urandom(8).hex())
    if (attempt.folder / METADATA).exists():
        raise UsageError(f"{attempt.folder} exists already", [("try", "another iteration, or remove the folder")])
    attempt.partial.mkdir()
    lock = os.open(attempt.partial / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except BaseException:
        os.close(lock)
        raise
    return attempt, lock


def _remove_abandoned(partial: Path) -> None:
    try:
        lock = os.open(partial / _LOCK, os.O_RDWR)
    except FileNotFoundError:  # its save was killed before it could lock it, or when it had nearly ended
        shutil.rmtree(partial, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(
            f"another save is under way: {partial.name}", [("try", "wait() for it before the next save")]
        ) from None
    else:
        shutil.rmtree(partial, ignore_errors=True)
    finally:
        os.close(lock)


def unlock(lock: int) -> None:
    """Let go of a save's lock, also where a child process has got its file descriptor."""
    try:
        with suppress(OSError):  # closed, it is gone too, but for such children
            fcntl.flock(lock, fcntl.LOCK_UN)
    finally:
        os.close(lock)


def write_rank(attempt: Attempt, rank: int, common: object, items: Iterable[tuple[StoredItem, Tensor]]) -> None:
    """Write this rank's file and tell the others.  All items are taken, also after a failure: taking one may be
    something that all ranks do together.

    :param common: the common state, on the rank that writes it; else None.
    """
    vote = Vote()
    left = iter(items)
    try:
        vote = Vote(placed=_write(attempt.partial / f"__{rank}_0.distcp", common, left))
    except Exception as failure:
        vote = Vote(failure=f"{type(failure).__name__}: {failure}")
        for _ in left:
            pass
    write_safely(attempt.vote_file(rank), msgspec.json.encode(vote))


def _write(path: Path, common: object, items: Iterable[tuple[StoredItem, Tensor]]) -> list[Placed]:
    placed: list[Placed] = []
    with path.open("wb") as file:
        if common is not None:
            placed.append(_append(file, COMMON_KEY, None, common))
        for stored, value in items:
            held = value.detach().reshape(stored.box.shape).contiguous().cpu()
            if held.untyped_storage().nbytes() != held.nbytes:
                held = held.clone()  # torch.save writes the whole storage of a view
            placed.append(_append(file, stored.stored.key, stored.box.start, held))
        file.flush()
        os.fsync(file.fileno())
    return placed


def _append(file: BufferedWriter, key: str, start: tuple[int, ...] | None, value: object) -> Placed:
    offset = file.tell()
    torch.save(value, file)
    return Placed(key, start, offset, file.tell() - offset)


def commit(
    attempt: Attempt, ranks: int, keys: Sequence[StoredKey], boxes: dict[str, list[Box]], timeout: float
) -> Path:
    """Wait for all ranks, then make the checkpoint complete and the newest.  On the rank that began it.

    :raises CheckpointError: when a rank failed or said nothing in time; nothing is left of the attempt but a note of
        why.
    """
    try:
        votes = [_await_vote(attempt, rank, timeout) for rank in range(ranks)]
        for rank, vote in enumerate(votes):
            if vote.failure:
                raise CheckpointError(f"rank {rank} could not write its part of {attempt.folder.name}: {vote.failure}")
        _complete(attempt, votes, keys, boxes)
    except BaseException as failure:
        if attempt.partial.exists():
            for leftover in attempt.partial.glob("__*.distcp"):
                leftover.unlink(missing_ok=True)
            write_safely(attempt.partial / _FAILED, str(failure).encode())
        raise
    return attempt.folder


def await_outcome(attempt: Attempt, timeout: float) -> Path:
    """Wait until the save is complete, on a rank that did not begin it.

    :raises CheckpointError: when it failed, or did not end in time.
    """
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if (attempt.folder / METADATA).exists():
            return attempt.folder
        failed = attempt.partial / _FAILED
        if failed.exists():
            raise CheckpointError(failed.read_text(encoding="utf-8", errors="replace"))
        time.sleep(_POLL_SECONDS)
    raise CheckpointError(f"the save of {attempt.folder.name} did not end within {timeout:.0f} s")


def _await_vote(attempt: Attempt, rank: int, timeout: float) -> Vote:
    end = time.monotonic() + timeout
    path = attempt.vote_file(rank)
    while not path.exists():
        if time.monotonic() > end:
            raise CheckpointError(f"rank {rank} did not write its part of {attempt.folder.name} in {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)
    return msgspec.json.decode(path.read_bytes(), type=Vote)


def _complete(attempt: Attempt, votes: Sequence[Vote], keys: Sequence[StoredKey], boxes: dict[str, list[Box]]) -> None:
    folder = attempt.partial
    described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    write_safely(folder / BACKEND_FILE, msgspec.json.encode(described))
    write_safely(folder / METADATA, pickle.dumps(_metadata(votes, keys, boxes), protocol=4))
    for rank in range(len(votes)):
        attempt.vote_file(rank).unlink()
    (folder / _LOCK).unlink(missing_ok=True)
    if attempt.folder.exists():  # what another program's save, cut short, has left: it has no .metadata
        os.replace(attempt.folder, attempt.root / f".{attempt.folder.name}.partial-{attempt.ticket}-old")
    os.rename(folder, attempt.folder)
    _sync_folder(attempt.root)
    write_safely(attempt.root / TRACKER, f"{attempt.iteration}\n".encode())


def _metadata(votes: Sequence[Vote], keys: Sequence[StoredKey], boxes: dict[str, list[Box]]) -> Metadata:
    described: dict[str, Any] = {COMMON_KEY: BytesStorageMetadata()}
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    for key in keys:
        chunks = [ChunkStorageMetadata(torch.Size(b.start), torch.Size(b.shape)) for b in boxes[key.key]]
        properties = TensorProperties(dtype=getattr(torch, key.dtype))
        described[key.key] = TensorStorageMetadata(properties, torch.Size(key.shape), chunks)
        numbers |= {(key.key, box.start): number for number, box in enumerate(boxes[key.key])}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank, vote in enumerate(votes):
        for placed in vote.placed:
            index = (
                MetadataIndex(placed.key)
                if placed.start is None
                else MetadataIndex(placed.key, torch.Size(placed.start), numbers.pop((placed.key, placed.start)))
            )
            places[index] = _StorageInfo(f"__{rank}_0.distcp", placed.offset, placed.length)
    if numbers:
        missing, start = next(iter(numbers))
        raise CheckpointError(f"no rank wrote the chunk of {missing} at {list(start)}")
    return Metadata(state_dict_metadata=described, planner_data=None, storage_data=places)


def write_safely(path: Path, data: bytes) -> None:
    """Write a file that is there whole or not at all, also after a power cut."""
    waiting = path.with_name(f".{path.name}.tmp")
    with waiting.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(waiting, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
