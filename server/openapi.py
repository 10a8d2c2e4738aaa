"""``GET /openapi.json``: made from the tables that the routes read their fields with, so that it cannot say otherwise.

Every path of the application is in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from gtp_serve import __version__
from gtp_serve.server.http_errors import JsonResponse
from gtp_serve.server.openai.fields import Schema
from gtp_serve.server.openapi_bodies import BODIES
from gtp_serve.server.openapi_replies import ERROR, REPLIES
from gtp_serve.server.openapi_weights import WEIGHT_BODIES, WEIGHT_QUERIES, WEIGHT_REPLIES, WEIGHT_STREAMS

PATH = "/openapi.json"
_SUMMARIES: Mapping[str, tuple[str, str]] = {
    "/generate": ("Generate", "Text or token ids from a prompt, with SGLang's fields"),
    "/v1/completions": ("OpenAI", "A completion of one prompt or several"),
    "/v1/chat/completions": ("OpenAI", "The next message of a conversation"),
    "/v1/models": ("OpenAI", "The model that is served"),
    "/v1/models/{id}": ("OpenAI", "The model by its name"),
    "/tokenize": ("Text", "Token ids of a text or a conversation"),
    "/v1/tokenize": ("Text", "Token ids of a text or a conversation"),
    "/detokenize": ("Text", "The text of token ids"),
    "/v1/detokenize": ("Text", "The text of token ids"),
    "/tokenizer_info": ("Text", "The tokenizer's special tokens and chat template"),
    "/ready": ("Status", "200 when a request would be taken"),
    "/health": ("Status", "200 while the engine makes progress or has nothing to do"),
    "/health_generate": ("Status", "200 when a token was made just now"),
    "/liveness": ("Status", "200 unless only a new process can help"),
    "/v1/loads": ("Status", "How much is in progress"),
    "/version": ("Status", "This program's version"),
    "/model_info": ("Status", "What is served"),
    "/get_model_info": ("Status", "What is served"),
    "/server_info": ("Status", "Limits of the engine, and what start-up took"),
    "/get_server_info": ("Status", "Limits of the engine, and what start-up took"),
    "/metrics": ("Status", "Prometheus metrics"),
    "/stats": ("Status", "The numbers of the page, as JSON"),
    "/checkpoint": ("Status", "What is known of the checkpoint that is served"),
}
_WEIGHTS: Mapping[str, str] = {
    "/weights": "What serves, what is on its way, what has been",
    "/weights/checksum": "Digest of every parameter, computed now",
    "/weights/layout": "The model's tensors, and each rank's parameters as shards",
    "/weights/updates": "Begin an update",
    "/weights/updates/{id}": "One update, under way or ended",
    "/weights/updates/{id}/commit": "Let a verified update serve",
    "/weights/updates/{id}/abort": "Drop an update that is not committed",
    "/weights/rollback": "Back to the version before",
    "/pause": "Run no step",
    "/resume": "Run steps again",
}
_STREAMS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
_TEXTS: Mapping[str, str] = {"/metrics": "text/plain", "/flush_cache": "text/plain"}
_EMPTY = frozenset({"/abort_request"})
_HIDDEN = frozenset({PATH, "/", "/docs", "/icon.svg"})


class OpenApiRoute:
    """The document, made once from the application's routes."""

    def __init__(self) -> None:
        self._document: dict[str, Any] | None = None

    def route(self) -> Route:
        """Its path."""
        return Route(PATH, self.show, methods=["GET"], include_in_schema=False)

    async def show(self, request: Request) -> Response:
        """The document."""
        if self._document is None:
            self._document = document(request.app.routes)
        return JsonResponse(self._document)


def document(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """The OpenAPI document of an application."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema and route.path not in _HIDDEN:
            path = route.path.replace(":path}", "}")
            methods = sorted((route.methods or set()) - {"HEAD"})
            paths.setdefault(path, {}).update({method.lower(): _operation(path, method) for method in methods})
    return {
        "openapi": "3.1.0",
        "info": {"title": "gtp-serve", "version": __version__, "description": "Weight routes need the admin key."},
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR},
            "securitySchemes": {"admin_key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(path: str, method: str) -> dict[str, Any]:
    theirs = ("Other servers' routes", f"{path[1:].replace('_', ' ')}, as SGLang or vLLM have it")
    tag, summary = _SUMMARIES.get(path, ("Weights", _WEIGHTS[path]) if path in _WEIGHTS else theirs)
    listed = path in _SUMMARIES
    name = "_".join([method.lower(), *(part for part in path.replace("{", "").replace("}", "").split("/") if part)])
    operation: dict[str, Any] = {"operationId": name, "tags": [tag], "summary": summary, "responses": _responses(path)}
    if not listed:
        operation["security"] = [{"admin_key": []}, {}]
    in_path = [_parameter(part[1:-1]) for part in path.split("/") if part.startswith("{")]
    parameters = [*in_path, *WEIGHT_QUERIES.get((path, method), ())]
    if parameters:
        operation["parameters"] = parameters
    if method in ("POST", "PUT"):
        operation["requestBody"] = _request_body(path, listed)
    return operation


def _request_body(path: str, listed: bool) -> dict[str, Any]:
    body = BODIES[path] if listed else WEIGHT_BODIES[path]
    content = {"application/json": {"schema": body}}
    if path in WEIGHT_STREAMS:
        kind, schema = WEIGHT_STREAMS[path]
        content[kind] = {"schema": schema}
    return {"required": listed or "required" in body or "anyOf" in body, "content": content}


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _responses(path: str) -> dict[str, Any]:
    error: Schema = {"$ref": "#/components/schemas/Error"}
    if path in WEIGHT_REPLIES:
        statuses, schema = WEIGHT_REPLIES[path]
        told = {status: _json("Under way" if status == "202" else "Done", schema) for status in statuses}
        return told | {name: _json("Why not", error) for name in ("4XX", "500", "503", "504")}
    if path not in _SUMMARIES:
        anything: Schema = {}
        told = _json("Done, or why not, as that server says it", anything)
        if path in _EMPTY:
            del told["content"]  # its good answer has no body
        if path in _TEXTS:
            told["content"][_TEXTS[path]] = {"schema": {"type": "string"}}
        return {"default": told}
    if path in _TEXTS:
        good: dict[str, Any] = {"description": "Text", "content": {_TEXTS[path]: {"schema": {"type": "string"}}}}
    else:
        good = _json("The answer", REPLIES.get(path, {"type": "object"}))
    if path in _STREAMS:
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "200": good,
        "4XX": _json("The request is at fault", error),
        "500": _json("A bug of the server", error),
        "503": _json("Starting, stopping, overloaded or without an engine", error),
    }


def _json(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def described(paths: Iterable[str]) -> list[str]:
    """Those of the paths that need no admin key."""
    return [path for path in paths if path in _SUMMARIES]
