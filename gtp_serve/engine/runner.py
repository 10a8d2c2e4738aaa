"""One rank's model as a ``Runner``: inputs, forward pass, sampling.

``launch`` only puts work on the device; ``wait`` brings tokens to the host.  On a CPU all of it happens in
``launch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from gtp_serve.config import EngineConfig
from gtp_serve.engine.inputs import build_batch, build_rows
from gtp_serve.engine.step import NO_TOKEN, StepPlan, StepResult
from gtp_serve.kv.pool import KVPool
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.sampling import Sampled, sample


class ForwardPass(Protocol):
    """What the runner needs of a decoder."""

    def forward(self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Write the batch's K and V; return logits ``[rows wanted, vocab_rows]``, float32."""
        ...


class PendingTokens:
    """Tokens that the device may still be working on."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def wait(self) -> StepResult:
        """The step's tokens, on the host."""
        sampled = self._sampled
        token_ids = torch.where(sampled.finite_S, sampled.token_ids_S, NO_TOKEN)
        return StepResult(token_ids=tuple(token_ids.tolist()), logprobs=tuple(sampled.logprobs_S.tolist()))


class ModelRunner:
    """Runs plans on one decoder and one KV pool, on the device of the configuration."""

    def __init__(self, decoder: ForwardPass, pool: KVPool, config: EngineConfig) -> None:
        self._decoder = decoder
        self._pool = pool
        self._config = config

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> PendingTokens:
        """Start the step."""
        batch = build_batch(plan, self._config.device)
        logits = self._decoder.forward(batch, self._pool.keys, self._pool.values)
        vocab_size = self._config.model.vocab_size
        return PendingTokens(sample(logits, build_rows(plan), vocab_size=vocab_size))
