"""Putting an engine together: captured steps stand where the decoder stands, and change no token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gtp_serve.assembly import build_pool, captures_steps, empty_decoder, fill_decoder, with_graphs
from gtp_serve.config import CacheConfig, EngineConfig
from gtp_serve.engine.capture import EagerCapture
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.layers.placement import Placement
from gtp_serve.loaders import open_checkpoint
from gtp_serve.models.decoder import Decoder
from gtp_serve.ops.table import PLAIN_PAGED
from gtp_serve.request import Request, SamplingParams

CKPT = Path(__file__).parents[1] / "data" / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
PROMPTS = [tuple(range(1, 2 + 3 * n)) for n in range(5)]


def engine_config() -> EngineConfig:
    checkpoint = open_checkpoint(CKPT)
    checkpoint.close()
    cache = CacheConfig(num_blocks=32, block_size=4)
    return EngineConfig(
        model=checkpoint.config, cache=cache, dtype="float32", max_context=64, max_running=4, prefix_cache=False
    )


def filled(config: EngineConfig, decoder: Decoder) -> Decoder:
    checkpoint = open_checkpoint(CKPT)
    try:
        fill_decoder(decoder, checkpoint, threads=1, progress=lambda done, total: None)
    finally:
        checkpoint.close()
    return decoder


def answers(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {str(n): [] for n in range(len(PROMPTS))}
    for n, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(max_new_tokens=6 + n, temperature=0.0)
        engine.add(Request(rid=str(n), input_ids=prompt, sampling=sampling))
    while engine.has_work():
        engine.check()
        for event in engine.step():
            tokens[event.rid] += event.token_ids
    return tokens


@pytest.mark.parametrize("changes", [{"graphs": False}, {"attention": "torch"}], ids=str)
def test_what_is_not_captured_has_no_scratch_block_in_its_pool(changes: dict[str, Any]) -> None:
    config = replace(engine_config(), **changes)
    decoder = empty_decoder(config)

    model, _ = with_graphs(config, decoder, build_pool(config, decoder))

    assert not captures_steps(config, decoder)
    assert model is decoder
    assert build_pool(config, decoder).num_blocks == 32


def test_native_steps_are_captured_once_for_all_numbers_of_rows() -> None:
    config = engine_config()
    decoder = filled(config, empty_decoder(config))
    pool = build_pool(config, decoder)

    model, between_steps = with_graphs(config, decoder, pool)
    between_steps()

    assert captures_steps(config, decoder)
    assert pool.num_blocks == 32 + SCRATCH_BLOCKS
    assert isinstance(model, DecodeGraphs)
    assert model.captured == [config.max_running]


def test_steps_captured_between_steps_give_the_tokens_of_the_decoder_alone() -> None:
    config = engine_config()
    plain = filled(config, empty_decoder(config))
    wanted = answers(Engine(config, ModelRunner(plain, build_pool(config, plain), config)))
    paged = filled(config, Decoder(config.model, Placement(dtype=torch.float32, ops=PLAIN_PAGED)))
    bigger = replace(config, cache=CacheConfig(num_blocks=32 + SCRATCH_BLOCKS, block_size=4))
    pool = build_pool(bigger, paged)

    model, between_steps = with_graphs(config, paged, pool, EagerCapture())
    got = answers(Engine(config, ModelRunner(model, pool, config), check=between_steps))

    assert isinstance(pool, KVPool)
    assert isinstance(model, DecodeGraphs)
    assert got == wanted
    assert model.captured == [1, 2, 4]
    assert model.replayed > 0
