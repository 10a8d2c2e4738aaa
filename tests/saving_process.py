"""A process that saves one iteration after another until it is killed."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from checkpoint_model import dense_config, fill_everything, on_grid

from gtp_serve.layout.gtp import Grid
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.checkpoint_save import save
from gtp_serve.training.shard_map import ShardMap

CONFIG = dense_config(num_layers=1)
GRID = Grid(gtp=2, alignment=16)


def save_on_and_on(pipe: Connection, root: str, first: int, background: bool) -> None:
    """Iteration n holds the tensors of seed n; each is told before it begins and once it is complete."""
    torch.set_num_threads(1)

    def act(shards: ShardMap) -> None:
        optimizer = AdamW(shards, lr=0.1)
        tell: Any = pipe.send if shards.mesh.rank == 0 else lambda _told: None
        for iteration in range(first, first + 1000):
            fill_everything(shards, optimizer, CONFIG, seed=iteration)
            tell(("begins", iteration))
            saving = save(
                Path(root),
                shards,
                config=CONFIG,
                grid=GRID,
                iteration=iteration,
                optimizer=optimizer,
                background=background,
            )
            saving.wait()
            tell(("complete", iteration))

    on_grid(CONFIG, GRID, act)
