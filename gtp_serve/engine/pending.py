"""A step between its plan and its result: what was prepared for it, and what the device may still be working on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtp_serve.engine.details import Details
from gtp_serve.engine.step import NO_TOKEN, PromptScores, StepPlan, StepResult
from gtp_serve.ops.batch import Taps
from gtp_serve.ops.greedy import Greedy
from gtp_serve.ops.logprobs import Normalise, PromptLogprobs
from gtp_serve.ops.sampling import Sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Masks:
    """Grammar masks of some sampler rows."""

    rows: tuple[int, ...] = ()
    words: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    overruled: tuple[tuple[int, int], ...] = ()
    """(row, what the result says instead of a token)."""


class Prepared:
    """A step that was begun: its specs, the taps for the model, and the masks under way.

    :param normalise: see ``ops.logprobs.PromptLogprobs``.
    """

    def __init__(self, plan: StepPlan, vocab_size: int, normalise: Normalise | None) -> None:
        self.plan = plan
        self.specs = [item.sample for item in plan.items if item.sample is not None]
        self.masks: Future[Masks] | None = None
        self.scores = _prompt_logprobs(plan, vocab_size, normalise)
        self.routes: list[Tensor] | None = [] if any(item.routes for item in plan.items) else None

    @property
    def taps(self) -> Taps | None:
        """What the model's pass must give beside logits."""
        if self.scores is None and self.routes is None:
            return None
        return Taps(scored=None if self.scores is None else self.scores.add, routes=self.routes)


def _prompt_logprobs(plan: StepPlan, vocab_size: int, normalise: Normalise | None) -> PromptLogprobs | None:
    specs = [item.score for item in plan.items if item.score is not None]
    if not specs:
        return None
    per_row = [(target, spec.options) for spec in specs for target in spec.targets]
    return PromptLogprobs(
        [target for target, _ in per_row],
        [options.top_n for _, options in per_row],
        [options.token_ids for _, options in per_row],
        vocab_size=vocab_size,
        normalise=normalise,
    )


class PendingTokens:
    """A step's result that the device may still be working on."""

    def __init__(
        self,
        prepared: Prepared,
        sampled: Sampled | Greedy,
        details: Details | None,
        overruled: Sequence[tuple[int, int]],
    ) -> None:
        self._plan, self._scores, self._routes = prepared.plan, prepared.scores, prepared.routes
        self._token_ids_S = torch.where(sampled.finite_S, sampled.token_ids_S, NO_TOKEN)
        self._logprobs_S = sampled.logprobs_S
        self._details = details
        self._overruled = overruled

    def wait(self) -> StepResult:
        """The step's result, on the host."""
        token_ids, logprobs = self._token_ids_S.tolist(), self._logprobs_S.tolist()
        for row, instead in self._overruled:
            if token_ids[row] != NO_TOKEN:
                token_ids[row] = instead
        details = () if self._details is None else self._details.add_to(logprobs, len(token_ids))
        return StepResult(
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            details=details,
            scores=() if self._scores is None else _scores_by_item(self._plan, self._scores),
            routed=() if not self._routes else _routed_by_item(self._plan, self._routes),
        )


def _scores_by_item(plan: StepPlan, scores: PromptLogprobs) -> tuple[PromptScores | None, ...]:
    logprobs, details = scores.on_host()
    found: list[PromptScores | None] = []
    start = 0
    for item in plan.items:
        if item.score is None:
            found.append(None)
            continue
        part = slice(start, start + len(item.score.targets))
        start = part.stop
        options = item.score.options
        found.append(
            PromptScores(
                logprobs=logprobs[part],
                top=tuple(top for top, _ in details[part]) if options.top_n else (),
                listed=tuple(listed for _, listed in details[part]) if options.token_ids else (),
            )
        )
    return tuple(found)


def _routed_by_item(plan: StepPlan, routes: Sequence[Tensor]) -> tuple[bytes, ...]:
    routed_TLC = torch.stack(list(routes), 1).int().cpu().numpy().astype("<i4", copy=False)
    found: list[bytes] = []
    start = 0
    for item in plan.items:
        end = start + len(item.token_ids)
        found.append(routed_TLC[start:end].tobytes() if item.routes else b"")
        start = end
    return tuple(found)
