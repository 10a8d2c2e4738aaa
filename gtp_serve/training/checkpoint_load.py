"""Loading a checkpoint into a training run: weights and optimizer state, from any grid into this one.

Each rank reads from the files what its own rows need, straight to where they belong; padding becomes zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Shape, Shard
from gtp_serve.loaders.checkpoint import Checkpoint, open_checkpoint
from gtp_serve.loaders.facts import Facts, SavedOverrides
from gtp_serve.refit.apply import Target, apply_plan, dtype_name
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.source import WeightSource
from gtp_serve.training.init import refresh_high_precision
from gtp_serve.training.layer import parameters_with_targets
from gtp_serve.training.optimizer import MASTER, ShardedOptimizer
from gtp_serve.training.optimizer_state import SavedOptimizer, read_optimizer
from gtp_serve.training.shard_map import ShardMap, is_quantised
from gtp_serve.training.shards import GTPShard


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What was loaded."""

    iteration: int | None
    facts: Facts
    optimizer_steps: int | None
    """None: optimizer state was not asked for."""


_NOTHING_SAID = SavedOverrides()


def load(
    path: Path | str,
    model: nn.Module | ShardMap,
    *,
    config: ModelConfig,
    optimizer: ShardedOptimizer | None = None,
    iteration: int | None = None,
    saved: SavedOverrides = _NOTHING_SAID,
    threads: int = 2,
    progress: Callable[[int], None] | None = None,
) -> Loaded:
    """Fill a model, and perhaps its optimizer, in place.  Each rank for itself: nothing is sent.

    Megatron checkpoints of any grid, padded or logical, Hugging Face folders and GGUF files; optimizer state from
    Megatron checkpoints only.  Masters that the file lacks begin as the loaded weights.

    :param config: the model's.
    :param iteration: of a Megatron root; None takes the newest complete one.
    :param saved: see ``open_checkpoint``.
    :param progress: called with each number of bytes read.
    :raises CheckpointError: as ``open_checkpoint``, before anything is written.
    :raises LayoutMismatch: when the checkpoint is of another model, or lacks a slot of the optimizer.
    """
    pairs = _pairs(model if optimizer is None else optimizer.shards)
    checkpoint = open_checkpoint(path, iteration=iteration, saved=saved)
    try:
        shapes = logical_tensors(config)
        _check_shapes(shapes, logical_tensors(checkpoint.config), str(path))
        stored = None if optimizer is None else _optimizer_of(checkpoint, optimizer)
        _Filling(threads, progress).weights(checkpoint.source, pairs, shapes)
        steps = None
        if optimizer is not None and stored is not None:
            steps = _load_state(checkpoint, optimizer, stored, shapes, _Filling(threads, progress))
        _forget_gathered(pairs)
        return Loaded(iteration=checkpoint.facts.iteration, facts=checkpoint.facts, optimizer_steps=steps)
    finally:
        checkpoint.close()


Pairs = Sequence[tuple[nn.Parameter, Shard]]


def _pairs(model: nn.Module | ShardMap) -> Pairs:
    if isinstance(model, ShardMap):
        return list(zip(model.parameters, model.shards, strict=True))
    return [(parameter, target.shard) for parameter, target in parameters_with_targets(model)]


@dataclass(frozen=True, slots=True)
class _Filling:
    threads: int
    progress: Callable[[int], None] | None

    def fill(self, source: WeightSource, targets: Sequence[Target], shapes: Mapping[str, Shape]) -> None:
        """Carry out a plan."""
        plan = build_plan(source.shards(), [target.shard for target in targets], shapes)
        apply_plan(plan, source, targets, threads=self.threads, progress=self.progress)

    def weights(self, source: WeightSource, pairs: Pairs, shapes: Mapping[str, Shape]) -> None:
        """Plain weights all together; quantised ones by one, through float32."""
        plain = [(p, shard) for p, shard in pairs if not is_quantised(_memory(p)) and not _keeps_first(p)]
        self.fill(source, [Target(shard, _memory(p)) for p, shard in plain], shapes)
        for parameter, shard in pairs:
            if is_quantised(_memory(parameter)) or _keeps_first(parameter):
                value = torch.empty(shard.shape, device=parameter.device)
                self.fill(source, [_target(shard, value)], shapes)
                with torch.no_grad():
                    parameter.copy_(value)
                refresh_high_precision(parameter, value)


def _memory(parameter: nn.Parameter) -> Tensor:
    return parameter.local if isinstance(parameter, GTPShard) else parameter.data


def _keeps_first(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "_high_precision_init_val", None) is not None


def _target(shard: Shard, tensor: Tensor) -> Target:
    return Target(Shard(shard.key, shard.shape, dtype_name(tensor), shard.spans), tensor)


def _optimizer_of(checkpoint: Checkpoint, optimizer: ShardedOptimizer) -> SavedOptimizer:
    if checkpoint.facts.format != "megatron":
        raise UsageError(
            f"{checkpoint.path} holds weights only", [("try", "load without an optimizer; it then starts anew")]
        )
    stored = read_optimizer(checkpoint.path)
    missing = sorted(slot for slot in optimizer.slots() if slot not in stored.slots and slot != MASTER)
    if missing:
        raise LayoutMismatch(
            f"{checkpoint.path} has no optimizer state {', '.join(missing)}",
            [("found", ", ".join(sorted(stored.slots)) or "none"), ("try", "load without an optimizer")],
        )
    return stored


def _load_state(
    checkpoint: Checkpoint,
    optimizer: ShardedOptimizer,
    stored: SavedOptimizer,
    shapes: Mapping[str, Shape],
    filling: _Filling,
) -> int:
    assert checkpoint.facts.saved is not None  # a Megatron checkpoint has a grid
    for slot, tensors in optimizer.slots().items():
        if slot not in stored.slots:
            optimizer.masters_from_weights()
            continue
        source = stored.source(slot, checkpoint.config, checkpoint.facts.saved)
        try:
            offered = {span.name for shard in source.shards() for span in shard.spans}
            targets = [_target(optimizer.shards.shards[index], tensor) for index, tensor in tensors.items()]
            filling.fill(source, targets, {name: shapes[name] for name in shapes if name in offered})
        finally:
            source.close()
    optimizer.steps = stored.steps or 0
    return optimizer.steps


def _check_shapes(mine: Mapping[str, Shape], theirs: Mapping[str, Shape], where: str) -> None:
    differing = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
    if differing:
        name = differing[0]
        have, need = (str(list(s)) if (s := of.get(name)) else "nothing" for of in (theirs, mine))
        raise LayoutMismatch(
            f"{where} is of another model: {len(differing)} tensors differ, the first is {name}",
            [("have", have), ("needed", need)],
        )


def _forget_gathered(pairs: Pairs) -> None:
    """Weights were written past torch: nothing that was gathered before may be used."""
    chains = {
        id(p.state.chain): p.state.chain for p, _ in pairs if isinstance(p, GTPShard) and p.state.chain is not None
    }
    for chain in chains.values():
        chain.invalidate()
