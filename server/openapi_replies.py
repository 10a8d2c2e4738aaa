"""Schemas of answers: what is always there, with its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_MAYBE_TEXT: Schema = {"type": ["string", "null"]}
_IDS: Schema = {"type": "array", "items": _COUNT}


def _object(needed: Mapping[str, Schema], **more: Schema) -> Schema:
    """An object that has these fields and may have others."""
    return {"type": "object", "required": sorted(needed), "properties": {**needed, **more}}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


ERROR = _object(
    {
        "error": _object(
            {"code": _TEXT, "message": _TEXT, "param": _MAYBE_TEXT, "did_you_mean": _MAYBE_TEXT, "type": _TEXT}
        )
    }
)
_SPANS = _list(_object({"version": _TEXT, "start": _COUNT, "end": _COUNT}))
_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
    }
)
_META = _object(
    {
        "id": _TEXT,
        "finish_reason": {"type": ["object", "null"], "required": ["type"], "properties": {"type": _TEXT}},
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "cached_tokens": _COUNT,
        "reasoning_tokens": _COUNT,
        "weight_version": _TEXT,
        "weight_versions": _SPANS,
    },
    e2e_latency={"type": "number"},
    input_token_logprobs={"type": "array"},
    output_token_logprobs={"type": "array"},
    routed_experts=_TEXT,
)
_REPLY = _object({"text": _TEXT, "output_ids": _IDS, "meta_info": _META}, prompt_token_ids=_IDS)


def _answer(kind: str, choice: Schema, **more: Schema) -> Schema:
    return _object(
        {
            "id": _TEXT,
            "object": {"const": kind},
            "created": _COUNT,
            "model": _TEXT,
            "choices": _list(choice),
            "usage": _USAGE,
        },
        **more,
    )


_COMPLETION_LOGPROBS: Schema = {
    "anyOf": [
        {"type": "null"},
        _object(
            {
                "tokens": _list(_TEXT),
                "token_logprobs": _list({"type": ["number", "null"]}),
                "top_logprobs": _list({"type": ["object", "null"]}),
                "text_offset": _list(_COUNT),
            }
        ),
    ]
}
_CHAT_LOGPROBS: Schema = {"anyOf": [{"type": "null"}, _object({"content": {"type": "array"}})]}
_ENDS: Mapping[str, Schema] = {
    "index": _COUNT,
    "finish_reason": _TEXT,
    "stop_reason": {"type": ["string", "integer", "null"]},
}
_COMPLETION = _answer(
    "text_completion",
    _object(
        {**_ENDS, "text": _TEXT, "logprobs": _COMPLETION_LOGPROBS},
        token_ids=_IDS,
        prompt_token_ids=_IDS,
        prompt_logprobs={"type": "array"},
        weight_versions=_SPANS,
    ),
    gtp=_object({"warning": _TEXT}),
)
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _MAYBE_TEXT},
    tool_calls=_list(_object({"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT})})),
    raw_content=_TEXT,
    prompt_token_ids=_IDS,
    generation_token_ids=_IDS,
    generation_log_probs=_list({"type": ["number", "null"]}),
)
_CHAT = _answer(
    "chat.completion",
    _object({**_ENDS, "message": _MESSAGE, "logprobs": _CHAT_LOGPROBS}, token_ids=_IDS, weight_versions=_SPANS),
    prompt_token_ids=_IDS,
    prompt_logprobs={"type": "array"},
)
_MODEL = _object(
    {"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT, "max_model_len": _COUNT}
)
_TOKENS = _object(
    {"count": {"anyOf": [_COUNT, _IDS]}, "tokens": {"type": "array"}, "max_model_len": _COUNT},
    token_strs={"type": "array"},
)
_TEXTS: Schema = {"anyOf": [_TEXT, _list(_TEXT)]}
_DETOKENIZED = _object({"prompt": _TEXTS, "text": _TEXTS})
_TOKENIZER = _object({"tokenizer_class": _TEXT, "chat_template": _MAYBE_TEXT, "model_max_length": _COUNT})
_STATUS = _object({"status": _TEXT})
_MODEL_INFO = _object({"model_path": _TEXT, "weight_version": _TEXT, "max_context": _COUNT})
_SERVER_INFO = _object({"model_path": _TEXT, "weight_version": _TEXT, "context_length": _COUNT, "version": _TEXT})
#: By path.
REPLIES: Mapping[str, Schema] = {
    "/generate": {"anyOf": [_REPLY, _list(_REPLY)]},
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/models": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "/v1/models/{id}": _MODEL,
    "/tokenize": _TOKENS,
    "/v1/tokenize": _TOKENS,
    "/detokenize": _DETOKENIZED,
    "/v1/detokenize": _DETOKENIZED,
    "/tokenizer_info": _TOKENIZER,
    "/ready": _STATUS,
    "/health": _STATUS,
    "/health_generate": _STATUS,
    "/liveness": _STATUS,
    "/v1/loads": _object({"loads": _list(_object({"num_running_reqs": _COUNT, "num_waiting_reqs": _COUNT}))}),
    "/version": _object({"version": _TEXT}),
    "/model_info": _MODEL_INFO,
    "/get_model_info": _MODEL_INFO,
    "/server_info": _SERVER_INFO,
    "/get_server_info": _SERVER_INFO,
}
