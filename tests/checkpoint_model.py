"""A decoder's parameters on a trainer's grid, filled from known tensors, with as many ranks as threads.

Ranks that only save, load and step need no collectives of their own layers: an axis is a size and a number.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from training_ranks import SECONDS, on_threads

from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import EMBEDDING, FINAL_NORM, HEAD, logical_tensors
from gtp_serve.layout.rows import Rows
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.apply import Target, dtype_name
from gtp_serve.training.embedding import VocabParallelEmbedding, VocabParallelHead
from gtp_serve.training.experts import GroupedExpertLinear
from gtp_serve.training.groups import ParallelGroups, dense_sizes, expert_sizes, size_of
from gtp_serve.training.init import stream
from gtp_serve.training.layer import ShardedLayer
from gtp_serve.training.linear import ColumnParallelLinear, NormColumnLinear, RowParallelLinear
from gtp_serve.training.mesh import Mesh, Message, SoloMesh
from gtp_serve.training.norm import RMSNorm
from gtp_serve.training.optimizer import ShardedOptimizer
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.shard_map import ShardMap

T = TypeVar("T")


def dense_config(**changes: Any) -> ModelConfig:
    """Rows that need padding on most grids."""
    sizes: dict[str, Any] = {
        "family": "qwen2",
        "num_layers": 2,
        "hidden_size": 40,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 12,
        "ffn_size": 56,
        "vocab_size": 84,
        "vocab_rows": 84,
        "qkv_bias": True,
        "tied": False,
        "dtype": "bfloat16",
    }
    return ModelConfig(**(sizes | changes))


def moe_config(**changes: Any) -> ModelConfig:
    """Four experts."""
    moe = MoeConfig(num_experts=4, top_k=2, ffn_size=36)
    return dense_config(**({"family": "mixtral", "ffn_size": 0, "moe": moe, "qkv_bias": False} | changes))


class Router(ShardedLayer):
    """A matrix that every rank holds whole."""

    def __init__(self, name: str, experts: int, hidden: int, placement: TrainPlacement) -> None:
        super().__init__(placement)
        self.name = name
        self.weight = nn.Parameter(torch.zeros(experts, hidden, dtype=placement.dtype))

    def targets(self) -> list[Target]:
        box = Box.whole(tuple(self.weight.shape))
        shard = Shard(self.name, box.shape, dtype_name(self.weight), (Span(self.name, box, box),))
        return [Target(shard, self.weight.data)]


class Block(nn.Module):
    """One decoder block's weights."""

    def __init__(self, n: int, config: ModelConfig, placement: TrainPlacement) -> None:
        super().__init__()
        hidden, prefix = config.hidden_size, f"model.layers.{n}."
        parts: list[Rows] = []
        for name, total in (("q", config.q_rows), ("k", config.kv_rows), ("v", config.kv_rows)):
            first, count = placement.cut(total, name)
            parts.append(Rows(sum(p.length for p in parts), count, f"{prefix}self_attn.{name}_proj", first))
        self.qkv = NormColumnLinear(
            f"{prefix}qkv",
            f"{prefix}input_layernorm",
            hidden,
            config.q_rows + 2 * config.kv_rows,
            placement,
            eps=1e-5,
            bias=config.qkv_bias,
            parts=tuple(parts),
        )
        self.o = RowParallelLinear(f"{prefix}self_attn.o_proj", config.q_rows, hidden, placement)
        self.norm = RMSNorm(f"{prefix}post_attention_layernorm", hidden, placement, eps=1e-5)
        if config.moe is None:
            self.gate_up: ShardedLayer = ColumnParallelLinear(
                f"{prefix}gate_up",
                hidden,
                2 * config.ffn_size,
                placement,
                parts=_gate_up(f"{prefix}mlp", config.ffn_size, placement, expert=False),
            )
            self.down: ShardedLayer = RowParallelLinear(f"{prefix}mlp.down_proj", config.ffn_size, hidden, placement)
            return
        moe, experts = config.moe, f"{prefix}mlp.experts.{{e}}"
        self.router = Router(f"{prefix}mlp.gate.weight", moe.num_experts, hidden, placement)
        self.gate_up = GroupedExpertLinear(
            f"{experts}.gate_up",
            moe.num_experts,
            hidden,
            2 * moe.ffn_size,
            placement,
            cut="column",
            parts=_gate_up(experts, moe.ffn_size, placement, expert=True),
        )
        self.down = GroupedExpertLinear(
            f"{experts}.down_proj", moe.num_experts, moe.ffn_size, hidden, placement, cut="row"
        )


