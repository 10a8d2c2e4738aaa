"""Plans become tensors, tensors become tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from fakes import TINY_MODEL, engine_config
from torch import Tensor

from gtp_serve.engine.inputs import build_batch, build_rows
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.engine.step import NO_TOKEN, SampleSpec, StepItem, StepPlan
from gtp_serve.kv.pool import KVPool
from gtp_serve.ops.batch import Batch, Taps

GREEDY = SampleSpec(temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0, seed=1, index=0)
DRAWN = SampleSpec(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=9, index=4, banned=(2, 3))


def item(start: int, tokens: Sequence[int], table: Sequence[int], sample: SampleSpec | None) -> StepItem:
    return StepItem(rid="r", token_ids=tuple(tokens), start=start, block_table=tuple(table), sample=sample)


PLAN = StepPlan(
    step=3,
    block_size=4,
    items=(item(5, [11], [7, 2], GREEDY), item(2, [21, 22, 23], [1, 9], None), item(0, [31, 32], [4], DRAWN)),
)


class EchoDecoder:
    """Logits that favour the token fed in the row asked for (NaN for token 32); notes what it was given."""

    def __init__(self, vocab_rows: int) -> None:
        self.vocab_rows = vocab_rows
        self.batches: list[Batch] = []

    def forward(
        self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor], taps: Taps | None = None
    ) -> Tensor:
        assert not torch.is_grad_enabled()
        self.batches.append(batch)
        keys[0].view(-1, keys[0].shape[-1])[batch.slots_T] = 1.0
        tokens = batch.token_ids_T[batch.logit_rows_S]
        logits = torch.nn.functional.one_hot(tokens, self.vocab_rows).float() * 5
        logits[:, -1] = 100.0  # a padding row
        logits[tokens == 32] = torch.nan
        return logits


def make_runner() -> tuple[ModelRunner, EchoDecoder, KVPool]:
    pool = KVPool(
        num_layers=1,
        num_blocks=10,
        block_size=4,
        num_kv_heads=1,
        head_dim=4,
        dtype=torch.float32,
        device="cpu",
    )
    decoder = EchoDecoder(TINY_MODEL.vocab_rows)
    return ModelRunner(decoder, pool, engine_config()), decoder, pool


def test_a_plan_becomes_one_flat_batch() -> None:
    batch = build_batch(PLAN, "cpu")

    assert batch.token_ids_T.tolist() == [11, 21, 22, 23, 31, 32]
    assert batch.positions_T.tolist() == [5, 2, 3, 4, 0, 1]
    assert batch.slots_T.tolist() == [2 * 4 + 1, 1 * 4 + 2, 1 * 4 + 3, 9 * 4, 4 * 4, 4 * 4 + 1]
    assert batch.query_starts == (0, 1, 4, 6)
    assert batch.context_lens == (6, 5, 2)
    assert batch.block_tables_SB.tolist() == [[7, 2], [1, 9], [4, 0]]
    assert batch.logit_rows_S.tolist() == [0, 5]
    assert {t.dtype for t in (batch.token_ids_T, batch.positions_T, batch.slots_T, batch.logit_rows_S)} == {torch.int64}
    assert not batch.all_logits


def test_single_tokens_that_are_all_sampled_need_no_picking() -> None:
    one, other = (item(at, [11], [7, 2], GREEDY) for at in (5, 4))
    plan = StepPlan(step=1, block_size=4, items=(one, other))
    assert build_batch(plan, "cpu").all_logits
    assert not build_batch(replace(plan, items=(one, item(4, [11], [7, 2], None))), "cpu").all_logits
    routed = build_batch(replace(plan, items=(one, replace(other, routes=True))), "cpu")
    assert (routed.all_logits, routed.all_routes) == (True, True)


def test_sampling_rows_are_those_of_the_samplers_in_order() -> None:
    rows = build_rows(PLAN)

    assert len(rows) == 2
    assert (rows.temperature, rows.top_k, rows.top_p, rows.min_p) == (
        (0.0, 0.7),
        (-1, 5),
        (1.0, 0.9),
        (0.0, 0.1),
    )
    assert (rows.seed, rows.index, rows.banned) == ((1, 9), (0, 4), ((), (2, 3)))


def test_the_runner_feeds_the_pool_and_brings_tokens_home() -> None:
    runner, decoder, pool = make_runner()

    result = runner.launch(PLAN).wait()

    assert result.token_ids == (11, NO_TOKEN)
    expected = torch.tensor([[0.0] * 11 + [5.0] + [0.0] * 38]).log_softmax(-1)[0, 11]
    assert abs(result.logprobs[0] - float(expected)) < 1e-6
    assert pool.keys[0].sum(-1).count_nonzero() == 6
    assert len(decoder.batches) == 1


def test_a_step_that_samples_nothing_gives_an_empty_result() -> None:
    runner, _, _ = make_runner()
    plan = StepPlan(step=0, block_size=4, items=(item(0, [1, 2], [3], None),))

    result = runner.launch(plan).wait()

    assert result.token_ids == result.logprobs == ()
