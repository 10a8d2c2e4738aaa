"""The served model's decode step alone, over contexts that nobody had to compute: random keys and values."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from gtp_serve.assembly import build_pool, empty_decoder, fill_decoder, keep_weights, with_graphs
from gtp_serve.config import CacheConfig, EngineConfig
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.engine.runner import CapturedPass
from gtp_serve.loaders import open_checkpoint
from gtp_serve.ops.batch import Batch

_BLOCK = 16


class DecodeStep:
    """The checkpoint's model, as the engine has it on a CPU.

    :param tokens: keys and values in the cache, of all sequences together.
    """

    def __init__(self, ckpt: Path, *, rows: int, context: int, tokens: int) -> None:
        checkpoint = open_checkpoint(ckpt)
        try:
            config = EngineConfig(
                model=checkpoint.config,
                cache=CacheConfig(num_blocks=-(-tokens // _BLOCK), block_size=_BLOCK),
                dtype="bfloat16",
                max_running=rows,
                max_context=context,
            )
            decoder = empty_decoder(config)
            keep_weights(decoder, config)
            fill_decoder(decoder, checkpoint, threads=torch.get_num_threads(), progress=lambda done, total: None)
        finally:
            checkpoint.close()
        self.ops = decoder.placement.ops.name
        self._pool = build_pool(config, decoder)
        for cache in (*self._pool.keys, *self._pool.values):
            cache.normal_()
        self._blocks = config.cache.num_blocks
        self._model, _ = with_graphs(config, decoder, self._pool)
        if isinstance(self._model, DecodeGraphs):
            while self._model.capture_next():
                pass

    @torch.inference_mode()
    def seconds(self, rows: int, context: int, budget: float) -> float:
        """Of one step of so many sequences with that many positions each, the median of those that fit the time."""
        batch = self.batch(rows, context)
        self._run(batch)
        times: list[float] = []
        end = time.perf_counter() + budget
        while len(times) < 3 or time.perf_counter() < end:
            began = time.perf_counter()
            self._run(batch)
            times.append(time.perf_counter() - began)
        return statistics.median(times)

    def batch(self, rows: int, context: int) -> Batch:
        """The last token of each sequence; their blocks lie scattered, and are shared once there are too few."""
        width = -(-context // _BLOCK)
        order = torch.randperm(self._blocks, generator=torch.Generator().manual_seed(0))
        tables = order[torch.arange(rows * width) % self._blocks].view(rows, width)
        last = context - 1
        return Batch(
            token_ids_T=torch.arange(rows) + 1,
            positions_T=torch.full((rows,), last),
            slots_T=tables[:, last // _BLOCK] * _BLOCK + last % _BLOCK,
            query_starts=tuple(range(rows + 1)),
            context_lens=(context,) * rows,
            block_tables_SB=tables,
            logit_rows_S=torch.arange(rows),
        )

    def _run(self, batch: Batch) -> None:
        cache = self._pool.keys, self._pool.values
        if isinstance(self._model, CapturedPass):
            self._model.run(self._model.choose(batch), batch, *cache)
        else:
            self._model.forward(batch, *cache)
