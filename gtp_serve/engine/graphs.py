"""The decode step, captured once for each bucket of batch sizes and replayed.

A captured step reads its inputs from buffers that never move; rows that a batch leaves over write to a
scratch block that no sequence owns.  How a step is recorded is a ``Capture``'s business (``engine.capture``).
Legend: S rows of a bucket, B blocks per table, P positions in a block, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gtp_serve.config import EngineConfig
from gtp_serve.engine.addresses import AddressRegistry, NamedTensors
from gtp_serve.engine.capture import Capture, CudaCapture, NativeCapture, NativeStep, ReadyStep, Recorded
from gtp_serve.engine.step import StepItem, StepPlan
from gtp_serve.errors import UsageError
from gtp_serve.kv.blocks import SCRATCH_BLOCKS, blocks_for
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder
from gtp_serve.ops.batch import Batch, FixedAttention, Taps
from gtp_serve.refit.apply import Target

Outcome = Callable[[], str]
"""Waits until the other ranks are done with a capture; why one of them failed, or nothing."""
Together = Callable[[int], AbstractContextManager[Outcome]]
"""Tells the other ranks to capture this size; entered around this rank's own capture."""


def alone(size: int) -> AbstractContextManager[Outcome]:
    """There are no other ranks."""
    return nullcontext(lambda: "")


class CapturableModel(Protocol):
    """What captured steps need of a decoder."""

    def forward(
        self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor], taps: Taps | None = None
    ) -> Tensor:
        """Logits, as ``Decoder.forward``; of single tokens it must ask the host nothing."""
        ...

    def fix_attention(self, batch: Batch, block_size: int) -> FixedAttention | None:
        """What makes that so where attention must be worked out on the host first; else None."""
        ...

    def targets(self) -> list[Target]:
        """All parameters."""
        ...


class StaticInputs:
    """The buffers that one bucket's step reads; all rows are padding at first.

    A padding row is token 0 at position 0 of the scratch block: it writes there and attends to nothing else.
    """

    def __init__(
        self, size: int, *, max_blocks: int, block_size: int, scratch_block: int, device: torch.device
    ) -> None:
        self._scratch_block, self._scratch_slot = scratch_block, scratch_block * block_size
        self._columns_3S = torch.zeros((3, size), dtype=torch.int64, device=device)
        self._columns_3S[2] = self._scratch_slot
        self._tables_SB = torch.full((size, max_blocks), scratch_block, dtype=torch.int64, device=device)
        self.batch = Batch(
            token_ids_T=self._columns_3S[0],
            positions_T=self._columns_3S[1],
            slots_T=self._columns_3S[2],
            query_starts=tuple(range(size + 1)),
            # Bounds: what is captured goes by positions.
            context_lens=(max_blocks * block_size,) * size,
            block_tables_SB=self._tables_SB,
            logit_rows_S=torch.arange(size, device=device),
        )
        if device.type == "cpu":
            self._arrays = self._columns_3S.numpy(), self._tables_SB.numpy()
        self._attention: FixedAttention | None = None
        self._used = 0
        """Rows that hold what the last batch put there."""
        self._tables: list[tuple[int, ...]] = [()] * size
        """The block table that ``put`` left in each row, while it is there."""

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The buffers that have one row for each sequence."""
        batch = self.batch
        return batch.token_ids_T, batch.positions_T, batch.slots_T, batch.logit_rows_S

    def use(self, attention: FixedAttention | None) -> None:
        """Let the step attend by this, which is told of each batch that is loaded."""
        self._attention = attention
        self.batch = replace(self.batch, attention=attention)

    def load(self, batch: Batch) -> None:
        """Put a batch into the first rows and padding into the others; two copies to a GPU, neither waited for."""
        count, width = batch.block_tables_SB.shape
        self._tables = [()] * len(self._tables)
        rows = (batch.token_ids_T, batch.positions_T, batch.slots_T)
        if self._columns_3S.device.type == "cpu":
            # At once, by numpy, which needs less time than torch for so little.
            columns, table = [row.numpy() for row in rows], batch.block_tables_SB.numpy()
            stale = slice(count, max(count, self._used))  # where the last batch was
            self._put(columns, table, self._arrays[0], self._arrays[1][:, :width], stale)
        else:
            columns_3S = self._staging(self._columns_3S.shape, batch)
            tables_SB = self._staging((self._tables_SB.shape[0], width), batch)
            self._put(rows, batch.block_tables_SB, columns_3S, tables_SB, slice(count, None))
            self._columns_3S.copy_(columns_3S, non_blocking=True)
            self._tables_SB[:, :width].copy_(tables_SB, non_blocking=True)
        self._used = count
        if self._attention is not None:
            self._attention.load(batch.context_lens)

    def put(self, items: Sequence[StepItem], block_size: int) -> None:
        """Single tokens into the first rows, on a CPU, for a step that computes no others.

        :param items: of a plan; their block tables are no longer than the buffers'.
        """
        count = len(items)
        columns_3S, tables_SB = self._arrays
        columns_3S[:, :count] = (
            [item.token_ids[0] for item in items],
            [item.start for item in items],
            [item.block_table[item.start // block_size] * block_size + item.start % block_size for item in items],
        )
        for row, item in enumerate(items):
            table = item.block_table
            if self._tables[row] != table:  # few change from one step to the next
                tables_SB[row, : len(table)] = self._tables[row] = table

    def _put(self, columns: Sequence[Any], table: Any, columns_3S: Any, tables_SB: Any, padded: slice) -> None:
        """A batch's columns and block table into the first rows of arrays or tensors, padding into others."""
        count = len(table)
        for row, values in enumerate(columns):
            columns_3S[row, :count] = values
        columns_3S[:2, padded] = 0
        columns_3S[2, padded] = self._scratch_slot
        tables_SB[:count] = table
        tables_SB[padded] = self._scratch_block

    def _staging(self, shape: Sequence[int], batch: Batch) -> Tensor:
        source, target = batch.token_ids_T.device, self._columns_3S.device
        # Pinned memory is not handed out again before the copy out of it is done.
        pinned = source.type == "cpu" and target.type == "cuda"
        return torch.empty(tuple(shape), dtype=torch.int64, device=source, pin_memory=pinned)


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    inputs: StaticInputs
    step: Recorded


