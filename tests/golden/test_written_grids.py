"""The fixture models, rewritten as trainers on every grid would save them: all load to the same bits and logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from parity.model_harness import PagedRun
from safetensors.torch import load_file
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import Grid, shard_rows
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import Checkpoint, open_checkpoint
from gtp_serve.loaders.megatron_writer import write_checkpoint
from gtp_serve.models.decoder import build_decoder
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.plan import build_plan

DATA = Path(__file__).resolve().parents[1] / "data"
#: A committed checkpoint of each model, whose tensors test_fixture_truth compares with the truth.
MODELS = {"llama": "llama-tp1-pp2", "qwen2": "qwen2-tp2-pp1-mcore016", "moe": "moe-tp1-pp1-ep2"}
SIZES = [(tp, gtp, alignment) for tp in (1, 2, 4) for gtp in (1, 2, 3, 4, 8) for alignment in (1, 16, 32, 128)]


@cache
def model(name: str) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    checkpoint = open_checkpoint(DATA / "megatron" / MODELS[name])
    try:
        return checkpoint.config, dict(checkpoint.tensors())
    finally:
        checkpoint.close()


def grid_of(config: ModelConfig, tp: int, gtp: int, alignment: int) -> Grid:
    """Experts are cut by the same sizes as dense weights."""
    if config.moe is None:
        return Grid(tp=tp, gtp=gtp, alignment=alignment)
    return Grid(tp=tp, gtp=gtp, etp=tp, egtp=gtp, alignment=alignment)


def can_be_padded(config: ModelConfig, tp: int, gtp: int, alignment: int) -> bool:
    """Megatron halves fc1 shards of the padded layout, so their rows must be even."""
    ffn = config.moe.ffn_size if config.moe else config.ffn_size
    return gtp == 1 or shard_rows(2 * ffn // tp, gtp, alignment) % 2 == 0


def logits_of(checkpoint: Checkpoint, input_ids: Tensor) -> Tensor:
    """Float32 logits through the one path by which weights reach a decoder."""
    decoder = build_decoder(checkpoint.config, dtype=torch.float32, device="cpu")
    targets = decoder.targets()
    plan = build_plan(checkpoint.source.shards(), [t.shard for t in targets], logical_tensors(checkpoint.config))
    apply_plan(plan, checkpoint.source, targets)
    run = PagedRun(decoder)
    return run.step([(run.add(), input_ids.tolist())])[0]


@pytest.mark.parametrize("layout", ["padded", "logical"])
@pytest.mark.parametrize(("tp", "gtp", "alignment"), SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_any_grid_loads_to_the_same_bits_and_the_recorded_logits(
    name: str, tp: int, gtp: int, alignment: int, layout: str, tmp_path: Path
) -> None:
    config, tensors = model(name)
    grid = grid_of(config, tp, gtp, alignment)
    if layout == "padded" and not can_be_padded(config, tp, gtp, alignment):
        with pytest.raises(UsageError, match="cannot be halved"):
            write_checkpoint(tmp_path, config, tensors, grid, layout="padded")
        return
    write_checkpoint(tmp_path, config, tensors, grid, layout=layout, pad_value=None)  # type: ignore[arg-type]
    recorded = load_file(DATA / "truth" / f"{name}-logits.safetensors")

    checkpoint = open_checkpoint(tmp_path)
    try:
        loaded = dict(checkpoint.tensors())
        logits = logits_of(checkpoint, recorded["input_ids"])
    finally:
        checkpoint.close()

    assert replace(checkpoint.config, family=config.family) == config
    assert loaded.keys() == tensors.keys()
    for key, value in tensors.items():
        assert torch.equal(loaded[key], value), key
    torch.testing.assert_close(logits, recorded["logits"], rtol=0, atol=1e-4)
