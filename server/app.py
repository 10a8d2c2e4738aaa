"""The HTTP application: which paths exist, and one error shape for whatever goes wrong on any of them."""

from __future__ import annotations

import difflib
import logging
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gtp_serve import __version__
from gtp_serve.errors import GtpServeError, WeightsTorn
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.answer import PING_SECONDS, Generating
from gtp_serve.server.compat.base import Front
from gtp_serve.server.compat.session import FedSession
from gtp_serve.server.compat.sglang import SglangRoutes
from gtp_serve.server.compat.vllm import VllmRoutes
from gtp_serve.server.generate import GenerateApi
from gtp_serve.server.http_errors import JsonResponse, error_response, plain_error
from gtp_serve.server.info import InfoRoutes
from gtp_serve.server.metrics import CONTENT_TYPE, Metrics
from gtp_serve.server.openai.chat import ChatApi
from gtp_serve.server.openai.completions import CompletionsApi
from gtp_serve.server.openai.models import ModelRoutes
from gtp_serve.server.openai.tokenize import TokenizeRoutes
from gtp_serve.server.openapi import OpenApiRoute
from gtp_serve.server.options import DEADLINE_SECONDS
from gtp_serve.server.page.routes import PageRoutes
from gtp_serve.server.state import ServerState
from gtp_serve.server.weights import WeightRoutes

_LONGEST_PATH = 100
"""Nothing is near to what is longer."""
_CODES = {404: "not-found", 405: "method-not-allowed"}


def build_app(
    state: ServerState,
    metrics: Metrics,
    log: logging.Logger,
    *,
    guard: AdminGuard,
    refit_seconds: float = DEADLINE_SECONDS,
    ping_seconds: float = PING_SECONDS,
    pages: bool = True,
) -> Starlette:
    """The application over a state that others move from starting to ready to stopping.

    :param guard: of every route that changes or tells about weights.
    :param refit_seconds: for an update whose request says nothing else.
    :param pages: whether ``/`` and ``/docs`` are there.
    """
    status = _Status(state, metrics)
    generate, completions, chat = (
        Generating(api, state, metrics, log, ping=ping_seconds) for api in (GenerateApi(), CompletionsApi(), ChatApi())
    )
    front = Front(state, guard, FedSession())
    app = Starlette(
        routes=[
            Route("/generate", generate, methods=["POST", "PUT"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            *ModelRoutes(state).routes(),
            *TokenizeRoutes(state).routes(),
            *InfoRoutes(state, metrics).routes(),
            Route("/ready", status.ready),
            Route("/health", status.health),
            Route("/model_info", status.model_info),
            Route("/get_model_info", status.model_info),
            Route("/metrics", status.metrics),
            *PageRoutes(state, metrics, pages=pages).routes(),
            *WeightRoutes(state, guard, seconds=refit_seconds).routes(),
            *SglangRoutes(front).routes(),
            *VllmRoutes(front).routes(),
            OpenApiRoute().route(),
        ],
        exception_handlers={
            HTTPException: _http_exception,
            GtpServeError: _own_error,
            Exception: _Bug(log),
        },
    )
    app.router.redirect_slashes = False
    return app


class _Status:
    """The routes that only read."""

    def __init__(self, state: ServerState, metrics: Metrics) -> None:
        self._state = state
        self._metrics = metrics

    async def ready(self, request: Request) -> Response:
        """200 when a request would be taken."""
        status = self._state.status()
        if status["status"] == "ready":
            return JsonResponse(status)
        if status["status"] == "torn":
            error = plain_error(503, WeightsTorn.default_code, f"the weights are not whole: {status['reason']}")
            return JsonResponse({**status, **error}, status_code=503, headers={"retry-after": "1"})
        phase = f": {status['phase']}" if "phase" in status else ""
        error = plain_error(503, _not_ready(status["status"]), f"the server is {_words(status['status'])}{phase}")
        return JsonResponse({**status, **error}, status_code=503, headers={"retry-after": "1"})

    async def health(self, request: Request) -> Response:
        """200 while the engine makes progress or has nothing to do."""
        reason = self._state.health()
        if reason is None:
            return JsonResponse({"status": "healthy"})
        return JsonResponse({"status": "unhealthy", **plain_error(503, "unhealthy", reason)}, status_code=503)

    async def model_info(self, request: Request) -> Response:
        """What is served; SGLang's keys and ours."""
        serving = self._state.require_serving()
        model, engine = serving.engine.model, serving.engine
        version = serving.client.weights.version or engine.weight_version
        body: dict[str, Any] = {
            "model_path": serving.name,
            "served_model_name": serving.name,
            "is_generation": True,
            "weight_version": version,
            "model_type": model.family,
            "dtype": engine.dtype,
            "device": engine.device,
            "vocab_size": model.vocab_size,
            "max_context": engine.max_context,
            "eos_token_ids": list(model.eos_token_ids),
            "has_tokenizer": serving.tokenizer is not None,
            "server_version": __version__,
        }
        return JsonResponse(body | serving.facts)

    async def metrics(self, request: Request) -> Response:
        """Prometheus text."""
        return Response(self._metrics.render(), headers={"content-type": CONTENT_TYPE})


def _not_ready(status: str) -> str:
    return {"failed": "worker-died", "stopping": "shutting-down"}.get(status, "not-ready")


def _words(status: str) -> str:
    return "without an engine" if status == "failed" else status


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (404, 405) in our shape; OPTIONS on a known path is answered with what it
    allows.
    """
    if not isinstance(error, HTTPException):
        raise error
    headers = dict(error.headers or {})
    if "Allow" in headers:  # a set's order, which changes from process to process
        headers["Allow"] = ", ".join(sorted(headers["Allow"].split(", ")))
    if error.status_code == 405 and request.method == "OPTIONS":
        return Response(status_code=204, headers=headers)
    code = _CODES.get(error.status_code, "http-error")
    message = {404: "there is nothing at this path", 405: "this path does not take this method"}.get(
        error.status_code, error.detail
    )
    if error.status_code == 405 and "Allow" in headers:
        message += f"; allowed: {headers['Allow']}"
    near = _nearest_path(request) if error.status_code == 404 else None
    message += f"; near it is '{near}'" if near else ""
    body = plain_error(error.status_code, code, message, did_you_mean=near)
    return JsonResponse(body, status_code=error.status_code, headers=headers)


def _nearest_path(request: Request) -> str | None:
    """The path of this server that the client may mean: with or without a prefix, a slash, or a slip of the finger."""
    path = str(request.scope["path"]).rstrip("/")
    if len(path) > _LONGEST_PATH:
        return None
    paths = [route.path for route in request.app.routes if isinstance(route, Route) and "{" not in route.path]
    ends = [one for one in paths if path and (one.endswith(path) or (path.endswith(one) and one != "/"))]
    near = ends or difflib.get_close_matches(path, paths, n=1, cutoff=0.8)
    return min(near, key=lambda one: abs(len(one) - len(path)), default=None)


async def _own_error(request: Request, error: Exception) -> Response:
    return error_response(error)


class _Bug:
    """Anything that nobody expected: 500 without a word of what it was; the log has it all."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log

    async def __call__(self, request: Request, error: Exception) -> Response:
        self._log.error("a request met a bug", exc_info=error)
        return error_response(error)
