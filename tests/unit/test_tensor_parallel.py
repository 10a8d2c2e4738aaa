"""Spans and arithmetic of tensor-parallel ranks, run as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from parity.model_harness import PagedRun, TensorSource, fill, filled_decoder
from torch import Tensor

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.errors import UsageError
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.ranks import kv_heads_per_rank, possible_ranks, rank_elements
from gtp_serve.layout.spans import Box, Span, check_coverage
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.refit.plan import build_plan

DENSE = ModelConfig(
    family="llama", num_layers=2, hidden_size=24, num_heads=8, num_kv_heads=2, head_dim=4, ffn_size=48,
    vocab_size=50, vocab_rows=50,
)  # fmt: skip
MOE = MoeConfig(num_experts=5, top_k=2, ffn_size=16)
CONFIGS = {
    "llama": DENSE,
    "biases everywhere": replace(DENSE, qkv_bias=True, proj_bias=True, mlp_bias=True),
    "qwen3, tied": replace(DENSE, qk_norm=True, tied=True),
    "moe": replace(DENSE, ffn_size=0, moe=MOE),
    "moe with a gated shared expert": replace(
        DENSE, ffn_size=0, moe=replace(MOE, shared_ffn_size=32, shared_gate=True)
    ),
}
SIZES = (1, 2, 4, 8)  # with two KV heads, 4 and 8 ranks hold each of them twice and four times


class Ranks:
    """Threads that meet at each collective, as processes would."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=20)
        self.given: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.given[rank] = x
        self.barrier.wait()
        everyone = [one for one in self.given if one is not None]
        self.barrier.wait()
        return everyone

    def run(self, work: Callable[[int], Tensor]) -> list[Tensor]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))


@dataclass(frozen=True)
class ThreadCollective:
    ranks: Ranks
    rank: int
    capturable: bool = False

    @property
    def size(self) -> int:
        return self.ranks.size

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self.ranks.exchange(self.rank, x)).sum(0)

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat(self.ranks.exchange(self.rank, x), dim=-1)


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


def build_ranks(config: ModelConfig, size: int) -> tuple[Ranks, list[Decoder]]:
    ranks = Ranks(size)
    decoders = [
        build_decoder(
            config,
            dtype=torch.float32,
            device="cpu",
            tp_rank=rank,
            tp_size=size,
            collective=ThreadCollective(ranks, rank),
        )
        for rank in range(size)
    ]
    return ranks, decoders


