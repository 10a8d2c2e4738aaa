"""``POST /tokenize`` and ``/detokenize``: what the server makes of a text, of a conversation, and of ids.

``GET /tokenizer_info`` tells the rest that a client needs to do without the tokenizer's files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gtp_serve.errors import RequestRejected
from gtp_serve.loaders.chat_prompt import ChatTokenizer
from gtp_serve.server.body import read_json_object
from gtp_serve.server.fields import check_names, read_text
from gtp_serve.server.http_errors import JsonResponse
from gtp_serve.server.openai.fields import (
    MAX_NAME_CHARS,
    MODEL,
    TEMPLATE_NUMBERS,
    TEMPLATE_SCHEMAS,
    TOKEN_IDS,
    TOOL_CHOICE,
    Schema,
)
from gtp_serve.server.openai.prompt import conversation_ids, read_conversation
from gtp_serve.server.sampling_fields import read_token_ids
from gtp_serve.server.schemas import MAX_SEQUENCES, MAX_TEXT_CHARS, Number, describe, read_number
from gtp_serve.server.state import ServerState, Serving

MAX_IDS = 1 << 20
TOKENIZE_NUMBERS: Mapping[str, Number] = {
    "add_special_tokens": Number(kind="bool", default=None, help="default: true for a text, false for messages"),
    "return_token_strs": Number(kind="bool", default=False, help="each token's own text"),
    **TEMPLATE_NUMBERS,
}
_TEXTS: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
TOKENIZE_SCHEMAS: Mapping[str, Schema] = {
    "model": MODEL,
    "prompt": _TEXTS,
    "text": _TEXTS,
    **TEMPLATE_SCHEMAS,
    "tool_choice": TOOL_CHOICE,
    "reasoning_effort": {"type": "string"},
}
DETOKENIZE_NUMBERS: Mapping[str, Number] = {
    "skip_special_tokens": Number(kind="bool", default=False, help="leave control tokens out of the text"),
}
_IDS: Schema = {**TOKEN_IDS, "minItems": 0}
DETOKENIZE_SCHEMAS: Mapping[str, Schema] = {
    "model": MODEL,
    "tokens": {"anyOf": [_IDS, {"type": "array", "items": _IDS}]},
}
_SYNONYMS = dict.fromkeys(("token_ids", "ids", "input_ids"), "tokens")


class TokenizeRoutes:
    """Under vLLM's and SGLang's paths."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def routes(self) -> list[Route]:
        """Every path of this module."""
        table = (("tokenize", self.tokenize), ("detokenize", self.detokenize))
        return [
            Route("/tokenizer_info", self.info, methods=["GET"]),
            *(
                Route(f"{prefix}/{name}", handler, methods=["POST"])
                for name, handler in table
                for prefix in ("", "/v1")
            ),
        ]

    async def info(self, request: Request) -> Response:
        """Special tokens and the chat template, under the names of ``tokenizer_config.json``."""
        serving = self._state.require_serving()
        tokenizer = _tokenizer(serving, "/tokenizer_info")
        body = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_source or None,
            "model_max_length": serving.engine.max_context,
        }
        return JsonResponse(body)

    async def tokenize(self, request: Request) -> Response:
        """Ids of a text, of several, or of a conversation."""
        serving = self._state.require_serving()
        try:
            body = await read_json_object(request)
        except ClientDisconnect:
            return Response(status_code=499)
        check_names(body, sorted({*TOKENIZE_SCHEMAS, *TOKENIZE_NUMBERS}))
        given = {name: value for name, value in body.items() if value is not None}
        read_text(given, "model", limit=MAX_NAME_CHARS)
        flags = {name: read_number(given, name, field, "") for name, field in TOKENIZE_NUMBERS.items()}
        ids = await self._ids(given, serving, special=flags["add_special_tokens"] is not False)
        several = bool(ids) and isinstance(ids[0], list)
        body = {"count": [len(one) for one in ids] if several else len(ids), "tokens": ids}
        if flags["return_token_strs"]:
            strings = _strings(_tokenizer(serving, "return_token_strs"))
            body["token_strs"] = [strings(one) for one in ids] if several else strings(ids)
        return JsonResponse({**body, "max_model_len": serving.engine.max_context})

    async def _ids(self, given: Mapping[str, Any], serving: Serving, *, special: bool) -> list[Any]:
        names = [name for name in ("prompt", "text", "messages") if name in given]
        if len(names) != 1:
            raise RequestRejected(
                f"give exactly one of prompt and messages, not {len(names)}",
                code="missing-field" if not names else None,
                param="prompt",
            )
        if names[0] == "messages":
            return await conversation_ids(read_conversation(given), serving)
        value, param = given[names[0]], names[0]
        several = isinstance(value, list)
        texts = value if several else [value]
        for index, text in enumerate(texts):
            _check_text(text, f"{param}[{index}]" if several else param)
        if len(texts) > MAX_SEQUENCES:
            raise RequestRejected(
                f"{len(texts)} texts are too many", [("possible", f"up to {MAX_SEQUENCES}")], param=param
            )
        tokenizer = _tokenizer(serving, param)
        found = await asyncio.to_thread(lambda: [tokenizer.encode(text, add_special_tokens=special) for text in texts])
        return found if several else found[0]

    async def detokenize(self, request: Request) -> Response:
        """The text of ids."""
        serving = self._state.require_serving()
        try:
            body = await read_json_object(request)
        except ClientDisconnect:
            return Response(status_code=499)
        check_names(body, sorted({*DETOKENIZE_SCHEMAS, *DETOKENIZE_NUMBERS}), synonyms=_SYNONYMS)
        read_text(body, "model", limit=MAX_NAME_CHARS)
        tokens = body.get("tokens")
        if not isinstance(tokens, list):
            code = "missing-field" if tokens is None else None
            raise RequestRejected(
                f"tokens must be a list of token ids, not {describe(tokens)}", code=code, param="tokens"
            )
        several = bool(tokens) and isinstance(tokens[0], list)
        lists = [_read_ids(one, f"tokens[{i}]", serving) for i, one in enumerate(tokens)] if several else None
        skip = bool(read_number(body, "skip_special_tokens", DETOKENIZE_NUMBERS["skip_special_tokens"], ""))
        tokenizer = _tokenizer(serving, "tokens")
        each = lists if lists is not None else [_read_ids(tokens, "tokens", serving)]
        texts = await asyncio.to_thread(lambda: [tokenizer.decode(ids, skip_special_tokens=skip) for ids in each])
        text = texts if several else texts[0]
        return JsonResponse({"prompt": text, "text": text})


