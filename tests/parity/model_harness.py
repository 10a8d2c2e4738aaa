"""A small paged runner around a decoder: fills its weights from logical tensors, feeds it in any chunks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.batch import Batch
from gtp_serve.refit.apply import apply_plan, dtype_name
from gtp_serve.refit.plan import build_plan


class TensorSource:
    """Whole logical tensors in memory, as a source of weights."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}

    def shards(self) -> list[Shard]:
        return [_whole_shard(name, tensor) for name, tensor in self.tensors.items()]

    def read(self, index: int) -> memoryview:
        tensor = list(self.tensors.values())[index]
        return memoryview(bytes(tensor.reshape(-1).view(torch.uint8).numpy()))

    def close(self) -> None:
        self.tensors = {}


def _whole_shard(name: str, tensor: Tensor) -> Shard:
    box = Box.whole(tuple(tensor.shape))
    return Shard(name, tuple(tensor.shape), dtype_name(tensor), (Span(name, box, box),))


def fill(decoder: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Plan and apply: the only way weights get in."""
    source, targets = TensorSource(tensors), decoder.targets()
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    plan = build_plan(source.shards(), [target.shard for target in targets], shapes)
    apply_plan(plan, source, targets)


def filled_decoder(config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = build_decoder(config, dtype=dtype, device="cpu")
    fill(decoder, tensors)
    return decoder


class PagedRun:
    """Sequences in a paged cache whose blocks are handed out in a shuffled order."""

    def __init__(self, decoder: Decoder, *, num_blocks: int = 96, block_size: int = 4) -> None:
        config = decoder.config
        shape = (num_blocks, block_size, decoder.num_kv_heads, config.head_dim)
        self.decoder, self.block_size = decoder, block_size
        # NaN: a key that was never written must never be seen.
        self.keys, self.values = (
            [torch.full(shape, torch.nan, dtype=decoder.placement.dtype) for _ in range(config.num_layers)]
            for _ in range(2)
        )
        self.free = random.Random(0).sample(range(num_blocks), num_blocks)
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []

    def add(self) -> int:
        """A new, empty sequence."""
        self.tables.append([])
        self.lengths.append(0)
        return len(self.tables) - 1

    def step(self, work: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Append tokens to sequences; returns logits [tokens, V] for each entry of ``work``."""
        logits = self.decoder.forward(self.batch(work), self.keys, self.values)
        return list(torch.split(logits, [len(tokens) for _, tokens in work]))

    def batch(self, work: Sequence[tuple[int, Sequence[int]]]) -> Batch:
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        for sequence, tokens in work:
            new = range(self.lengths[sequence], self.lengths[sequence] + len(tokens))
            table = self.tables[sequence]
            while len(table) * self.block_size < new.stop:
                table.append(self.free.pop())
            positions += new
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in new]
            starts.append(starts[-1] + len(tokens))
            self.lengths[sequence] = new.stop
        tables = [self.tables[sequence] for sequence, _ in work]
        width = max(map(len, tables))
        return Batch(
            token_ids_T=torch.tensor([token for _, tokens in work for token in tokens]),
            positions_T=torch.tensor(positions),
            slots_T=torch.tensor(slots),
            query_starts=tuple(starts),
            context_lens=tuple(self.lengths[sequence] for sequence, _ in work),
            block_tables_SB=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
            logit_rows_S=torch.arange(starts[-1]),
        )


def in_chunks(decoder: Decoder, tokens: Sequence[int], chunk: int) -> Tensor:
    """Logits [tokens, V] of one sequence, fed ``chunk`` tokens at a time."""
    run = PagedRun(decoder)
    sequence = run.add()
    parts = [run.step([(sequence, tokens[at : at + chunk])])[0] for at in range(0, len(tokens), chunk)]
    return torch.cat(parts)


def interleaved(decoder: Decoder, prompts: Sequence[Sequence[int]], chunks: Sequence[int]) -> list[Tensor]:
    """Logits of several sequences that share steps, sequence i fed ``chunks[i]`` tokens at a time."""
    run = PagedRun(decoder)
    sequences = [run.add() for _ in prompts]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    while any(run.lengths[s] < len(prompts[s]) for s in sequences):
        work = [
            (s, prompts[s][run.lengths[s] : run.lengths[s] + chunks[s]])
            for s in sequences
            if run.lengths[s] < len(prompts[s])
        ]
        for (sequence, _), logits in zip(work, run.step(work), strict=True):
            parts[sequence].append(logits)
    return [torch.cat(part) for part in parts]
