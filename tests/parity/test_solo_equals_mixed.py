"""On a real (small) Megatron model: whatever runs beside a request, its greedy text is what it is alone.

Chunked prefill, preemption in a KV cache that is far too small, shared prefixes, aborts: each mix has its own seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from parity.model_harness import filled_decoder, in_chunks
from parity.test_decoder_fixtures import MODELS, TRUTH, logical
from safetensors.torch import load_file

from gtp_serve.config import CacheConfig, EngineConfig
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.messages import EngineStats
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder
from gtp_serve.request import Request, SamplingParams

torch.set_num_threads(1)

MODEL = MODELS["tiny"]
BLOCK_SIZE = 4
CHUNK_SIZES = (1, 7, 64)
MIXES = 50
CLEAR = 1e-3
"""Logits of the two best ids are at least this far apart: then rounding cannot change a greedy choice."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt and what it is answered with when it is alone."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(kw_only=True)
class Ran:
    """What came out of a mix."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[float]]
    ends: dict[str, str]
    stats: EngineStats


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return filled_decoder(MODEL, logical(load_file(TRUTH / "tiny.safetensors"), MODEL))


@pytest.fixture(scope="module")
def cases(decoder: Decoder) -> list[Case]:
    """Requests with no close decision in their answer, many of them with a beginning in common."""
    rng = random.Random(5)
    shared = [tuple(rng.randrange(MODEL.vocab_size) for _ in range(16)) for _ in range(3)]
    found: list[Case] = []
    while len(found) < 48:
        start = rng.choice([(), *shared])[: rng.randint(4, 16)]
        tail = tuple(rng.randrange(MODEL.vocab_size) for _ in range(rng.randint(1, 8)))
        prompt, new = start + tail, rng.randint(1, 9)
        alone = make_engine(decoder, num_blocks=20, max_running=1, max_step_tokens=64, prefix_cache=False)
        ran = run(alone, {"only": (prompt, new)})
        answer = tuple(ran.tokens["only"])
        if is_clear(decoder, prompt, answer):
            found.append(Case(prompt=prompt, answer=answer, logprobs=tuple(ran.logprobs["only"])))
    return found


def is_clear(decoder: Decoder, prompt: tuple[int, ...], answer: tuple[int, ...]) -> bool:
    """Whether the answer is the clear choice at each of its positions, by one pass without an engine."""
    fed = prompt + answer[:-1]
    with torch.inference_mode():
        logits = in_chunks(decoder, fed, len(fed))[len(prompt) - 1 :, : MODEL.vocab_size]
    assert len(answer) == len(logits)
    best = logits.topk(2)
    clear = bool((best.values[:, 0] - best.values[:, 1] > CLEAR).all())
    if clear:
        assert tuple(best.indices[:, 0].tolist()) == answer
    return clear


def make_engine(
    decoder: Decoder, *, num_blocks: int, max_running: int, max_step_tokens: int, prefix_cache: bool = True
) -> Engine:
    config = EngineConfig(
        model=replace(MODEL, eos_token_ids=()),
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK_SIZE),
        dtype="float32",
        max_context=64,
        max_running=max_running,
        max_step_tokens=max_step_tokens,
        prefix_cache=prefix_cache,
    )
    pool = KVPool(
        num_layers=MODEL.num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=MODEL.head_dim,
        dtype=torch.float32,
        device="cpu",
    )
    return Engine(config, ModelRunner(decoder, pool, config), log=lambda text: None)


def run(engine: Engine, requests: dict[str, tuple[Sequence[int], int]], doomed: Iterable[tuple[int, str]] = ()) -> Ran:
    """Run all requests at once.

    :param requests: prompt and number of new tokens by name.
    :param doomed: (step, name) of requests to abort.
    """
    for rid, (prompt, new) in requests.items():
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0)
        engine.add(Request(rid=rid, input_ids=tuple(prompt), sampling=sampling))
    tokens: dict[str, list[int]] = {rid: [] for rid in requests}
    logprobs: dict[str, list[float]] = {rid: [] for rid in requests}
    ends: dict[str, str] = {}
    waiting = sorted(doomed, reverse=True)
    step = 0
    while engine.has_work():
        while waiting and waiting[-1][0] <= step:
            engine.abort(waiting.pop()[1])
        for event in engine.step():
            assert event.rid not in ends
            tokens[event.rid] += event.token_ids
            logprobs[event.rid] += event.logprobs
            if event.finish is not None:
                ends[event.rid] = event.finish.type
        engine.check_invariants()
        step += 1
    assert ends.keys() == requests.keys()
    return Ran(tokens=tokens, logprobs=logprobs, ends=ends, stats=engine.stats())


def check_answers(ran: Ran, chosen: dict[str, Case]) -> None:
    for rid, case in chosen.items():
        # Text alone would not show a KV entry that is slightly off.
        assert ran.logprobs[rid] == pytest.approx(case.logprobs[: len(ran.logprobs[rid])], abs=1e-4), rid
        if ran.ends[rid] == "abort":
            assert tuple(ran.tokens[rid]) == case.answer[: len(ran.tokens[rid])], rid
        else:
            assert tuple(ran.tokens[rid]) == case.answer, rid


def mix_of(seed: int, cases: list[Case]) -> tuple[dict[str, Case], list[tuple[int, str]], random.Random]:
    rng = random.Random(seed)
    chosen = {f"r{n}": rng.choice(cases) for n in range(rng.randint(1, 64))}
    doomed = [(rng.randrange(30), rid) for rid in chosen if rng.random() < 0.1]
    return chosen, doomed, rng


def test_i1_greedy_text_alone_equals_greedy_text_in_50_mixes(decoder: Decoder, cases: list[Case]) -> None:
    preemptions = hits = aborts = 0
    for seed in range(MIXES):
        chosen, doomed, rng = mix_of(seed, cases)
        engine = make_engine(
            decoder,
            num_blocks=rng.choice([8, 12, 40]),
            max_running=rng.choice([4, 16, 64]),
            max_step_tokens=CHUNK_SIZES[seed % len(CHUNK_SIZES)],
        )

        ran = run(engine, {rid: (case.prompt, len(case.answer)) for rid, case in chosen.items()}, doomed)

        check_answers(ran, chosen)
        assert ran.stats.kv_blocks_used == 0
        preemptions += ran.stats.preemptions_total
        hits += ran.stats.prefix_hits_total
        aborts += ran.stats.requests_total["abort"]
    assert min(preemptions, hits, aborts) > 30


def test_i3_200_streams_with_a_tenth_aborted_return_all_blocks_and_change_no_result(
    decoder: Decoder, cases: list[Case]
) -> None:
    rng = random.Random(0)
    chosen = {f"r{n}": rng.choice(cases) for n in range(200)}
    doomed = [(rng.randrange(60), rid) for rid in rng.sample(sorted(chosen), 20)]
    engine = make_engine(decoder, num_blocks=48, max_running=32, max_step_tokens=64)
    free_before = engine.stats().kv_blocks_total - engine.stats().kv_blocks_used

    ran = run(engine, {rid: (case.prompt, len(case.answer)) for rid, case in chosen.items()}, doomed)

    check_answers(ran, chosen)
    assert ran.stats.kv_blocks_total - ran.stats.kv_blocks_used == free_before == 48
    assert 5 <= ran.stats.requests_total["abort"] <= 20
    assert ran.stats.requests_total["length"] == 200 - ran.stats.requests_total["abort"]