def random_tensors(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * 0.3 + ("norm" in name)
        for name, shape in logical_tensors(config).items()
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_targets_are_exactly_the_logical_tensors(name: str) -> None:
    pieces: dict[str, list[Span]] = {}
    for target in build_decoder(CONFIGS[name], dtype=torch.float32, device="cpu").targets():
        for span in target.shard.spans:
            pieces.setdefault(span.name, []).append(span)
    assert pieces.keys() == logical_tensors(CONFIGS[name]).keys()
    for tensor, shape in logical_tensors(CONFIGS[name]).items():
        check_coverage(tensor, shape, [(span.logical, "") for span in pieces[tensor]])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_what_a_rank_is_said_to_hold_is_what_it_holds(name: str, size: int) -> None:
    config = CONFIGS[name]
    shapes = logical_tensors(config)
    said = sum(rank_elements(tensor, shape, config, size) for tensor, shape in shapes.items())
    first = build_ranks(config, size)[1][0]
    assert said == sum(target.tensor.numel() for target in first.targets())
    assert kv_heads_per_rank(config, size) == first.num_kv_heads


def copies_of(spans: list[Span], shape: tuple[int, ...]) -> Tensor:
    """How many ranks hold each element."""
    counts = torch.zeros(shape, dtype=torch.int64)
    for span in spans:
        counts[tuple(slice(a, b) for a, b in zip(span.logical.start, span.logical.stop, strict=True))] += 1
    return counts


def expected_copies(name: str, size: int) -> int:
    last = name.rsplit(".", 2)[-2]
    if "norm" in name or last in ("gate", "shared_expert_gate"):
        return size
    if last in ("k_proj", "v_proj"):
        return max(1, size // DENSE.num_kv_heads)
    return 1


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_together_hold_each_element_as_often_as_they_should(name: str, size: int) -> None:
    _, decoders = build_ranks(CONFIGS[name], size)
    spans = [span for decoder in decoders for target in decoder.targets() for span in target.shard.spans]
    for tensor, shape in logical_tensors(CONFIGS[name]).items():
        counts = copies_of([span for span in spans if span.name == tensor], shape)
        assert set(counts.flatten().tolist()) == {expected_copies(tensor, size)}, tensor


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("name", CONFIGS)
def test_any_number_of_ranks_gives_the_logits_of_one(name: str, size: int) -> None:
    config, tensors = CONFIGS[name], random_tensors(CONFIGS[name])
    work = [(0, [3, 49, 0, 17]), (1, [25, 26])]
    alone = logits_of(filled_decoder(config, tensors), work)
    ranks, decoders = build_ranks(config, size)
    for decoder in decoders:
        fill(decoder, tensors)
    for logits in ranks.run(lambda rank: logits_of(decoders[rank], work)):
        assert logits.shape == (6, config.vocab_rows)
        torch.testing.assert_close(logits, alone, rtol=0, atol=2e-5)


def logits_of(decoder: Decoder, work: list[tuple[int, list[int]]]) -> Tensor:
    run = PagedRun(decoder)
    for _ in work:
        run.add()
    return torch.cat(run.step(work))


def test_a_vocabulary_that_ranks_do_not_divide_is_padded_with_zeros() -> None:
    _, decoders = build_ranks(DENSE, 4)
    tables = [decoder.embedding for decoder in decoders]
    assert [(table.first, table.count) for table in tables] == [(0, 13), (13, 13), (26, 13), (39, 11)]
    fill(decoders[3], random_tensors(DENSE))
    assert torch.count_nonzero(tables[3].weight[11:]) == 0
    assert tables[3].weight[:11].abs().sum(1).all()


def test_a_tied_head_is_the_embedding_itself() -> None:
    decoder = build_decoder(CONFIGS["qwen3, tied"], dtype=torch.float32, device="cpu")
    assert decoder.head.weight.data_ptr() == decoder.embedding.weight.data_ptr()
    assert [target.shard.key for target in decoder.targets()].count("model.embed_tokens.weight") == 1


def test_parameters_are_fused_and_filled_in_place() -> None:
    tensors = random_tensors(DENSE)
    decoder = build_decoder(DENSE, dtype=torch.float32, device="cpu")
    before = [target.tensor.data_ptr() for target in decoder.targets()]
    fill(decoder, tensors)
    assert [target.tensor.data_ptr() for target in decoder.targets()] == before
    parts = [tensors[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(decoder.layers[1].attention.qkv.weight, torch.cat(parts))


def test_a_rank_reads_only_its_share() -> None:
    tensors = random_tensors(DENSE)
    source = TensorSource(tensors)
    shapes = logical_tensors(DENSE)
    _, decoders = build_ranks(DENSE, 2)
    plans = [
        build_plan(source.shards(), [target.shard for target in decoder.targets()], shapes) for decoder in decoders
    ]
    norms = 4 * sum(Box.whole(shape).volume for name, shape in shapes.items() if "norm" in name)
    total = 4 * sum(tensor.numel() for tensor in tensors.values())
    assert [plan.source_bytes for plan in plans] == [(total + norms) // 2] * 2


THREE_KV = replace(DENSE, num_heads=12, num_kv_heads=3)
REFUSED = [
    (DENSE, 3, "8 attention heads cannot be shared out to 3 tensor-parallel ranks"),
    (THREE_KV, 2, "3 KV heads cannot be shared out to 2 tensor-parallel ranks"),
    (THREE_KV, 4, "3 KV heads cannot be repeated evenly on 4 tensor-parallel ranks"),
    (
        replace(DENSE, ffn_size=42),
        4,
        "42 rows of model.layers.0.mlp.gate_proj cannot be shared out to 4 tensor-parallel ranks",
    ),
]


@pytest.mark.parametrize(("config", "size", "message"), REFUSED)
def test_a_model_that_ranks_cannot_share_is_refused_with_numbers_that_fit(
    config: ModelConfig, size: int, message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        build_ranks(config, size)
    fitting = {3: "1, 3, 6, 12", 2: "1, 2, 4, 8"}[config.num_kv_heads]
    fitting = "1, 2" if config.ffn_size == 42 else fitting
    assert str(caught.value) == f"{message}; try: --tp with one of {fitting}"


@pytest.mark.parametrize("config", [*CONFIGS.values(), THREE_KV, replace(DENSE, ffn_size=42)])
def test_numbers_of_ranks_that_are_said_to_fit_do_and_the_others_do_not(config: ModelConfig) -> None:
    def fits(size: int) -> bool:
        try:
            build_ranks(config, size)
        except UsageError:
            return False
        return True

    assert possible_ranks(config) == [size for size in range(1, config.num_heads + 3) if fits(size)]


def test_ranks_without_a_collective_are_refused() -> None:
    with pytest.raises(UsageError, match="rank 1 of 2 was asked for with a collective that is rank 0 of 1"):
        build_decoder(DENSE, dtype=torch.float32, device="cpu", tp_rank=1, tp_size=2)
