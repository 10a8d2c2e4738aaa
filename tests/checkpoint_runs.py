"""Whole runs, weights and optimizer state, saved on one grid and compared on another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint_model import check_everything, fill_everything, on_grid, on_grid_alone, spoil

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.checkpoint_load import load
from gtp_serve.training.checkpoint_save import save
from gtp_serve.training.muon import Muon
from gtp_serve.training.optimizer import ShardedOptimizer
from gtp_serve.training.shard_map import ShardMap


def optimizer_of(kind: str, shards: ShardMap) -> ShardedOptimizer:
    return Muon(shards, lr=0.1) if kind == "muon" else AdamW(shards, lr=0.1)


def save_run(root: Path, config: ModelConfig, grid: Grid, kind: str = "adamw", dp: int = 1, **keywords: Any) -> None:
    def act(shards: ShardMap) -> None:
        optimizer = optimizer_of(kind, shards)
        optimizer.steps = 5
        fill_everything(shards, optimizer, config)
        given: dict[str, Any] = {"config": config, "grid": grid, "iteration": 3, "optimizer": optimizer} | keywords
        save(root, shards, **given).wait()

    on_grid(config, grid, act, dp=dp)


def load_run(root: Path, config: ModelConfig, grid: Grid, kind: str = "adamw", steps: int = 5) -> None:
    def act(shards: ShardMap) -> None:
        optimizer = optimizer_of(kind, shards)
        spoil(shards, optimizer)
        loaded = load(root, shards, config=config, optimizer=optimizer, threads=1)
        assert (loaded.iteration, loaded.optimizer_steps, optimizer.steps) == (3, steps, steps)
        check_everything(shards, optimizer, config)

    if kind == "muon":
        on_grid(config, grid, act)
    else:
        on_grid_alone(config, grid, act)  # a load is nothing that ranks do together
