"""One request inside the engine: its tokens, how far its KV reaches, its blocks, its legal transitions.

    WAITING --admit--> RUNNING --finish--> FINISHED
       ^--------preempt---'        WAITING --finish--> FINISHED

A preempted sequence keeps its tokens and loses its KV; it is recomputed when it is admitted again.  No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from gtp_serve.engine.step import SampleSpec
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
    """

    __slots__ = (
        "_end_ids",
        "_sorted_end_ids",
        "arrival",
        "blocks",
        "num_computed",
        "num_counted",
        "prompt_len",
        "request",
        "seed",
        "state",
        "tokens",
    )

    def __init__(
        self, request: Request, *, arrival: int, seed: int, eos_token_ids: Iterable[int] = ()
    ) -> None:
        self.request = request
        self.arrival = arrival
        self.seed = seed
        self.state = State.WAITING
        self.tokens = list(request.input_ids)
        """Prompt, then what was generated."""
        self.prompt_len = len(request.input_ids)
        self.num_computed = 0
        """Tokens whose K and V lie in ``blocks``."""
        self.num_counted = 0
        """Prompt tokens that the statistics have seen."""
        self.blocks: list[int] = []
        ignored = request.sampling.ignore_eos
        self._end_ids = frozenset(request.sampling.stop_token_ids) | frozenset(
            () if ignored else eos_token_ids
        )
        self._sorted_end_ids = tuple(sorted(self._end_ids))

    @property
    def rid(self) -> str:
        """The request's name."""
        return self.request.rid

    @property
    def num_output(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_pending(self) -> int:
        """Tokens that must still be fed before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed

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
            banned=self._sorted_end_ids if self.num_output < sampling.min_new_tokens else (),
        )

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
        blocks, self.blocks, self.num_computed = self.blocks, [], 0
        return blocks
