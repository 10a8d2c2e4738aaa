"""``/`` and ``/docs``, their icon, ``/stats`` and ``/checkpoint``.

The pages hold nothing secret and are served before the engine is ready; what they show they fetch.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gtp_serve.server.http_errors import JsonResponse
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.page.stats import Stats
from gtp_serve.server.state import ServerState

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)
_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#1f6f78"/>'
    '<path d="M3 4h10v2H3zM3 7h7v2H3zM3 10h4v2H3z" fill="#fff"/></svg>'
)


class PageRoutes:
    """What a browser asks for.

    :param pages: False: no HTML; the JSON stays.
    """

    def __init__(self, state: ServerState, metrics: Metrics, *, pages: bool = True) -> None:
        self._state = state
        self._stats = Stats(state, metrics)
        self._pages = pages

    def routes(self) -> list[Route]:
        """Every path of this module."""
        data = [
            Route("/stats", self.stats, methods=["GET"]),
            Route("/checkpoint", self.checkpoint, methods=["GET"]),
        ]
        if not self._pages:
            return data
        return [
            Route("/", self.index, methods=["GET"]),
            Route("/docs", self.docs, methods=["GET"]),
            Route("/icon.svg", self.icon, methods=["GET"]),
            *data,
        ]

    async def index(self, request: Request) -> Response:
        """The page."""
        return _answer("index.html", request)

    async def docs(self, request: Request) -> Response:
        """A viewer of ``/openapi.json``."""
        return _answer("docs.html", request)

    async def icon(self, request: Request) -> Response:
        """The pages' icon."""
        headers = {"cache-control": "max-age=86400", "x-content-type-options": "nosniff"}
        return Response(_ICON, media_type="image/svg+xml", headers=headers)

    async def stats(self, request: Request) -> Response:
        """Live numbers; made to be asked for once a second."""
        return JsonResponse(self._stats.read(), headers={"cache-control": "no-store"})

    async def checkpoint(self, request: Request) -> Response:
        """What was read at the start, and how some of its tensors lie."""
        return JsonResponse(self._state.require_serving().checkpoint)


@cache
def read_page(name: str) -> str:
    """An HTML file of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@cache
def content_policy(html: str) -> str:
    """The policy under which a page runs its own inline script and style, and nothing else from anywhere.

    Trusted types without any policy: text that a model wrote cannot become markup, even by a mistake in the script.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(hashes['script'])}",
            f"style-src {' '.join(hashes['style'])}",
            "connect-src 'self'",
            "img-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        ]
    )


def _answer(name: str, request: Request) -> Response:
    html = read_page(name)
    headers = {
        "content-security-policy": content_policy(html),
        "etag": f'"{hashlib.sha256(html.encode()).hexdigest()[:20]}"',
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
        "x-frame-options": "DENY",
        "referrer-policy": "no-referrer",
    }
    if request.headers.get("if-none-match") == headers["etag"]:
        return Response(status_code=304, headers=headers)
    return Response(html, media_type="text/html", headers=headers)
