"""Any trainer grid to any engine grid: every final buffer is what a cold load leaves, whatever was there before.

Simulated ranks: real cuts, shards and padding of a trainer, and the real update path of each engine rank.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from checkpoint_files import random_tensors
from refit_harness import Rank, cold_digest
from trainer_ranks import trainer_ranks

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.refit.orders import DiskOrder

DENSE = ModelConfig(
    family="llama",
    num_layers=2,
    hidden_size=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=4,
    ffn_size=40,
    vocab_size=50,
    vocab_rows=52,
    max_context=64,
)
MOE = replace(
    DENSE,
    family="qwen3_moe",
    ffn_size=0,
    qk_norm=True,
    moe=MoeConfig(num_experts=4, top_k=2, ffn_size=20, normalise_top_k=True),
)
MODELS = {
    "untied": DENSE,
    "tied": replace(DENSE, tied=True),
    "biased": replace(DENSE, family="qwen2", qkv_bias=True, tied=True),
    "all-biases": replace(DENSE, qkv_bias=True, proj_bias=True, mlp_bias=True, qk_norm=True),
    "moe": MOE,
    # Rows that two engine ranks cannot share evenly: the second one's last row is padding.
    "ragged": replace(DENSE, vocab_size=51, vocab_rows=51),
}
TPS, GTPS, ALIGNMENTS, PPS, ENGINE_TPS = (1, 2, 4), (1, 2, 4, 8), (1, 32, 128), (1, 2), (1, 2)


@cache
def engine_rank(name: str, tp: int, rank: int) -> tuple[Rank, str]:
    """An engine rank, and the digest that a cold load has there."""
    config = MODELS[name]
    digest = cold_digest(config, 1, rank, tp, torch.bfloat16)
    return Rank(config, tp_rank=rank, tp_size=tp, dtype=torch.bfloat16), digest


def corrupt(rank: Rank, generator: torch.Generator) -> None:
    """Random bits in every byte of both sets, padding too."""
    for target in (*rank.store.live, *rank.store.staged):
        bits = target.tensor.view(-1).view(torch.uint8)
        bits.random_(0, 256, generator=generator)


def wrong_digests(name: str, grid: Grid, memory: str) -> list[str]:
    """Where an update from this grid does not end in what a cold load leaves."""
    config = MODELS[name]
    source = trainer_ranks(config, grid, random_tensors(config, 1))
    wrong: list[str] = []
    for tp in ENGINE_TPS:
        for number in range(tp):
            rank, expected = engine_rank(name, tp, number)
            corrupt(rank, torch.Generator().manual_seed(grid.tp * 100 + grid.gtp))
            rank.disk["trainer"] = lambda: source
            rank.reports.clear()
            rank.stage("trainer", DiskOrder(path="trainer"), memory=memory)
            vote = rank.vote("trainer")
            assert vote.error is None, (grid, vote.error)
            committed = rank.weights.commit("trainer", "1")
            if not committed == expected == rank.weights.checksum():
                wrong.append(f"{name} from {grid} to rank {number} of {tp}")
    return wrong


@pytest.mark.parametrize("gtp", GTPS)
@pytest.mark.parametrize("tp", TPS)
@pytest.mark.parametrize("name", ["untied", "tied", "biased", "all-biases"])
def test_dense_model_from_any_grid(name: str, tp: int, gtp: int) -> None:
    grids = [Grid(tp=tp, gtp=gtp, alignment=a, pp=pp) for a, pp in itertools.product(ALIGNMENTS, PPS)]

    assert [wrong for grid in grids for wrong in wrong_digests(name, grid, "staged")] == []


@pytest.mark.parametrize("gtp", GTPS)
@pytest.mark.parametrize("tp", TPS)
def test_moe_model_from_any_grid_with_expert_parallel_sizes_of_its_own(tp: int, gtp: int) -> None:
    grids = [
        Grid(tp=tp, gtp=gtp, alignment=alignment, pp=pp, ep=ep, etp=etp, egtp=egtp)
        for alignment, pp, (ep, etp, egtp) in itertools.product(ALIGNMENTS, PPS, [(1, 1, 1), (2, 1, 4), (4, 2, 2)])
    ]

    assert [wrong for grid in grids for wrong in wrong_digests("moe", grid, "staged")] == []


@pytest.mark.parametrize("gtp", GTPS)
def test_vocabulary_that_the_engine_pads_and_the_trainer_pads_otherwise(gtp: int) -> None:
    grids = [Grid(gtp=gtp, alignment=a, pp=pp) for a, pp in itertools.product(ALIGNMENTS, PPS)]

    assert [wrong for grid in grids for wrong in wrong_digests("ragged", grid, "staged")] == []


@pytest.mark.parametrize("name", MODELS)
def test_update_in_place_leaves_the_same_buffers(name: str) -> None:
    tp = 1 if name == "ragged" else 2

    assert wrong_digests(name, Grid(tp=tp, gtp=4, alignment=32, etp=tp, egtp=4, ep=2, pp=2), "inplace") == []


def test_trainer_that_holds_a_row_at_another_place_than_it_says_is_found_by_the_digest() -> None:
    """The matrix can fail: shards whose spans are off by one row."""
    config = MODELS["untied"]
    tensors = random_tensors(config, 1)
    name = "model.layers.0.mlp.up_proj.weight"
    rolled = {**tensors, name: tensors[name].roll(1, 0)}
    rank, expected = engine_rank("untied", 1, 0)
    rank.disk["trainer"] = lambda: trainer_ranks(config, Grid(tp=2, gtp=2), rolled)
    rank.reports.clear()
    rank.stage("trainer", DiskOrder(path="trainer"))

    assert rank.vote("trainer").digest != expected
