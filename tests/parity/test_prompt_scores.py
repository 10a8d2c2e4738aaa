"""Prompt log-probabilities and routed experts: the same in any chunks, under preemption, with the prefix cache."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes import TINY_MODEL, engine_config

from gtp_serve.config import CacheConfig, MoeConfig
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.batch import Batch, Taps
from gtp_serve.request import LogprobOptions, Request, SamplingParams, TokenEvent

torch.set_num_threads(1)

MODEL = replace(
    TINY_MODEL,
    family="qwen3_moe",
    num_layers=3,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=0,
    moe=MoeConfig(num_experts=8, top_k=2, ffn_size=16),
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    made = build_decoder(MODEL, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(3)
    for target in made.targets():
        target.tensor.copy_(torch.randn(target.tensor.shape, generator=generator) * 0.3)
    return made


def pool_for(decoder: Decoder, num_blocks: int) -> KVPool:
    return KVPool(
        num_layers=MODEL.num_layers,
        num_blocks=num_blocks,
        block_size=4,
        num_kv_heads=decoder.num_kv_heads,
        head_dim=MODEL.head_dim,
        dtype=torch.float32,
        device="cpu",
    )


def make_engine(decoder: Decoder, *, num_blocks: int = 100, max_step_tokens: int = 64) -> Engine:
    config = replace(
        engine_config(max_step_tokens=max_step_tokens),
        model=MODEL,
        cache=CacheConfig(num_blocks=num_blocks, block_size=4),
    )

    def tell(text: str) -> None:
        raise AssertionError(text)

    return Engine(config, ModelRunner(decoder, pool_for(decoder, num_blocks), config), log=tell)


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {request.rid: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for event in engine.step():
            events[event.rid].append(event)
    return events


def whole_pass(decoder: Decoder, tokens: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
    """(log-probabilities after each token, experts of each token in each layer) in one pass."""
    count = len(tokens)
    ids, places = torch.tensor(tokens), torch.arange(count)
    batch = Batch(
        token_ids_T=ids,
        positions_T=places,
        slots_T=places,
        query_starts=(0, count),
        context_lens=(count,),
        block_tables_SB=torch.arange(-(-count // 4))[None],
        logit_rows_S=places,
        all_routes=True,
    )
    pool, routes = pool_for(decoder, -(-count // 4)), list[torch.Tensor]()
    logits = decoder.forward(batch, pool.keys, pool.values, Taps(routes=routes))
    return logits[:, : MODEL.vocab_size].log_softmax(-1), torch.stack(routes, 1).numpy()


def asking(rid: str, prompt: Sequence[int], start: int, **sampling: object) -> Request:
    return Request(
        rid=rid,
        input_ids=tuple(prompt),
        sampling=SamplingParams(ignore_eos=True, **sampling),  # type: ignore[arg-type]
        logprobs=LogprobOptions(top_n=3, token_ids=(4, 9), prompt_start=start),
        return_routed_experts=True,
    )


@pytest.mark.parametrize(("chunk", "blocks"), [(64, 100), (1, 100), (7, 100), (8, 14)])
def test_every_prompt_token_is_told_once_and_right(decoder: Decoder, chunk: int, blocks: int) -> None:
    rng = random.Random(chunk)
    prompts = [[rng.randrange(MODEL.vocab_size) for _ in range(rng.randrange(2, 30))] for _ in range(6)]
    starts = [rng.randrange(len(prompt)) for prompt in prompts]
    requests = [
        asking(str(at), prompt, start, max_new_tokens=12, temperature=0.0)
        for at, (prompt, start) in enumerate(zip(prompts, starts, strict=True))
    ]
    engine = make_engine(decoder, num_blocks=blocks, max_step_tokens=chunk)
    told = run(engine, requests)
    if blocks < 100:
        assert engine.stats().preemptions_total > 0
    for prompt, start, events in zip(prompts, starts, told.values(), strict=True):
        output = [token for event in events for token in event.token_ids]
        logprobs, routes = whole_pass(decoder, [*prompt, *output])
        targets = prompt[start + 1 :]
        want = [float(logprobs[start + at, token]) for at, token in enumerate(targets)]
        first = events[0]
        assert first.prompt_logprobs == pytest.approx(want, abs=2e-4)
        assert len(first.prompt_top_logprobs) == len(first.prompt_listed_logprobs) == len(targets)
        for at, (top, listed) in enumerate(zip(first.prompt_top_logprobs, first.prompt_listed_logprobs, strict=True)):
            assert [v for _, v in top] == pytest.approx(logprobs[start + at].topk(3).values.tolist(), abs=2e-4)
            assert listed == pytest.approx([float(logprobs[start + at, t]) for t in (4, 9)], abs=2e-4)
        assert not any(event.prompt_logprobs or event.prompt_top_logprobs for event in events[1:])
        made = [value for event in events for value in event.logprobs]
        rows = logprobs[len(prompt) - 1 :]
        assert made == pytest.approx([float(rows[at, token]) for at, token in enumerate(output)], abs=2e-4)
        assert all(event.top_logprobs[0][0][0] == event.token_ids[0] for event in events)  # greedy
        routed = np.frombuffer(b"".join(event.routed_experts for event in events), "<i4").reshape(-1, 3, 2)
        assert routed.shape[0] == len(prompt) + len(output) - 1
        assert (np.sort(routed, -1) == np.sort(routes[:-1], -1)).mean() > 0.999


def test_a_request_for_nothing_new_gets_the_prompts_values_only(decoder: Decoder) -> None:
    prompt = [3, 1, 4, 1, 5]
    (event,) = run(make_engine(decoder), [asking("r", prompt, 0, max_new_tokens=0)])["r"]
    logprobs, _ = whole_pass(decoder, prompt)
    assert event.token_ids == ()
    assert event.finish is not None
    assert event.finish.type == "length"
    assert event.prompt_logprobs == pytest.approx([float(logprobs[at, t]) for at, t in enumerate(prompt[1:])], abs=2e-4)
    assert len(event.routed_experts) == len(prompt) * 3 * 2 * 4


def test_a_cached_prefix_does_not_swallow_what_was_asked(decoder: Decoder) -> None:
    prompt = list(range(10, 32))
    engine = make_engine(decoder)
    plain = Request(rid="warm", input_ids=tuple(prompt), sampling=SamplingParams(max_new_tokens=2, temperature=0.0))
    run(engine, [plain])
    scored = replace_logprobs(plain, "scored", LogprobOptions(prompt_start=9))
    events = run(engine, [scored])["scored"]
    assert events[0].cached_tokens == 8  # whole blocks up to position 9
    logprobs, _ = whole_pass(decoder, prompt)
    want = [float(logprobs[9 + at, token]) for at, token in enumerate(prompt[10:])]
    assert events[0].prompt_logprobs == pytest.approx(want, abs=2e-4)
    again = run(engine, [replace_logprobs(plain, "again", LogprobOptions(top_n=1))])["again"]
    assert again[0].cached_tokens == 20
    assert again[0].prompt_logprobs == ()


def replace_logprobs(request: Request, rid: str, options: LogprobOptions) -> Request:
    return Request(rid=rid, input_ids=request.input_ids, sampling=request.sampling, logprobs=options)


def test_what_nobody_asked_for_is_not_in_the_events(decoder: Decoder) -> None:
    plain = Request(rid="r", input_ids=(1, 2, 3), sampling=SamplingParams(max_new_tokens=3, temperature=0.0))
    beside = asking("asks", [1, 2, 3], 0, max_new_tokens=3, temperature=0.0)
    events = run(make_engine(decoder), [plain, beside])
    alone = run(make_engine(decoder), [plain])
    for event in events["r"]:
        assert (event.routed_experts, event.top_logprobs, event.prompt_logprobs) == (b"", (), ())
    assert [e.token_ids for e in events["r"]] == [e.token_ids for e in alone["r"]]
