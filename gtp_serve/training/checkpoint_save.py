"""Saving a training run as a Megatron ``torch_dist`` checkpoint in the logical layout.

The file knows nothing of GTP: shapes are without padding, chunks end where the real rows end, fc1 lies in halves.
Every element is written by one rank.  Parts of a chunk that lie on several ranks are sent to its writer, one chunk at
a time, so a save needs memory for about one tensor; one in the background for a copy of what the rank writes.
"""

from __future__ import annotations

import argparse
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import torch
from torch import Tensor, nn

from gtp_serve.config import DTYPE_BYTES, DType, ModelConfig
from gtp_serve.errors import CheckpointError, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.spans import Box
from gtp_serve.loaders.megatron_writer import saved_arguments
from gtp_serve.training.checkpoint_files import Attempt, await_outcome, begin, commit, unlock, write_rank
from gtp_serve.training.checkpoint_plan import StoredItem, StoredKey, plan_checkpoint, rank_tensor
from gtp_serve.training.exchange import assemble, waves
from gtp_serve.training.optimizer import ShardedOptimizer
from gtp_serve.training.shard_map import ShardMap, as_map


class _Begun(msgspec.Struct, frozen=True):
    """What the first rank says of the beginning."""

    ticket: str = ""
    refusal: str = ""
    usage: bool = False


class Saving:
    """A save that may still be under way."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        """Whether this rank's part in it has ended."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """The folder of the complete checkpoint.

        :raises CheckpointError: when a rank failed; nothing that a reader would take for a checkpoint is left.
        """
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        assert self._path is not None  # the thread has set one of the two
        return self._path


def save(
    root: Path | str,
    model: nn.Module | ShardMap,
    *,
    config: ModelConfig,
    grid: Grid,
    iteration: int,
    optimizer: ShardedOptimizer | None = None,
    background: bool = False,
    timeout: float = 1800.0,
) -> Saving:
    """Write ``root/iter_NNNNNNN``.  Collective: all ranks call it with the same arguments, on one file system.

    Killed at any moment, it leaves the iterations before it as they were, and nothing that could be taken for a
    complete one.  ``latest_checkpointed_iteration.txt`` changes last.

    :param model: or a map of it; an optimizer's own map is used where one is given.
    :param grid: the trainer's; it decides the chunks.
    :param background: return once everything is copied; weights may change from then on.
    :param timeout: seconds that ranks wait for one another's files.
    :raises UsageError: for an iteration that is there already, a grid that Megatron could not have, or while another
        save below ``root`` is under way.
    :raises LayoutMismatch: when the ranks together do not hold the model that ``config`` describes.
    :raises CheckpointError: when a rank could not write.  In the background: from ``wait``.
    """
    shards = optimizer.shards if optimizer is not None else as_map(model)
    if iteration < 0:
        raise UsageError(f"iteration {iteration} is below 0")
    plan = plan_checkpoint(shards, config, grid, optimizer)
    common = _common_state(shards, config, grid, iteration, optimizer)
    attempt, lock = _begin_together(shards, Path(root), iteration)
    job = _Job(shards, optimizer, plan, attempt, lock, common, timeout)
    saving = Saving()
    if not background:
        saving._path = job.run(job.values())
        return saving
    try:
        held = [(stored, _copied(value)) for stored, value in job.values()]
    except BaseException:
        job.let_go()
        raise
    saving._thread = threading.Thread(target=_in_background, args=(saving, job, held), name="save")
    saving._thread.start()
    return saving


def _begin_together(shards: ShardMap, root: Path, iteration: int) -> tuple[Attempt, int]:
    """Begin on the first rank; all go on, or all raise."""
    begun, lock = _Begun(), -1
    if shards.mesh.rank == 0:
        try:
            attempt, lock = begin(root, iteration)
            begun = _Begun(ticket=attempt.ticket)
        except UsageError as refusal:
            begun = _Begun(refusal=str(refusal), usage=True)
        except OSError as failure:
            begun = _Begun(refusal=f"{root} cannot be written: {failure}")
    told = msgspec.json.decode(shards.mesh.all_bytes(msgspec.json.encode(begun))[0], type=_Begun)
    if told.refusal:
        raise UsageError(told.refusal) if told.usage else CheckpointError(told.refusal)
    return Attempt(root, iteration, told.ticket), lock


def _in_background(saving: Saving, job: _Job, held: list[tuple[StoredItem, Tensor]]) -> None:
    try:
        saving._path = job.run(_let_go(held))
    except BaseException as failure:
        saving._failure = failure


def _let_go(held: list[tuple[StoredItem, Tensor]]) -> Iterator[tuple[StoredItem, Tensor]]:
    """Each copy, which is freed once the next is asked for."""
    held.reverse()
    while held:
        yield held.pop()


def _copied(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True)


class _Job:
    """One rank's part in a save."""

    def __init__(
        self,
        shards: ShardMap,
        optimizer: ShardedOptimizer | None,
        plan: list[StoredItem],
        attempt: Attempt,
        lock: int,
        common: object,
        timeout: float,
    ) -> None:
        self.shards, self.optimizer, self.plan = shards, optimizer, plan
        self.attempt, self.lock, self.common, self.timeout = attempt, lock, common, timeout

    def values(self) -> Iterator[tuple[StoredItem, Tensor]]:
        """This rank's chunks, one at a time.  Collective: it must be gone through to its end."""
        mesh = self.shards.mesh
        by_item = {id(stored.item): stored for stored in self.plan}
        for wave in waves([stored.item for stored in self.plan], mesh.size):
            value = assemble(
                mesh,
                wave,
                lambda item, index: rank_tensor(self.shards, self.optimizer, by_item[id(item)].slot, index),
                self.shards.device,
            )
            if value is not None:
                yield by_item[id(next(item for item in wave if item.worker == mesh.rank))], value

    def run(self, values: Iterator[tuple[StoredItem, Tensor]]) -> Path:
        """Write this rank's file and see the save through."""
        rank = self.shards.mesh.rank
        try:
            write_rank(self.attempt, rank, self.common if rank == 0 else None, values)
            if rank:
                return await_outcome(self.attempt, self.timeout)
            keys: dict[str, StoredKey] = {}
            boxes: dict[str, list[Box]] = {}
            for stored in self.plan:
                keys[stored.stored.key] = stored.stored
                boxes.setdefault(stored.stored.key, []).append(stored.box)
            return commit(self.attempt, self.shards.mesh.size, list(keys.values()), boxes, self.timeout)
        except OSError as failure:
            raise CheckpointError(f"{self.attempt.folder} could not be written: {failure}") from failure
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Allow the next save."""
        if self.lock >= 0:
            unlock(self.lock)
            self.lock = -1


def _common_state(
    shards: ShardMap, config: ModelConfig, grid: Grid, iteration: int, optimizer: ShardedOptimizer | None
) -> list[object]:
    """Megatron's common state (0.19 on): the part that ``inspect`` and Megatron read, and the optimizer's numbers."""
    dtype = max((one.shard.dtype for one in shards.owned if len(one.shard.shape) == 2), default=config.dtype)
    if dtype in DTYPE_BYTES:
        config = replace(config, dtype=cast(DType, dtype))
    state: dict[str, object] = {
        "args": argparse.Namespace(**saved_arguments(config, grid), iteration=iteration),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
    if optimizer is not None:
        group = {**optimizer.settings(), "step": optimizer.steps}
        step = torch.tensor(float(optimizer.steps))
        state["optimizer"] = {"state": {"common_step": step}, "param_groups": [group]}
    return [state]