class DecodeGraphs:
    """A decoder whose decode steps are replayed where a bucket is captured, and run eagerly where not.

    It stands where the decoder stands.  Buckets are captured one at a time, largest first, so that from the
    first one on every decode batch fits; call ``capture_next`` between steps until it returns False.

    :param pool: has SCRATCH_BLOCKS blocks beyond the scheduler's; addresses are taken from it.
    :param sizes: batch sizes to capture.
    :param max_blocks: the longest block table of a sequence.
    :param together: see ``Together``.  Every rank captures the same sizes in the same order, and rank 0 says which
        of them a step runs in: it does ``choose``, the others ``run``.
    """

    def __init__(
        self,
        model: CapturableModel,
        pool: KVPool,
        capture: Capture,
        *,
        sizes: Sequence[int],
        max_blocks: int,
        together: Together = alone,
    ) -> None:
        self._model, self._pool, self._capture, self._together = model, pool, capture, together
        self._device = pool.keys[0].device
        self._max_blocks = max_blocks
        self._pending = sorted(set(sizes), reverse=True)
        self._buckets: dict[int, _Bucket] = {}
        self.failures: dict[int, str] = {}
        """Sizes that could not be captured, and why; they run in a larger bucket or eagerly."""
        self.replayed, self.ran_eagerly = 0, 0
        self.addresses = AddressRegistry(self._tensors)

    @property
    def captured(self) -> list[int]:
        """Sizes that can be replayed, ascending."""
        return sorted(self._buckets)

    def capture_next(self) -> bool:
        """Capture the largest size that is left; returns whether there was one.

        :raises GtpServeError: with other ranks, when they are no longer in step.
        """
        if not self._pending:
            return False
        size = self._pending.pop(0)
        with self._together(size) as outcome:
            try:
                failure = self.capture(size)
            except Exception as error:
                if self._together is not alone:
                    raise  # the others may be waiting in a collective
                failure = _words(error)
            failure = outcome() or failure
        if failure:
            self._buckets.pop(size, None)
            self.failures[size] = failure
        return True

    @torch.inference_mode()
    def capture(self, size: int) -> str:
        """Capture one size; why it could not be recorded, or nothing.  Raises what its warm-up raises."""
        inputs, step = self._prepare(size)
        self._capture.warm_up(step)
        try:
            bucket = _Bucket(inputs, self._capture.record(step, inputs.rows))
        except Exception as error:  # whatever a device says to recording: eager steps go on
            return _words(error)
        self._buckets[size] = bucket
        if len(self._buckets) == 1:
            self.addresses.register()
        return ""

    def _prepare(self, size: int) -> tuple[StaticInputs, Callable[[], Tensor]]:
        inputs = StaticInputs(
            size,
            max_blocks=self._max_blocks,
            block_size=self._pool.block_size,
            scratch_block=self._pool.num_blocks - SCRATCH_BLOCKS,
            device=self._device,
        )
        inputs.use(self._model.fix_attention(inputs.batch, self._pool.block_size))
        keys, values = self._pool.keys, self._pool.values
        return inputs, lambda: self._model.forward(inputs.batch, keys, values)

    def fits(self, batch: Batch) -> bool:
        """Each sequence brings one token, logits alone are wanted, and a captured bucket is large enough."""
        return (
            batch.decode_only
            and batch.score_rows_R is None
            and batch.block_tables_SB.shape[1] <= self._max_blocks
            and self._size_for(len(batch.context_lens)) is not None
        )

    def _size_for(self, count: int) -> int | None:
        return min((size for size in self._buckets if size >= count), default=None)

    @torch.inference_mode()
    def replay(self, batch: Batch) -> Tensor:
        """Logits [rows wanted, V] float32 of a batch that fits; rows wanted are ascending, each once.

        The result is read by work on the same stream before the next replay, or it is lost.

        :param batch: on the CPU (cheapest) or on the model's device.
        :raises ValueError: it does not fit.
        """
        return self._replay(batch, self._size_for(len(batch.context_lens)))

    def _replay(self, batch: Batch, size: int | None) -> Tensor:
        count = len(batch.context_lens)
        if size is None or size not in self._buckets or size < count or not self.fits(batch):
            raise ValueError(f"a batch of {count} sequences fits none of the buckets {self.captured}")
        bucket = self._buckets[size]
        bucket.inputs.load(batch)
        logits = bucket.step.replay(count)[:count]
        self.replayed += 1
        wanted = batch.logit_rows_S
        return logits if len(wanted) == count else logits.index_select(0, wanted.to(self._device))

    def forward(
        self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor], taps: Taps | None = None
    ) -> Tensor:
        """``run`` in the bucket that ``choose`` finds.

        :param keys: the pool's, as ``values``.
        """
        return self.run(self.choose(batch, taps), batch, keys, values, taps)

    def choose(self, batch: Batch, taps: Taps | None = None) -> int | None:
        """The bucket that fits; None where none does or something is tapped that a replay cannot give."""
        if not self.fits(batch) or (taps is not None and taps.routes is not None):
            return None
        return self._size_for(len(batch.context_lens))

    @torch.inference_mode()
    def run(
        self,
        size: int | None,
        batch: Batch,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        taps: Taps | None = None,
    ) -> Tensor:
        """Replay this bucket, or run the model's own step where there is none.

        :raises ValueError: the bucket is not captured, or the batch does not fit it.
        """
        if size is not None:
            return self._replay(batch, size)
        self.ran_eagerly += 1
        return self._model.forward(batch.to(self._device), keys, values, taps)

    def ready(self, plan: StepPlan) -> ReadyStep | None:
        """See ``runner.ReadyPass``."""
        count = len(plan.items)
        size = self._size_for(count)
        bucket = None if size is None or self._together is not alone else self._buckets[size]
        if bucket is None or not isinstance(bucket.step, NativeStep):
            return None
        if max(len(item.block_table) for item in plan.items) > self._max_blocks:
            return None
        bucket.inputs.put(plan.items, plan.block_size)
        self.replayed += 1
        return ReadyStep(bucket.step, count)

    def targets(self) -> list[Target]:
        """The model's parameters."""
        return self._model.targets()

    def _tensors(self) -> NamedTensors:
        for target in self._model.targets():
            yield target.shard.key, target.tensor
        for layer, (keys, values) in enumerate(zip(self._pool.keys, self._pool.values, strict=True)):
            yield f"the KV cache's keys of layer {layer}", keys
            yield f"the KV cache's values of layer {layer}", values


