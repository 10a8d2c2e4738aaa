"""The decode step, captured once for each bucket of batch sizes and replayed.

How a step is recorded is a ``Capture``'s business (``engine.capture``), what it reads ``engine.static_inputs``'s, and
steps with prompts are ``engine.prompts``'s.  Legend: V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gtp_serve.config import EngineConfig
from gtp_serve.engine.addresses import AddressRegistry, NamedTensors
from gtp_serve.engine.capture import Capture, CudaCapture, NativeCapture, NativeStep, ReadyStep, Recorded
from gtp_serve.engine.prompts import RecordedPrompts
from gtp_serve.engine.static_inputs import StaticInputs
from gtp_serve.engine.step import StepPlan
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
    :param prompts: takes what fits no bucket, once it is recorded: last.
    :param log: told what could not be captured, since all goes on without it, only slower.
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
        prompts: RecordedPrompts | None = None,
        log: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._log = log
        self._model, self._pool, self._capture, self._together = model, pool, capture, together
        self._prompts, self._unrecorded = prompts, prompts
        self._device = pool.keys[0].device
        self._max_blocks = max_blocks
        self._pending = sorted(set(sizes), reverse=True)
        self._buckets: dict[int, _Bucket] = {}
        self.failures: dict[int, str] = {}
        """Sizes that could not be captured, and why; they run in a larger bucket or eagerly."""
        self.prompts_failure = ""
        """Why the step with prompts could not be recorded, or nothing."""
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
            return self._record_prompts()
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
            self._log(
                f"steps of {size} sequences could not be captured and run in a larger bucket or eagerly: {failure}"
            )
        return True

    def _record_prompts(self) -> bool:
        """Record the step with prompts if it is left; whether it was."""
        prompts, self._unrecorded = self._unrecorded, None
        if prompts is None:
            return False
        try:
            prompts.record()
        except Exception as error:  # eager steps go on
            self.prompts_failure = _words(error)
            self._log(f"steps with prompts could not be recorded and run eagerly: {self.prompts_failure}")
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
        """Replay this bucket, or the step with prompts where there is none, or run the model's own.

        :raises ValueError: the bucket is not captured, or the batch does not fit it.
        """
        if size is not None:
            return self._replay(batch, size)
        if self._prompts is not None and self._prompts.fits(batch, taps):
            self.replayed += 1
            return self._prompts.run(batch, taps)
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
    log: Callable[[str], None] = lambda text: None,
) -> DecodeGraphs:
    """Nothing captured yet.

    :param capture: by default programs of the decoder's own ops where these record steps, else CUDA graphs.
    :param together: see ``DecodeGraphs``, as for ``log``.
    :raises UsageError: the decoder cannot be captured (see ``refusal``).
    """
    if capture is None and (reason := refusal(decoder, config)) is not None:
        raise UsageError(f"the decode step cannot be captured: {reason}")
    if not decoder.placement.ops.capturable:
        raise UsageError(f"the decode step cannot be captured with {decoder.placement.ops.name}")
    if pool.num_blocks != config.cache.num_blocks + SCRATCH_BLOCKS:
        raise ValueError(f"{pool.num_blocks} blocks in the pool, {config.cache.num_blocks} in the configuration")
    recorder = decoder.placement.ops.recorder
    max_blocks = blocks_for(config.max_context, config.cache.block_size)
    if capture is None:
        capture = CudaCapture(config.device) if recorder is None else NativeCapture(recorder, config.model.vocab_size)
    prompts, sizes = None, bucket_sizes(config.max_running)
    if recorder is not None and isinstance(capture, NativeCapture):
        # A program computes the rows that there are, so one serves all batches; a graph always computes its own number.
        sizes = [config.max_running]
        tokens = max(config.max_step_tokens, config.max_running)
        prompts = RecordedPrompts(
            decoder, pool, recorder, tokens=tokens, sequences=config.max_running, max_blocks=max_blocks
        )
    return DecodeGraphs(
        decoder,
        pool,
        capture,
        sizes=sizes,
        max_blocks=max_blocks,
        together=together,
        prompts=prompts,
        log=log,
    )