def _gate_up(prefix: str, ffn: int, placement: TrainPlacement, *, expert: bool) -> tuple[Rows, ...]:
    first, count = placement.cut(ffn, "ffn", expert=expert)
    return (Rows(0, count, f"{prefix}.gate_proj", first), Rows(count, count, f"{prefix}.up_proj", first))


class Parameters(nn.Module):
    """What one rank of a grid holds of a decoder."""

    def __init__(self, config: ModelConfig, grid: Grid, groups: ParallelGroups) -> None:
        super().__init__()
        dtype: torch.dtype = getattr(torch, config.dtype)
        placement = TrainPlacement(dtype=dtype, groups=groups, alignment=grid.alignment)
        stage = 0 if groups.pp is None else groups.pp.rank()
        share = config.num_layers // grid.pp
        self.blocks = nn.ModuleList([Block(stage * share + n, config, placement) for n in range(share)])
        if stage == 0:
            self.embed = VocabParallelEmbedding(EMBEDDING, config.vocab_rows, config.hidden_size, placement)
        if stage == size_of(groups.pp) - 1:
            self.norm = RMSNorm(FINAL_NORM.removesuffix(".weight"), config.hidden_size, placement, eps=1e-5)
            if not config.tied:
                self.head = VocabParallelHead(HEAD, config.vocab_rows, config.hidden_size, placement)


@dataclass(frozen=True)
class Axis:
    """A rank's place on an axis."""

    count: int
    me: int

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.me


def world_of(grid: Grid, dp: int = 1) -> int:
    """Ranks of a grid, at least ``dp`` copies of each dense weight."""
    dense, expert = grid.tp * grid.gtp * dp, grid.etp * grid.ep * grid.egtp
    assert dense % expert == 0 or expert % dense == 0
    return max(dense, expert) * grid.pp


def places(grid: Grid, world: int, rank: int) -> ParallelGroups:
    """A rank's axes, without any communication."""
    fields: dict[str, Any] = {}
    for sizes in (dense_sizes(grid, world), expert_sizes(grid, world)):
        rest = rank
        for name, size in sizes:
            fields[name] = Axis(size, rest % size) if size > 1 else None
            rest //= size
    return ParallelGroups(**fields)


@dataclass(eq=False)
class Hall:
    """Where the threads of a mesh meet."""

    size: int
    told: list[Any] = field(default_factory=list)
    pipes: dict[tuple[int, int], queue.Queue[Tensor]] = field(default_factory=dict)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=SECONDS)
        self.told = [None] * self.size
        self.pipes = {(a, b): queue.Queue() for a in range(self.size) for b in range(self.size)}

    def everyone(self, rank: int, mine: Any) -> list[Any]:
        self.told[rank] = mine
        self.barrier.wait()
        found = list(self.told)
        self.barrier.wait()
        return found


