"""One sequence's reply as it grows: token events in, SGLang's response object out, whole or only the news."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from gtp_serve.request import FinishReason, TokenEvent
from gtp_serve.server.calls import Prompt
from gtp_serve.server.text import IncrementalDecoder, StopMatcher, TextTokenizer

Triple = tuple[float | None, int, str | None]


def abort_status(finish: FinishReason) -> int:
    """The HTTP status that fits an abort: 200 when it was asked for, 503 when the server ended, 500 for a
    fault.
    """
    return {"": 200, "aborted": 200, "shutting-down": 503}.get(finish.code, 500)


class Reply:
    """Text, ids, log-probabilities and weight versions of one sequence.

    Text ends before the stop (string, id or end token) unless ``no_stop_trim``; ids and log-probabilities
    include the token that completed it, and nothing after it.

    :param hidden_stops: stop strings that are single special tokens, by id; the engine stops at the id.
    :param tokenizer: None when the server has none; text is then empty.
    """

    def __init__(
        self,
        prompt: Prompt,
        input_ids: Sequence[int],
        tokenizer: TextTokenizer | None,
        *,
        hidden_stops: Mapping[int, str],
        text_in_logprobs: bool = False,
        with_prompt_ids: bool = False,
        weight_version: str = "0",
    ) -> None:
        sampling = prompt.sampling
        self.prompt = prompt
        self.num_prompt = len(input_ids)
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.ids: list[int] = []
        self._prompt_ids = list(input_ids) if with_prompt_ids else None
        self._tokenizer = tokenizer
        self._decoder = None
        if tokenizer is not None:
            self._decoder = IncrementalDecoder(
                tokenizer, skip_special_tokens=sampling.skip_special_tokens, context=input_ids
            )
        self._matcher = StopMatcher(sampling.stop)
        self._hidden_stops = hidden_stops
        self._text_in_logprobs = text_in_logprobs and tokenizer is not None
        self._pieces: list[str] = []
        self._triples: list[Triple] = []
        self._versions: list[tuple[str, int]] = []
        """(version, index of its first token)."""
        self._weight_version = weight_version
        self._sent_pieces = 0
        self._sent_ids = 0

    @property
    def text(self) -> str:
        """Everything so far."""
        return "".join(self._pieces)

    def add(self, event: TokenEvent) -> bool:
        """Take an event; True when the sequence is over, by the engine's word or by a stop string."""
        self.cached_tokens = event.cached_tokens or self.cached_tokens
        last = len(event.token_ids) - 1
        for index, token in enumerate(event.token_ids):
            logprob = event.logprobs[index] if index < len(event.logprobs) else None
            self._count(token, logprob, event.weight_version)
            final = event.finish if index == last else None
            matched = None if self._is_trimmed(token, final) else self._add_text(token)
            if matched is not None:
                return self._end(FinishReason(type="stop", matched=matched))
        if event.finish is None:
            return False
        return self._end(self._drain(event.finish))

    def _count(self, token: int, logprob: float | None, version: str) -> None:
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, len(self.ids)))
        self.ids.append(token)
        if self.prompt.return_logprob:
            value = logprob if logprob is not None and isfinite(logprob) else None
            self._triples.append((value, token, self._token_text(token)))

    def _token_text(self, token: int) -> str | None:
        if not self._text_in_logprobs or self._tokenizer is None:
            return None
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def _is_trimmed(self, token: int, finish: FinishReason | None) -> bool:
        """Whether this token is the stop itself, whose text is not shown."""
        stopped = finish is not None and finish.type == "stop" and finish.matched == token
        return stopped and not self.prompt.sampling.no_stop_trim

    def _add_text(self, token: int) -> str | None:
        """Add a token's text; returns the stop string that it completes."""
        if self._decoder is None:
            return None
        return self._match(self._decoder.push([token]))

    def _match(self, text: str) -> str | None:
        if len(self.ids) < self.prompt.sampling.min_new_tokens:
            self._pieces.append(text)
            return None
        safe, matched = self._matcher.push(text)
        if matched is not None and self.prompt.sampling.no_stop_trim:
            safe += matched
        if safe:
            self._pieces.append(safe)
        return matched

    def _drain(self, finish: FinishReason) -> FinishReason:
        """Give out what decoder and matcher hold; a stop string may still complete there."""
        if self._decoder is not None:
            matched = self._match(self._decoder.flush())
            if matched is not None:
                return FinishReason(type="stop", matched=matched)
            self._pieces.append(self._matcher.flush())
        if finish.type == "stop" and isinstance(finish.matched, int) and finish.matched in self._hidden_stops:
            return FinishReason(type="stop", matched=self._hidden_stops[finish.matched])
        return finish

    def _end(self, finish: FinishReason) -> bool:
        self.finish = finish
        return True

    def has_news(self) -> bool:
        """Whether a stream has something to send."""
        return self.finish is not None or self._sent_ids < len(self.ids)

    def whole(self, *, seconds: float | None = None) -> dict[str, Any]:
        """The reply so far.  ``seconds`` since the request came, put in when the reply is complete."""
        self._sent_pieces, self._sent_ids = len(self._pieces), len(self.ids)
        return self._body(self.text, list(self.ids), self._triples, seconds)

    def news(self, *, seconds: float | None = None) -> dict[str, Any]:
        """What is new since the last ``whole`` or ``news``; ``meta_info``'s counts are of the whole reply."""
        text, ids = "".join(self._pieces[self._sent_pieces :]), self.ids[self._sent_ids :]
        triples = self._triples[self._sent_ids :]
        self._sent_pieces, self._sent_ids = len(self._pieces), len(self.ids)
        return self._body(text, ids, triples, seconds)

    def _body(
        self, text: str, ids: list[int], triples: list[Triple], seconds: float | None
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"text": text, "output_ids": ids}
        if self._prompt_ids is not None:
            body["prompt_token_ids"] = self._prompt_ids
        body["meta_info"] = self._meta(triples, seconds)
        return body

    def _meta(self, triples: list[Triple], seconds: float | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.prompt.rid,
            "finish_reason": self._finish_body(),
            "prompt_tokens": self.num_prompt,
            "completion_tokens": len(self.ids),
            "cached_tokens": self.cached_tokens,
            "weight_version": self._versions[-1][0] if self._versions else self._weight_version,
            "weight_versions": self._spans(),
        }
        if self.finish is not None and seconds is not None:
            meta["e2e_latency"] = seconds
        if self.prompt.return_logprob:
            meta["output_token_logprobs"] = triples
            meta["output_token_logprobs_length"] = len(self._triples)
        return meta

    def _spans(self) -> list[dict[str, Any]]:
        """Which version made which tokens: half-open ranges that tile the reply."""
        ends = [start for _, start in self._versions[1:]] + [len(self.ids)]
        return [
            {"version": version, "start": start, "end": end}
            for (version, start), end in zip(self._versions, ends, strict=False)
        ]

    def _finish_body(self) -> dict[str, Any] | None:
        finish = self.finish
        if finish is None:
            return None
        if finish.type == "stop":
            return {"type": "stop", "matched": finish.matched}
        if finish.type == "length":
            return {"type": "length", "length": len(self.ids)}
        return {
            "type": "abort",
            "message": finish.message,
            "status_code": abort_status(finish),
            "err_type": finish.code or None,
        }
