"""``GET /v1/models``: the one model that is served."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gtp_serve.server.http_errors import JsonResponse, plain_error
from gtp_serve.server.state import ServerState, Serving


class ModelRoutes:
    """The list and its one entry."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        """Every path of this module."""
        return [
            Route("/v1/models", self.show_all, methods=["GET"]),
            Route("/v1/models/{id:path}", self.show, methods=["GET"]),
        ]

    async def show_all(self, request: Request) -> Response:
        """All models."""
        return JsonResponse({"object": "list", "data": [self._entry(self._state.require_serving())]})

    async def show(self, request: Request) -> Response:
        """One model by its name."""
        serving, name = self._state.require_serving(), request.path_params["id"]
        if name != serving.name:
            error = plain_error(404, "model-not-found", "there is no model of this name", did_you_mean=serving.name)
            return JsonResponse(error, status_code=404)
        return JsonResponse(self._entry(serving))

    def _entry(self, serving: Serving) -> dict[str, Any]:
        return {
            "id": serving.name,
            "object": "model",
            "created": self._created,
            "owned_by": "gtp-serve",
            "root": serving.name,
            "parent": None,
            "max_model_len": serving.engine.max_context,
        }
