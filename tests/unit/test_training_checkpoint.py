"""Saving on one grid and loading on another."""

from __future__ import annotations

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_model import (
    check_everything,
    dense_config,
    moe_config,
    on_grid,
    on_grid_alone,
    spoil,
    truth_of,
)
from checkpoint_runs import load_run, save_run
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_state_dict

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.megatron_save import plan_save
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.loaders.megatron_writer import write_checkpoint
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.checkpoint_load import load
from gtp_serve.training.checkpoint_save import save
from gtp_serve.training.exchange import slices
from gtp_serve.training.shard_map import ShardMap

DENSE = [
    Grid(),
    Grid(tp=2),
    Grid(gtp=2, alignment=16),
    Grid(gtp=4, alignment=16),
    Grid(gtp=3, alignment=4),
    Grid(tp=2, gtp=2, alignment=16),
    Grid(tp=2, gtp=4, alignment=32),
    Grid(pp=2, gtp=2, alignment=1),
]
MOE = [
    Grid(),
    Grid(ep=2),
    Grid(egtp=2, gtp=2, alignment=16),
    Grid(egtp=4, gtp=4, alignment=32),
    Grid(tp=2, etp=2, gtp=2, egtp=2, alignment=16),
    Grid(ep=2, egtp=2, gtp=4, alignment=8),
    Grid(tp=2, ep=2, gtp=2, egtp=1, pp=2, alignment=1),
    Grid(tp=2, etp=1, ep=4, gtp=2, alignment=16),
]


def _name(grid: Grid) -> str:
    sizes = {"tp": grid.tp, "gtp": grid.gtp, "pp": grid.pp, "ep": grid.ep, "etp": grid.etp, "egtp": grid.egtp}
    return "-".join(f"{name}{size}" for name, size in sizes.items() if size > 1) + f"-a{grid.alignment}"


@pytest.mark.parametrize("number", range(len(DENSE)), ids=[_name(grid) for grid in DENSE])
def test_a_dense_run_saved_on_one_grid_resumes_on_another(number: int, tmp_path: Path) -> None:
    save_run(tmp_path, dense_config(), DENSE[number])
    load_run(tmp_path, dense_config(), DENSE[(number + 3) % len(DENSE)])


@pytest.mark.parametrize("number", range(len(MOE)), ids=[_name(grid) for grid in MOE])
def test_an_moe_run_saved_on_one_grid_resumes_on_another(number: int, tmp_path: Path) -> None:
    save_run(tmp_path, moe_config(), MOE[number])
    load_run(tmp_path, moe_config(), MOE[(number + 3) % len(MOE)])


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_sixty_four_more_pairs_of_grids(number: int, tmp_path: Path) -> None:
    for name, config, grids in (("dense", dense_config(), DENSE), ("moe", moe_config(), MOE)):
        save_run(tmp_path / name, config, grids[number])
        for step in (1, 2, 4, 6):
            load_run(tmp_path / name, config, grids[(number + step) % len(grids)])


@pytest.mark.parametrize(
    ("config", "grid"), [(dense_config(), DENSE[5]), (moe_config(), MOE[4]), (dense_config(tied=True), DENSE[3])]
)
def test_muons_momentum_and_adams_moments_lie_side_by_side(config: ModelConfig, grid: Grid, tmp_path: Path) -> None:
    save_run(tmp_path, config, grid, kind="muon")
    for other in (Grid(), Grid(gtp=2, egtp=2 if config.moe else 1, alignment=16)):
        load_run(tmp_path, config, other, kind="muon")


def test_copies_along_data_parallel_axes_are_written_once_and_by_all(tmp_path: Path) -> None:
    config, grid = dense_config(), Grid(gtp=2, alignment=1)
    save_run(tmp_path / "many", config, grid, dp=3)
    save_run(tmp_path / "one", config, grid)
    many, one = (_sizes(tmp_path / name) for name in ("many", "one"))
    assert len(many) == 6
    assert max(many) < 2 * min(many)
    assert sum(many) == pytest.approx(sum(one), rel=0.05)
    load_run(tmp_path / "many", config, Grid())


def _sizes(root: Path) -> list[int]:
    return [file.stat().st_size for file in sorted(root.glob("iter_*/*.distcp"))]


