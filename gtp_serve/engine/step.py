"""What one step does (``StepPlan``), what it gave (``StepResult``) and who does it (``Runner``).  No torch.

Plans are frozen, printable and comparable: a scheduler can be tested without a model, and a rank that only
follows needs nothing but the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

NO_TOKEN = -1
"""In a StepResult: this row's logits were not finite, so nothing was sampled."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """One token and its raw log-probability for each sampler of the plan."""

    token_ids: tuple[int, ...]
    """NO_TOKEN where the logits were not finite."""
    logprobs: tuple[float, ...]


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
