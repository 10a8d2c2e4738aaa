"""What ``LLM`` answers with, and how an answer grows out of the engine's token events.  No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gtp_serve.request import FinishReason, TokenEvent, TopLogprobs
from gtp_serve.text import StoppingText, TextTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Output tokens ``start`` to ``end`` were made by the weights of ``version``."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One finished sequence.  Text ends before the stop; ids and log-probabilities include its token."""

    text: str
    """Empty without a tokenizer."""
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural-log probability of each id in the raw distribution; empty when it was not wanted."""
    top_logprobs: tuple[TopLogprobs, ...]
    """For each id the most probable (id, log-probability) pairs, when ``top_logprobs`` was given."""
    finish_reason: FinishReason
    """``stop``, ``length``, or ``abort``: the sequence could not be finished, and ``message`` says why."""
    prompt_ids: tuple[int, ...]
    weight_versions: tuple[VersionSpan, ...]
    cached_tokens: int
    """Prompt tokens that came from the prefix cache."""
    routed_experts: bytes = b""
    """int32, little-endian, [prompt and output tokens less the last, MoE layers, chosen experts]; empty when it was not
    wanted.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What is new in a sequence since the last one; only the last has ``finish_reason``."""

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """Log-probabilities of given tokens."""

    ids: tuple[int, ...]
    start: int
    logprobs: tuple[float, ...]
    """Of ``ids[start + 1:]``, each after all ids before it."""

    @property
    def total(self) -> float:
        """Log-probability of ``ids[start + 1:]`` as a whole."""
        return sum(self.logprobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRules:
    """Where a sequence's text ends and what of it is shown."""

    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False
    """The stop (string, id or end token) stays in the text."""
    skip_special_tokens: bool = True


class Growing:
    """One sequence on its way.

    :param hidden_stops: stop strings that are single special tokens, by id; the engine stops at the id.
    """

    def __init__(
        self,
        prompt_ids: Sequence[int],
        tokenizer: TextTokenizer | None,
        rules: TextRules,
        *,
        hidden_stops: Mapping[int, str],
        min_tokens: int,
    ) -> None:
        self.finish: FinishReason | None = None
        self.prompt_logprobs: tuple[float, ...] = ()
        self._prompt_ids = tuple(prompt_ids)
        self._hidden_stops = hidden_stops
        self._text = StoppingText(
            tokenizer,
            context=prompt_ids,
            stops=rules.stop,
            keep_stop=rules.no_stop_trim,
            min_tokens=min_tokens,
            skip_special_tokens=rules.skip_special_tokens,
        )
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[TopLogprobs] = []
        self._versions: list[tuple[str, int]] = []
        self._cached = 0
        self._routed = bytearray()
        self._told_pieces = 0
        self._told_ids = 0

    def add(self, event: TokenEvent) -> bool:
        """Take an event; True when the sequence is over, by the engine's word or by a stop string."""
        self._cached = event.cached_tokens or self._cached
        self._routed += event.routed_experts
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        for index, token in enumerate(event.token_ids):
            self._count(event, index)
            last = index == len(event.token_ids) - 1
            ends = last and event.finish is not None and event.finish.type == "stop" and event.finish.matched == token
            if (matched := self._text.push(token, ends=ends)) is not None:
                self.finish = FinishReason(type="stop", matched=matched)
                return True
        if event.finish is None:
            return False
        self.finish = self._settle(event.finish)
        return True

    def _count(self, event: TokenEvent, index: int) -> None:
        if not self._versions or self._versions[-1][0] != event.weight_version:
            self._versions.append((event.weight_version, len(self._ids)))
        self._ids.append(event.token_ids[index])
        self._logprobs += event.logprobs[index : index + 1]
        self._top += event.top_logprobs[index : index + 1]

    def _settle(self, finish: FinishReason) -> FinishReason:
        matched: int | str | None = self._text.finish()
        if matched is None and finish.type == "stop" and isinstance(finish.matched, int):
            matched = self._hidden_stops.get(finish.matched)
        return finish if matched is None else FinishReason(type="stop", matched=matched)

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self._ids)

    def news(self) -> Delta:
        """What came since the last call."""
        pieces, at = self._text.pieces[self._told_pieces :], self._told_ids
        self._told_pieces, self._told_ids = len(self._text.pieces), len(self._ids)
        return Delta(
            text="".join(pieces),
            ids=tuple(self._ids[at:]),
            logprobs=tuple(self._logprobs[at:]),
            finish_reason=self.finish,
        )

    def whole(self, *, with_logprobs: bool) -> Completion:
        """The finished sequence."""
        assert self.finish is not None
        ends = [start for _, start in self._versions[1:]] + [len(self._ids)]
        return Completion(
            text="".join(self._text.pieces),
            ids=tuple(self._ids),
            logprobs=tuple(self._logprobs) if with_logprobs else (),
            top_logprobs=tuple(self._top),
            finish_reason=self.finish,
            prompt_ids=self._prompt_ids,
            weight_versions=tuple(
                VersionSpan(version=version, start=start, end=end)
                for (version, start), end in zip(self._versions, ends, strict=False)
            ),
            cached_tokens=self._cached,
            routed_experts=bytes(self._routed),
        )