def bucket_sizes(largest: int) -> list[int]:
    """1, 2, 4, 8, 16, then each power of two and what lies halfway, and the largest itself."""
    sizes = [1, 2, 4, 8, *(base << power for power in range(12) for base in (16, 24))]
    return sorted({size for size in sizes if size < largest} | {largest})


def refusal(decoder: Decoder, config: EngineConfig) -> str | None:
    """Why this decoder's steps cannot be captured; None when they can."""
    ops = decoder.placement.ops
    if torch.device(config.device).type != "cuda" and ops.recorder is None:
        return f"{ops.name} on {config.device} does not record steps"
    if not ops.capturable:
        return f"attention of {ops.name} asks the host for lengths"
    if config.model.moe is not None and not ops.captures_experts:
        return f"routed experts of {ops.name} ask the host how many tokens each expert has"
    if not decoder.placement.tp.capturable:
        return "the ranks' collectives run on the host"
    return None


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def build_graphs(
    decoder: Decoder,
    pool: KVPool,
    config: EngineConfig,
    capture: Capture | None = None,
    together: Together = alone,
) -> DecodeGraphs:
    """Nothing captured yet.

    :param capture: by default programs of the decoder's own ops where these record steps, else CUDA graphs.
    :param together: see ``DecodeGraphs``.
    :raises UsageError: the decoder cannot be captured (see ``refusal``).
    """
    if capture is None and (reason := refusal(decoder, config)) is not None:
        raise UsageError(f"the decode step cannot be captured: {reason}")
    if not decoder.placement.ops.capturable:
        raise UsageError(f"the decode step cannot be captured with {decoder.placement.ops.name}")
    if pool.num_blocks != config.cache.num_blocks + SCRATCH_BLOCKS:
        raise ValueError(f"{pool.num_blocks} blocks in the pool, {config.cache.num_blocks} in the configuration")
    recorder = decoder.placement.ops.recorder
    if capture is None:
        capture = CudaCapture(config.device) if recorder is None else NativeCapture(recorder, config.model.vocab_size)
    return DecodeGraphs(
        decoder,
        pool,
        capture,
        # A program computes the rows that there are, so one serves all batches; a graph always computes its own number.
        sizes=[config.max_running] if isinstance(capture, NativeCapture) else bucket_sizes(config.max_running),
        max_blocks=blocks_for(config.max_context, config.cache.block_size),
        together=together,
    )
