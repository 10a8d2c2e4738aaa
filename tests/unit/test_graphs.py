"""Captured decode steps on a CPU: the same buckets, buffers and addresses as on a GPU, run eagerly."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from fakes import TINY_MODEL, engine_config, request
from torch import Tensor

from gtp_serve.assembly import captures_steps
from gtp_serve.config import CacheConfig, EngineConfig, MoeConfig
from gtp_serve.engine.addresses import AddressRegistry
from gtp_serve.engine.capture import EagerCapture, EagerStep
from gtp_serve.engine.collective import GroupCollective
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.graphs import DecodeGraphs, bucket_sizes, build_graphs, refusal
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.errors import EngineFault, UsageError
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.batch import Batch, Taps
from gtp_serve.ops.cuda import triton_ops
from gtp_serve.ops.table import PLAIN_PAGED, REFERENCE, Ops

torch.set_num_threads(1)

MODEL = replace(TINY_MODEL, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, ffn_size=48)
BLOCKS, BLOCK, TABLE = 40, 4, 6


def make_decoder(ops: Ops = PLAIN_PAGED, seed: int = 3) -> Decoder:
    decoder = build_decoder(MODEL, dtype=torch.float32, device="cpu", ops=ops)
    fill(decoder, seed)
    return decoder


def fill(decoder: Decoder, seed: int) -> None:
    """New weights into the old memory."""
    generator = torch.Generator().manual_seed(seed)
    for target in decoder.targets():
        target.tensor.copy_(torch.randn(target.tensor.shape, generator=generator) * 0.3)


def make_pool() -> KVPool:
    return KVPool(
        num_layers=2,
        num_blocks=BLOCKS + SCRATCH_BLOCKS,
        block_size=BLOCK,
        num_kv_heads=2,
        head_dim=8,
        dtype=torch.float32,
        device="cpu",
    )


def filled_pool() -> KVPool:
    pool = make_pool()
    generator = torch.Generator().manual_seed(1)
    for cache in (*pool.keys, *pool.values):
        cache.copy_(torch.randn(cache.shape, generator=generator))
    return pool


def make_graphs(
    decoder: Decoder, pool: KVPool, sizes: tuple[int, ...] = (1, 2, 4), capture_all: bool = True
) -> DecodeGraphs:
    graphs = DecodeGraphs(decoder, pool, EagerCapture(), sizes=sizes, max_blocks=TABLE)
    while capture_all and graphs.capture_next():
        pass
    return graphs


def decode_batch(count: int, seed: int = 0, width: int = 5) -> Batch:
    """Sequences of different lengths in blocks of their own."""
    rng = random.Random(seed)
    contexts = [rng.randint(1, width * BLOCK) for _ in range(count)]
    blocks = rng.sample(range(BLOCKS), BLOCKS)
    tables = [[blocks.pop() for _ in range(width)] for _ in contexts]
    slots = [table[(n - 1) // BLOCK] * BLOCK + (n - 1) % BLOCK for n, table in zip(contexts, tables, strict=True)]
    return Batch(
        token_ids_T=torch.tensor([rng.randrange(50) for _ in contexts]),
        positions_T=torch.tensor(contexts) - 1,
        slots_T=torch.tensor(slots),
        query_starts=tuple(range(count + 1)),
        context_lens=tuple(contexts),
        block_tables_SB=torch.tensor(tables),
        logit_rows_S=torch.arange(count),
    )


def eager(decoder: Decoder, batch: Batch, pool: KVPool) -> Tensor:
    return decoder.forward(batch, pool.keys, pool.values)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_replayed_step_gives_the_logits_and_the_cache_of_an_eager_one(count: int) -> None:
    reference = make_decoder(REFERENCE)
    captured_pool, eager_pool = filled_pool(), filled_pool()
    graphs = make_graphs(make_decoder(), captured_pool)
    for seed in range(3):
        batch = decode_batch(count, seed)
        expected = eager(reference, batch, eager_pool)
        torch.testing.assert_close(graphs.replay(batch), expected, rtol=0, atol=2e-5)
    for mine, other in zip(captured_pool.keys, eager_pool.keys, strict=True):
        torch.testing.assert_close(mine[:BLOCKS], other[:BLOCKS], rtol=0, atol=2e-5)


def test_a_full_bucket_gives_the_bits_of_the_same_step_run_eagerly() -> None:
    decoder, batch = make_decoder(), decode_batch(4)
    expected = eager(decoder, batch, filled_pool())
    assert torch.equal(make_graphs(decoder, filled_pool()).replay(batch), expected)


def test_padding_rows_write_to_the_scratch_block_and_nowhere_else() -> None:
    pool = filled_pool()
    graphs = make_graphs(make_decoder(), pool, sizes=(4,))
    for cache in (*pool.keys, *pool.values):
        cache[BLOCKS] = 9.0
    before = [cache.clone() for cache in (*pool.keys, *pool.values)]
    batch = decode_batch(3, 7)
    graphs.replay(decode_batch(4, 3))  # leaves its tables and slots in the buffers
    for cache, saved in zip((*pool.keys, *pool.values), before, strict=True):
        cache.copy_(saved)
    graphs.replay(batch)
    for cache, saved in zip((*pool.keys, *pool.values), before, strict=True):
        changed = (cache != saved).flatten(0, 1).any(-1).any(-1).nonzero().flatten().tolist()
        assert changed == sorted([*batch.slots_T.tolist(), BLOCKS * BLOCK])


def test_capturing_touches_no_block_that_a_sequence_may_own() -> None:
    pool = filled_pool()
    before = [cache.clone() for cache in (*pool.keys, *pool.values)]
    make_graphs(make_decoder(), pool)
    for cache, saved in zip((*pool.keys, *pool.values), before, strict=True):
        assert torch.equal(cache[:BLOCKS], saved[:BLOCKS])


def test_what_padding_rows_read_cannot_reach_the_other_rows() -> None:
    pool = filled_pool()
    graphs = make_graphs(make_decoder(), pool, sizes=(4,))
    batch = decode_batch(2)
    expected = graphs.replay(batch).clone()
    for cache in (*pool.keys, *pool.values):
        cache[BLOCKS] = torch.nan
    assert torch.equal(graphs.replay(batch), expected)


def test_buckets_are_captured_one_at_a_time_and_the_largest_first() -> None:
    graphs = make_graphs(make_decoder(), filled_pool(), sizes=(2, 8, 4), capture_all=False)
    batch = decode_batch(3)
    assert not graphs.fits(batch)
    seen = []
    while graphs.capture_next():
        seen.append(graphs.captured)
        assert graphs.fits(batch)
    assert seen == [[8], [4, 8], [2, 4, 8]]
    assert not graphs.capture_next()


def test_a_batch_takes_the_smallest_bucket_that_holds_it() -> None:
    ran: list[int] = []

    class NotingCapture(EagerCapture):
        def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> EagerStep:
            result = step().clone()

            def noted() -> Tensor:
                ran.append(len(result))
                return step()

            return EagerStep(noted, result)

    graphs = DecodeGraphs(make_decoder(), filled_pool(), NotingCapture(), sizes=(1, 2, 4), max_blocks=TABLE)
    while graphs.capture_next():
        pass
    for count in (1, 2, 3, 4):
        graphs.replay(decode_batch(count))
    assert ran == [1, 2, 4, 4]


@pytest.mark.parametrize("why", ["chunk", "too many", "table", "scores"])
def test_a_batch_that_fits_no_bucket_runs_eagerly(why: str) -> None:
    batch = decode_batch(5) if why == "too many" else decode_batch(2)
    if why == "chunk":
        batch = replace(decode_batch(2), query_starts=(0, 2), context_lens=(2,), logit_rows_S=torch.tensor([1]))
        batch = replace(batch, positions_T=torch.tensor([0, 1]), block_tables_SB=torch.tensor([[3]]))
    if why == "table":
        batch = replace(batch, block_tables_SB=torch.nn.functional.pad(batch.block_tables_SB, (0, 2)))
    if why == "scores":
        batch = replace(batch, score_rows_R=torch.tensor([0]))
    decoder, pool = make_decoder(), filled_pool()
    expected = eager(decoder, batch, filled_pool())
    graphs = make_graphs(decoder, pool)
    assert not graphs.fits(batch)
    with pytest.raises(ValueError, match=r"none of the buckets \[1, 2, 4\]"):
        graphs.replay(batch)
    assert torch.equal(graphs.forward(batch, pool.keys, pool.values), expected)
    assert (graphs.replayed, graphs.ran_eagerly) == (0, 1)


def test_forward_replays_unless_the_choice_of_experts_is_wanted() -> None:
    decoder, pool = make_decoder(), filled_pool()
    graphs = make_graphs(decoder, pool)
    graphs.forward(decode_batch(2), pool.keys, pool.values, Taps())
    graphs.forward(replace(decode_batch(2), all_routes=True), pool.keys, pool.values, Taps(routes=[]))
    assert (graphs.replayed, graphs.ran_eagerly) == (1, 1)


def test_only_the_wanted_rows_come_back() -> None:
    graphs = make_graphs(make_decoder(), filled_pool())
    batch = decode_batch(3)
    every = graphs.replay(batch).clone()
    some = graphs.replay(replace(batch, logit_rows_S=torch.tensor([0, 2])))
    assert torch.equal(some, every[[0, 2]])


def test_inputs_and_result_stay_in_their_memory() -> None:
    graphs = make_graphs(make_decoder(), filled_pool())
    results = [graphs.replay(decode_batch(3, seed)) for seed in range(2)]
    assert results[0].data_ptr() == results[1].data_ptr()
    inputs = graphs._buckets[4].inputs
    places = [t.data_ptr() for t in (inputs.batch.token_ids_T, inputs.batch.block_tables_SB)]
    graphs.replay(decode_batch(3, 2))
    assert [t.data_ptr() for t in (inputs.batch.token_ids_T, inputs.batch.block_tables_SB)] == places


def test_weights_that_change_in_place_are_used_by_the_next_replay() -> None:
    decoder, batch = make_decoder(), decode_batch(4)
    graphs = make_graphs(decoder, filled_pool())
    before = graphs.replay(batch).clone()
    fill(decoder, seed=4)
    graphs.addresses.check()
    assert torch.equal(graphs.replay(batch), eager(decoder, batch, filled_pool()))
    assert not torch.allclose(before, graphs.replay(batch))


def test_a_parameter_that_moved_is_named() -> None:
    decoder = make_decoder()
    graphs = make_graphs(decoder, filled_pool())
    norm = decoder.layers[1].ffn_norm
    norm.weight = norm.weight.clone()
    with pytest.raises(EngineFault, match=r"^model\.layers\.1\.post_attention_layernorm\.weight has moved"):
        graphs.addresses.check()


def test_a_cache_that_moved_is_named() -> None:
    pool = filled_pool()
    graphs = make_graphs(make_decoder(), pool)
    pool.values = (pool.values[0], pool.values[1].clone())
    with pytest.raises(EngineFault, match="the KV cache's values of layer 1 has moved"):
        graphs.addresses.check()


def test_other_changes_of_addresses_are_told_apart_and_many_are_summed_up() -> None:
    held = {name: torch.zeros(4, 6) for name in ("a", "b", "c")}
    registry = AddressRegistry(held.items)
    registry.check()
    assert registry.register() == 3
    registry.check()
    held["b"] = held["b"].view(6, 4)
    with pytest.raises(EngineFault, match=r"b has changed from torch.float32 \[4, 6\] with strides \[6, 1\] to"):
        registry.check()
    del held["b"]
    with pytest.raises(EngineFault, match="b has gone"):
        registry.check()
    held |= {str(n): torch.zeros(1) for n in range(9)}
    with pytest.raises(EngineFault, match="also: 3 has appeared; and: 5 more"):
        registry.check()


def test_a_size_that_cannot_be_captured_is_left_out_and_said() -> None:
    class SmallMemory(EagerCapture):
        def record(self, step: Callable[[], Tensor], inputs: Sequence[Tensor]) -> EagerStep:
            output = step().clone()
            if len(output) > 2:
                raise torch.OutOfMemoryError("no memory for 4 rows")
            return EagerStep(step, output)

    pool = filled_pool()
    told: list[str] = []
    graphs = DecodeGraphs(make_decoder(), pool, SmallMemory(), sizes=(1, 2, 4), max_blocks=TABLE, log=told.append)
    while graphs.capture_next():
        pass
    assert graphs.captured == [1, 2]
    assert graphs.failures == {4: "OutOfMemoryError: no memory for 4 rows"}
    assert [text.partition(" could")[0] for text in told] == ["steps of 4 sequences"]
    graphs.forward(decode_batch(3), pool.keys, pool.values)
    assert graphs.ran_eagerly == 1
    assert graphs.addresses.register() > 4


def test_bucket_sizes_waste_little_and_hold_the_largest_batch() -> None:
    assert bucket_sizes(1) == [1]
    assert bucket_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert bucket_sizes(128) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128]


def config(ops_device: str = "cpu", **changes: int) -> EngineConfig:
    base = replace(engine_config(**changes), model=MODEL, cache=CacheConfig(num_blocks=BLOCKS, block_size=BLOCK))
    chosen: EngineConfig = replace(base, device=ops_device)
    return chosen


def test_a_decoder_that_asks_the_host_is_not_captured() -> None:
    plain, pool = make_decoder(REFERENCE), make_pool()
    with pytest.raises(UsageError, match="cannot be captured with plain torch"):
        build_graphs(plain, pool, config(), EagerCapture())
    with pytest.raises(UsageError, match="on cpu does not record steps"):
        build_graphs(make_decoder(), pool, config())
    assert refusal(plain, config("cuda")) == "attention of plain torch asks the host for lengths"
    moe = MoeConfig(num_experts=4, top_k=2, ffn_size=8)
    sparse = replace(config("cuda"), model=replace(MODEL, moe=moe))
    assert "how many tokens each expert has" in (refusal(make_decoder(), sparse) or "")
    assert refusal(make_decoder(triton_ops(None)), sparse) is None
    assert refusal(make_decoder(), config("cuda")) is None


def test_ranks_are_captured_where_their_collectives_are_the_devices_own() -> None:
    def ranks(*, capturable: bool) -> Decoder:
        group = GroupCollective(0, 2, group=None, abort=lambda: None, capturable=capturable)
        return build_decoder(
            MODEL, dtype=torch.float32, device="cpu", tp_rank=0, tp_size=2, collective=group, ops=PLAIN_PAGED
        )

    two = replace(config("cuda"), tp=2)
    assert captures_steps(two, ranks(capturable=True))
    assert not captures_steps(two, ranks(capturable=False))
    assert not captures_steps(replace(two, graphs=False), ranks(capturable=True))
    assert refusal(ranks(capturable=False), two) == "the ranks' collectives run on the host"


def test_the_pool_must_have_the_scratch_block() -> None:
    without = replace(config(), cache=CacheConfig(num_blocks=BLOCKS + 1, block_size=BLOCK))
    with pytest.raises(ValueError, match="41 blocks in the pool, 41 in the configuration"):
        build_graphs(make_decoder(), make_pool(), without, EagerCapture())


def test_an_engine_generates_the_same_tokens_with_captured_steps() -> None:
    limits = config(max_running=4, max_step_tokens=16)
    pools = make_pool(), make_pool()
    graphs = build_graphs(make_decoder(), pools[0], replace(limits, max_context=24), EagerCapture())
    engines = [
        Engine(limits, ModelRunner(graphs, pools[0], limits)),
        Engine(limits, ModelRunner(make_decoder(REFERENCE), pools[1], limits)),
    ]
    rng = random.Random(0)
    prompts = [[rng.randrange(50) for _ in range(rng.randint(1, 12))] for _ in range(9)]
    answers: list[dict[str, list[int]]] = []
    for engine in engines:
        for n, prompt in enumerate(prompts):
            engine.add(request(f"r{n}", prompt, max_new_tokens=4 + n % 5, temperature=0.0, ignore_eos=True))
        tokens: dict[str, list[int]] = {f"r{n}": [] for n in range(9)}
        while engine.has_work():
            for event in engine.step():
                tokens[event.rid] += event.token_ids
            graphs.capture_next()
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert graphs.captured == [1, 2, 4]
    assert graphs.replayed > 5
    assert graphs.ran_eagerly > 0
