"""``GET /openapi.json``: made from the tables that the routes read their fields with, so that it cannot say otherwise.

Every path of the application is in it.  Routes of other servers and of the weights are listed with their methods; their
bodies are described in docs/refit.md.
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
_STREAMS = frozenset({"/generate", "/v1/completions", "/v1/chat/completions"})
_TEXTS: Mapping[str, str] = {"/metrics": "text/plain"}
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
    tag, summary = _SUMMARIES.get(path, ("Weights and other servers' routes", path))
    listed = path in _SUMMARIES
    name = "_".join([method.lower(), *(part for part in path.replace("{", "").replace("}", "").split("/") if part)])
    operation: dict[str, Any] = {"operationId": name, "tags": [tag], "summary": summary, "responses": _responses(path)}
    if not listed:
        operation["security"] = [{"admin_key": []}, {}]
    parameters = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if parameters:
        operation["parameters"] = [_parameter(name) for name in parameters]
    if method in ("POST", "PUT"):
        body = BODIES.get(path, {"type": "object"})
        operation["requestBody"] = {"required": listed, "content": {"application/json": {"schema": body}}}
    return operation


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _responses(path: str) -> dict[str, Any]:
    if path not in _SUMMARIES:
        anything: Schema = {}
        return {"default": _json("Done, or why not", anything)}
    if path in _TEXTS:
        good: dict[str, Any] = {"description": "Text", "content": {_TEXTS[path]: {"schema": {"type": "string"}}}}
    else:
        good = _json("The answer", REPLIES.get(path, {"type": "object"}))
    if path in _STREAMS:
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    error: Schema = {"$ref": "#/components/schemas/Error"}
    return {
        "200": good,
        "4XX": _json("The request is at fault", error),
        "500": _json("A bug of the server", error),
        "503": _json("Starting, stopping, overloaded or without an engine", error),
    }


def _json(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def described(paths: Iterable[str]) -> list[str]:
    """Those of the paths whose bodies and answers the document describes."""
    return [path for path in paths if path in _SUMMARIES]
