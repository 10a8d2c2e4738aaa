"""The extras FlashInfer and flash-attn on a device, where they are installed: eagerly and in CUDA graphs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_steps import BLOCKS, cache_of, random_step, step_of
from fakes import TINY_MODEL

from gtp_serve.config import AttentionBackend
from gtp_serve.engine.capture import CudaCapture
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops import reference
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.table import REFERENCE, Ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

BACKENDS: list[tuple[AttentionBackend, int]] = [("flashinfer", 16), ("flash-attn", 256)]
MODEL = replace(
    TINY_MODEL, num_layers=2, hidden_size=256, num_heads=6, num_kv_heads=2, head_dim=64, ffn_size=256
)  # fmt: skip


def ops_of(attention: AttentionBackend, dtype: torch.dtype, head_dim: int, block_size: int) -> Ops:
    try:
        return choose_ops(device="cuda", dtype=dtype, head_dim=head_dim, block_size=block_size, attention=attention)
    except (EnvironmentFault, UsageError) as refused:
        pytest.skip(refused.message)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("attention", "block"), BACKENDS)
def test_random_steps_attend_as_the_reference_does(
    attention: AttentionBackend, block: int, dtype: torch.dtype, head_dim: int
) -> None:
    ops = ops_of(attention, dtype, head_dim, block)
    for seed in range(12):
        rng = random.Random(seed)
        batch = random_step(rng, block, decode=seed % 3 == 0)
        window, kv_heads = rng.choice([None, block + 3]), rng.choice([1, 2])
        heads = kv_heads * rng.choice([1, 3, 4])
        keys, values = (
            cache.to("cuda", dtype) for cache in cache_of(batch, block, kv_heads, head_dim, seed, unowned=100.0)
        )
        batch = batch.to("cuda")
        q = torch.randn(len(batch.token_ids_T), heads, head_dim, device="cuda", dtype=dtype)
        scale = head_dim**-0.5
        expected = reference.attend(q, keys, values, reference.plan_attention(batch, block, window), scale)
        got = ops.plan_attention(batch, block, window).attend(q, keys, values, scale)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


def model_with(ops: Ops, block: int) -> tuple[Decoder, KVPool]:
    decoder = build_decoder(MODEL, dtype=torch.bfloat16, device="cuda", ops=ops)
    pool = KVPool(
        num_layers=2,
        num_blocks=BLOCKS + SCRATCH_BLOCKS,
        block_size=block,
        num_kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
        device="cuda",
    )
    generator = torch.Generator("cuda").manual_seed(3)
    for target in decoder.targets():
        target.tensor.normal_(generator=generator).mul_(0.1)
    for cache in (*pool.keys, *pool.values):
        cache.normal_(generator=generator)
    return decoder, pool


@torch.inference_mode()
@pytest.mark.parametrize(("attention", "block"), BACKENDS)
def test_recorded_steps_follow_lengths_and_blocks(attention: AttentionBackend, block: int) -> None:
    """Padded buckets too, and one batch right after another, without waiting for the device in between."""
    decoder, pool = model_with(ops_of(attention, torch.bfloat16, 64, block), block)
    plain, plain_pool = model_with(REFERENCE, block)
    graphs = DecodeGraphs(decoder, pool, CudaCapture("cuda"), sizes=(1, 2, 4, 8), max_blocks=8)
    while graphs.capture_next():
        pass
    assert graphs.failures == {}
    rng = random.Random(0)
    counts = (8, 5, 1, 2, 7, 4, 8, 8)
    batches = [step_of(rng, [(1, rng.randint(1, 6 * block)) for _ in range(n)], block) for n in counts]
    replayed = [graphs.replay(batch).clone() for batch in batches]
    for batch, got in zip(batches, replayed, strict=True):
        expected = plain.forward(batch.to("cuda"), plain_pool.keys, plain_pool.values)
        torch.testing.assert_close(got, expected, rtol=0, atol=0.1)
    assert graphs.replayed == len(counts)
