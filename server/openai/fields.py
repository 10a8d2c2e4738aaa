"""The fields of OpenAI's routes: what each may be, and which field of ``/generate`` it stands for.

Ranges are those of ``server.schemas``: a field that stands for one of ``/generate`` is read by the same code.  An
unknown field is refused with the nearest right name.  A field that changes no token is taken and not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gtp_serve.engine.limits import (
    MAX_ALLOWED,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    MAX_SALT_CHARS,
    MAX_TOP_LOGPROBS,
)
from gtp_serve.server.schemas import (
    CALL_NUMBERS,
    MAX_RID_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TOKENS,
    SAMPLING,
    Number,
)

Schema = dict[str, Any]
AtDefault = Mapping[str, tuple[tuple[object, ...], str]]

MAX_MESSAGES = 4096
MAX_TOOLS = 512
MAX_NAME_CHARS = 1024

#: Fields that stand for one of ``sampling_params``: theirs -> ours.
SAMPLED: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "sampling_seed",
    "n": "n",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "include_stop_str_in_output": "no_stop_trim",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "logit_bias": "logit_bias",
    "allowed_token_ids": "allowed_token_ids",
    "bad_words": "bad_words",
}
#: Fields that stand for one of the call's own.
CALLED: Mapping[str, str] = {
    "request_id": "rid",
    "cache_salt": "cache_salt",
    "deadline_seconds": "deadline_seconds",
}

_FLAG = Number(kind="bool", default=False)
#: Numbers and flags that are read here, for both routes.
NUMBERS: Mapping[str, Number] = {
    "stream": _FLAG,
    "return_token_ids": Number(kind="bool", default=False, help="token ids of prompt and reply"),
    "return_weight_versions": Number(kind="bool", default=False, help="which weights made which tokens"),
    "return_tokens_as_token_ids": Number(kind="bool", default=False, help='tokens as "token_id:7" in logprobs'),
    "prompt_logprobs": Number(
        kind="int", default=None, low=0, high=MAX_TOP_LOGPROBS, help="of the prompt's tokens, with so many others"
    ),
}
COMPLETION_NUMBERS: Mapping[str, Number] = {
    "echo": Number(kind="bool", default=False, help="the prompt comes before the reply"),
    "logprobs": Number(
        kind="int", default=None, low=0, high=MAX_TOP_LOGPROBS, help="of chosen tokens, with so many others"
    ),
}
TEMPLATE_NUMBERS: Mapping[str, Number] = {
    "add_generation_prompt": Number(kind="bool", default=None, help="default: true, unless the last message goes on"),
    "continue_final_message": Number(kind="bool", default=False, help="the reply goes on with the last message"),
}
CHAT_NUMBERS: Mapping[str, Number] = {
    "logprobs": Number(kind="bool", default=False, help="of chosen tokens"),
    "top_logprobs": Number(kind="int", default=0, low=0, high=MAX_TOP_LOGPROBS, help="others beside them"),
    "parallel_tool_calls": Number(kind="bool", default=True, help="false: a reply has one call at most"),
    **TEMPLATE_NUMBERS,
}
OPTION_NUMBERS: Mapping[str, Number] = {
    "include_usage": Number(kind="bool", default=False, help="a last chunk with the counts"),
    "continuous_usage_stats": Number(kind="bool", default=False, help="counts in every chunk"),
}

_NOT_YET = "not supported yet"
_NO_PADDING = "not supported: chunks are never padded"
_ONE_TEXT = "not supported: what a model thinks stays in its text"
_OTHER_MODALITIES = "not supported: text and token ids only"
_NO_TEMPLATE = "not supported: a template comes from the model or the operator, never from a request"
_NO_SUFFIX = "not supported: spell the model's own tokens for filling in a middle in the prompt"
_ONE_REPLY = "not supported: replies are not ranked; send n"
_TOOLS = "not supported: send tools"
OPTIONS_AT_DEFAULT: AtDefault = {"include_obfuscation": ((False,), _NO_PADDING)}
_SHARED_AT_DEFAULT: AtDefault = {
    "use_beam_search": ((False,), _NOT_YET),
    "length_penalty": ((1,), _NOT_YET),
    "truncate_prompt_tokens": ((), _NOT_YET),
    "spaces_between_special_tokens": ((True, False), "true or false; no tokenizer that is served heeds it"),
    "priority": ((0,), _NOT_YET),
    "logits_processors": (([],), "not supported: code from a client is never run"),
    "kv_transfer_params": ((), _NOT_YET),
    "vllm_xargs": (({},), _NOT_YET),
    "lora_path": ((), "not supported: merge the adapter into the weights"),
}
COMPLETION_AT_DEFAULT: AtDefault = {
    **_SHARED_AT_DEFAULT,
    "suffix": (("",), _NO_SUFFIX),
    "best_of": ((1,), _ONE_REPLY),
    "prompt_embeds": ((), _NOT_YET),
    "add_special_tokens": ((True,), _NOT_YET),
}
CHAT_AT_DEFAULT: AtDefault = {
    **_SHARED_AT_DEFAULT,
    "audio": ((), _OTHER_MODALITIES),
    "modalities": ((["text"], []), _OTHER_MODALITIES),
    "prediction": ((), _NOT_YET),
    "web_search_options": ((), _NOT_YET),
    "mm_processor_kwargs": ((), _OTHER_MODALITIES),
    "chat_template": ((), _NO_TEMPLATE),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "echo": ((False,), _NOT_YET),
    "add_special_tokens": ((False,), "not supported: the template has them"),
    "verbosity": (("medium",), _NOT_YET),
    "store": ((False,), _NOT_YET),
    "include_reasoning": ((True,), _ONE_TEXT),
    "separate_reasoning": ((False,), _ONE_TEXT),
}

_IGNORED = {
    "user": "not looked at",
    "metadata": "not looked at",
    "safety_identifier": "not looked at",
    "service_tier": "not looked at",
    "prompt_cache_key": "not looked at",
    "prompt_cache_retention": "not looked at",
}
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_TOKENS}, "minItems": 1}
PROMPT: Schema = {"type": "string", "minLength": 1}
MODEL: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_NAME_CHARS}
ROLE = "[A-Za-z0-9_-]{1,64}"
BAD_WORD: Schema = {
    "anyOf": [
        {"type": "string", "maxLength": MAX_STOP_CHARS, "pattern": r"\S"},
        {**TOKEN_IDS, "maxItems": MAX_BAD_WORD_IDS},
    ]
}
CHOICE_LISTS: Mapping[str, Schema] = {
    "allowed_token_ids": {**TOKEN_IDS, "maxItems": MAX_ALLOWED, "description": "no other id can be chosen"},
    "bad_words": {
        "type": "array",
        "items": BAD_WORD,
        "maxItems": MAX_BAD_WORDS // 2,
        "description": "texts or ids: a word's last token cannot follow its others",
    },
}
_LISTS: Mapping[str, Schema] = {
    "stop": {
        "anyOf": [
            {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
            {
                "type": "array",
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                "maxItems": MAX_STOPS,
            },
        ]
    },
    "stop_token_ids": {**TOKEN_IDS, "minItems": 0, "maxItems": MAX_STOP_IDS},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "request_id": {"type": "string", "minLength": 1, "maxLength": MAX_RID_CHARS},
    "cache_salt": {"type": "string", "maxLength": MAX_SALT_CHARS},
    **CHOICE_LISTS,
}
GRAMMARS: Mapping[str, Schema] = {
    "json": {"anyOf": [_OBJECT, PROMPT]},
    "json_object": {"type": "boolean"},
    "regex": {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_CHARS},
    "choice": {"type": "array", "items": PROMPT, "minItems": 1, "maxItems": MAX_CHOICES},
    "grammar": {"type": "string", "minLength": 1, "maxLength": MAX_GRAMMAR_CHARS},
}
_FORMAT: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "json_object"]}},
    "additionalProperties": False,
}
_JSON_FORMAT: Schema = {
    "type": "object",
    "required": ["type", "json_schema"],
    "properties": {
        "type": {"const": "json_schema"},
        "json_schema": {
            "type": "object",
            "required": ["schema"],
            "properties": {"name": _TEXT, "description": _TEXT, "schema": _OBJECT, "strict": {"type": "boolean"}},
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
_SHARED_SCHEMAS: Mapping[str, Schema] = {
    "model": {**MODEL, "description": "any name: the one model answers"},
    "response_format": {"anyOf": [_FORMAT, _JSON_FORMAT]},
    "structured_outputs": {
        "type": "object",
        "properties": dict(GRAMMARS),
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    },
    "stream_options": {"type": "object", "additionalProperties": False},
    **_LISTS,
    **{name: {"description": text} for name, text in _IGNORED.items()},
}
COMPLETION_SCHEMAS: Mapping[str, Schema] = {
    "prompt": {
        "anyOf": [
            PROMPT,
            {"type": "array", "items": PROMPT, "minItems": 1},
            TOKEN_IDS,
            {"type": "array", "items": TOKEN_IDS, "minItems": 1},
        ]
    },
    **_SHARED_SCHEMAS,
}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "pattern": f"^{ROLE}$"},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]},
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object", "required": ["function"]}},
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 256}, "parameters": _OBJECT},
        },
    },
}
_FUNCTION: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1, "maxLength": 256}},
        },
    },
    "additionalProperties": False,
}
_ALLOWED_TOOLS: Schema = {
    "type": "object",
    "required": ["type", "allowed_tools"],
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "required": ["tools"],
            "properties": {
                "mode": {"enum": ["auto", "required"]},
                "tools": {"type": "array", "items": _FUNCTION, "minItems": 1},
            },
            "additionalProperties": False,
        },
    },
    "additionalProperties": False,
}
TOOL_CHOICE: Schema = {
    "anyOf": [{"enum": ["none", "auto", "required"]}, _FUNCTION, _ALLOWED_TOOLS],
    "description": "required, or a function by its name: the reply is a call, by grammar",
}
TEMPLATE_SCHEMAS: Mapping[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_MESSAGES,
        "items": _MESSAGE,
    },
    "tools": {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS},
    "documents": {"type": "array", "items": _OBJECT},
    "chat_template_kwargs": _OBJECT,
    "required_prefix_token_ids": {**TOKEN_IDS, "description": "the prompt's ids up to the last reply's end"},
}
CHAT_SCHEMAS: Mapping[str, Schema] = {
    "max_completion_tokens": {"type": "integer", "minimum": 0, "description": "max_tokens by its newer name"},
    "tool_choice": TOOL_CHOICE,
    "reasoning_effort": {**_TEXT, "description": "given to the template"},
    **TEMPLATE_SCHEMAS,
    **_SHARED_SCHEMAS,
}

_PROMPTS = ("prompt", "messages")
#: Names that people send to the wrong route: ours, of which a route has one.
_SYNONYMS: Mapping[str, str | tuple[str, ...]] = {
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "num_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "text": _PROMPTS,
    "inputs": _PROMPTS,
    "input_ids": _PROMPTS,
    "prompt_token_ids": _PROMPTS,
    "prompt": _PROMPTS,
    "messages": _PROMPTS,
    "sampling_seed": "seed",
    "stop_sequences": "stop",
    "stop_strings": "stop",
    "stop_words": "stop",
    "no_stop_trim": "include_stop_str_in_output",
    "rid": "request_id",
    "regex": "structured_outputs.regex",
    "guided_regex": "structured_outputs.regex",
    "guided_json": "structured_outputs.json",
    "json_schema": "structured_outputs.json",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "ebnf": "structured_outputs.grammar",
    "return_logprob": "logprobs",
    "top_logprobs": "logprobs",
    "top_logprobs_num": ("top_logprobs", "logprobs"),
    "return_prompt_token_ids": "return_token_ids",
    "best_of": "n",
    "num_return_sequences": "n",
}


def _names(*parts: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(sorted({name for part in parts for name in part}))


COMPLETION_NAMES = _names(COMPLETION_SCHEMAS, SAMPLED, CALLED, NUMBERS, COMPLETION_NUMBERS, COMPLETION_AT_DEFAULT)
CHAT_NAMES = _names(CHAT_SCHEMAS, SAMPLED, CALLED, NUMBERS, CHAT_NUMBERS, CHAT_AT_DEFAULT)


def numbers_of(own: Mapping[str, Number]) -> dict[str, Number]:
    """Every number and flag of a route, those of ``/generate`` under their names here."""
    sampled = {name: SAMPLING[ours] for name, ours in SAMPLED.items() if ours in SAMPLING}
    return {**sampled, **NUMBERS, "deadline_seconds": CALL_NUMBERS["deadline_seconds"], **own}


def synonyms_of(names: Sequence[str]) -> dict[str, str]:
    """Names that people try on a route: the one that it has instead.

    :param names: of the route's fields.
    """
    found: dict[str, str] = {}
    for name, ours in _SYNONYMS.items():
        here = [one for one in ((ours,) if isinstance(ours, str) else ours) if one.partition(".")[0] in names]
        found |= {name: here[0]} if here else {}
    return found