def test_the_file_is_what_a_megatron_trainer_without_padding_would_leave(tmp_path: Path) -> None:
    config, grid = dense_config(), DENSE[6]
    save_run(tmp_path, config, grid)
    plan = {saved.key: saved for saved in plan_save(config, grid, "logical")}
    metadata = FileSystemReader(tmp_path / "iter_0000003").read_metadata()
    for prefix, dtype in (("", torch.bfloat16), ("optimizer.state.exp_avg.", torch.float32)):
        for key, saved in plan.items():
            found = metadata.state_dict_metadata[prefix + key]
            assert isinstance(found, TensorStorageMetadata)
            assert tuple(found.size) == saved.shape
            assert found.properties.dtype == dtype
            wanted = {(c.box.start, c.box.shape) for c in saved.chunks if c.box.volume}
            assert {(tuple(c.offsets), tuple(c.sizes)) for c in found.chunks} == wanted
    assert all(_payload(metadata, index) + 4096 > info.length for index, info in metadata.storage_data.items())
    slots = {key.split(".")[2] for key in metadata.state_dict_metadata if key.startswith("optimizer.")}
    assert slots == {"exp_avg", "exp_avg_sq", "fp32_param"}
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3\n"
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]
    names = sorted(path.name for path in (tmp_path / "iter_0000003").iterdir())
    assert names == sorted([".metadata", "metadata.json", *(f"__{rank}_0.distcp" for rank in range(8))])


