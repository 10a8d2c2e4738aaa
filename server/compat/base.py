"""What both fronts do the same way: let a request in, ask the engine, end requests, change the label."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gtp_serve.errors import EngineFault, GtpServeError, RequestRejected, UpdateFailed
from gtp_serve.refit.orders import (
    Begin,
    Checksum,
    DiskOrder,
    InFlight,
    Pause,
    PauseMode,
    Relabel,
    Release,
    Restore,
    UpdateRecord,
    UpdateRequest,
)
from gtp_serve.refit.versions import next_label
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.compat.reading import read_body, read_bool, read_string
from gtp_serve.server.compat.session import FedSession
from gtp_serve.server.http_errors import JsonResponse
from gtp_serve.server.state import ServerState, Serving

Handler = Callable[[Serving, Request, dict[str, Any]], Awaitable[Response]]
Refuse = Callable[[GtpServeError], Response]
_KEPT = frozenset({401, 403, 408, 413, 415, 503})
"""Of a refusal these statuses say more than 400, which every other gets."""
MAX_LABEL_CHARS = 128


class Front:
    """One guard, one state and one session for all routes of other servers.

    :param session: shared by the fronts: an update is one whoever's routes it came through.
    """

    def __init__(self, state: ServerState, guard: AdminGuard, session: FedSession) -> None:
        self._state = state
        self._guard = guard
        self.session = session

    def route(self, handler: Handler, refuse: Refuse) -> Callable[[Request], Awaitable[Response]]:
        """The handler behind the guard, with its refusals answered as its clients know them."""

        async def answer(request: Request) -> Response:
            self._guard.check(request)
            serving = self._state.require_serving()
            try:
                return await handler(serving, request, await read_body(request))
            except ClientDisconnect:
                return Response(status_code=499)  # nobody is there to read it
            except EngineFault:
                raise
            except GtpServeError as error:
                if isinstance(error, RequestRejected) and error.http_status in _KEPT:
                    raise
                return refuse(error)

        return answer

    # -- what several routes do --------------------------------------------------------------------

    async def abort(self, serving: Serving, rids: Iterable[str] | None) -> int:
        """End requests in progress, all of them or those whose names begin so; how many."""
        found = [rid for rid in self._state.rids if rids is None or any(rid.startswith(one) for one in rids)]
        for rid in found:
            await serving.client.abort(rid)
        return len(found)

    async def update_from_disk(
        self, serving: Serving, path: str, version: str | None, in_flight: InFlight
    ) -> UpdateRecord:
        """Load a checkpoint and let it serve; returns when it does.

        :raises GtpServeError: why it does not.
        """
        label = version if version is not None else next_label(serving.client.weights.version)
        order = DiskOrder(path=path)
        request = UpdateRequest(order=order, version=label, in_flight=in_flight, any_order=True)
        begin = Begin(request=request, id=f"disk-{uuid.uuid4().hex[:12]}")
        record = msgspec.convert(await serving.client.control(begin), UpdateRecord)
        record = await serving.client.wait_update(record.id)
        if record.state != "committed":
            raise UpdateFailed(record.message or "the update was not taken", record.details, code=record.code or None)
        return record

    async def pause(self, serving: Serving, mode: PauseMode) -> None:
        """Run no step from now on."""
        await serving.client.control(Pause(mode=mode))

    async def update_weight_version(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """``/update_weight_version`` of both: the same weights under another label.

        SGLang would end all running requests unless told otherwise, vLLM none; here the spans of each reply tell
        which label a token has, so they are ended only if that is asked for.
        """
        version = read_string(body, "new_version", limit=MAX_LABEL_CHARS)
        if read_bool(body, "abort_all_requests"):
            await self.abort(serving, None)
        await serving.client.control(Relabel(version=version))
        return JsonResponse(
            {"success": True, "message": f"Weight version updated to {version}", "new_version": version}
        )

    async def checksums(self, serving: Serving) -> tuple[str, list[str]]:
        """Digest of all live parameters, and of each rank's."""
        told = await serving.client.control(Checksum())
        return str(told["digest"]), [str(digest) for digest in told["ranks"]]

    async def forget_weights(self, serving: Serving) -> None:
        """Empty the live weights; nothing is generated until a good update has filled them.

        :raises UpdateRefused: while requests run.
        """
        await serving.client.control(Release(tags=("weights",)))
        await serving.client.control(Restore(tags=("weights",)))


def in_flight_of(serving: Serving, *, otherwise: InFlight) -> InFlight:
    """What becomes of running sequences: whoever paused has said so already."""
    return "keep" if serving.client.weights.paused else otherwise