@dataclass(frozen=True)
class ThreadMesh:
    """One thread's end of a mesh; counts the bytes that it sends."""

    hall: Hall
    rank: int
    sent: list[int] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.hall.size

    def all_bytes(self, mine: bytes) -> list[bytes]:
        return self.hall.everyone(self.rank, mine)

    def exchange(self, send: Sequence[Message], receive: Sequence[Message]) -> None:
        assert len({peer for peer, _ in send}) == len(send)
        for peer, x in send:
            self.sent.append(x.nbytes)
            self.hall.pipes[self.rank, peer].put(x.clone())
        for peer, x in receive:
            came = self.hall.pipes[peer, self.rank].get(timeout=SECONDS)
            assert came.dtype == x.dtype
            x.copy_(came)

    def total(self, x: Tensor) -> Tensor:
        return torch.stack(self.hall.everyone(self.rank, x.clone())).sum(0)


def on_grid(config: ModelConfig, grid: Grid, act: Callable[[ShardMap], T], *, dp: int = 1) -> list[T]:
    """``act`` on every rank of a grid."""
    world = world_of(grid, dp)
    hall = Hall(world)

    def one(rank: int) -> T:
        mesh: Mesh = ThreadMesh(hall, rank)
        return act(ShardMap.of(Parameters(config, grid, places(grid, world, rank)), mesh))

    return on_threads(world, one)


def on_grid_alone(config: ModelConfig, grid: Grid, act: Callable[[ShardMap], None]) -> None:
    """``act`` on every rank of a grid, one after another: each sees nothing of the others."""
    world = world_of(grid)
    for rank in range(world):
        act(ShardMap.of(Parameters(config, grid, places(grid, world, rank)), SoloMesh()))


@lru_cache(maxsize=16)
def truth_of(config: ModelConfig, seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Known logical tensors."""
    return {
        name: torch.randn(shape, generator=stream(seed, name)).to(dtype)
        for name, shape in logical_tensors(config).items()
    }


def fill(shard: Shard, tensor: Tensor, truth: Mapping[str, Tensor], padding: float = 0.0) -> None:
    """A rank's rows of known tensors."""
    with torch.no_grad():
        tensor.fill_(padding)
        for span in shard.spans:
            tensor[_at(span.local)] = truth[span.name][_at(span.logical)].to(tensor.dtype)


def check(shard: Shard, tensor: Tensor, truth: Mapping[str, Tensor]) -> None:
    """Every bit, and padding zero."""
    wanted = torch.full_like(tensor, float("nan"))
    fill(shard, wanted, truth)
    assert torch.equal(tensor, wanted), f"{shard.key}: {(tensor != wanted).sum()} of {tensor.numel()} elements differ"


def fill_everything(shards: ShardMap, optimizer: ShardedOptimizer | None, config: ModelConfig, seed: int = 1) -> None:
    """Weights and all slots; padding gets a number that must not reach a file."""
    visit(shards, optimizer, config, seed, lambda shard, tensor, truth: fill(shard, tensor, truth, padding=7.0))


def check_everything(shards: ShardMap, optimizer: ShardedOptimizer | None, config: ModelConfig, seed: int = 1) -> None:
    """The same tensors, each bit of them."""
    visit(shards, optimizer, config, seed, check)


def visit(
    shards: ShardMap,
    optimizer: ShardedOptimizer | None,
    config: ModelConfig,
    seed: int,
    act: Callable[[Shard, Tensor, Mapping[str, Tensor]], None],
) -> None:
    weights = truth_of(config, seed, getattr(torch, config.dtype))
    for parameter, shard in zip(shards.parameters, shards.shards, strict=True):
        act(shard, parameter.detach(), weights)
    for slot, tensors in (optimizer.slots() if optimizer is not None else {}).items():
        state = truth_of(config, seed + sum(map(ord, slot)), torch.float32)
        for index, tensor in tensors.items():
            act(shards.shards[index], tensor, state)


def spoil(shards: ShardMap, optimizer: ShardedOptimizer | None) -> None:
    """Fill everything with numbers that must not be there afterwards."""
    with torch.no_grad():
        for parameter in shards.parameters:
            parameter.fill_(float("nan"))
        for tensors in (optimizer.slots() if optimizer is not None else {}).values():
            for tensor in tensors.values():
                tensor.fill_(float("nan"))


def _at(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
