"""The fields of ``POST /generate``: one table of types, ranges and defaults, and the checks for any field.

Names and defaults are SGLang's.  ``null`` means the default.  An unknown field is refused with the nearest
right name. Fields of SGLang that this version does not have are accepted at their default and refused by
name otherwise.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gtp_serve.engine.limits import (
    MAX_DEADLINE_SECONDS,
    MAX_PENALTY,
    MAX_REPETITION,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION,
)
from gtp_serve.errors import RequestRejected

Kind = Literal["int", "float", "bool"]

MAX_SEQUENCES = 1024
"""Prompts times n of one call."""
MAX_STOPS = 32
MAX_STOP_CHARS = 256
MAX_STOP_IDS = 256
MAX_RID_CHARS = 256
MAX_TEXT_CHARS = 8 << 20
MAX_N = 128
MAX_TOKENS = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """One numeric or boolean field: what it may be and what it is when it is left out."""

    kind: Kind
    default: int | float | bool | None
    low: float = 0
    high: float = 0
    above: bool = False
    """``low`` itself is not allowed."""
    also: int | None = None
    """One value outside the range that is allowed too."""
    help: str = ""

    def possible(self) -> str:
        """The range in words."""
        if self.kind == "bool":
            return "true or false"
        what = "a whole number" if self.kind == "int" else "a number"
        start = f"above {self.low:g}" if self.above else f"from {self.low:g}" if self.low < 1e15 else f"from {self.low}"
        text = f"{what} {start} to {_plain(self.high)}"
        return text if self.also is None else f"{text}, or {self.also}"


def _plain(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


#: ``sampling_params``; the strings and lists (stop, stop_token_ids) are read below.
SAMPLING: Mapping[str, Number] = {
    "max_new_tokens": Number(
        kind="int", default=128, low=0, high=MAX_TOKENS, help="most tokens to generate; 0: only the prompt's"
    ),
    "min_new_tokens": Number(kind="int", default=0, low=0, high=MAX_TOKENS, help="no end before this many tokens"),
    "temperature": Number(kind="float", default=1.0, low=0, high=MAX_TEMPERATURE, help="below 1e-6: greedy"),
    "top_k": Number(kind="int", default=-1, low=1, high=(1 << 31) - 1, also=-1, help="-1 keeps all"),
    "top_p": Number(kind="float", default=1.0, low=0, high=1, above=True),
    "min_p": Number(kind="float", default=0.0, low=0, high=1),
    "presence_penalty": Number(
        kind="float", default=0.0, low=-MAX_PENALTY, high=MAX_PENALTY, help="of ids in the output"
    ),
    "frequency_penalty": Number(
        kind="float", default=0.0, low=-MAX_PENALTY, high=MAX_PENALTY, help="for each time in the output"
    ),
    "repetition_penalty": Number(
        kind="float", default=1.0, low=MIN_REPETITION, high=MAX_REPETITION, help="of ids in prompt or output"
    ),
    "sampling_seed": Number(kind="int", default=None, low=0, high=MAX_SEED, help="same seed, same tokens"),
    "n": Number(kind="int", default=1, low=1, high=MAX_N, help="replies for each prompt"),
    "ignore_eos": Number(kind="bool", default=False),
    "skip_special_tokens": Number(kind="bool", default=True),
    "no_stop_trim": Number(kind="bool", default=False, help="keep the stop in the text"),
}

#: Top level; ``stream`` is also allowed to be "delta", ``return_logprob`` to be a list.
CALL: dict[str, Number] = {
    "return_text_in_logprobs": Number(kind="bool", default=False),
    "return_prompt_token_ids": Number(kind="bool", default=False),
    "return_routed_experts": Number(kind="bool", default=False, help="of each token, in each MoE layer"),
    "no_logs": Number(kind="bool", default=False),
    "log_metrics": Number(kind="bool", default=True),
}

CALL_NUMBERS: dict[str, Number] = {
    "routed_experts_start_len": Number(kind="int", default=0, low=0, high=MAX_TOKENS),
    "deadline_seconds": Number(
        kind="float", default=None, low=0, high=MAX_DEADLINE_SECONDS, above=True, help="abort after so long"
    ),
}

#: Top level, one value for all prompts or a list with one for each.
EACH: Mapping[str, Number] = {
    "return_logprob": Number(kind="bool", default=False),
    "logprob_start_len": Number(
        kind="int", default=-1, low=0, high=MAX_TOKENS, also=-1, help="-1: of output tokens only"
    ),
    "top_logprobs_num": Number(kind="int", default=0, low=0, high=MAX_TOP_LOGPROBS),
}

_NOT_YET = "not supported yet"
_NO_MEDIA = "not supported: text and token ids only"
_NO_CODE = "not supported: code from a client is never run"
_NO_LORA = "not supported: merge the adapter into the weights"

#: Fields that are accepted with one of these values (and null) and refused with any other: (values, reason).
AT_DEFAULT: Mapping[str, tuple[tuple[object, ...], str]] = {
    "return_hidden_states": ((False,), _NOT_YET),
    "return_indexer_topk": ((False,), _NOT_YET),
    "return_sampling_mask": ((False,), _NOT_YET),
    "return_entropy": ((False,), _NOT_YET),
    "return_flat_raw_top_logprobs": ((False,), _NOT_YET),
    "session_id": ((), _NOT_YET),
    "session_params": ((), _NOT_YET),
    "priority": ((), _NOT_YET),
    "custom_labels": ((), _NOT_YET),
    "routed_dp_rank": ((), _NOT_YET),
    "data_parallel_rank": ((), _NOT_YET),
    "bootstrap_host": ((), _NOT_YET),
    "bootstrap_port": ((), _NOT_YET),
    "bootstrap_room": ((), _NOT_YET),
    "decode_tp_size": ((), _NOT_YET),
    "disagg_prefill_dp_rank": ((), _NOT_YET),
    "kv_hints": ((), _NOT_YET),
    "require_reasoning": ((False,), _NOT_YET),
    "max_thinking_tokens": ((), _NOT_YET),
    "background": ((False,), _NOT_YET),
    "images_config": ((), _NO_MEDIA),
    "watermark": ((), _NOT_YET),
    "modalities": (([],), _NO_MEDIA),
    "mm_processor_kwargs": (({},), _NO_MEDIA),
    "mm_data": ((), _NO_MEDIA),
    "input_embeds": ((), _NOT_YET),
    "image_data": ((), _NO_MEDIA),
    "video_data": ((), _NO_MEDIA),
    "audio_data": ((), _NO_MEDIA),
    "lora_path": ((), _NO_LORA),
    "lora_id": ((), _NO_LORA),
    "custom_logit_processor": ((), _NO_CODE),
}

#: The same inside ``sampling_params``.
SAMPLING_AT_DEFAULT: Mapping[str, tuple[tuple[object, ...], str]] = {
    "stop_regex": (([],), _NOT_YET),
    "beam_width": ((1,), _NOT_YET),
    "structural_tag": ((), _NOT_YET),
    "spaces_between_special_tokens": ((True, False), "true or false; no tokenizer that is served heeds it"),
    "stream_interval": ((1,), _NOT_YET),
    "custom_params": (({},), _NOT_YET),
    "watermark": ((), _NOT_YET),
}

_CALL_NAMES = frozenset(
    {"text", "input_ids", "sampling_params", "rid", "stream", "token_ids_logprob", "sampling_logprobs_mode"}
    | {"cache_salt", "extra_key", *CALL, *CALL_NUMBERS, *EACH}
)
_SAMPLING_NAMES = frozenset(
    {"stop", "stop_token_ids", "seed", "logit_bias", "json_schema", "regex", "ebnf", "choice"}
    | {"allowed_token_ids", "bad_words", *SAMPLING}
)

#: Other APIs' names for fields of ``sampling_params``.
_SAMPLING_SYNONYMS: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
    "max_gen_len": "max_new_tokens",
    "n_predict": "max_new_tokens",
    "num_predict": "max_new_tokens",
    "num_tokens_to_generate": "max_new_tokens",
    "tokens_to_generate": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "random_seed": "sampling_seed",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "best_of": "n",
    "num_return_sequences": "n",
    "bad_words_ids": "bad_words",
    "allowed_tokens": "allowed_token_ids",
    "include_stop_str_in_output": "no_stop_trim",
    "temp": "temperature",
}
#: Other APIs' names for fields of the call.
_CALL_SYNONYMS: Mapping[str, str] = {
    "prompt": "text",
    "prompts": "text",
    "inputs": "text",
    "input": "text",
    "prompt_token_ids": "input_ids",
    "token_ids": "input_ids",
    "tokens": "input_ids",
    "request_id": "rid",
    "parameters": "sampling_params",
    "logprobs": "return_logprob",
    "return_logprobs": "return_logprob",
    "return_token_ids": "return_prompt_token_ids",
}


KNOWN_CALL = frozenset({*_CALL_NAMES, *AT_DEFAULT})
KNOWN_SAMPLING = frozenset({*_SAMPLING_NAMES, *SAMPLING_AT_DEFAULT})


def check_names(
    given: Mapping[str, Any],
    known: frozenset[str],
    prefix: str,
    at_default: Mapping[str, tuple[tuple[object, ...], str]],
) -> None:
    """Refuse unknown names, and known ones that this version can only take at their default.

    :param prefix: of the field's path, for example ``sampling_params.``.
    """
    for name in given:
        if name not in known:
            raise _unknown_field(name, prefix)
    check_at_default(given, prefix, at_default)


def check_at_default(
    given: Mapping[str, Any], prefix: str, at_default: Mapping[str, tuple[tuple[object, ...], str]]
) -> None:
    """Refuse a field that this version can only take at its default and that has another value."""
    for name, value in given.items():
        if name in at_default and value is not None:
            values, reason = at_default[name]
            if not any((type(value) is not bool and value == one) or value is one for one in values):
                raise RequestRejected(f"{prefix}{name} is {reason}", code="not-supported", param=f"{prefix}{name}")


def _unknown_field(name: str, prefix: str) -> RequestRejected:
    shown = name if len(name) <= 64 else name[:64] + "..."
    where = f" in {prefix[:-1]}" if prefix else ""
    right = _nearest(name, inside=bool(prefix))
    message = f"unknown field '{shown}'{where}"
    if right is not None:
        message += f"; on /generate it is '{right}'" if right != name else ""
    return RequestRejected(message, code="unknown-field", param=f"{prefix}{shown}", did_you_mean=right)


def _nearest(name: str, *, inside: bool) -> str | None:
    """The right name; with its path when it belongs to the other level."""
    here, there = (_SAMPLING_NAMES, _CALL_NAMES) if inside else (_CALL_NAMES, _SAMPLING_NAMES)
    synonyms_here, synonyms_there = (
        (_SAMPLING_SYNONYMS, _CALL_SYNONYMS) if inside else (_CALL_SYNONYMS, _SAMPLING_SYNONYMS)
    )
    if name in synonyms_here:
        return synonyms_here[name]
    elsewhere = name if name in there else synonyms_there.get(name)
    if elsewhere is not None:
        return elsewhere if inside else f"sampling_params.{elsewhere}"
    if len(name) > 64:
        return None
    near = difflib.get_close_matches(name, sorted(here), n=1, cutoff=0.6)
    if near:
        return near[0]
    near = difflib.get_close_matches(name, sorted(there), n=1, cutoff=0.75)
    return None if not near else near[0] if inside else f"sampling_params.{near[0]}"


def read_number(given: Mapping[str, Any], name: str, field: Number, prefix: str) -> int | float | bool | None:
    """One field of a table.

    :raises RequestRejected: for a wrong type or a value out of range.
    """
    value = given.get(name)
    if value is None:
        return field.default
    if field.kind == "bool":
        if isinstance(value, bool):
            return value
    elif _is_number(value, field.kind) and _in_range(value, field):
        return value if field.kind == "int" else float(value)
    raise RequestRejected(f"{prefix}{name} must be {field.possible()}, not {describe(value)}", param=f"{prefix}{name}")


def _is_number(value: object, kind: Kind) -> bool:
    return not isinstance(value, bool) and isinstance(value, int if kind == "int" else int | float)


def _in_range(value: int | float, field: Number) -> bool:
    if field.also is not None and value == field.also:
        return True
    return (field.low < value if field.above else field.low <= value) and value <= field.high


def describe(value: object) -> str:
    """A value in a message: numbers as they are, of everything else only the kind."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"{value!r}"[:40]
    names: Mapping[type, str] = {str: "a string", list: "a list", dict: "an object", type(None): "null"}
    return names.get(type(value), "something else")