def _payload(metadata: Any, index: Any) -> int:
    """Bytes that an item needs: a view's whole storage in its place would be much more."""
    stored = metadata.state_dict_metadata[index.fqn]
    if not isinstance(stored, TensorStorageMetadata):
        return 4096
    sizes = next(chunk.sizes for chunk in stored.chunks if chunk.offsets == index.offset)
    return int(sizes.numel() * stored.properties.dtype.itemsize)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_reader_finds_the_same_tensors(tmp_path: Path) -> None:
    config = dense_config()
    save_run(tmp_path, config, DENSE[3])
    key = "decoder.layers.mlp.linear_fc1.weight"
    found = {key: torch.zeros(2, 2 * config.ffn_size, config.hidden_size, dtype=torch.bfloat16)}
    load_state_dict(found, checkpoint_id=tmp_path / "iter_0000003", no_dist=True)
    truth = truth_of(config, 1, torch.bfloat16)
    for layer in range(2):
        parts = [truth[f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(found[key][layer], torch.cat(parts))


def test_inspect_and_the_server_read_what_was_saved(tmp_path: Path) -> None:
    config, grid = moe_config(), MOE[4]
    save_run(tmp_path, config, grid)
    checkpoint = open_checkpoint(tmp_path)
    try:
        assert checkpoint.facts.layout == "logical"
        saved = checkpoint.facts.saved
        assert (saved.tp, saved.gtp, saved.etp, saved.egtp) == (2, 2, 2, 2)
        assert checkpoint.config.moe == config.moe
        assert (checkpoint.config.dtype, checkpoint.facts.warnings) == ("bfloat16", ())
        truth = truth_of(config, 1, torch.bfloat16)
        for name, tensor in checkpoint.tensors():
            assert torch.equal(tensor, truth[name]), name
    finally:
        checkpoint.close()


@pytest.mark.parametrize(("config", "grid"), [(dense_config(), DENSE[6]), (moe_config(), MOE[3])])
def test_a_padded_file_goes_into_an_unsharded_model_and_back(config: ModelConfig, grid: Grid, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config, truth_of(config, 1, torch.bfloat16), grid, layout="padded", pad_value=None)

    def unsharded(shards: ShardMap) -> None:
        spoil(shards, None)
        assert load(tmp_path, shards, config=config).facts.layout == "padded"
        check_everything(shards, None, config)
        save(tmp_path / "back", shards, config=config, grid=Grid(), iteration=3)

    def sharded(shards: ShardMap) -> None:
        spoil(shards, None)
        load(tmp_path / "back", shards, config=config)
        check_everything(shards, None, config)

    on_grid(config, Grid(), unsharded)
    on_grid(config, grid, sharded)


def test_optimizer_state_of_a_padded_permuted_file_is_read_by_the_weights_rules(tmp_path: Path) -> None:
    config, grid = dense_config(dtype="float32"), Grid(tp=2, gtp=2, alignment=32)
    folders = [
        write_checkpoint(tmp_path / slot, config, truth_of(config, seed, torch.float32), grid, pad_value=None)
        for slot, seed in (("", 1), *((s, 1 + sum(map(ord, s))) for s in ("exp_avg", "exp_avg_sq")))
    ]
    _join(folders[0], dict(zip(("exp_avg", "exp_avg_sq"), folders[1:], strict=True)))

    def act(shards: ShardMap) -> None:
        optimizer = AdamW(shards, lr=0.1)
        spoil(shards, optimizer)
        load(folders[0], shards, config=config, optimizer=optimizer)
        check_everything(shards, optimizer, config)

    on_grid_alone(config, Grid(gtp=3, alignment=4), act)


def _join(folder: Path, slots: dict[str, Path]) -> None:
    """Make other checkpoints' weights the optimizer state of one."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for slot, other in slots.items():
        theirs = pickle.loads((other / ".metadata").read_bytes())
        for key, value in theirs.state_dict_metadata.items():
            if not key.startswith("common_state"):
                metadata.state_dict_metadata[f"optimizer.state.{slot}.{key}"] = value
        for index, info in theirs.storage_data.items():
            if not index.fqn.startswith("common_state"):
                named = dataclasses.replace(index, fqn=f"optimizer.state.{slot}.{index.fqn}")
                path = f"__{slot}_{info.relative_path.removeprefix('__')}"
                shutil.copyfile(other / info.relative_path, folder / path)
                metadata.storage_data[named] = dataclasses.replace(info, relative_path=path)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_megatrons_own_optimizer_state_is_loaded_with_its_step(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "data/megatron/tiny-tp2-pp1-fp32-with-optimizer"
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    checkpoint.close()
    key = "decoder.layers.mlp.linear_fc2.weight"
    stored = {f"optimizer.state.{s}.{key}": torch.zeros(2, 32, 48) for s in ("exp_avg", "exp_avg_sq")}
    load_state_dict(stored, checkpoint_id=checkpoint.path, no_dist=True)

    def act(shards: ShardMap) -> None:
        optimizer = AdamW(shards, lr=0.1)
        spoil(shards, optimizer)
        loaded = load(folder, shards, config=config, optimizer=optimizer)
        assert loaded.optimizer_steps is not None
        assert loaded.optimizer_steps > 0
        for index, shard in enumerate(shards.shards):
            for span in shard.spans:
                if span.name.endswith("down_proj.weight"):
                    whole = stored[f"optimizer.state.exp_avg.{key}"][int(span.name.split(".")[2])]
                    mine = optimizer.state[index]["exp_avg"]
                    assert torch.equal(mine[slices(span.local)], whole[slices(span.logical)])
                    assert mine[slices(span.local)].any()

    on_grid_alone(config, Grid(gtp=2, alignment=16), act)


def test_a_checkpoint_without_optimizer_state_is_refused_where_state_is_wanted(tmp_path: Path) -> None:
    config = dense_config(dtype="float32")

    def act(shards: ShardMap) -> None:
        save(tmp_path, shards, config=config, grid=Grid(), iteration=3)
        optimizer = AdamW(shards, lr=0.1)
        with pytest.raises(LayoutMismatch, match="no optimizer state exp_avg"):
            load(tmp_path, shards, config=config, optimizer=optimizer)

    on_grid(config, Grid(), act)


def test_masters_that_the_file_lacks_begin_as_the_loaded_weights(tmp_path: Path) -> None:
    wide, narrow = dense_config(dtype="float32"), dense_config()
    save_run(tmp_path, wide, Grid())

    def act(shards: ShardMap) -> None:
        optimizer = AdamW(shards, lr=0.1)
        spoil(shards, optimizer)
        load(tmp_path, shards, config=narrow, optimizer=optimizer)
        for index, parameter in enumerate(shards.parameters):
            assert torch.equal(optimizer.state[index]["fp32_param"], parameter.detach().float())

    on_grid_alone(narrow, Grid(gtp=2, alignment=16), act)
