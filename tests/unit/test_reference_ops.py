"""The specification's operations against the textbook, written out in loops and in float64."""

from __future__ import annotations

import math
import time

import pytest
import torch
from torch import Tensor

from gtp_serve.ops import reference as ops
from gtp_serve.ops.batch import Batch

GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)
    GENERATOR.manual_seed(0)


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR)


def make_batch(lengths: list[tuple[int, int]], tables: list[list[int]], block_size: int) -> Batch:
    """``lengths``: (new tokens, context after the step) of each sequence."""
    starts = [0]
    positions: list[int] = []
    slots: list[int] = []
    for (new, context), table in zip(lengths, tables, strict=True):
        starts.append(starts[-1] + new)
        positions += range(context - new, context)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(context - new, context)]
    width = max(map(len, tables))
    return Batch(
        token_ids_T=torch.zeros(starts[-1], dtype=torch.int64),
        positions_T=torch.tensor(positions),
        slots_T=torch.tensor(slots),
        query_starts=tuple(starts),
        context_lens=tuple(context for _, context in lengths),
        block_tables_SB=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        logit_rows_S=torch.arange(len(lengths)),
    )


def attend_by_hand(q_THE: Tensor, keys: list[Tensor], values: list[Tensor], batch: Batch, window: int | None) -> Tensor:
    """One row and one head at a time; ``keys[s]`` is [context, K, E]."""
    out = torch.zeros_like(q_THE, dtype=torch.float64)
    heads, size = q_THE.shape[1:]
    for s, context in enumerate(batch.context_lens):
        first, stop = batch.query_starts[s : s + 2]
        group = heads // keys[s].shape[1]
        for row in range(first, stop):
            last = context - (stop - row)
            begin = 0 if window is None else max(0, last - window + 1)
            for head in range(heads):
                k, v = (kv[s][begin : last + 1, head // group].double() for kv in (keys, values))
                weights = torch.softmax(k @ q_THE[row, head].double() / math.sqrt(size), dim=0)
                out[row, head] = weights @ v
    return out


LENGTHS = [(1, 9), (4, 4), (3, 13), (1, 1), (5, 21)]
TABLES = [[7, 2, 11], [3], [9, 0, 5, 12], [4], [1, 6, 8, 10, 13, 14]]


@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_attention_of_a_mixed_batch_is_the_textbook_one(heads: int, kv_heads: int, window: int | None) -> None:
    batch = make_batch(LENGTHS, TABLES, 4)
    cache = [torch.full((16, 4, kv_heads, 8), torch.nan) for _ in range(2)]
    whole = [[rand(context, kv_heads, 8) for _, context in LENGTHS] for _ in range(2)]
    for stored, tensors in zip(cache, whole, strict=True):
        for table, tensor in zip(TABLES, tensors, strict=True):
            for position, row in enumerate(tensor):
                stored[table[position // 4], position % 4] = row
    q = rand(batch.query_starts[-1], heads, 8)
    segments = ops.plan_attention(batch, 4, window)
    out = ops.attend(q, cache[0], cache[1], segments, 8**-0.5)
    expected = attend_by_hand(q, whole[0], whole[1], batch, window)
    torch.testing.assert_close(out, expected.float(), rtol=0, atol=2e-6)


def test_a_long_chunk_is_cut_and_still_attends_to_all_that_came_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = make_batch([(13, 29)], [list(range(8))], 4)
    keys, values, q = rand(8, 4, 2, 8), rand(8, 4, 2, 8), rand(13, 4, 8)
    whole = ops.attend(q, keys, values, ops.plan_attention(batch, 4), 0.3)
    monkeypatch.setattr(ops, "_SCORES", 5 * 29)
    segments = ops.plan_attention(batch, 4)
    assert [segment.rows.tolist() for segment in segments] == [[*range(5)], [*range(5, 10)], [10, 11, 12]]
    torch.testing.assert_close(ops.attend(q, keys, values, segments, 0.3), whole, rtol=0, atol=2e-6)


def test_a_sequence_attends_to_the_same_bits_whatever_shares_its_batch() -> None:
    keys, values, q = rand(16, 4, 2, 8), rand(16, 4, 2, 8), rand(14, 4, 8)
    together = ops.attend(q, keys, values, ops.plan_attention(make_batch(LENGTHS, TABLES, 4), 4), 0.3)
    for s, first, stop in ((0, 0, 1), (2, 5, 8), (3, 8, 9)):
        batch = make_batch(LENGTHS[s : s + 1], TABLES[s : s + 1], 4)
        alone = ops.attend(q[first:stop], keys, values, ops.plan_attention(batch, 4), 0.3)
        assert torch.equal(together[first:stop], alone)


def test_single_tokens_of_like_contexts_are_computed_together_and_large_groups_are_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = [(1, 9), (1, 12), (1, 3), (1, 11), (2, 4)]
    tables = [[0, 1, 2], [3, 4, 5], [6], [7, 8, 9], [10]]
    batch = make_batch(lengths, tables, 4)
    keys, values, q = rand(11, 4, 2, 8), rand(11, 4, 2, 8), rand(6, 4, 8)
    segments = ops.plan_attention(batch, 4)
    assert [segment.rows.tolist() for segment in segments] == [[4, 5], [0, 1, 3], [2]]
    whole = ops.attend(q, keys, values, segments, 0.3)
    monkeypatch.setattr(ops, "_KEYS", 2 * 12)
    segments = ops.plan_attention(batch, 4)
    assert [segment.rows.tolist() for segment in segments] == [[4, 5], [0, 1], [3], [2]]
    assert torch.equal(ops.attend(q, keys, values, segments, 0.3), whole)


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_padded_lengths_are_whole_blocks_and_at_most_a_quarter_longer(block_size: int) -> None:
    for blocks in range(1, 300):
        padded = ops.padded_length(blocks * block_size, block_size)
        assert padded % block_size == 0
        assert blocks * block_size <= padded <= 1.25 * blocks * block_size
    assert len({ops.padded_length(length, block_size) for length in range(1, 1025)}) <= 45


def test_a_sequence_with_broken_numbers_does_not_spoil_its_neighbours() -> None:
    batch = make_batch([(1, 3), (1, 3)], [[0], [1]], 4)
    keys, values, q = rand(2, 4, 2, 8), rand(2, 4, 2, 8), rand(2, 4, 8)
    keys[0], values[0] = torch.nan, torch.inf
    values[1, 3] = torch.nan  # left over in the last block from whoever had it before
    out = ops.attend(q, keys, values, ops.plan_attention(batch, 4), 0.3)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    batch = make_batch([(2, 6), (1, 1)], [[3, 1], [0]], 4)
    keys, values = torch.zeros(4, 4, 2, 8), torch.zeros(4, 4, 2, 8)
    k, v = rand(3, 2, 8), rand(3, 2, 8)
    ops.write_kv(k, v, keys, values, batch.slots_T)
    for cache, written in ((keys, k), (values, v)):
        assert torch.equal(torch.stack([cache[1, 0], cache[1, 1], cache[0, 0]]), written)
        assert torch.count_nonzero(cache) == written.numel()


def test_a_cache_that_is_not_contiguous_is_not_written_into_a_copy() -> None:
    cache = torch.zeros(4, 8, 2, 8)[:, :4]
    with pytest.raises(RuntimeError, match="view"):
        ops.write_kv(rand(1, 2, 8), rand(1, 2, 8), cache, cache, torch.tensor([0]))


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, weight = rand(5, 12), rand(12)
    expected = torch.stack([row / math.sqrt(float((row**2).mean()) + 1e-3) for row in x]) * weight
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-3), expected)


def test_rms_norm_rounds_before_it_multiplies_by_the_weight() -> None:
    x, weight = rand(64, 32).bfloat16(), rand(32).bfloat16()
    normed = (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), normed * weight)
    huge = torch.full((1, 8), 300.0, dtype=torch.float16)  # squares overflow in half precision
    assert ops.rms_norm(huge, torch.ones(8, dtype=torch.float16), 1e-5).tolist() == [[1.0] * 8]


def test_add_rms_norm_returns_the_sum_too() -> None:
    x, delta, weight = rand(3, 8), rand(3, 8), rand(8)
    normed, total = ops.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, ops.rms_norm(x + delta, weight, 1e-5))


