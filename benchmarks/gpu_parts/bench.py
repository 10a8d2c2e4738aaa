"""A random model of some size on a device, its cache with random contents, and batches for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_parts.report import Timer
from gtp_serve.config import AttentionBackend, CacheConfig, EngineConfig, ModelConfig, MoeConfig, RopeConfig
from gtp_serve.engine.capture import EagerCapture
from gtp_serve.engine.graphs import DecodeGraphs, build_graphs
from gtp_serve.kv.blocks import SCRATCH_BLOCKS
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.table import PLAIN_PAGED, Ops

LARGE = ModelConfig(
    family="llama",
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    vocab_size=128256,
    vocab_rows=128256,
    max_context=8192,
    tied=True,
    rope=RopeConfig(theta=500000.0),
    dtype="bfloat16",
)
TINY = replace(
    LARGE,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    vocab_size=300,
    vocab_rows=320,
    max_context=64,
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is built and measured."""

    model: ModelConfig
    context: int
    """Positions of each sequence; the last of them is decoded."""
    batches: tuple[int, ...]
    prompt: int
    steps: int
    """Steps of one measurement."""
    experts: MoeConfig
    """Of the mixture-of-experts model, which is the same but for these in the place of the dense layers."""
    sparse_layers: int
    copied_bytes: int
    """Of the copy that measures the memory."""


SIZES = {
    "large": Size(
        model=LARGE,
        context=1024,
        batches=(1, 8, 32, 64),
        prompt=2048,
        steps=50,
        experts=MoeConfig(num_experts=64, top_k=8, ffn_size=768),
        sparse_layers=4,
        copied_bytes=2 << 30,
    ),
    "tiny": Size(
        model=TINY,
        context=48,
        batches=(1, 2, 4),
        prompt=40,
        steps=3,
        experts=MoeConfig(num_experts=4, top_k=2, ffn_size=32),
        sparse_layers=2,
        copied_bytes=1 << 20,
    ),
}


def with_experts(size: Size) -> Size:
    """The mixture-of-experts model of this size."""
    return replace(size, model=replace(size.model, num_layers=size.sparse_layers, ffn_size=0, moe=size.experts))


class Bench:
    """The model, its cache and its captured steps.

    :raises GtpServeError: the attention that was named is not there, or does not serve this model.
    """

    def __init__(self, size: Size, device: str, *, attention: AttentionBackend = "auto", block_size: int = 16) -> None:
        self.size, self.device = size, torch.device(device)
        self.timer = Timer(self.device)
        largest = max(size.batches)
        blocks = largest * -(-size.context // block_size)
        self.config = EngineConfig(
            model=size.model,
            cache=CacheConfig(num_blocks=blocks, block_size=block_size),
            dtype="bfloat16",
            device=device,
            max_running=largest,
            max_context=size.context,
            attention=attention,
        )
        self.decoder = self.build(self.ops())
        self.fill(0)
        self.pool = self.build_pool()

    def ops(self) -> Ops:
        """What is served with on a GPU; on a CPU plain torch that can be captured."""
        if self.device.type != "cuda" and self.config.attention == "auto":
            return PLAIN_PAGED
        return choose_ops(
            device=self.config.device,
            dtype=torch.bfloat16,
            head_dim=self.size.model.head_dim,
            block_size=self.config.cache.block_size,
            attention=self.config.attention,
        )

    def build(self, ops: Ops) -> Decoder:
        """A decoder without weights."""
        return build_decoder(self.size.model, dtype=torch.bfloat16, device=self.config.device, ops=ops)

    def build_pool(self) -> KVPool:
        """With random numbers in every block: contexts that nobody had to compute."""
        model, cache = self.size.model, self.config.cache
        pool = KVPool(
            num_layers=model.num_layers,
            num_blocks=cache.num_blocks + SCRATCH_BLOCKS,
            block_size=cache.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=torch.bfloat16,
            device=self.device,
        )
        generator = torch.Generator(self.device).manual_seed(1)
        for tensor in (*pool.keys, *pool.values):
            tensor.normal_(generator=generator)
        return pool

    def fill(self, seed: int) -> None:
        """New weights into the memory of the old ones."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for target in self.decoder.targets():
            scale = target.tensor.shape[-1] ** -0.5 if target.tensor.dim() > 1 else 1.0
            target.tensor.normal_(generator=generator).mul_(scale)
            if target.tensor.dim() == 1:
                target.tensor.mul_(0.1).add_(1.0)

    def weight_bytes(self) -> int:
        """Read by each step: all parameters; of a table that is not the head, only rows."""
        counted = 0
        for target in self.decoder.targets():
            if target.shard.key == "model.embed_tokens.weight" and not self.size.model.tied:
                continue
            counted += target.tensor.nbytes
        return counted

    def kv_bytes(self, sequences: int) -> int:
        """Read by each step."""
        model = self.size.model
        return 2 * model.num_layers * sequences * self.size.context * model.num_kv_heads * model.head_dim * 2

    def decode(self, count: int, device: torch.device | str = "cpu") -> Batch:
        """The last token of ``count`` sequences, whose blocks lie scattered."""
        block = self.config.cache.block_size
        order = torch.randperm(self.config.cache.num_blocks, generator=torch.Generator().manual_seed(2))
        tables = order.view(max(self.size.batches), -1)[:count]
        last = self.size.context - 1
        return Batch(
            token_ids_T=torch.arange(count) + 1,
            positions_T=torch.full((count,), last),
            slots_T=tables[:, last // block] * block + last % block,
            query_starts=tuple(range(count + 1)),
            context_lens=(self.size.context,) * count,
            block_tables_SB=tables,
            logit_rows_S=torch.arange(count),
        ).to(device)

    def prompt(self) -> Batch:
        """Chunks of several sequences, each at the end of its context."""
        block, context = self.config.cache.block_size, self.size.context
        decode = self.decode(max(1, self.size.prompt // (context // 2)))
        tables, count = decode.block_tables_SB, len(decode.block_tables_SB)
        rows = self.size.prompt // count
        positions = torch.arange(context - rows, context)
        return Batch(
            token_ids_T=torch.arange(rows * count) % self.size.model.vocab_size,
            positions_T=positions.repeat(count),
            slots_T=(tables[:, positions // block] * block + positions % block).flatten(),
            query_starts=tuple(range(0, rows * count + 1, rows)),
            context_lens=(context,) * count,
            block_tables_SB=tables,
            logit_rows_S=torch.arange(1, count + 1) * rows - 1,
        ).to(self.device)

    def eager(self, batch: Batch, decoder: Decoder | None = None) -> Tensor:
        """Logits of the step as it runs without a graph."""
        return (decoder or self.decoder).forward(batch.to(self.device), self.pool.keys, self.pool.values)

    def graphs(self) -> DecodeGraphs:
        """Nothing captured yet."""
        capture = None if self.device.type == "cuda" else EagerCapture()
        return build_graphs(self.decoder, self.pool, self.config, capture)
