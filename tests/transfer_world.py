"""Trainers and engines of small models for tests of transfers: the values, who holds what, and what must arrive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.megatron_save import plan_save
from gtp_serve.layout.spans import Shard
from gtp_serve.models.decoder import build_decoder
from gtp_serve.refit.apply import Target, apply_plan
from gtp_serve.refit.offer import whole_shard
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.source import WeightSource

DTYPE = torch.bfloat16
GARBAGE = 3.0e4
"""What padding holds; no weight is that large."""

LLAMA = ModelConfig(
    family="llama", num_layers=2, hidden_size=24, num_heads=8, num_kv_heads=2, head_dim=4, ffn_size=48,
    vocab_size=50, vocab_rows=50,
)  # fmt: skip
MODELS: dict[str, ModelConfig] = {
    "llama": LLAMA,
    "qwen2": replace(LLAMA, family="qwen2", qkv_bias=True, tied=True),
    "moe": replace(LLAMA, family="qwen3_moe", ffn_size=0, moe=MoeConfig(num_experts=4, top_k=2, ffn_size=16)),
    "wide": replace(LLAMA, hidden_size=256, head_dim=32, ffn_size=768, vocab_size=2000, vocab_rows=2000),
    "wide, tied": replace(
        LLAMA, hidden_size=256, head_dim=32, ffn_size=768, vocab_size=2000, vocab_rows=2000, tied=True
    ),
}

Pair = tuple[Shard, Tensor]


def state_dict(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """A whole model under its logical names."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(DTYPE) for name, shape in logical_tensors(config).items()}


def trainer_ranks(config: ModelConfig, grid: Grid, values: Mapping[str, Tensor], replicas: int = 1) -> list[list[Pair]]:
    """Each rank's shards as a Megatron trainer on this grid holds them: norms on all ranks of a stage, padded."""
    per_stage = max(grid.tp, grid.etp) * max(grid.gtp, grid.egtp)
    held: list[list[Shard]] = [[] for _ in range(grid.pp * per_stage)]
    for tensor in plan_save(config, grid, "padded"):
        for chunk in tensor.chunks:
            shard = replace(chunk.shard, dtype="bfloat16", key=f"{chunk.shard.key}#{len(held[chunk.rank])}")
            held[chunk.rank].append(shard)
        if tensor.key.endswith(("norm.weight", "norm_weight")):
            for chunk in tensor.chunks:
                for rank in range(chunk.rank + 1, chunk.rank + per_stage):
                    held[rank].append(replace(chunk.shard, dtype="bfloat16"))
    return [[(shard, filled(shard, values)) for shard in shards] for shards in held] * replicas


def filled(shard: Shard, values: Mapping[str, Tensor]) -> Tensor:
    """A shard's tensor, padding included."""
    tensor = torch.full(shard.shape, GARBAGE, dtype=getattr(torch, shard.dtype))
    for span in shard.spans:
        local = tuple(slice(a, b) for a, b in zip(span.local.start, span.local.stop, strict=True))
        logical = tuple(slice(a, b) for a, b in zip(span.logical.start, span.logical.stop, strict=True))
        tensor[local] = values[span.name][logical].to(tensor.dtype)
    return tensor


def engine_ranks(config: ModelConfig, tp: int, *, seed: int | None = None, device: str = "cpu") -> list[list[Target]]:
    """Each engine rank's parameters: cold-loaded from a seed's values, or full of garbage."""
    ranks = []
    for rank in range(tp):
        decoder = build_decoder(
            config, dtype=DTYPE, device=device, tp_rank=rank, tp_size=tp, collective=_Alone(rank, tp)
        )
        targets = decoder.targets()
        if seed is None:
            for target in targets:
                target.tensor.detach().fill_(-GARBAGE)
        else:
            source = WholeTensors(state_dict(config, seed))
            shards = [target.shard for target in targets]
            apply_plan(build_plan(source.shards(), shards, logical_tensors(config)), source, targets)
        ranks.append(targets)
    return ranks


class _Alone:
    """A rank that never meets the others: enough to hold parameters."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.capturable = False

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("no step is run")

    def all_gather(self, x: Tensor) -> Tensor:
        raise AssertionError("no step is run")


class WholeTensors(WeightSource):
    """A state dict as a WeightSource."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self._tensors = list(values.values())
        self._shards = tuple(whole_shard(name, tensor) for name, tensor in values.items())

    def shards(self) -> Sequence[Shard]:
        return self._shards

    def read(self, index: int) -> memoryview:
        return self._tensors[index].contiguous().reshape(-1).view(torch.uint8).numpy().data

    def close(self) -> None:
        pass


def same(a: Sequence[Target], b: Sequence[Target]) -> list[str]:
    """Keys of the parameters that differ in any bit."""
    return [
        one.shard.key
        for one, other in zip(a, b, strict=True)
        if not torch.equal(one.tensor.detach().cpu().view(torch.uint8), other.tensor.detach().cpu().view(torch.uint8))
    ]


def model_bytes(config: ModelConfig) -> int:
    """Of the unpadded model, a tied head once."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state_dict(config, 0).values())
