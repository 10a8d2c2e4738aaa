"""The two sets of weights of the kill matrix, who holds what of them, and what each of them would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from checkpoint_files import SMALL, random_tensors, write_hf
from parity.model_harness import PagedRun, filled_decoder
from safetensors.torch import save_file
from torch import Tensor
from transfer_world import Pair, trainer_ranks

from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import stored_name
from gtp_serve.models.decoder import Decoder

CONFIG = replace(SMALL, max_context=1024, dtype="float32")
GRID = Grid(gtp=2, alignment=32)
PROMPT = (3, 1, 4, 1, 5)
_SEEDS = {"a": 1, "b": 2}
_CLOSE = 2e-3
"""How far below the best logit a chosen token may be: sums are added in another order on two ranks."""


@cache
def values_of(weights: str) -> dict[str, Tensor]:
    """Logical tensors that bfloat16 holds exactly, so that every way to the server brings the same bits."""
    found = random_tensors(CONFIG, _SEEDS[weights])
    return {name: tensor.to(torch.bfloat16).float() for name, tensor in found.items()}


@cache
def pairs_of(weights: str) -> list[list[Pair]]:
    """What each trainer rank holds."""
    return trainer_ranks(CONFIG, GRID, values_of(weights))


def write_folder(folder: Path, weights: str) -> Path:
    """A checkpoint of them."""
    write_hf(folder, CONFIG)
    stored = {stored_name(key, CONFIG.family): value for key, value in values_of(weights).items()}
    save_file(stored, folder / "model.safetensors")
    return folder


@cache
def _decoder(weights: str) -> Decoder:
    return filled_decoder(CONFIG, values_of(weights))


@torch.inference_mode()
def wrong_tokens(weights: str, tokens: Sequence[int], start: int, end: int) -> list[int]:
    """Places in ``tokens[start:end]`` where these weights, having read all before, would not have said that."""
    run = PagedRun(_decoder(weights), num_blocks=CONFIG.max_context // 4)
    logits = run.step([(run.add(), tokens[:end])])[0][start - 1 : end - 1]
    chosen = logits.gather(1, torch.tensor(tokens[start:end]).unsqueeze(1)).squeeze(1)
    short: Any = logits.max(dim=1).values - chosen
    return [start + place for place in range(end - start) if short[place] > _CLOSE]
