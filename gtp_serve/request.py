"""What crosses the engine's border: requests in, token events out.  Token ids only; text lives in the server."""

from __future__ import annotations

from typing import Literal

import msgspec

TopLogprobs = tuple[tuple[int, float], ...]
"""(token id, log-probability) by log-probability descending, id ascending."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What the whole output must match; ``engine.grammar`` says which texts are legal and how large."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "lark", "tool_calls"]
    text: str = ""
    """The schema as JSON, the regular expression, a JSON list of strings, the Lark grammar, or
    ``engine.tool_grammar.ToolCalls`` as JSON; empty for ``json_object``.
    """


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen.  ``engine.limits`` has the ranges and checks them.

    Logits go through, in this order: repetition penalty, presence and frequency penalties, logit bias,
    grammar, allowed ids, bad words and forbidden end tokens, temperature, top-k, top-p, min-p.
    """

    max_new_tokens: int = 128
    """0: nothing is generated; for log-probabilities of the prompt."""
    min_new_tokens: int = 0
    """End tokens and stop ids cannot be sampled before this many tokens."""
    temperature: float = 1.0
    """Below 1e-6: greedy (the lowest id among equals)."""
    top_k: int = -1
    """Keep this many; -1 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """Same seed, same tokens, whatever runs beside it; None draws one."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    """Subtracted from the logit of each id that is in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from an id's logit once for each time it is in the output."""
    repetition_penalty: float = 1.0
    """For each id in prompt or output: a positive logit is divided by it, any other multiplied."""
    logit_bias: dict[int, float] = {}
    """Added to these ids' logits."""
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """No other id can be chosen, also no end token; empty: all can."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of ids that the output must not hold: where all but the last are there, the last cannot follow."""


class LogprobOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which log-probabilities are wanted beside the chosen token's, which is always there."""

    top_n: int = 0
    """Of the most probable ids, at each token."""
    token_ids: tuple[int, ...] = ()
    """Of these ids, at each token."""
    prompt_start: int | None = None
    """Also of the prompt's tokens after this position, ``input_ids[prompt_start + 1:]``; None: of none."""
    processed: bool = False
    """Of output tokens in the distribution that was sampled from (after penalties, bias, grammar, temperature
    and filters; an id that was filtered out has -inf), not in the raw one.  The prompt's are always raw.
    """


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate."""

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    logprobs: LogprobOptions | None = None
    cache_salt: str = ""
    """The prefix cache is shared only between requests of the same salt."""
    deadline_seconds: float | None = None
    """Aborted so long after it was added, whatever it has."""
    return_routed_experts: bool = False

    @property
    def num_cacheable(self) -> int:
        """Leading prompt tokens that need not pass through the model: nothing is to be told of them."""
        if self.return_routed_experts:
            return 0
        scored = None if self.logprobs is None else self.logprobs.prompt_start
        return len(self.input_ids) if scored is None else scored


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a sequence ended: ``stop`` (``matched`` is the token id or stop string), ``length`` or ``abort``."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    code: str = ""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence; the last event of a sequence, and only that one, has ``finish``.

    Log-probabilities are natural logarithms, float32; -inf is possible.
    """

    rid: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of each token: in the raw distribution (temperature 1, unfiltered) unless ``processed`` was asked for."""
    weight_version: str = ""
    """Of every token in this event."""
    finish: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; constant over a sequence."""
    queue_seconds: float = 0.0
    """From its arrival in the engine to its first admission; on the first event, 0 on later ones."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """For each token, when ``top_n`` was asked for."""
    listed_logprobs: tuple[tuple[float, ...], ...] = ()
    """For each token, in the order of ``LogprobOptions.token_ids``."""
    prompt_logprobs: tuple[float, ...] = ()
    """Of ``input_ids[prompt_start + 1:]``; on the first event with a token (with the end, when
    ``max_new_tokens`` is 0), as the next two.
    """
    prompt_top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_listed_logprobs: tuple[tuple[float, ...], ...] = ()
    routed_experts: bytes = b""
    """int32, little-endian, [tokens, MoE layers, chosen experts]: of the tokens of prompt and output that went through
    the model since the last event.  Joined: of all but the last token.
    """
