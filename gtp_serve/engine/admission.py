"""Which requests the engine can carry out at all; all others are refused before they take a place.  No torch.

The HTTP process checks types and ranges first, for good error texts; these checks are the engine's own, so
that no caller can bring a value into a step that breaks it.
"""

from __future__ import annotations

from gtp_serve.config import EngineConfig
from gtp_serve.engine.limits import check_options, check_sampling
from gtp_serve.errors import PromptTooLong, RequestRejected
from gtp_serve.kv.blocks import cache_tokens
from gtp_serve.request import Request, SamplingParams


def check_request(request: Request, config: EngineConfig) -> None:
    """Refuse what can never be answered.

    :raises PromptTooLong: prompt plus new tokens exceed the context (or the KV cache: code ``never-fits``).
    :raises RequestRejected: an empty prompt, a token id that does not exist, a sampling value out of range.
    """
    _check_prompt(request.input_ids, config)
    check_sampling(request.sampling, config.model.vocab_size)
    check_options(request, config.model.vocab_size)
    _check_ids(request.sampling.stop_token_ids, config.model.vocab_size, "sampling_params.stop_token_ids")
    _check_something_is_allowed(request.sampling, config)
    _check_length(len(request.input_ids), request.sampling.max_new_tokens, config)


def _check_prompt(input_ids: tuple[int, ...], config: EngineConfig) -> None:
    if not input_ids:
        raise RequestRejected("the prompt has no tokens", code="empty-prompt", param="input_ids")
    _check_ids(input_ids, config.model.vocab_size, "input_ids")


def _check_ids(ids: tuple[int, ...], vocab_size: int, param: str) -> None:
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    at, token = next((at, token) for at, token in enumerate(ids) if not 0 <= token < vocab_size)
    raise RequestRejected(
        f"{param}[{at}] is {token}, which is no token id of this model",
        [("needed", f"0 to {vocab_size - 1}")],
        code="bad-token-id",
        param=param,
    )


def _check_something_is_allowed(sampling: SamplingParams, config: EngineConfig) -> None:
    _check_left(sampling, config.model.vocab_size)
    if sampling.min_new_tokens == 0:
        return
    eos = () if sampling.ignore_eos else config.model.eos_token_ids
    ends = {*sampling.stop_token_ids, *eos}
    if (
        ends.issuperset(sampling.allowed_token_ids)
        if sampling.allowed_token_ids
        else len(ends) >= config.model.vocab_size
    ):
        raise RequestRejected(
            "min_new_tokens forbids each token that is allowed, since each is an end token",
            param="sampling_params.min_new_tokens",
        )


def _check_left(sampling: SamplingParams, vocab_size: int) -> None:
    """Words of one id must not forbid everything."""
    never = {word[0] for word in sampling.bad_words if len(word) == 1}
    if never and (
        never.issuperset(sampling.allowed_token_ids) if sampling.allowed_token_ids else len(never) >= vocab_size
    ):
        raise RequestRejected(
            "bad_words forbids every token that is allowed",
            param="sampling_params.bad_words",
        )


def _check_length(prompt: int, new: int, config: EngineConfig) -> None:
    if prompt + new > config.max_context:
        raise PromptTooLong(
            f"{prompt} prompt tokens and {new} new ones are more than the context of {config.max_context}",
            [("try", _shorter(prompt, config.max_context))],
            param="input_ids" if prompt >= config.max_context else "sampling_params.max_new_tokens",
        )
    room = cache_tokens(config.cache)
    if prompt + new > room:
        raise PromptTooLong(
            f"{prompt} prompt tokens and {new} new ones can never fit the KV cache of {room} tokens",
            [("try", _shorter(prompt, room))],
            code="never-fits",
            param="input_ids",
        )


def _shorter(prompt: int, room: int) -> str:
    if prompt >= room:
        return f"a prompt of fewer than {room} tokens"
    return f"max_new_tokens of at most {room - prompt}"
