"""What the gloo processes of tests/distributed/test_checkpoint_processes.py run."""

from __future__ import annotations

import resource

import torch
from checkpoint_model import Parameters, check_everything, dense_config, fill, fill_everything, spoil, truth_of

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.checkpoint_load import load
from gtp_serve.training.checkpoint_save import save
from gtp_serve.training.gradients import gradient_norm
from gtp_serve.training.groups import ParallelGroups
from gtp_serve.training.muon import Muon
from gtp_serve.training.shard_map import ShardMap


def write(
    groups: ParallelGroups, rank: int, *, root: str, config: ModelConfig, at: Grid, muon: bool, background: bool
) -> str:
    """Save known tensors; in the background, spoil them meanwhile."""
    shards = ShardMap.of(Parameters(config, at, groups))
    optimizer = Muon(shards, lr=0.1) if muon else AdamW(shards, lr=0.1)
    optimizer.steps = 7
    fill_everything(shards, optimizer, config)
    saving = save(
        root, shards, config=config, grid=at, iteration=2, optimizer=optimizer, background=background, timeout=60
    )
    spoil(shards, optimizer)
    return saving.wait().name


def read(groups: ParallelGroups, rank: int, *, root: str, config: ModelConfig, at: Grid, muon: bool) -> int | None:
    """Load them into sentinel-filled memory and compare every bit."""
    shards = ShardMap.of(Parameters(config, at, groups))
    optimizer = Muon(shards, lr=0.1) if muon else AdamW(shards, lr=0.1)
    spoil(shards, optimizer)
    loaded = load(root, shards, config=config, optimizer=optimizer)
    check_everything(shards, optimizer, config)
    return loaded.optimizer_steps


def muon_steps(groups: ParallelGroups, rank: int, *, config: ModelConfig, at: Grid, root: str) -> tuple[float, str]:
    """Two steps of Muon by known gradients; the gradient's norm, and a save of the outcome."""
    shards = ShardMap.of(Parameters(config, at, groups))
    fill_everything(shards, None, config)
    optimizer = Muon(shards, lr=0.02)
    norm = 0.0
    for step in range(2):
        truth = truth_of(config, 50 + step, torch.float32)
        for parameter, shard in zip(shards.parameters, shards.shards, strict=True):
            grad = torch.zeros(shard.shape)
            fill(shard, grad, truth)
            parameter.grad = grad
        norm = gradient_norm(shards)
        optimizer.step()
    return norm, save(root, shards, config=config, grid=at, iteration=1, optimizer=optimizer).wait().name


def growth(groups: ParallelGroups, rank: int, *, root: str, at: Grid) -> tuple[float, float, float]:
    """(MiB of the largest tensor, MiB by which a save and then a load make this process's peak grow)."""
    config = dense_config(
        num_layers=16, hidden_size=512, num_heads=8, num_kv_heads=8, head_dim=64, ffn_size=2048, dtype="float32"
    )
    shards = ShardMap.of(Parameters(config, at, groups))
    for parameter in shards.parameters:
        parameter.data.fill_(1.0)
    small = ShardMap.of(Parameters(dense_config(), at, groups))
    save(f"{root}/small", small, config=dense_config(), grid=at, iteration=1)  # whatever the first time needs
    load(f"{root}/small", small, config=dense_config())
    peaks = [_peak()]
    save(root, shards, config=config, grid=at, iteration=1)
    peaks.append(_peak())
    load(root, shards, config=config, threads=1)
    peaks.append(_peak())
    return 2 * 2048 * 512 * 4 / 2**20, peaks[1] - peaks[0], peaks[2] - peaks[1]


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