def test_rotary_turns_the_halves_of_a_head_as_complex_numbers() -> None:
    x, angles = rand(4, 3, 10), rand(4, 5)
    turned = torch.complex(x[..., :5], x[..., 5:]) * torch.polar(torch.ones(4, 5), angles)[:, None]
    out = ops.apply_rotary(x, angles.cos(), angles.sin())
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), dim=-1))


def test_swiglu_gates_with_the_first_half() -> None:
    gate_up = rand(3, 8)
    gate, up = gate_up[:, :4], gate_up[:, 4:]
    torch.testing.assert_close(ops.swiglu(gate_up), gate / (1 + (-gate).exp()) * up)


def test_routing_takes_the_likeliest_experts_and_normalises_on_request() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]])
    probabilities = logits.softmax(-1)[0]
    weights, chosen = ops.route(logits, 2, normalise=False)
    assert chosen.tolist() == [[1, 2]]
    torch.testing.assert_close(weights[0], probabilities[[1, 2]])
    weights, _ = ops.route(logits.bfloat16(), 2, normalise=True)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights[0], torch.tensor([3.0, 2.0]).softmax(0))


def test_experts_see_only_their_tokens_and_their_results_are_weighted() -> None:
    x, gate_up, down = rand(7, 6), rand(4, 10, 6), rand(4, 6, 5)
    weights, chosen = ops.route(rand(7, 4), 2, normalise=True)
    expected = torch.zeros(7, 6)
    for token in range(7):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            expected[token] += weight * (down[expert] @ ops.swiglu(gate_up[expert] @ x[token]))
    torch.testing.assert_close(ops.experts(x, weights, chosen, gate_up, down), expected, rtol=0, atol=1e-4)


def test_a_decode_step_of_64_sequences_attends_in_well_under_a_second_for_30_layers() -> None:
    lengths = [(1, 200)] * 64
    tables = [list(range(s * 13, s * 13 + 13)) for s in range(64)]
    batch = make_batch(lengths, tables, 16)
    keys, values, q = rand(832, 16, 3, 64), rand(832, 16, 3, 64), rand(64, 9, 64)
    segments = ops.plan_attention(batch, 16)
    ops.attend(q, keys, values, segments, 0.125)
    start = time.process_time()
    ops.attend(q, keys, values, segments, 0.125)
    assert (time.process_time() - start) * 30 < 1.5