def _check_text(text: Any, param: str) -> None:
    if not isinstance(text, str):
        raise RequestRejected(f"{param} must be a string, not {describe(text)}", param=param)
    if len(text) > MAX_TEXT_CHARS:
        raise RequestRejected(f"{param} has more than {MAX_TEXT_CHARS} characters", code="prompt-too-long", param=param)


def _read_ids(value: Any, param: str, serving: Serving) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise RequestRejected(f"{param} must be a list of token ids, not {describe(value)}", param=param)
    if len(value) > MAX_IDS:
        raise RequestRejected(f"{param} has {len(value)} ids", [("possible", f"up to {MAX_IDS}")], param=param)
    ids, vocab = read_token_ids(value, param), serving.engine.model.vocab_size
    if ids and max(ids) >= vocab:
        raise RequestRejected(
            f"{param} has {max(ids)}, which is no token id of this model",
            [("possible", f"0 to {vocab - 1}")],
            code="bad-token-id",
            param=param,
        )
    return ids


def _tokenizer(serving: Serving, param: str) -> ChatTokenizer:
    if serving.tokenizer is None:
        raise RequestRejected(f"{param} needs a tokenizer, and this server has none", code="no-tokenizer", param=param)
    return serving.tokenizer


def _strings(tokenizer: ChatTokenizer) -> Callable[[list[int]], list[str]]:
    return lambda ids: [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
