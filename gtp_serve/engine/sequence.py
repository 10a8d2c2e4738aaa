"""One request inside the engine: its tokens, how far its KV reaches, its blocks, its legal transitions.

    WAITING --admit--> RUNNING --finish--> FINISHED
       ^--------preempt---'        WAITING --finish--> FINISHED

A preempted sequence keeps its tokens and loses its KV; it is recomputed when it is admitted again.  No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from gtp_serve.engine.bad_words import BadWords
from gtp_serve.engine.step import SampleSpec, Shaping, StepItem
from gtp_serve.engine.told import Told
from gtp_serve.kv.prefix import PrefixChain
from gtp_serve.request import FinishReason, Request


class State(Enum):
    """Where a sequence is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """A request with its progress.

    :param arrival: unique, grows with each request; older is smaller.
    :param eos_token_ids: the model's end tokens (they count unless the request ignores them).
    :param deadline: when it is aborted, by the scheduler's clock.
    :param arrived: when it came, by the same clock.
    """

    __slots__ = (
        "_bad_words",
        "_end_ids",
        "_shaping",
        "_sorted_end_ids",
        "arrival",
        "arrived",
        "blocks",
        "cached_tokens",
        "chain",
        "deadline",
        "in_flight",
        "num_computed",
        "num_counted",
        "num_named",
        "prompt_len",
        "queue_seconds",
        "request",
        "seed",
        "state",
        "tokens",
        "told",
    )

    def __init__(
        self,
        request: Request,
        *,
        arrival: int,
        seed: int,
        eos_token_ids: Iterable[int] = (),
        deadline: float | None = None,
        arrived: float = 0.0,
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.arrived = arrived
        self.queue_seconds = 0.0
        """Until it was first admitted."""
        self.seed = seed
        self.deadline = deadline
        self.state = State.WAITING
        self.tokens = list(request.input_ids)
        """Prompt, then what was generated."""
        self.prompt_len = len(request.input_ids)
        self.num_computed = 0
        """Tokens whose K and V lie in ``blocks``."""
        self.num_counted = 0
        """Prompt tokens that the statistics have seen."""
        self.cached_tokens: int | None = None
        """Prompt tokens that were there already when it was first admitted; None before that."""
        self.in_flight: StepItem | None = None
        """Its part in the step under way."""
        self.blocks: list[int] = []
        self.chain: PrefixChain | None = None
        """Names of its full blocks; None when they are not to be shared, or not named yet."""
        self.num_named = 0
        """Leading blocks that came from the prefix cache or were put there."""
        ignored = request.sampling.ignore_eos
        self._end_ids = frozenset(request.sampling.stop_token_ids) | frozenset(() if ignored else eos_token_ids)
        self._sorted_end_ids = tuple(sorted(self._end_ids))
        self._shaping = Shaping.of(
            request.sampling, self.tokens, prompt_len=self.prompt_len, end_ids=self._sorted_end_ids
        )
        self._bad_words = BadWords(request.sampling.bad_words) if request.sampling.bad_words else None
        asks = request.logprobs is not None or request.return_routed_experts
        self.told = Told(request) if asks else None
        """What it is told beside its tokens."""

    @property
    def rid(self) -> str:
        """The request's name."""
        return self.request.rid

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def queue_news(self) -> float:
        """``queue_seconds`` for the event with the first token, 0 for later ones."""
        return self.queue_seconds if self.num_output <= 1 else 0.0

    @property
    def num_pending(self) -> int:
        """Tokens that must still be fed before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose K and V may come from the prefix cache: something must be left to compute."""
        if self.request.return_routed_experts:
            return 0
        told = self.num_output > 0  # what was asked about the prompt went out with the first token
        cacheable = self.prompt_len if told else self.request.num_cacheable
        return len(self.tokens) - 1 if cacheable >= self.prompt_len else cacheable

    @property
    def num_next(self) -> int:
        """Tokens to be fed after the step under way; 0 when it is certain to end with that one."""
        if self.in_flight is None:
            return self.num_pending
        if self.in_flight.sample is None:
            return self.num_pending - len(self.in_flight.token_ids)
        return 1 if self.num_output + 1 < self.request.sampling.max_new_tokens else 0

    def sample_spec(self) -> SampleSpec:
        """How the next token is chosen."""
        sampling = self.request.sampling
        return SampleSpec(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=self.seed,
            index=self.num_output,
            banned=self._banned(),
            shaping=self._shaping,
            logprobs=self.request.logprobs,
        )

    def _banned(self) -> tuple[int, ...]:
        ends = self._sorted_end_ids if self.num_output < self.request.sampling.min_new_tokens else ()
        if self._bad_words is None:
            return ends
        return tuple(sorted({*ends, *self._bad_words.after(self.tokens, self.prompt_len)}))

    def append(self, token: int) -> FinishReason | None:
        """Take a generated token; returns why the sequence is complete, if it is (an end token first)."""
        self.tokens.append(token)
        if token in self._end_ids:
            return FinishReason(type="stop", matched=token)
        if self.num_output >= self.request.sampling.max_new_tokens:
            return FinishReason(type="length")
        return None

    def admit(self) -> None:
        """WAITING to RUNNING."""
        self._leave(State.WAITING)
        self.state = State.RUNNING

    def preempt(self) -> list[int]:
        """RUNNING to WAITING; returns the blocks, which the caller must release."""
        self._leave(State.RUNNING)
        self.state = State.WAITING
        return self._drop_kv()

    def finish(self) -> list[int]:
        """To FINISHED; returns the blocks, which the caller must release."""
        self._leave(State.WAITING, State.RUNNING)
        self.state = State.FINISHED
        return self._drop_kv()

    def _leave(self, *legal: State) -> None:
        if self.state not in legal:
            raise RuntimeError(f"sequence {self.rid} is {self.state.value}")

    def _drop_kv(self) -> list[int]:
        blocks, self.blocks, self.num_computed, self.num_named = self.blocks, [], 0, 0
        return blocks
