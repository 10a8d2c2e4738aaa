"""Schemas of request bodies, made from the tables of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gtp_serve.engine.limits import MAX_BIAS, MAX_BIASED, MAX_CHOICES, MAX_GRAMMAR_CHARS, MAX_LISTED, MAX_SALT_CHARS
from gtp_serve.server.openai.fields import (
    CHAT_AT_DEFAULT,
    CHAT_NUMBERS,
    CHAT_SCHEMAS,
    CHOICE_LISTS,
    COMPLETION_AT_DEFAULT,
    COMPLETION_NUMBERS,
    COMPLETION_SCHEMAS,
    OPTION_NUMBERS,
    OPTIONS_AT_DEFAULT,
    PROMPT,
    TOKEN_IDS,
    AtDefault,
    Schema,
    numbers_of,
)
from gtp_serve.server.openai.tokenize import (
    DETOKENIZE_NUMBERS,
    DETOKENIZE_SCHEMAS,
    TOKENIZE_NUMBERS,
    TOKENIZE_SCHEMAS,
)
from gtp_serve.server.schemas import (
    AT_DEFAULT,
    CALL,
    CALL_NUMBERS,
    EACH,
    MAX_RID_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    SAMPLING,
    SAMPLING_AT_DEFAULT,
    Number,
)

_TYPES = {"int": "integer", "float": "number", "bool": "boolean"}
_TEXT: Schema = {"type": "string"}


def number_schema(field: Number) -> Schema:
    """A numeric or boolean field."""
    schema: Schema = {"type": _TYPES[field.kind]}
    if field.kind != "bool":
        schema["exclusiveMinimum" if field.above else "minimum"] = _plain(field.low)
        schema["maximum"] = _plain(field.high)
    if field.also is not None:
        schema = {"anyOf": [schema, {"const": field.also}]}
    if field.default is not None:
        schema["default"] = field.default
    return {**schema, "description": field.help} if field.help else schema


def _plain(value: float) -> float:
    return int(value) if float(value).is_integer() else value


def object_schema(
    numbers: Mapping[str, Number],
    others: Mapping[str, Schema],
    at_default: AtDefault,
    required: tuple[str, ...] = (),
) -> Schema:
    """A whole body; null is every field's default."""
    fields = {name: number_schema(field) for name, field in numbers.items()} | dict(others)
    fields |= {name: _default_only(values, reason) for name, (values, reason) in at_default.items()}
    plain = {name: schema if name in required else _or_null(schema) for name, schema in sorted(fields.items())}
    schema: Schema = {"type": "object", "properties": plain, "additionalProperties": False}
    return {**schema, "required": [*required]} if required else schema


def _or_null(schema: Schema) -> Schema:
    notes: Schema = {name: schema[name] for name in ("description", "default") if name in schema}
    bare = {name: value for name, value in schema.items() if name not in notes}
    return {"anyOf": [bare, {"type": "null"}], **notes} if bare else notes


def _default_only(values: tuple[object, ...], reason: str) -> Schema:
    return {"enum": [*values], "description": reason} if values else {"type": "null", "description": reason}


_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_SAMPLING_LISTS: Mapping[str, Schema] = {
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]},
    "stop_token_ids": {**TOKEN_IDS, "minItems": 0, "maxItems": MAX_STOP_IDS},
    "seed": {**number_schema(SAMPLING["sampling_seed"]), "description": "sampling_seed by another name"},
    "logit_bias": {
        "type": "object",
        "maxProperties": MAX_BIASED,
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    },
    "json_schema": {"anyOf": [{"type": "object"}, {**_TEXT, "maxLength": MAX_GRAMMAR_CHARS}]},
    "regex": {**_TEXT, "maxLength": MAX_GRAMMAR_CHARS},
    "ebnf": {**_TEXT, "maxLength": MAX_GRAMMAR_CHARS},
    "choice": {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_CHOICES},
    **CHOICE_LISTS,
}
_SAMPLING = object_schema(SAMPLING, _SAMPLING_LISTS, SAMPLING_AT_DEFAULT)
_RID: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_RID_CHARS}
_SALT: Schema = {"type": "string", "maxLength": MAX_SALT_CHARS, "description": "share cached prompts only within it"}


def _each(schema: Schema) -> Schema:
    """One value for all prompts, or a list with one for each."""
    return {"anyOf": [schema, {"type": "array", "items": schema, "minItems": 1}]}


_GENERATE: Mapping[str, Schema] = {
    "text": _each(PROMPT),
    "input_ids": _each(TOKEN_IDS),
    "sampling_params": _each(_SAMPLING),
    "rid": _each(_RID),
    "stream": {"enum": [True, False, "delta"], "description": '"delta": only what is new in each event'},
    "token_ids_logprob": _each({**TOKEN_IDS, "minItems": 0, "maxItems": MAX_LISTED}),
    "sampling_logprobs_mode": {"enum": ["raw", "processed"]},
    "cache_salt": _SALT,
    "extra_key": _SALT,
    **{name: _each(number_schema(field)) for name, field in EACH.items()},
}
_STREAM_OPTIONS = object_schema(OPTION_NUMBERS, {}, OPTIONS_AT_DEFAULT)


def _chat() -> Schema:
    others: dict[str, Any] = {**CHAT_SCHEMAS, "stream_options": _STREAM_OPTIONS}
    return object_schema(numbers_of(CHAT_NUMBERS), others, CHAT_AT_DEFAULT, required=("messages",))


def _completions() -> Schema:
    others: dict[str, Any] = {**COMPLETION_SCHEMAS, "stream_options": _STREAM_OPTIONS}
    return object_schema(numbers_of(COMPLETION_NUMBERS), others, COMPLETION_AT_DEFAULT, required=("prompt",))


def _one_of(schema: Schema, *names: str) -> Schema:
    """Exactly one of these fields is needed."""
    return {**schema, "oneOf": [{"required": [name]} for name in names]}


_TOKENIZE = _one_of(object_schema(TOKENIZE_NUMBERS, TOKENIZE_SCHEMAS, {}), "prompt", "text", "messages")
_DETOKENIZE = object_schema(DETOKENIZE_NUMBERS, DETOKENIZE_SCHEMAS, {}, required=("tokens",))
#: By path.
BODIES: Mapping[str, Schema] = {
    "/generate": _one_of(object_schema({**CALL, **CALL_NUMBERS}, _GENERATE, AT_DEFAULT), "text", "input_ids"),
    "/v1/completions": _completions(),
    "/v1/chat/completions": _chat(),
    "/tokenize": _TOKENIZE,
    "/v1/tokenize": _TOKENIZE,
    "/detokenize": _DETOKENIZE,
    "/v1/detokenize": _DETOKENIZE,
}
