"""The one shape in which every route answers an error, and which status it has.

4xx: the client's fault, 503: not ready, stopping, overloaded or without an engine, 500: a bug of ours.  No
path, no class name and no stack ever goes into a body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from gtp_serve.errors import EngineFault, GtpServeError, RequestRejected

_TYPES = {429: "overloaded_error", 503: "unavailable_error"}


class Conflict(RequestRejected):
    """The request contradicts another one that is running."""

    default_code = "conflict"
    http_status = 409


class JsonResponse(Response):
    """A body that orjson writes: non-finite numbers become null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """JSON bytes."""
        return orjson.dumps(content)


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RequestRejected):
        return error.http_status
    return 503 if isinstance(error, EngineFault) else 500


def error_object(error: BaseException) -> dict[str, Any]:
    """``{"error": {code, message, param, did_you_mean, type}}``."""
    status = status_of(error)
    if isinstance(error, RequestRejected):
        return plain_error(status, error.code, str(error), param=error.param, did_you_mean=error.did_you_mean)
    if isinstance(error, EngineFault):
        return plain_error(status, error.code, "the engine has ended; the server's log says why")
    code = error.code if isinstance(error, GtpServeError) else "internal"
    return plain_error(status, code, "the server failed to answer; its log says why")


def plain_error(
    status: int, code: str, message: str, *, param: str | None = None, did_you_mean: str | None = None
) -> dict[str, Any]:
    """The same object from its parts."""
    default = "invalid_request_error" if status < 500 else "internal_error"
    kind = _TYPES.get(status, default)
    return {
        "error": {
            "code": code,
            "message": message,
            "param": param,
            "did_you_mean": did_you_mean,
            "type": kind,
        }
    }


def error_response(error: BaseException, headers: Mapping[str, str] | None = None) -> JsonResponse:
    """The whole answer."""
    status = status_of(error)
    if status in (408, 413):
        headers = {**(headers or {}), "connection": "close"}  # the rest of the body is not read
    if status == 401:
        headers = {"www-authenticate": "Bearer", **(headers or {})}
    if status == 503:
        headers = {"retry-after": "1", **(headers or {})}
    return JsonResponse(error_object(error), status_code=status, headers=headers)
