"""One sequence's reply as it grows: token events in, SGLang's response object out, whole or only the news."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from gtp_serve.request import FinishReason, LogprobOptions, TokenEvent, TopLogprobs
from gtp_serve.server.calls import Prompt
from gtp_serve.text import StoppingText, TextTokenizer

Triple = tuple[float | None, int, str | None]


_ABORT_STATUS = {
    **dict.fromkeys(("", "aborted", "deadline-exceeded", "paused", "weights-replaced"), 200),
    **dict.fromkeys(("grammar-dead-end", "no-token-allowed"), 400),
    **dict.fromkeys(("shutting-down", "weights_torn"), 503),
}


def abort_status(finish: FinishReason) -> int:
    """The HTTP status that fits an abort: 200 when somebody asked for it (a deadline, a pause or new weights too: what
    was made until then is kept), 400 when its own fields left it no token, 503 when the server cannot go on with it,
    500 for a fault.
    """
    return _ABORT_STATUS.get(finish.code, 500)


def _is_the_stop(token: int, finish: FinishReason | None) -> bool:
    """Whether this token is itself what stopped the sequence."""
    return finish is not None and finish.type == "stop" and finish.matched == token


def _finite(value: float | None) -> float | None:
    """JSON has no infinities: null stands for the probability 0 (and for a number that is none)."""
    return value if value is not None and isfinite(value) else None


class Reply:
    """Text, ids, log-probabilities and weight versions of one sequence.

    Text ends before the stop (string, id or end token) unless ``no_stop_trim``; ids and log-probabilities
    include the token that completed it, and nothing after it.

    :param hidden_stops: stop strings that are single special tokens, by id; the engine stops at the id.
    :param tokenizer: None when the server has none; text is then empty.
    :param routed_start: the first token whose routed experts are wanted; None: of none.
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
        routed_start: int | None = None,
        weight_version: str = "0",
    ) -> None:
        sampling = prompt.sampling
        self.prompt = prompt
        self.num_prompt = len(input_ids)
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.ids: list[int] = []
        self.input_ids = input_ids
        self._prompt_ids = list(input_ids) if with_prompt_ids else None
        self._options = prompt.logprobs or LogprobOptions()
        self.top: list[list[Triple]] = []
        self._listed: list[list[Triple]] = []
        self._routed_start = routed_start
        self._routed = bytearray()
        self._tokenizer = tokenizer
        self._text = StoppingText(
            tokenizer,
            context=input_ids,
            stops=sampling.stop,
            keep_stop=sampling.no_stop_trim,
            min_tokens=sampling.min_new_tokens,
            skip_special_tokens=sampling.skip_special_tokens,
        )
        self._hidden_stops = hidden_stops
        self._text_in_logprobs = text_in_logprobs and tokenizer is not None
        self._token_texts: dict[int, str] = {}
        self.inputs = self._input_body(TokenEvent(rid=prompt.rid))
        """``input_*`` of meta_info; complete when the first event has come."""
        self.triples: list[Triple] = []
        self._versions: list[tuple[str, int]] = []
        """(version, index of its first token)."""
        self._weight_version = weight_version
        self._sent_pieces = 0
        self._sent_ids = 0

    @property
    def text(self) -> str:
        """Everything so far."""
        return "".join(self._text.pieces)

    def add(self, event: TokenEvent) -> bool:
        """Take an event; True when the sequence is over, by the engine's word or by a stop string."""
        self.cached_tokens = event.cached_tokens or self.cached_tokens
        self._routed += event.routed_experts
        if event.prompt_logprobs:
            self.inputs = self._input_body(event)
        last = len(event.token_ids) - 1
        for index, token in enumerate(event.token_ids):
            logprob = event.logprobs[index] if index < len(event.logprobs) else None
            self._count(token, logprob, event.weight_version)
            self._count_more(index, event)
            final = event.finish if index == last else None
            matched = self._text.push(token, ends=_is_the_stop(token, final))
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
            self.triples.append((_finite(logprob), token, self._token_text(token)))

    def _count_more(self, index: int, event: TokenEvent) -> None:
        if self._options.top_n:
            self.top.append(self._top_triples(event.top_logprobs[index] if event.top_logprobs else ()))
        if self._options.token_ids:
            self._listed.append(self._listed_triples(event.listed_logprobs[index]))

    def _top_triples(self, top: TopLogprobs) -> list[Triple]:
        return [(_finite(value), token, self._token_text(token)) for token, value in top]

    def _listed_triples(self, values: Sequence[float]) -> list[Triple]:
        ids = self._options.token_ids
        return [(_finite(v), token, self._token_text(token)) for token, v in zip(ids, values, strict=True)]

    def _input_body(self, event: TokenEvent) -> dict[str, Any]:
        """``input_*`` of meta_info: from logprob_start_len on, the first token without a value."""
        start = self._options.prompt_start
        if start is None:
            return {"input_token_logprobs": []} if self.prompt.return_logprob else {}
        values = [None, *map(_finite, event.prompt_logprobs)]
        tokens = self.input_ids[start:]
        body: dict[str, Any] = {
            "input_token_logprobs": [
                (value, token, self._token_text(token)) for value, token in zip(values, tokens, strict=False)
            ]
        }
        if self._options.top_n:
            body["input_top_logprobs"] = [None, *map(self._top_triples, event.prompt_top_logprobs)]
        if self._options.token_ids:
            listed = map(self._listed_triples, event.prompt_listed_logprobs)
            body["input_token_ids_logprobs"] = [None, *listed]
        return body

    def _token_text(self, token: int) -> str | None:
        if not self._text_in_logprobs or self._tokenizer is None:
            return None
        if token not in self._token_texts:
            self._token_texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._token_texts[token]

    def _drain(self, finish: FinishReason) -> FinishReason:
        """Give out what decoder and matcher hold; a stop string may still complete there."""
        matched = self._text.finish()
        if matched is not None:
            return FinishReason(type="stop", matched=matched)
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
        self._sent_pieces, self._sent_ids = len(self._text.pieces), len(self.ids)
        return self._body(self.text, list(self.ids), 0, seconds)

    def news(self, *, seconds: float | None = None) -> dict[str, Any]:
        """What is new since the last ``whole`` or ``news``; ``meta_info``'s counts are of the whole reply."""
        text, since = self.take()
        return self._body(text, self.ids[since:], since, seconds)

    def take(self) -> tuple[str, int]:
        """(text that is new since the last look, index of the first new token)."""
        text, since = "".join(self._text.pieces[self._sent_pieces :]), self._sent_ids
        self._sent_pieces, self._sent_ids = len(self._text.pieces), len(self.ids)
        return text, since

    def _body(self, text: str, ids: list[int], since: int, seconds: float | None) -> dict[str, Any]:
        body: dict[str, Any] = {"text": text, "output_ids": ids}
        if self._prompt_ids is not None:
            body["prompt_token_ids"] = self._prompt_ids
        body["meta_info"] = self._meta(since, seconds)
        return body

    def _meta(self, since: int, seconds: float | None) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self.prompt.rid,
            "finish_reason": self._finish_body(),
            "prompt_tokens": self.num_prompt,
            "completion_tokens": len(self.ids),
            "reasoning_tokens": 0,
            "cached_tokens": self.cached_tokens,
            "weight_version": self._versions[-1][0] if self._versions else self._weight_version,
            "weight_versions": self.spans(),
        }
        if self.finish is not None and seconds is not None:
            meta["e2e_latency"] = seconds
        if self.prompt.return_logprob:
            meta |= self._logprobs_body(since)
        if self._routed_start is not None and self.finish is not None:
            meta["routed_experts"] = self._routed_body(self._routed_start)
        return meta

    def _logprobs_body(self, since: int) -> dict[str, Any]:
        body = {} if since else dict(self.inputs)
        body["output_token_logprobs"] = self.triples[since:]
        body["output_token_logprobs_length"] = len(self.triples)
        if self._options.top_n:
            body["output_top_logprobs"] = self.top[since:]
        if self._options.token_ids:
            body["output_token_ids_logprobs"] = self._listed[since:]
        return body

    def _routed_body(self, start: int) -> str:
        tokens = max(1, self.num_prompt + len(self.ids) - 1)
        row = len(self._routed) // tokens
        return base64.b64encode(self._routed[start * row :]).decode()

    def spans(self) -> list[dict[str, Any]]:
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
