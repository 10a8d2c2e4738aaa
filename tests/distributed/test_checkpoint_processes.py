"""Saving, loading and Muon over real process groups: four processes joined by gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_model import dense_config, moe_config
from training_ranks import ProcessRanks, gloo_processes

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders.checkpoint import open_checkpoint

pytestmark = pytest.mark.distributed

CASES = "saving_cases"


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    with gloo_processes(4) as running:
        yield running


@pytest.mark.parametrize(
    ("config", "saved", "loaded", "muon", "background"),
    [
        (dense_config(), Grid(tp=2, gtp=2, alignment=16), Grid(gtp=4, alignment=32), False, False),
        (dense_config(), Grid(gtp=4, alignment=32), Grid(tp=2, alignment=1), True, True),
        (moe_config(), Grid(gtp=2, ep=2, egtp=2, alignment=16), Grid(pp=2, gtp=2, egtp=2), False, True),
    ],
)
def test_four_processes_save_on_one_grid_and_load_on_another(
    ranks: ProcessRanks,
    tmp_path: Path,
    config: ModelConfig,
    saved: Grid,
    loaded: Grid,
    muon: bool,
    background: bool,
) -> None:
    common: dict[str, Any] = {"root": str(tmp_path), "config": config, "muon": muon}

    written = ranks.run(CASES, "write", saved, **common, background=background, at=saved)
    steps = ranks.run(CASES, "read", loaded, **common, at=loaded)

    assert written == ["iter_0000002"] * 4
    assert steps == [7] * 4


def test_muon_on_four_processes_gives_the_same_bits_on_every_grid(ranks: ProcessRanks, tmp_path: Path) -> None:
    config = dense_config(dtype="float32")
    found, norms = [], []
    for number, grid in enumerate((Grid(), Grid(tp=2, gtp=2, alignment=16), Grid(gtp=4, alignment=32))):
        root = tmp_path / str(number)
        told = ranks.run(CASES, "muon_steps", grid, config=config, at=grid, root=str(root))
        norms += [norm for norm, _ in told]
        checkpoint = open_checkpoint(root)
        found.append(dict(checkpoint.tensors()))
        checkpoint.close()
    assert max(norms) == pytest.approx(min(norms), rel=1e-12)
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in found[0])


def test_a_save_and_a_load_need_memory_for_about_one_tensor(ranks: ProcessRanks, tmp_path: Path) -> None:
    grid = Grid(gtp=4, alignment=16)
    for largest, saving, loading in ranks.run(CASES, "growth", grid, root=str(tmp_path), at=grid):
        assert saving < 4 * largest, (largest, saving)
        assert loading < 4 * largest, (largest, loading)
