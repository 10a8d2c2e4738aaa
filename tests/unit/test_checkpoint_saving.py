"""What a save promises when something goes wrong, or on."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoint_model import (
    Hall,
    ThreadMesh,
    check_everything,
    dense_config,
    fill_everything,
    on_grid,
    on_grid_alone,
    spoil,
)
from checkpoint_runs import load_run, save_run
from torch.distributed.checkpoint.filesystem import FileSystemReader
from training_ranks import on_threads, thread_groups

from gtp_serve.config import ModelConfig
from gtp_serve.errors import CheckpointError, LayoutMismatch, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.training import checkpoint_files
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.checkpoint_load import load
from gtp_serve.training.checkpoint_save import save
from gtp_serve.training.decoder import TrainDecoder, build_train_decoder
from gtp_serve.training.gather import GatherChain
from gtp_serve.training.gradients import clip_gradients
from gtp_serve.training.loss import target_logprobs
from gtp_serve.training.shard_map import ShardMap
from gtp_serve.training.shards import GTPShard


def test_frozen_layers_have_weights_and_no_state_in_the_file(tmp_path: Path) -> None:
    config = dense_config()

    def freeze(shards: ShardMap) -> AdamW:
        for index, parameter in enumerate(shards.parameters):
            parameter.requires_grad_(not any(n.startswith("model.layers.0.") for n in shards.names(index)))
        return AdamW(shards, lr=0.1)

    def write(shards: ShardMap) -> None:
        optimizer = freeze(shards)
        fill_everything(shards, optimizer, config)
        save(tmp_path, shards, config=config, grid=Grid(tp=2), iteration=3, optimizer=optimizer)

    def read(shards: ShardMap) -> None:
        optimizer = freeze(shards)
        spoil(shards, optimizer)
        load(tmp_path, shards, config=config, optimizer=optimizer)
        check_everything(shards, optimizer, config)

    on_grid(config, Grid(tp=2), write)
    on_grid_alone(config, Grid(), read)
    keys = FileSystemReader(tmp_path / "iter_0000003").read_metadata().state_dict_metadata
    assert "optimizer.state.exp_avg.decoder.layers.1.mlp.linear_fc2.weight" in keys
    assert "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight" not in keys


def test_a_save_in_the_background_keeps_the_values_of_its_beginning(tmp_path: Path) -> None:
    config, grid = dense_config(), Grid(tp=2, gtp=2, alignment=16)
    started = threading.Event()

    def act(shards: ShardMap) -> None:
        optimizer = AdamW(shards, lr=0.1)
        optimizer.steps = 5
        fill_everything(shards, optimizer, config)
        saving = save(tmp_path, shards, config=config, grid=grid, iteration=3, optimizer=optimizer, background=True)
        spoil(shards, optimizer)
        started.set()
        assert saving.wait() == tmp_path / "iter_0000003"
        assert saving.done()

    on_grid(config, grid, act)
    load_run(tmp_path, config, Grid(gtp=2, alignment=16))


def test_an_iteration_is_never_written_twice_and_two_saves_never_meet(tmp_path: Path) -> None:
    config = dense_config()
    save_run(tmp_path, config, Grid())
    with pytest.raises(UsageError, match="exists already"):
        save_run(tmp_path, config, Grid(tp=2))
    attempt, lock = checkpoint_files.begin(tmp_path, 4)
    with pytest.raises(UsageError, match="another save is under way"):
        save_run(tmp_path, config, Grid(), iteration=5)
    checkpoint_files.unlock(lock)
    assert attempt.partial.exists()
    save_run(tmp_path, config, Grid(), iteration=5)
    assert not attempt.partial.exists()


def test_a_rank_that_cannot_write_fails_the_save_on_all_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, grid = dense_config(), Grid(tp=2, gtp=2, alignment=16)
    save_run(tmp_path, config, grid, iteration=2)
    real, failures = checkpoint_files._append, []

    def full(file: Any, key: str, *rest: Any) -> Any:
        # An early one: parts of later chunks must still be sent to the other ranks.
        if key.endswith("word_embeddings.weight") and file.name.endswith("__1_0.distcp"):
            raise OSError(28, "No space left on device")
        return real(file, key, *rest)

    monkeypatch.setattr(checkpoint_files, "_append", full)

    def act(shards: ShardMap) -> None:
        with pytest.raises(CheckpointError, match=r"rank 1 could not write .*No space left") as failure:
            save(tmp_path, shards, config=config, grid=grid, iteration=3)
        failures.append(failure)

    on_grid(config, grid, act)
    assert len(failures) == 4
    (partial_folder,) = tmp_path.glob(".iter_0000003.partial-*")
    votes = [msgspec.json.decode((partial_folder / f"vote_{rank}").read_bytes()) for rank in range(4)]
    assert [bool(vote["failure"]) for vote in votes] == [False, True, False, False]  # nobody waited for the others
    assert not (tmp_path / "iter_0000003").exists()
    assert open_checkpoint(tmp_path).facts.iteration == 2
    monkeypatch.undo()
    save_run(tmp_path, config, grid)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["iter_0000002", "iter_0000003"]


def test_a_root_that_cannot_be_written_is_told_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")

    def act(shards: ShardMap) -> None:
        with pytest.raises(CheckpointError, match="cannot be written"):
            save(tmp_path / "file" / "root", shards, config=dense_config(), grid=Grid(gtp=2), iteration=1)

    on_grid(dense_config(), Grid(gtp=2), act)


def test_a_model_that_is_not_the_described_one_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = dense_config()
    for other, words in (
        (dense_config(num_layers=3), "lacks 12 tensors: model.layers.2"),
        (dense_config(qkv_bias=False), "has, unknown to its description, 6 tensors"),
        (dense_config(ffn_size=60), "missing"),
    ):
        with pytest.raises(LayoutMismatch, match=words):
            on_grid(config, Grid(), partial(_save_as, tmp_path, other))
    assert not list(tmp_path.iterdir())


def _save_as(root: Path, config: ModelConfig, shards: ShardMap) -> None:
    save(root, shards, config=config, grid=Grid(), iteration=3)


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    config = dense_config()
    save_run(tmp_path, config, Grid())
    other = dense_config(ffn_size=60)

    def act(shards: ShardMap) -> None:
        fill_everything(shards, None, other)
        with pytest.raises(LayoutMismatch, match=r"another model: 6 tensors differ, the first is model.layers.0.mlp"):
            load(tmp_path, shards, config=other)
        for parameter in shards.parameters:
            assert parameter.isfinite().all()

    on_grid(other, Grid(), act)


def test_what_was_gathered_ahead_is_dropped_by_a_load(tmp_path: Path) -> None:
    config = dense_config()
    save_run(tmp_path, config, Grid())

    def act(shards: ShardMap) -> None:
        chain = next(p.state.chain for p in shards.parameters if isinstance(p, GTPShard))
        assert chain is not None
        called = []
        chain.invalidate = lambda: called.append(1)  # type: ignore[method-assign]
        load(tmp_path, shards, config=config)
        assert called == [1]

    on_grid_alone(config, Grid(), act)


def test_a_run_that_is_saved_and_resumed_on_another_grid_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    config = dense_config(dtype="float32", hidden_size=48)
    ids = torch.randint(0, config.vocab_size, (12,), generator=torch.Generator().manual_seed(1))

    def train(model: TrainDecoder, optimizer: AdamW, steps: int) -> None:
        for _ in range(steps):
            logprobs = target_logprobs(model(ids, [7, 5]), ids.roll(-1), config, model.placement)
            torch.autograd.backward(-logprobs.mean())
            model.chain.finish_gradients()
            clip_gradients(optimizer.shards, 0.5)
            optimizer.step()
            optimizer.zero_gradients()

    first = build_train_decoder(config, dtype=torch.float32, deterministic=True)
    first.initialise(3)
    optimizer = AdamW(first, lr=1e-2)
    train(first, optimizer, 2)
    save(tmp_path, first, config=config, grid=Grid(), iteration=2, optimizer=optimizer)
    train(first, optimizer, 2)
    save(tmp_path, first, config=config, grid=Grid(), iteration=4, optimizer=optimizer)

    groups = thread_groups(Grid(gtp=2), 2)
    hall = Hall(2)

    def resume(rank: int) -> None:
        chain = GatherChain(accumulation="float32")
        model = build_train_decoder(
            config, dtype=torch.float32, groups=groups[rank], chain=chain, alignment=16, deterministic=True
        )
        shards = ShardMap.of(model, ThreadMesh(hall, rank))
        again = AdamW(shards, lr=1e-2)
        assert load(tmp_path, shards, config=config, optimizer=again, iteration=2).optimizer_steps == 2
        train(model, again, 2)
        save(tmp_path / "resumed", shards, config=config, grid=Grid(gtp=2, alignment=16), iteration=4, optimizer=again)

    on_threads(2, resume)
    one, other = (open_checkpoint(root) for root in (tmp_path, tmp_path / "resumed"))
    for (_, wanted), (_, found) in zip(one.tensors(), other.tensors(), strict=True):
        # The clipping factor is a quotient of norms whose squares were added in another order.
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    one.close()
    other.close()
