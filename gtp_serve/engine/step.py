"""What one step does (``StepPlan``), what it gave (``StepResult``) and who does it (``Runner``).  No torch.

Plans are frozen, printable and comparable: a scheduler can be tested without a model, and a rank that only
follows needs nothing but the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from gtp_serve.request import LogprobOptions, SamplingParams, TopLogprobs

NO_TOKEN = -1
"""In a StepResult: this row's logits were not finite, so nothing was sampled."""
COMPLETE = -2
"""In a StepResult: the grammar is complete and no end token may be chosen; the sequence ends without a token."""
DEAD_END = -3
"""In a StepResult: no id can be chosen (the grammar cannot go on, or all are forbidden); nothing was sampled."""
NOT_YET = -4
"""In a StepResult: the grammar is still being compiled; the same token must be fed again."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False, weakref_slot=True)
class Shaping:
    """What changes a sequence's logits over its whole life: penalties, bias, grammar, allowed ids, and what they need.

    One for each sequence that needs it, compared by identity: whoever samples keeps its own state beside it
    (counts, a parser) for as long as it lives, and brings that up to date from ``tokens``.
    """

    params: SamplingParams
    tokens: Sequence[int]
    """Prompt, then output; grows in place, never changes."""
    prompt_len: int
    end_ids: tuple[int, ...] = ()
    """Ids that end the sequence, ascending."""

    @staticmethod
    def of(
        params: SamplingParams, tokens: Sequence[int], *, prompt_len: int, end_ids: tuple[int, ...] = ()
    ) -> Shaping | None:
        """None when the parameters change nothing."""
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1)
        if not (any(penalties) or params.logit_bias or params.grammar is not None or params.allowed_token_ids):
            return None
        return Shaping(params=params, tokens=tokens, prompt_len=prompt_len, end_ids=end_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSpec:
    """How one sequence's next token is chosen; the fields are SamplingParams', settled."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    index: int
    """Which output token of its sequence this is, from 0; with the seed it decides the random number."""
    banned: tuple[int, ...] = ()
    """Ids that must not be chosen now, ascending."""
    shaping: Shaping | None = field(default=None, compare=False, repr=False)
    logprobs: LogprobOptions | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSpec:
    """Rows of a prompt chunk whose next token's log-probability is wanted."""

    first: int
    """The first row, counted within the chunk; the others follow it."""
    targets: tuple[int, ...]
    """For each row the prompt's next token."""
    options: LogprobOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class StepItem:
    """One sequence's part in a step: these tokens, at consecutive positions from ``start``."""

    rid: str
    token_ids: tuple[int, ...]
    start: int
    block_table: tuple[int, ...]
    """Blocks of positions 0 to ``context_len - 1``, in order."""
    sample: SampleSpec | None
    """None while the prompt is not complete: this sequence's logits are not wanted."""
    score: ScoreSpec | None = None
    routes: bool = False
    """The experts that each token was routed to are wanted."""

    @property
    def context_len(self) -> int:
        """KV length of the sequence after this step."""
        return self.start + len(self.token_ids)

    @property
    def positions(self) -> range:
        """Position of each token."""
        return range(self.start, self.context_len)

    def slots(self, block_size: int) -> list[int]:
        """Where each token's K and V are written: block * block_size + offset."""
        table = self.block_table
        return [table[at // block_size] * block_size + at % block_size for at in self.positions]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One pass through the model: items in order of arrival, at least one."""

    step: int
    """Counts plans from 0."""
    block_size: int
    items: tuple[StepItem, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens fed to the model."""
        return sum(len(item.token_ids) for item in self.items)

    @property
    def samplers(self) -> tuple[StepItem, ...]:
        """Items whose next token is wanted; a StepResult has one row for each, in this order."""
        return tuple(item for item in self.items if item.sample is not None)

    def for_followers(self) -> StepPlan:
        """The same passes through the model, without what only the rank that samples needs: plain data."""
        return replace(self, items=tuple(_followed(item) for item in self.items))


_FOLLOWED = SampleSpec(temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0, seed=0, index=0)


def _followed(item: StepItem) -> StepItem:
    return item if item.sample is None else replace(item, sample=_FOLLOWED)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenDetails:
    """More log-probabilities at one token."""

    top: TopLogprobs = ()
    listed: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptScores:
    """Log-probabilities of a chunk's prompt tokens, one entry for each target of the ScoreSpec."""

    logprobs: tuple[float, ...]
    top: tuple[TopLogprobs, ...] = ()
    listed: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One token and its log-probability for each sampler of the plan; the rest only where it was asked for."""

    token_ids: tuple[int, ...]
    """NO_TOKEN, COMPLETE, DEAD_END or NOT_YET where nothing was sampled."""
    logprobs: tuple[float, ...]
    details: tuple[TokenDetails | None, ...] = ()
    """Empty, or one for each sampler."""
    scores: tuple[PromptScores | None, ...] = ()
    """Empty, or one for each item."""
    routed: tuple[bytes, ...] = ()
    """Empty, or for each item int32 [tokens of the item, MoE layers, chosen experts]."""


class Pending(Protocol):
    """A step under way."""

    def wait(self) -> StepResult:
        """Block until the result is there; call it once."""
        ...


class Runner(Protocol):
    """Carries out plans: the model, a group of ranks, or a script in a test."""

    def launch(self, plan: StepPlan) -> Pending:
        """Start a step.  Exceptions from here or from ``wait`` cost the plan's requests, not the engine."""
        ...


@runtime_checkable
class Waiting(Runner, Protocol):
    """A runner some of whose steps are best carried out by whoever waits for them."""

    def ready(self, plan: StepPlan) -> Pending | None:
        """Get such a step ready, to be computed in ``wait``; None: this one is not of them."""
        ...
