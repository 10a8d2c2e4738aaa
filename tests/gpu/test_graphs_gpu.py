"""CUDA graphs of the decode step: equal to eager, blind to padding, awake to weights, fixed in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fakes import TINY_MODEL, engine_config
from torch import Tensor

from gtp_serve.config import CacheConfig, EngineConfig, ModelConfig, MoeConfig
from gtp_serve.engine.graphs import DecodeGraphs, build_graphs
from gtp_serve.errors import EngineFault
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.table import PLAIN_PAGED, Ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

MODEL = replace(TINY_MODEL, num_layers=3, hidden_size=256, num_heads=8, num_kv_heads=2, head_dim=64, ffn_size=512)
BLOCKS, BLOCK = 64, 16
CONFIG: EngineConfig = replace(
    engine_config(),
    model=MODEL,
    cache=CacheConfig(num_blocks=BLOCKS, block_size=BLOCK),
    device="cuda",
    max_running=8,
    max_context=128,
)


class Setup:
    """A decoder with random weights, a pool with random contents, and its captured steps."""

    def __init__(self, dtype: torch.dtype, ops: Ops | None = None, model: ModelConfig = MODEL) -> None:
        self.decoder = build_decoder(model, dtype=dtype, device="cuda", ops=ops)
        self.fill(1)
        self.pool = KVPool(
            num_layers=3,
            num_blocks=BLOCKS + SCRATCH_BLOCKS,
            block_size=BLOCK,
            num_kv_heads=2,
            head_dim=64,
            dtype=dtype,
            device="cuda",
        )
        for cache in (*self.pool.keys, *self.pool.values):
            cache.normal_()
        self.graphs: DecodeGraphs = build_graphs(self.decoder, self.pool, replace(CONFIG, model=model))

    def fill(self, seed: int) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        for target in self.decoder.targets():
            target.tensor.normal_(generator=generator).mul_(0.1)

    def capture(self) -> None:
        while self.graphs.capture_next():
            pass
        assert self.graphs.failures == {}
        assert self.graphs.captured == [1, 2, 4, 8]

    @torch.inference_mode()
    def eager(self, batch: Batch) -> Tensor:
        return self.decoder.forward(batch.to("cuda"), self.pool.keys, self.pool.values)

    def caches(self) -> list[Tensor]:
        return [cache.clone() for cache in (*self.pool.keys, *self.pool.values)]


def decode_batch(count: int, device: str = "cpu") -> Batch:
    contexts = [(37 * n + 11) % 126 + 2 for n in range(count)]
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(0))
    tables = order.view(8, 8)[:count]
    last = torch.tensor(contexts) - 1
    slots = tables.gather(1, last[:, None] // BLOCK)[:, 0] * BLOCK + last % BLOCK
    return Batch(
        token_ids_T=torch.arange(count) + 3,
        positions_T=last,
        slots_T=slots,
        query_starts=tuple(range(count + 1)),
        context_lens=tuple(contexts),
        block_tables_SB=tables,
        logit_rows_S=torch.arange(count),
    ).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ops", [None, PLAIN_PAGED], ids=["triton", "plain"])
def test_a_replayed_step_has_the_bits_of_an_eager_one(dtype: torch.dtype, ops: Ops | None) -> None:
    setup = Setup(dtype, ops)
    setup.capture()
    for count in (1, 2, 4, 8):
        for device in ("cpu", "cuda"):
            batch = decode_batch(count, device)
            expected = setup.eager(batch)
            assert torch.isfinite(expected).all()
            assert torch.equal(setup.graphs.replay(batch), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replayed_step_through_routed_experts_has_the_bits_of_an_eager_one(dtype: torch.dtype) -> None:
    """For other tokens, which go to other experts, than those that it was recorded with."""
    moe = MoeConfig(num_experts=16, top_k=4, ffn_size=96, shared_ffn_size=64, shared_gate=True)
    setup = Setup(dtype, model=replace(MODEL, ffn_size=0, moe=moe))
    setup.capture()
    for count in (1, 2, 4, 8):
        for shift in (0, 20):
            batch = decode_batch(count)
            batch = replace(batch, token_ids_T=batch.token_ids_T + shift)
            expected = setup.eager(batch)
            assert torch.isfinite(expected).all()
            assert torch.equal(setup.graphs.replay(batch), expected)


def test_a_batch_between_two_sizes_is_padded_and_its_padding_touches_no_sequence() -> None:
    setup = Setup(torch.bfloat16)
    before = setup.caches()
    setup.capture()
    for cache, saved in zip(setup.caches(), before, strict=True):
        assert torch.equal(cache[:BLOCKS], saved[:BLOCKS])
    batch = decode_batch(5)
    setup.graphs.replay(decode_batch(8))
    before = setup.caches()
    replayed = setup.graphs.replay(batch).clone()
    for cache, saved in zip(setup.caches(), before, strict=True):
        changed = (cache != saved).flatten(0, 1).flatten(1).any(-1).nonzero().flatten().tolist()
        assert set(changed) <= {*batch.slots_T.tolist(), BLOCKS * BLOCK}
    torch.testing.assert_close(replayed, setup.eager(batch), rtol=0, atol=0.1)


def test_new_weights_in_the_old_memory_are_used_without_a_new_capture() -> None:
    setup = Setup(torch.bfloat16)
    setup.capture()
    batch = decode_batch(4)
    old = setup.graphs.replay(batch).clone()
    setup.fill(2)
    setup.graphs.addresses.check()
    new = setup.graphs.replay(batch).clone()
    assert torch.equal(new, setup.eager(batch))
    assert not torch.allclose(new, old)


def test_a_parameter_that_moved_is_named() -> None:
    setup = Setup(torch.bfloat16)
    setup.capture()
    decoder: Decoder = setup.decoder
    decoder.norm.weight = decoder.norm.weight.clone()
    with pytest.raises(EngineFault, match=r"^model\.norm\.weight has moved"):
        setup.graphs.addresses.check()


def test_buckets_share_memory_and_results_of_one_outlive_the_replay_of_another() -> None:
    setup = Setup(torch.bfloat16)
    setup.capture()
    first = setup.graphs.replay(decode_batch(8))
    kept = first.clone()
    setup.graphs.replay(decode_batch(2))
    assert torch.equal(first, kept)
