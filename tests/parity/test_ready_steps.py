"""Recorded steps that take a plan as it is: the bits of other steps, and only where they apply."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from fakes import TINY_MODEL, engine_config
from native_library import THREADS
from random_decoder import random_decoder

from gtp_serve.config import ModelConfig
from gtp_serve.engine.capture import NativeCapture
from gtp_serve.engine.graphs import DecodeGraphs, alone
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.engine.step import (
    NO_TOKEN,
    SampleSpec,
    ScoreSpec,
    Shaping,
    StepItem,
    StepPlan,
)
from gtp_serve.engine.thread import InThread
from gtp_serve.kv.pool import KVPool
from gtp_serve.ops.cpu.native import native_ops
from gtp_serve.ops.sampling import BY_TORCH, Chooser
from gtp_serve.request import LogprobOptions, SamplingParams

MODEL = replace(TINY_MODEL, num_layers=2, hidden_size=48, num_heads=6, num_kv_heads=2, head_dim=8, ffn_size=80)
BLOCK, BLOCKS, WIDTH, ROWS = 4, 60, 6, 5
GREEDY = SampleSpec(temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0, seed=1, index=0)
SHAPING = Shaping.of(SamplingParams(presence_penalty=0.5), [1, 2], prompt_len=1)
SAMPLED = (
    GREEDY,
    replace(GREEDY, temperature=0.8),
    replace(GREEDY, temperature=0.8, top_k=3, banned=(3,)),
    replace(GREEDY, shaping=SHAPING),
    replace(GREEDY, logprobs=LogprobOptions(top_n=2)),
)


def make(model: ModelConfig, *, captured: bool = True, own: bool = True) -> tuple[ModelRunner, DecodeGraphs, KVPool]:
    ops = native_ops(THREADS)
    decoder, pool = random_decoder(model, torch.bfloat16, ops, blocks=BLOCKS, block_size=BLOCK)
    assert ops.recorder is not None
    graphs = DecodeGraphs(
        decoder, pool, NativeCapture(ops.recorder, model.vocab_size), sizes=[ROWS], max_blocks=WIDTH, together=alone
    )
    while captured and graphs.capture_next():
        pass
    config = replace(engine_config(num_blocks=BLOCKS), model=model)
    chooser = Chooser(greedy=ops.greedy, normalises=True, draw=ops.draw) if own else BY_TORCH
    return ModelRunner(graphs, pool, config, chooser=chooser), graphs, pool


def item(start: int, token: int, table: Sequence[int]) -> StepItem:
    return StepItem(rid="r", token_ids=(token,), start=start, block_table=tuple(table), sample=GREEDY)


def plan_of(*items: StepItem) -> StepPlan:
    return StepPlan(step=0, block_size=BLOCK, items=items)


@pytest.mark.parametrize("vocab_rows", [50, 64], ids=["all rows are ids", "padded rows"])
def test_ready_steps_give_the_bits_of_other_steps_whatever_comes_between(vocab_rows: int) -> None:
    model = replace(MODEL, vocab_rows=vocab_rows)
    ready, _, cache = make(model)
    parts, _, other = make(model)
    rng = random.Random(3)
    lengths = {sequence: rng.randrange(1, 6) for sequence in range(8)}
    for step in range(60):
        chosen = rng.sample(sorted(lengths), rng.randrange(1, ROWS + 1))
        items = []
        for sequence in chosen:
            table = range(1 + sequence * WIDTH, 1 + sequence * WIDTH + -(-(lengths[sequence] + 1) // BLOCK))
            one = item(lengths[sequence], rng.randrange(model.vocab_size), table)
            items.append(replace(one, sample=rng.choice(SAMPLED)) if step % 3 == 1 else one)
            lengths[sequence] = (lengths[sequence] + 1) % (WIDTH * BLOCK)
        plan = plan_of(*items)
        expected = parts.launch(plan).wait()
        pending = None if step % 5 == 3 else ready.ready(plan)
        assert (pending or ready.launch(plan)).wait() == expected
        assert (pending is None) == (step % 5 == 3)
    for one_cache, two in zip([*cache.keys, *cache.values], [*other.keys, *other.values], strict=True):
        assert torch.equal(one_cache[:BLOCKS], two[:BLOCKS])


def test_a_row_of_logits_that_are_no_numbers_gives_no_token_and_spoils_no_other() -> None:
    runner, _, pool = make(MODEL)
    plan = plan_of(item(5, 3, [1, 2]), item(6, 4, [3, 4]), item(2, 5, [5]))
    first = runner.launch(plan).wait()
    pool.keys[0][3] = torch.nan
    pending = runner.ready(plan)
    assert pending is not None
    result = pending.wait()
    assert result.token_ids == (first.token_ids[0], NO_TOKEN, first.token_ids[2])
    assert (result.logprobs[0], result.logprobs[2]) == (first.logprobs[0], first.logprobs[2])


def test_a_step_of_more_than_single_tokens_is_never_ready() -> None:
    runner, graphs, _ = make(MODEL)
    plain = item(5, 3, [1, 2])
    assert runner.ready(plan_of(plain, plain)) is not None
    for other in (
        replace(plain, sample=None),
        replace(plain, token_ids=(3, 4)),
        replace(plain, score=ScoreSpec(first=0, targets=(3,), options=LogprobOptions())),
        replace(plain, routes=True),
        item(5, 3, range(1, WIDTH + 2)),
    ):
        assert runner.ready(plan_of(plain, other)) is None
    assert runner.ready(plan_of(*[plain] * (ROWS + 1))) is None
    assert graphs.replayed == 1
    assert make(MODEL, captured=False)[0].ready(plan_of(plain)) is None


def test_deterministic_steps_are_ready_too_and_choose_as_all_their_others_do() -> None:
    runner, _, _ = make(MODEL, own=False)
    plan = plan_of(item(5, 3, [1, 2]), item(6, 4, [3, 4]))
    pending = runner.ready(plan)
    assert pending is not None
    assert pending.wait() == runner.launch(plan).wait()


def test_the_thread_of_a_runner_leaves_ready_steps_to_whoever_waits_for_them() -> None:
    runner, _, _ = make(MODEL)
    threaded = InThread(runner)
    plan = plan_of(item(5, 3, [1, 2]))
    assert threaded.launch(plan).wait() == runner.launch(plan).wait()
    assert threaded._thread is None
    prompt = plan_of(replace(plan.items[0], token_ids=(3, 4)))
    assert threaded.launch(prompt).wait() == runner.launch(prompt).wait()
    assert threaded._thread is not None
