"""One rank's model as a ``Runner``: inputs, forward pass, sampling.

``launch`` only puts work on the device; ``wait`` brings tokens to the host.  On a CPU all of it happens in
``launch``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from gtp_serve.config import EngineConfig
from gtp_serve.engine.capture import ReadyStep
from gtp_serve.engine.grammar import GrammarCompiler
from gtp_serve.engine.inputs import build_batch
from gtp_serve.engine.pending import PendingTokens, Prepared
from gtp_serve.engine.sampler import Sampler
from gtp_serve.engine.step import Pending, StepItem, StepPlan, StepResult
from gtp_serve.kv.pool import KVPool
from gtp_serve.ops.batch import Batch, Taps
from gtp_serve.ops.sampling import BY_TORCH, Chooser


class ForwardPass(Protocol):
    """What the runner needs of a decoder."""

    def forward(
        self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor], taps: Taps | None = None
    ) -> Tensor:
        """Write the batch's K and V; return logits ``[rows wanted, vocab_rows]``, float32."""
        ...


@runtime_checkable
class CapturedPass(ForwardPass, Protocol):
    """A decoder with recorded steps."""

    def choose(self, batch: Batch, taps: Taps | None = None) -> int | None:
        """Which of them this batch is run in; None: in none."""
        ...

    def run(
        self,
        size: int | None,
        batch: Batch,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        taps: Taps | None = None,
    ) -> Tensor:
        """``forward`` in the one that was chosen."""
        ...


@runtime_checkable
class ReadyPass(Protocol):
    """A decoder with recorded steps that take a plan's inputs as they are."""

    def ready(self, plan: StepPlan) -> ReadyStep | None:
        """A step of single tokens, to be carried out before the decoder is asked anything else; None: it has none."""
        ...


class ModelRunner:
    """Runs plans on one decoder and one KV pool, on the device of the configuration.

    :param together: entered around each forward pass, when its inputs are built: it tells the other ranks the plan
        and the recorded step that it runs in.
    :param grammars: compiles grammars for the model's tokenizer, if it has one.
    :param chooser: see ``Sampler``.
    """

    def __init__(
        self,
        decoder: ForwardPass,
        pool: KVPool,
        config: EngineConfig,
        *,
        together: Callable[[StepPlan, int | None], AbstractContextManager[None]] = lambda plan, bucket: nullcontext(),
        grammars: GrammarCompiler | None = None,
        chooser: Chooser = BY_TORCH,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._config = config
        self._together = together
        self._ready = decoder.ready if isinstance(decoder, ReadyPass) else None
        self._sampler = Sampler(
            vocab_size=config.model.vocab_size, device=config.device, grammars=grammars, chooser=chooser
        )

    @torch.inference_mode()
    def forward(self, plan: StepPlan, taps: Taps | None = None) -> Tensor:
        """The pass through the model alone: logits."""
        batch = build_batch(plan, self._config.device)
        bucket = self._decoder.choose(batch, taps) if isinstance(self._decoder, CapturedPass) else None
        with self._together(plan, bucket):
            return self._run(batch, bucket, taps)

    @torch.inference_mode()
    def follow(self, plan: StepPlan, bucket: int | None) -> Tensor:
        """The same pass on a rank that is told which recorded step it runs in."""
        return self._run(build_batch(plan, self._config.device), bucket, None)

    def _run(self, batch: Batch, bucket: int | None, taps: Taps | None) -> Tensor:
        cache = self._pool.keys, self._pool.values
        if isinstance(self._decoder, CapturedPass):
            return self._decoder.run(bucket, batch, *cache, taps)
        if taps is None:
            return self._decoder.forward(batch, *cache)
        return self._decoder.forward(batch, *cache, taps)

    def ready(self, plan: StepPlan) -> Pending | None:
        """See ``Waiting``: steps of single tokens, where the decoder has recorded them."""
        if self._ready is None or not all(map(_is_single, plan.items)):
            return None
        step = self._ready(plan)
        if step is None:
            return None
        if self._sampler.is_greedy(plan):
            return _Greedy(step)
        return _Sampled(step, self._sampler, self._sampler.begin(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingTokens:
        """Start the step."""
        prepared = self._sampler.begin(plan)
        return self._sampler.finish(prepared, self.forward(plan, prepared.taps))


def _is_single(item: StepItem) -> bool:
    """One token, and nothing but what comes next is wanted of it."""
    return len(item.token_ids) == 1 and item.sample is not None and item.score is None and not item.routes


@dataclass(frozen=True, slots=True, eq=False)
class _Greedy:
    step: ReadyStep

    def wait(self) -> StepResult:
        return self.step.most_probable()


@dataclass(frozen=True, slots=True, eq=False)
class _Sampled:
    step: ReadyStep
    sampler: Sampler
    prepared: Prepared

    @torch.inference_mode()
    def wait(self) -> StepResult:
        return self.sampler.finish(self.prepared, *self.step.logits()).wait()
