"""Memory that is taken while torch is imported: enough for every kind of model, and never what is not wanted."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from gtp_serve.assembly import build_pool, empty_decoder, keep_weights
from gtp_serve.config import CacheConfig, DType, EngineConfig, ModelConfig, MoeConfig
from gtp_serve.refit.arena import MappedArena
from gtp_serve.refit.mapping import HUGE_PAGE, MappedRange, resident_bytes
from gtp_serve.server import early_memory
from gtp_serve.server.early_memory import NOTHING_TAKEN, EarlyMemory, take_memory
from gtp_serve.server.launch import Launch, write_order
from gtp_serve.server.options import SavedGrid

DENSE = ModelConfig(
    family="llama", num_layers=2, hidden_size=264, num_heads=4, num_kv_heads=2, head_dim=66, ffn_size=1000,
    vocab_size=4001, vocab_rows=4032,
)  # fmt: skip
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tied=True),
    "biased": replace(DENSE, qkv_bias=True, qk_norm=True),
    "experts": replace(DENSE, moe=MoeConfig(num_experts=5, top_k=2, ffn_size=72)),
}


def config_of(model: ModelConfig, dtype: DType = "bfloat16", *, device: str = "cpu", tp: int = 1) -> EngineConfig:
    return EngineConfig(model=model, cache=CacheConfig(num_blocks=4), dtype=dtype, device=device, tp=tp)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_lie_in_the_memory_that_was_taken(name: str, dtype: DType) -> None:
    config = config_of(MODELS[name], dtype)
    taken_memory = take_memory(config)
    memory, cache = taken_memory.weights, taken_memory.cache
    assert memory is not None
    assert cache is not None
    assert resident_bytes(memory.address, memory.size) == memory.size
    taken = range(memory.address, memory.address + memory.size)

    decoder = empty_decoder(config)
    store = keep_weights(decoder, config, memory)

    assert all(target.tensor.data_ptr() in taken for target in decoder.targets())
    assert store.num_bytes <= memory.size < store.num_bytes + HUGE_PAGE

    pool = build_pool(config, decoder, cache)
    assert pool.keys[0].data_ptr() == cache.address
    assert pool.num_bytes <= cache.size < pool.num_bytes + HUGE_PAGE
    assert all(int(part.count_nonzero()) == 0 for part in (*pool.keys, *pool.values))
    small = MappedRange(HUGE_PAGE)
    larger = build_pool(replace(config, cache=CacheConfig(num_blocks=4000)), decoder, small)
    assert larger.num_blocks >= 4000
    assert larger.keys[0].data_ptr() != small.address


def test_of_a_large_cache_the_first_page_of_each_tensor_is_taken() -> None:
    config = replace(config_of(DENSE), cache=CacheConfig(num_blocks=2000, block_size=16))
    cache = take_memory(config).cache
    assert cache is not None
    stride = 2001 * 16 * DENSE.num_kv_heads * DENSE.head_dim * 2
    assert cache.size >= 4 * stride > 8 * HUGE_PAGE
    for tensor in range(4):
        assert resident_bytes(cache.address + tensor * stride // HUGE_PAGE * HUGE_PAGE, HUGE_PAGE) == HUGE_PAGE
    assert resident_bytes(cache.address, cache.size) == 4 * HUGE_PAGE


def test_memory_that_is_too_large_is_cut_and_holds_zeros() -> None:
    memory = MappedRange(5 * HUGE_PAGE)
    memory.populate()
    first, like = memory.address, torch.empty(HUGE_PAGE // 4 + 1)

    arena = MappedArena(like.nbytes, memory=memory)

    assert memory.size == 2 * HUGE_PAGE
    assert arena.live(0, like).data_ptr() == first
    assert int(arena.live(0, like).count_nonzero()) == 0
    assert resident_bytes(first + memory.size, HUGE_PAGE) == 0


def test_memory_that_is_too_small_is_given_back() -> None:
    memory = MappedRange(HUGE_PAGE)
    memory.populate()
    like = torch.empty(HUGE_PAGE // 4 + 1)
    assert MappedArena(like.nbytes, memory=memory).live(0, like).data_ptr() != memory.address
    assert resident_bytes(memory.address, memory.size) == 0


def test_nothing_is_taken_for_a_gpu_or_beside_other_ranks() -> None:
    assert take_memory(config_of(DENSE, device="cuda")) == NOTHING_TAKEN
    assert take_memory(config_of(DENSE, tp=2)) == NOTHING_TAKEN


def test_what_may_not_fit_is_left_to_those_who_can_say_so() -> None:
    assert take_memory(config_of(replace(DENSE, num_layers=1_000_000))) == NOTHING_TAKEN


def order(text: bytes) -> int:
    reading, writing = os.pipe()
    os.write(writing, text)
    os.close(writing)
    return reading


def test_the_order_is_heard_with_the_memory() -> None:
    launch = Launch(ckpt="/c", iteration=None, saved=SavedGrid(), engine=config_of(DENSE), threads=1, first_prompt=(1,))
    heard, memory = EarlyMemory(order(write_order(launch, "ipc:///x"))).wait()
    assert heard == (launch, "ipc:///x")
    assert memory.weights is not None


def test_no_order_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_memory, "take_memory", None)
    assert EarlyMemory(order(b"")).wait() == (None, NOTHING_TAKEN)


def test_an_order_that_is_none_is_told_to_who_waits() -> None:
    with pytest.raises(ValueError, match="Expected `array`, got `object`"):
        EarlyMemory(order(b"{}")).wait()
