"""The engine on a real (tiny, random) decoder: what runs beside a request does not change it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from fakes import TINY_MODEL, engine_config, request

from gtp_serve.config import CacheConfig
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.request import Request

torch.set_num_threads(1)

MODEL = replace(TINY_MODEL, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    made = build_decoder(MODEL, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    for target in made.targets():
        target.tensor.copy_(torch.randn(target.tensor.shape, generator=generator) * 0.3)
    return made


def make_engine(decoder: Decoder, *, num_blocks: int, max_running: int, max_step_tokens: int) -> Engine:
    config = replace(
        engine_config(max_running=max_running, max_step_tokens=max_step_tokens),
        model=MODEL,
        cache=CacheConfig(num_blocks=num_blocks, block_size=4),
    )
    pool = KVPool(
        num_layers=MODEL.num_layers,
        num_blocks=num_blocks,
        block_size=4,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=MODEL.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    return Engine(config, ModelRunner(decoder, pool, config), log=lambda text: None)


def generate(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], list[float]]]:
    output: dict[str, tuple[list[int], list[float]]] = {req.rid: ([], []) for req in requests}
    for req in requests:
        engine.add(req)
    while engine.has_work():
        for event in engine.step():
            output[event.rid][0].extend(event.token_ids)
            output[event.rid][1].extend(event.logprobs)
        engine.check_invariants()
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().requests_total["abort"] == 0
    return output


def random_requests(count: int) -> list[Request]:
    rng = random.Random(count)
    return [
        request(
            f"r{n}",
            [rng.randrange(50) for _ in range(rng.randint(1, 30))],
            max_new_tokens=rng.randint(1, 16),
            temperature=rng.choice([0.0, 0.9]),
            top_p=rng.choice([1.0, 0.8]),
            top_k=rng.choice([-1, 10]),
            seed=n,
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(("num_blocks", "preempts"), [(600, False), (24, True)])
def test_64_requests_together_answer_as_each_does_alone(decoder: Decoder, num_blocks: int, preempts: bool) -> None:
    requests = random_requests(64)
    together = make_engine(decoder, num_blocks=num_blocks, max_running=16, max_step_tokens=50)

    mixed = generate(together, requests)

    assert (together.stats().preemptions_total > 0) == preempts
    for req in requests:
        alone = make_engine(decoder, num_blocks=20, max_running=1, max_step_tokens=1000)
        tokens, logprobs = generate(alone, [req])[req.rid]
        assert mixed[req.rid][0] == tokens
        assert mixed[req.rid][1] == pytest.approx(logprobs, abs=1e-4)


def test_padding_ids_are_never_generated(decoder: Decoder) -> None:
    requests = [request(f"r{n}", [n], max_new_tokens=20, temperature=3.0, ignore_eos=True) for n in range(40)]
    engine = make_engine(decoder, num_blocks=400, max_running=40, max_step_tokens=100)

    output = generate(engine, requests)

    drawn = {token for tokens, _ in output.values() for token in tokens}
    assert drawn <= set(range(MODEL.vocab_size))
    assert len(drawn) > 30
