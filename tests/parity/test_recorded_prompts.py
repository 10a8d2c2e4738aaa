"""Steps with prompts, recorded: the bits of eager steps, whatever a batch is made of, and eager steps where they do not
fit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
from native_decoders import DENSE, MODELS, batch_of, make
from native_library import THREADS
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.engine.capture import NativeCapture
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.engine.prompts import RecordedPrompts
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder
from gtp_serve.ops.batch import Batch, Taps
from gtp_serve.ops.cpu.native import native_ops

TOKENS, SEQUENCES, TABLE = 40, 5, 8
Made = tuple[Decoder, KVPool]


def recorded(made: Made) -> DecodeGraphs:
    decoder, pool = made
    recorder = decoder.placement.ops.recorder
    assert recorder is not None
    prompts = RecordedPrompts(decoder, pool, recorder, tokens=TOKENS, sequences=SEQUENCES, max_blocks=TABLE)
    capture = NativeCapture(recorder, decoder.config.vocab_size)
    graphs = DecodeGraphs(decoder, pool, capture, sizes=[SEQUENCES], max_blocks=TABLE, prompts=prompts)
    assert [graphs.capture_next() for _ in range(3)] == [True, True, False]
    assert (graphs.failures, graphs.prompts_failure) == ({}, "")
    return graphs


@torch.inference_mode()
def run(model: Decoder | DecodeGraphs, pool: KVPool, batch: Batch, taps: Taps | None = None) -> Tensor:
    return model.forward(batch, pool.keys, pool.values, taps)


def random_parts(rng: random.Random, reached: dict[int, int]) -> list[tuple[int, int, int]]:
    """Chunks and single tokens of some sequences, each going on where it was."""
    parts = []
    for sequence in rng.sample(range(SEQUENCES), rng.randint(1, SEQUENCES)):
        first = reached.get(sequence, 0)
        count = rng.choice([1, rng.randint(1, 8)])
        if first + count > TABLE * 4:
            first = 0  # another one takes its blocks
        reached[sequence] = first + count
        parts.append((sequence, first, count))
    return parts


def same_cache(one: KVPool, other: KVPool) -> bool:
    pairs = zip([*one.keys, *one.values], [*other.keys, *other.values], strict=True)
    return all(torch.equal(a[:-SCRATCH_BLOCKS], b[:-SCRATCH_BLOCKS]) for a, b in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_any_batch_gives_the_bits_of_an_eager_step(model: ModelConfig, dtype: torch.dtype) -> None:
    ops = native_ops(THREADS)
    (eager, cached), made = make(model, dtype, ops), make(model, dtype, ops)
    graphs, (_, pool) = recorded(made), made
    rng, reached = random.Random(5), dict[int, int]()
    for _ in range(40):
        batch = batch_of(random_parts(rng, reached), TABLE)
        tokens = len(batch.token_ids_T)
        wanted = torch.tensor(sorted(rng.sample(range(tokens), rng.randint(0, min(3, tokens)))), dtype=torch.int64)
        if not batch.decode_only:
            batch = replace(batch, logit_rows_S=wanted)
        assert torch.equal(run(graphs, pool, batch), run(eager, cached, batch))
        assert same_cache(pool, cached)
    assert (graphs.replayed, graphs.ran_eagerly) == (40, 0)


def scored(model: Decoder | DecodeGraphs, pool: KVPool, batch: Batch) -> list[Tensor]:
    pieces: list[Tensor] = []
    run(model, pool, batch, Taps(scored=lambda logits: pieces.append(logits.clone())))
    return pieces


def test_scores_of_a_prompt_come_from_the_recorded_step_too() -> None:
    ops = native_ops(THREADS)
    (eager, cached), made = make(DENSE, torch.bfloat16, ops), make(DENSE, torch.bfloat16, ops)
    graphs, (_, pool) = recorded(made), made
    for parts in ([(0, 0, 30), (1, 0, 9)], [(0, 30, 1), (1, 9, 1)]):
        batch = batch_of(parts, TABLE)
        batch = replace(batch, score_rows_R=torch.arange(len(batch.token_ids_T)))
        expected = scored(eager, cached, batch)
        assert len(expected) == 1
        for piece, other in zip(scored(graphs, pool, batch), expected, strict=True):
            assert torch.equal(piece, other)
    assert graphs.ran_eagerly == 0


@pytest.mark.parametrize(
    ("parts", "width"),
    [
        ([(0, 0, TOKENS + 1)], 11),
        ([(0, 0, TOKENS), (1, 0, 1)], 11),
        ([(sequence, 0, 2) for sequence in range(SEQUENCES + 1)], TABLE),
        ([(0, 0, 5)], TABLE + 1),
    ],
    ids=["a prompt too long", "tokens too many", "sequences too many", "a table too long"],
)
def test_what_does_not_fit_runs_eagerly(parts: Sequence[tuple[int, int, int]], width: int) -> None:
    ops = native_ops(THREADS)
    (eager, cached), made = make(DENSE, torch.float32, ops), make(DENSE, torch.float32, ops)
    graphs, (_, pool) = recorded(made), made
    batch = batch_of(parts, width)
    assert torch.equal(run(graphs, pool, batch), run(eager, cached, batch))
    assert (graphs.replayed, graphs.ran_eagerly) == (0, 1)
    with pytest.raises(ValueError, match="fits no recorded step"):
        graphs._prompts.run(batch)  # type: ignore[union-attr]


def test_single_tokens_that_all_want_logits_are_such_a_batch_too() -> None:
    ops = native_ops(THREADS)
    (eager, cached), (decoder, pool) = make(DENSE, torch.float32, ops), make(DENSE, torch.float32, ops)
    assert ops.recorder is not None
    prompts = RecordedPrompts(decoder, pool, ops.recorder, tokens=TOKENS, sequences=SEQUENCES, max_blocks=TABLE)
    prompts.record()
    prompts.run(batch_of([(0, 0, 9)], TABLE))  # whose rows are other ones
    batch = replace(batch_of([(2, 0, 1), (1, 0, 1), (3, 0, 1)], TABLE), all_logits=True)
    assert torch.equal(prompts.run(batch), run(eager, cached, batch))


def test_a_prompt_of_which_nothing_is_wanted_fills_the_cache() -> None:
    ops = native_ops(THREADS)
    (eager, cached), made = make(DENSE, torch.bfloat16, ops), make(DENSE, torch.bfloat16, ops)
    graphs, (_, pool) = recorded(made), made
    batch = replace(batch_of([(0, 0, 9), (1, 0, 4)], TABLE), logit_rows_S=torch.zeros(0, dtype=torch.int64))
    for model, where in ((graphs, pool), (eager, cached)):
        assert run(model, where, batch).shape[0] == 0
    assert same_cache(pool, cached)
    batch = batch_of([(0, 9, 3), (1, 4, 1)], TABLE)
    assert torch.equal(run(graphs, pool, batch), run(eager, cached, batch))


def test_more_rows_than_there_is_room_for_run_eagerly() -> None:
    ops = native_ops(THREADS)
    (eager, cached), made = make(DENSE, torch.float32, ops), make(DENSE, torch.float32, ops)
    graphs, (_, pool) = recorded(made), made
    for repeats, ran_eagerly in ((TOKENS + SEQUENCES - 1, 0), (TOKENS + SEQUENCES, 1)):
        batch = replace(batch_of([(0, 0, 5)], TABLE), score_rows_R=torch.full((repeats,), 2))
        for piece, other in zip(scored(graphs, pool, batch), scored(eager, cached, batch), strict=True):
            assert torch.equal(piece, other)
        assert graphs.ran_eagerly == ran_eagerly


def test_the_largest_batch_fits() -> None:
    ops = native_ops(THREADS)
    (eager, cached), made = make(DENSE, torch.float32, ops), make(DENSE, torch.float32, ops)
    graphs, (_, pool) = recorded(made), made
    batch = batch_of([(sequence, 0, TOKENS // SEQUENCES) for sequence in range(SEQUENCES)], TABLE)
    assert torch.equal(run(graphs, pool, batch), run(eager, cached, batch))
    assert (graphs.replayed, graphs.ran_eagerly) == (1, 0)


def test_experts_that_are_to_be_told_are_found_eagerly() -> None:
    ops = native_ops(THREADS)
    made = make(MODELS["mixture"], torch.float32, ops)
    graphs, (_, pool) = recorded(made), made
    routes: list[Tensor] = []
    batch = batch_of([(0, 0, 7)], TABLE)
    told = run(graphs, pool, replace(batch, all_routes=True), Taps(routes=routes))
    assert [chosen.shape for chosen in routes] == [(7, 2)] * 3
    assert torch.equal(told, run(graphs, pool, batch))
    assert (graphs.ran_eagerly, graphs.replayed) == (1, 1)
    with pytest.raises(ValueError, match="without all_routes"):
        run(graphs, pool, batch, Taps(routes=routes))


def test_weights_that_change_in_place_are_read_by_the_next_step() -> None:
    ops = native_ops(THREADS)
    (eager, cached), made = make(DENSE, torch.bfloat16, ops), make(DENSE, torch.bfloat16, ops)
    graphs, (decoder, pool) = recorded(made), made
    batch = batch_of([(0, 0, 6)], TABLE)
    before = run(graphs, pool, batch)
    for mine, other in zip(decoder.targets(), eager.targets(), strict=True):
        mine.tensor.mul_(1.5)
        other.tensor.mul_(1.5)
    after = run(graphs, pool, batch)
    assert torch.equal(after, run(eager, cached, batch))
    assert not torch.equal(after, before)


def test_angles_reach_as_far_as_the_longest_table() -> None:
    ops = native_ops(THREADS)
    (eager, cached), (decoder, pool) = make(DENSE, torch.float32, ops), make(DENSE, torch.float32, ops)
    assert ops.recorder is not None
    prompts = RecordedPrompts(decoder, pool, ops.recorder, tokens=TOKENS, sequences=1, max_blocks=TABLE)
    prompts.record()
    batch = batch_of([(0, 0, 4 * TABLE)], TABLE)
    assert torch.equal(prompts.run(batch), run(eager, cached, batch))


def test_a_step_of_another_thread_is_carried_out_while_one_is_recorded() -> None:
    """The engine's thread computes a prompt while its caller records."""
    ops = native_ops(THREADS)
    (eager, cached), (decoder, pool) = make(DENSE, torch.float32, ops), make(DENSE, torch.float32, ops)
    batch, found = batch_of([(0, 0, 9), (1, 0, 2)], TABLE), list[Tensor]()
    recorder, hidden = ops.recorder, decoder.hidden
    assert recorder is not None
    expected = run(eager, cached, batch)

    def hidden_beside_another(*args: Any) -> Tensor:
        other = Thread(target=lambda: found.append(run(eager, cached, batch)))
        other.start()
        other.join(30)
        return hidden(*args)

    prompts = RecordedPrompts(decoder, pool, recorder, tokens=TOKENS, sequences=SEQUENCES, max_blocks=TABLE)
    with patch.object(decoder, "hidden", hidden_beside_another):
        prompts.record()
    assert torch.equal(found[0], expected)
    assert torch.equal(prompts.run(batch), expected)


def test_where_it_cannot_be_recorded_eager_steps_go_on() -> None:
    ops = native_ops(THREADS)
    decoder, pool = make(DENSE, torch.float32, ops)
    assert ops.recorder is not None
    prompts = RecordedPrompts(decoder, pool, ops.recorder, tokens=TOKENS, sequences=SEQUENCES, max_blocks=TABLE)
    capture = NativeCapture(ops.recorder, DENSE.vocab_size)
    told: list[str] = []
    graphs = DecodeGraphs(decoder, pool, capture, sizes=[2], max_blocks=TABLE, prompts=prompts, log=told.append)
    assert graphs.capture_next()
    with patch.object(decoder, "hidden", side_effect=MemoryError("none for 40 tokens")):
        assert graphs.capture_next()
    assert graphs.prompts_failure == "MemoryError: none for 40 tokens"
    assert told == ["steps with prompts could not be recorded and run eagerly: MemoryError: none for 40 tokens"]
    assert not graphs.capture_next()
    batch = batch_of([(0, 0, 6)], TABLE)
    assert torch.equal(run(graphs, pool, batch), run(decoder, pool, batch))
    assert graphs.ran_eagerly == 1
