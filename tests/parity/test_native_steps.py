"""Whole passes through a decoder of native ops: the reference's logits, the same bits recorded or not, alone or not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_decoders import DENSE, MODELS, batch_of, make
from native_library import THREADS
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.engine.capture import NativeCapture
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.errors import EngineFault
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder
from gtp_serve.ops.cpu.native import native_ops
from gtp_serve.ops.cpu.recording import OnlyRecorded, place
from gtp_serve.ops.table import REFERENCE

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 0.12}


@torch.inference_mode()
def run(made: tuple[Decoder, KVPool], *parts: tuple[int, int, int]) -> Tensor:
    decoder, pool = made
    return decoder.forward(batch_of(parts), pool.keys, pool.values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_pass_gives_the_reference_s_logits(model: ModelConfig, dtype: torch.dtype) -> None:
    native, reference = make(model, dtype, native_ops(THREADS)), make(model, dtype, REFERENCE)
    steps = [
        [(0, 0, 13)],
        [(1, 0, 5), (0, 13, 1)],
        [(1, 5, 9), (2, 0, 3), (0, 14, 1)],
        [(0, 15, 1), (1, 14, 1), (2, 3, 1)],
    ]
    for parts in steps:
        torch.testing.assert_close(run(native, *parts), run(reference, *parts), rtol=0, atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_a_row_has_the_same_bits_alone_in_a_batch_and_however_its_prompt_is_cut(
    model: ModelConfig, dtype: torch.dtype
) -> None:
    alone, mixed = (make(model, dtype, native_ops(THREADS)) for _ in range(2))
    whole, then = run(alone, (0, 0, 17)), run(alone, (0, 17, 1))
    run(mixed, (1, 0, 11))
    run(mixed, (0, 0, 3), (1, 11, 1))
    run(mixed, (2, 0, 20), (0, 3, 8), (1, 12, 1))
    cut = run(mixed, (1, 13, 1), (0, 11, 6), (2, 20, 1))
    assert torch.equal(cut[1], whole[0])
    assert torch.equal(run(mixed, (2, 21, 1), (1, 14, 1), (0, 17, 1), (3, 0, 1))[2], then[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_one_recorded_program_serves_every_number_of_rows_with_the_bits_of_eager_steps(
    model: ModelConfig, dtype: torch.dtype
) -> None:
    ops = native_ops(THREADS)
    eager, (decoder, pool) = make(model, dtype, ops), make(model, dtype, ops)
    assert ops.recorder is not None
    graphs = DecodeGraphs(decoder, pool, NativeCapture(ops.recorder, DENSE.vocab_size), sizes=[7], max_blocks=8)
    assert graphs.capture_next()
    assert graphs.failures == {}
    for made in (eager, (decoder, pool)):
        run(made, *((sequence, 0, 3 + sequence) for sequence in range(7)))
    for step, count in enumerate((7, 1, 3, 2, 7, 5)):
        parts = [(sequence, 3 + sequence + step, 1) for sequence in range(count)]
        for sequence in range(count, 7):  # the others keep up
            for made in (eager, (decoder, pool)):
                run(made, (sequence, 3 + sequence + step, 1))
        assert torch.equal(graphs.replay(batch_of(parts)), run(eager, *parts))
    assert graphs.replayed == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 130])
def test_threads_that_share_a_long_context_see_its_newest_position_where_it_was_just_put(
    dtype: torch.dtype, window: int | None
) -> None:
    ops = native_ops(THREADS)
    width, blocks = 200, 601
    made = [make(replace(DENSE, sliding_window=window), dtype, ops, blocks) for _ in range(2)]
    for layer in range(DENSE.num_layers):
        for cache in ("keys", "values"):
            one, other = (getattr(pool, cache)[layer] for _, pool in made)
            one.normal_(generator=torch.Generator().manual_seed(layer))
            other.copy_(one)
    (eager, cached), (decoder, pool) = made
    assert ops.recorder is not None
    graphs = DecodeGraphs(decoder, pool, NativeCapture(ops.recorder, DENSE.vocab_size), sizes=[3], max_blocks=width)
    assert graphs.capture_next()
    for positions in ((0, 255, 511), (1, 256, 512), (300, 767, 768), (301,)):
        batch = batch_of([(sequence, at, 1) for sequence, at in enumerate(positions)], width, blocks)
        with torch.inference_mode():
            expected = eager.forward(batch, cached.keys, cached.values)
        assert torch.equal(graphs.replay(batch), expected)
    for one, other in zip([*cached.keys, *cached.values], [*pool.keys, *pool.values], strict=True):
        assert torch.equal(one[:-SCRATCH_BLOCKS], other[:-SCRATCH_BLOCKS])


def test_an_operation_goes_into_the_next_where_nothing_else_needs_what_it_gives() -> None:
    ops = native_ops(THREADS)
    recorder, add_shared = ops.recorder, ops.add_shared
    assert recorder is not None
    assert add_shared is not None
    generator = torch.Generator().manual_seed(2)
    x_TD, weight_D, weight_OD = (torch.randn(shape, generator=generator) for shape in ((6, 32), (32,), (32, 32)))
    inputs = {x_TD.data_ptr(): 0}

    def used_twice() -> Tensor:
        normed_TD = ops.rms_norm(x_TD, weight_D, 1e-5)
        return add_shared(normed_TD, ops.linear(normed_TD, weight_OD, None), None)

    def summed() -> Tensor:
        normed_TD, total_TD = ops.add_rms_norm(x_TD, x_TD, weight_D, 1e-5)
        return add_shared(total_TD, ops.linear(normed_TD, weight_OD, None), None)

    def of_heads() -> Tensor:
        normed = ops.rms_norm(x_TD.view(6, 4, 8), weight_D[:8], 1e-5)
        return ops.linear(normed.flatten(1), weight_OD, None)

    def kept() -> Tensor:
        normed_TD = ops.rms_norm(x_TD, weight_D, 1e-5)
        ops.linear(normed_TD, weight_OD, None)
        return normed_TD

    steps = [
        lambda: ops.linear(ops.rms_norm(x_TD, weight_D, 1e-5), weight_OD, None),
        summed,
        used_twice,
        of_heads,
        kept,
    ]
    for step, length in zip(steps, (1, 2, 3, 2, 2), strict=True):
        program, output = recorder.record(step, inputs)
        expected = step()
        for rows in (6, 1, 4):
            output.fill_(torch.nan)
            program.run(rows)
            assert torch.equal(output[:rows], expected[:rows])
        assert len(program) == length  # type: ignore[arg-type]


def test_weights_that_change_in_place_are_read_by_the_next_replay() -> None:
    ops = native_ops(THREADS)
    decoder, pool = make(DENSE, torch.float32, ops)
    assert ops.recorder is not None
    graphs = DecodeGraphs(decoder, pool, NativeCapture(ops.recorder, DENSE.vocab_size), sizes=[2], max_blocks=8)
    graphs.capture_next()
    before = graphs.replay(batch_of([(0, 0, 1)])).clone()
    for target in decoder.targets():
        target.tensor.mul_(1.5)
    assert torch.equal(graphs.replay(batch_of([(0, 0, 1)])), run((decoder, pool), (0, 0, 1)))
    assert not torch.equal(graphs.replay(batch_of([(0, 0, 1)])), before)


def test_an_operation_that_a_replay_would_leave_out_cannot_be_recorded() -> None:
    ops, others = native_ops(THREADS), native_ops(THREADS)
    recorder = ops.recorder
    assert recorder is not None
    x, weight = torch.ones(3, 8), torch.ones(8)
    with pytest.raises(EngineFault, match="mul"):
        recorder.record(lambda: x * 2, {x.data_ptr(): 0})
    with pytest.raises(EngineFault, match="none of its inputs"):
        recorder.record(lambda: ops.rms_norm(x, weight, 1e-5), {})
    with pytest.raises(EngineFault, match="comes from elsewhere"):
        recorder.record(lambda: others.rms_norm(x, weight, 1e-5), {x.data_ptr(): 0})


def test_views_and_new_memory_are_no_operations() -> None:
    x = torch.arange(12.0).view(3, 4)
    with OnlyRecorded():  # type: ignore[no-untyped-call]
        assert x[1:].transpose(0, 1).flatten(0, 0).shape == (4, 2)
        torch.empty(3)
        with pytest.raises(EngineFault):
            x.add_(1)
        with pytest.raises(EngineFault):
            x.t().contiguous()


@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(0, 6), st.integers(1, 500)).map(lambda t: (t[0], t[0] + t[1], t[2])),
        max_size=24,
    )
)
def test_memory_that_lives_at_one_time_never_overlaps(lives: list[tuple[int, int, int]]) -> None:
    places = place(lives)
    for i, (first, last, size) in enumerate(lives):
        assert places[i] % 64 == 0
        for j in range(i):
            if lives[j][0] <= last and first <= lives[j][1]:
                assert places[j] + lives[j][2] <= places[i] or places[i] + size <= places[j]


def test_memory_of_a_chain_of_steps_is_used_again() -> None:
    lives = [(at, at + 1, 4096) for at in range(100)]
    places = place(lives)
    assert max(places) == 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_greedy_choice_reads_what_the_head_found_out_eagerly_and_recorded(dtype: torch.dtype) -> None:
    ops = native_ops(THREADS)
    decoder, pool = make(replace(DENSE, vocab_size=200, vocab_rows=200), dtype, ops)
    assert ops.recorder is not None
    graphs = DecodeGraphs(decoder, pool, NativeCapture(ops.recorder, DENSE.vocab_size), sizes=[5], max_blocks=8)
    graphs.capture_next()
    eager = run((decoder, pool), (0, 0, 3), (1, 0, 4))
    for logits in (eager, graphs.replay(batch_of([(0, 3, 1), (1, 4, 1), (2, 0, 1)])), eager + 1):
        chosen = ops.greedy(logits, 200)
        expected = logits.log_softmax(-1)
        assert torch.equal(chosen.token_ids_S, logits.argmax(-1))
        torch.testing.assert_close(
            chosen.logprobs_S, expected.gather(1, chosen.token_ids_S[:, None])[:, 0], rtol=0, atol=2e-6
        )
        assert torch.equal(ops.greedy(logits.clone(), 200).logprobs_S, chosen.logprobs_S)
    assert torch.equal(ops.greedy(eager, 150).token_ids_S, eager[:, :150].argmax(-1))
