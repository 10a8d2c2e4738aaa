"""Tokens and their log-probabilities as OpenAI's two routes write them, and prompt log-probabilities as vLLM does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gtp_serve.server.reply import Triple
from gtp_serve.text import TextTokenizer

NEVER = -9999.0
"""Stands for the probability 0, which JSON cannot write as a logarithm."""
Top = Sequence[Triple] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenWriter:
    """How tokens are spelled.

    :param tokenizer: None: tokens are spelled as their ids.
    :param as_ids: ``token_id:7`` also where there is a tokenizer.
    """

    tokenizer: TextTokenizer | None
    as_ids: bool

    def text(self, token: int) -> str:
        """One token; the pieces of a character become U+FFFD each."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token}"
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")

    def completion(self, chosen: Sequence[Triple], tops: Sequence[Top], others: int, offset: int) -> dict[str, Any]:
        """The lists of ``/v1/completions``.

        :param chosen: (log-probability or None, id, ...) of each token; the first of a prompt has none.
        :param tops: the most probable ids at each token.
        :param others: so many of them are wanted.
        :param offset: characters of the choice's text before the first token.
        """
        texts = [self.text(token) for _, token, _ in chosen]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_number(value) for value, _, _ in chosen],
            "top_logprobs": [
                self._top(one, top, others) for one, top in zip(chosen, _padded(tops, chosen), strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, chosen: Triple, top: Top, others: int) -> dict[str, float] | None:
        value, token, _ = chosen
        if top is None:
            return None
        found: dict[str, float] = {}
        for logprob, other, _ in [*top[:others], (value, token, None)]:
            found.setdefault(self.text(other), _number(logprob))  # of two with one spelling the more probable stays
        return found

    def chat(self, chosen: Sequence[Triple], tops: Sequence[Top], others: int) -> list[dict[str, Any]]:
        """The list of ``/v1/chat/completions``."""
        return [
            self._entry(one) | {"top_logprobs": [self._entry(other) for other in (top or ())[:others]]}
            for one, top in zip(chosen, _padded(tops, chosen), strict=True)
        ]

    def _entry(self, one: Triple) -> dict[str, Any]:
        value, token, _ = one
        raw = self.tokenizer.token_bytes(token) if self.tokenizer is not None else b""
        return {"token": self.text(token), "logprob": _number(value), "bytes": list(raw)}

    def prompt(self, chosen: Sequence[Triple], tops: Sequence[Top], others: int) -> list[dict[str, Any] | None]:
        """``prompt_logprobs``: at each token of the prompt an object by id; nothing at the first."""
        found: list[dict[str, Any] | None] = []
        for index, (one, top) in enumerate(zip(chosen, _padded(tops, chosen), strict=True)):
            found.append(None if index == 0 else self._ranked(one, (top or ())[:others]))
        return found

    def _ranked(self, chosen: Triple, top: Iterable[Triple]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for rank, (value, token, _) in enumerate(top, 1):
            found[str(token)] = {"logprob": _number(value), "rank": rank, "decoded_token": self.text(token)}
        value, token, _ = chosen
        found.setdefault(str(token), {"logprob": _number(value), "rank": None, "decoded_token": self.text(token)})
        return found


def _padded(tops: Sequence[Top], chosen: Sequence[Triple]) -> Sequence[Top]:
    """One for each token: none were asked of the engine where only chosen tokens are wanted."""
    return tops if tops else [[] for _ in chosen]


def _number(value: float | None) -> float:
    return NEVER if value is None else value
