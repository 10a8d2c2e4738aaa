"""Weights on a GPU change places by copying: captured steps read the new ones at the old addresses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checkpoint_files import random_tensors
from fakes import TINY_MODEL, engine_config
from parity.model_harness import TensorSource

from gtp_serve.config import CacheConfig
from gtp_serve.engine.graphs import DecodeGraphs, build_graphs
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.batch import Batch
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.arena import DeviceArena
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.store import WeightStore
from gtp_serve.refit.verify import rank_digest, verify

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

MODEL = replace(TINY_MODEL, num_layers=2, hidden_size=256, num_heads=4, num_kv_heads=2, head_dim=64, ffn_size=512)
BLOCKS, BLOCK = 16, 16
CONFIG = replace(
    engine_config(),
    model=MODEL,
    cache=CacheConfig(num_blocks=BLOCKS, block_size=BLOCK),
    dtype="bfloat16",
    device="cuda",
    max_running=4,
    max_context=64,
)


def fill(store: WeightStore, seed: int, *, staged: bool) -> None:
    source = TensorSource(random_tensors(MODEL, seed))
    shapes = {name: tuple(tensor.shape) for name, tensor in source.tensors.items()}
    plan = build_plan(source.shards(), store.shards, shapes)
    apply_plan(plan, source, store.staged if staged else store.live)


def new_decoder() -> Decoder:
    return build_decoder(MODEL, dtype=torch.bfloat16, device="cuda")


def captured(decoder: Decoder) -> DecodeGraphs:
    graphs = build_graphs(decoder, new_pool(), CONFIG)
    while graphs.capture_next():
        pass
    return graphs


def one_token(graphs: DecodeGraphs) -> torch.Tensor:
    """Logits of a single token at position 0 of block 0."""
    batch = Batch(
        token_ids_T=torch.tensor([3]),
        positions_T=torch.tensor([0]),
        slots_T=torch.tensor([0]),
        query_starts=(0, 1),
        context_lens=(1,),
        block_tables_SB=torch.tensor([[0]]),
        logit_rows_S=torch.tensor([0]),
    )
    return graphs.replay(batch).clone()


def new_pool() -> KVPool:
    return KVPool(
        num_layers=MODEL.num_layers,
        num_blocks=BLOCKS + SCRATCH_BLOCKS,
        block_size=BLOCK,
        num_kv_heads=MODEL.num_kv_heads,
        head_dim=MODEL.head_dim,
        dtype=torch.bfloat16,
        device="cuda",
    )


def test_captured_steps_compute_with_swapped_weights_and_with_the_old_ones_after_a_second_swap() -> None:
    decoder = new_decoder()
    store = WeightStore(decoder.targets())
    fill(store, 1, staged=False)
    graphs = captured(decoder)
    old = one_token(graphs)
    other = new_decoder()
    others = WeightStore(other.targets())
    fill(others, 2, staged=False)

    fill(store, 2, staged=True)
    assert torch.equal(one_token(graphs), old)
    store.swap()
    graphs.addresses.check()

    assert torch.equal(one_token(graphs), one_token(captured(other)))
    assert rank_digest(store.live) == verify(others.live)
    store.swap()
    assert torch.equal(one_token(graphs), old)


def test_device_arena_exchanges_what_is_no_whole_chunk() -> None:
    size = (64 << 20) * 2 + 1000
    arena = DeviceArena(size, torch.device("cuda"))
    live, staged = (take(0, torch.empty(size // 4)) for take in (arena.live, arena.staged))
    numbers = torch.arange(size // 4, device="cuda", dtype=torch.float32)
    live.copy_(numbers)
    staged.copy_(-numbers)

    arena.swap()

    assert torch.equal(live, -numbers)
    assert torch.equal(staged, numbers)


def test_released_second_set_frees_its_memory() -> None:
    arena = DeviceArena(256 << 20, torch.device("cuda"))
    arena.staged(0, torch.empty(4))
    before = torch.cuda.memory_allocated()

    assert arena.release_staged() == 256 << 20
    assert before - torch.cuda.memory_allocated() >= 256 << 20
