"""What crosses the engine's border: requests in, token events out.  Token ids only; text lives in the server."""

from __future__ import annotations

from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen.  Ranges are checked where a request enters (server.schemas, LLM)."""

    max_new_tokens: int = 128
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


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate."""

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams


class FinishReason(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a sequence ended: ``stop`` (``matched`` is the token id or stop string), ``length`` or ``abort``."""

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    message: str = ""
    code: str = ""


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New tokens of one sequence; the last event of a sequence, and only that one, has ``finish``."""

    rid: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Natural-log probability of each token under the raw (temperature 1, unfiltered) distribution, float32."""
    weight_version: str = ""
    """Of every token in this event."""
    finish: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; constant over a sequence."""
