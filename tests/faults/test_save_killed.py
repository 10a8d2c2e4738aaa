"""A save that is killed at any moment leaves the one before it, and is never taken for complete."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from checkpoint_model import check_everything, on_grid_alone, spoil
from saving_process import CONFIG, save_on_and_on
from torch.distributed.checkpoint.filesystem import FileSystemReader

from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders.megatron_folder import iteration_folders, tracked_iteration
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.checkpoint_load import load
from gtp_serve.training.shard_map import ShardMap

KILLS = 20
SECONDS = 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_twenty_saves_killed_at_random_moments_leave_the_one_before(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "saving_process"])
    chance, complete, left_behind, span = random.Random(3), 0, 0, 0.2
    for kill in range(KILLS):
        mine, theirs = context.Pipe()
        process = context.Process(
            target=save_on_and_on, args=(theirs, str(tmp_path), complete + 1, kill % 2 == 1), daemon=True
        )
        process.start()
        theirs.close()
        begun = 0.0
        try:
            # Let one save end, so that the moment is one of a save's own life and not of the start of a process.
            for what, number in (("begins", complete + 1), ("complete", complete + 1), ("begins", complete + 2)):
                assert mine.poll(SECONDS)
                assert mine.recv() == (what, number)
                if what == "complete":
                    span = time.monotonic() - begun
                begun = time.monotonic()
            time.sleep(chance.uniform(0, 1.1 * span))
        finally:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        acknowledged = complete + 1
        while mine.poll():
            try:
                what, number = mine.recv()
            except EOFError:
                break
            acknowledged = max(acknowledged, number if what == "complete" else 0)
        mine.close()
        left_behind += any(path.name.startswith(".iter") for path in tmp_path.iterdir())
        complete = _check(tmp_path, acknowledged)
    assert left_behind > KILLS // 4, "too few saves were hit: the test shows nothing"


def _check(root: Path, acknowledged: int) -> int:
    """The newest iteration, which must be the last that was acknowledged, or the one that was under way."""
    folders = iteration_folders(root)
    newest = max(folders)
    assert acknowledged <= newest <= acknowledged + 1
    tracked = tracked_iteration(root)
    assert tracked is not None
    assert acknowledged <= tracked <= newest
    assert all((folder / ".metadata").exists() for folder in folders.values())

    def act(shards: ShardMap) -> None:
        optimizer = AdamW(shards, lr=0.1)
        for number in {newest, tracked}:
            spoil(shards, optimizer)
            loaded = load(root, shards, config=CONFIG, optimizer=optimizer, iteration=number, threads=1)
            assert loaded.iteration == number
            check_everything(shards, optimizer, CONFIG, seed=number)
        assert load(root, shards, config=CONFIG, threads=1).iteration == newest

    on_grid_alone(CONFIG, Grid(), act)
    FileSystemReader(folders[newest]).read_metadata()
    for old in sorted(folders)[:-2]:
        for file in folders[old].iterdir():
            file.unlink()
        folders[old].rmdir()
    return newest
