"""What a request is told beside its tokens, while it is collected step by step.  No torch.

A sequence that loses its KV feeds tokens again: what a step says of a position replaces what was said before.
"""

from __future__ import annotations

from typing import Any

from gtp_serve.engine.step import PromptScores, ScoreSpec, StepItem, TokenDetails
from gtp_serve.request import LogprobOptions, Request, TopLogprobs


class Told:
    """Prompt log-probabilities and routed experts of one request."""

    def __init__(self, request: Request) -> None:
        self._prompt = request.input_ids
        self._options = request.logprobs or LogprobOptions()
        self._routes = request.return_routed_experts
        self._logprobs: list[float] = []
        self._top: list[TopLogprobs] = []
        self._listed: list[tuple[float, ...]] = []
        self._routed = bytearray()
        self._routed_told = 0
        self._prompt_is_told = False

    @property
    def routes(self) -> bool:
        """Whether each step must say where its tokens were routed."""
        return self._routes

    def score_spec(self, start: int, count: int) -> ScoreSpec | None:
        """What a step that feeds tokens ``start`` to ``start + count - 1`` must say of the prompt."""
        since = self._options.prompt_start
        if since is None or self._prompt_is_told:
            return None
        first = max(start, since)
        targets = self._prompt[first + 1 : start + count + 1]
        return ScoreSpec(first=first - start, targets=targets, options=self._options) if targets else None

    def collect(self, item: StepItem, scores: PromptScores | None, routed: bytes) -> None:
        """Take what a step said of this sequence's tokens."""
        if item.score is not None and scores is not None and self._options.prompt_start is not None:
            at = item.start + item.score.first - self._options.prompt_start
            self._logprobs[at:] = scores.logprobs
            self._top[at:] = scores.top
            self._listed[at:] = scores.listed
        if routed:
            self._routed[item.start * (len(routed) // len(item.token_ids)) :] = routed

    def fields(self, details: TokenDetails | None, *, token: bool) -> dict[str, Any]:
        """Fields of a TokenEvent: what was not told before.

        :param token: the event has one token, or ends a sequence that was to have none.
        """
        found: dict[str, Any] = {}
        if len(self._routed) > self._routed_told:
            found["routed_experts"] = bytes(self._routed[self._routed_told :])
            self._routed_told = len(self._routed)
        if token and not self._prompt_is_told:
            self._prompt_is_told = True
            found["prompt_logprobs"] = tuple(self._logprobs)
            found["prompt_top_logprobs"] = tuple(self._top)
            found["prompt_listed_logprobs"] = tuple(self._listed)
        if token and details is not None:
            found["top_logprobs"] = (details.top,) if self._options.top_n else ()
            found["listed_logprobs"] = (details.listed,) if self._options.token_ids else ()
        return found
