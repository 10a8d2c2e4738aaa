"""The weight routes: what serves, begin an update, commit, abort, roll back, pause, resume.

Each goes through the one guard, reads its fields, and passes one command to the engine, which decides.  The
client's leaving changes nothing: an update ends by itself, by a commit, an abort or its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from gtp_serve.errors import (
    CheckpointError,
    Details,
    EngineFault,
    RequestRejected,
    UnknownUpdate,
    UpdateFailed,
    UpdateRefused,
)
from gtp_serve.hardware import read_memory
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.refit.orders import (
    AbortUpdate,
    Begin,
    Checksum,
    Commit,
    Layout,
    Pause,
    PauseMode,
    Resume,
    RollBack,
    UpdateRecord,
    WeightsStatus,
)
from gtp_serve.refit.shared import SealedMemory
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.body import read_json_object
from gtp_serve.server.fields import check_names, from_query, read_choice, read_flag, read_text
from gtp_serve.server.http_errors import JsonResponse, error_object, error_response
from gtp_serve.server.linger import Lingering
from gtp_serve.server.schemas import Number
from gtp_serve.server.spool import STREAM_TYPE, spool
from gtp_serve.server.state import ServerState, Serving
from gtp_serve.server.update_fields import NUMBERS, Asked, read_in_flight, read_stream_fields, read_update

MAX_BODY_BYTES = 256 << 20
MAX_BODY_STRINGS = 8_000_000
"""An order of a trainer's memory names each of its shards."""

_FLAGS: Mapping[str, Number] = {"wait": Number(kind="bool", default=False)}
_LATE = frozenset({"update-deadline", "peer-late", "peer-silent", "peer-lost", "trainer-lost"})
"""Codes of updates that ended for somebody who did not come, or no more."""


class UpdateNotTaken(RequestRejected):
    """An update that has ended without being committed, told to whoever waited for it."""

    default_code = "update-failed"
    http_status = 422


class WeightRoutes:
    """The routes over a state whose engine does the work.

    :param seconds: for a body to arrive when the request gives no deadline.
    """

    def __init__(self, state: ServerState, guard: AdminGuard, *, seconds: float) -> None:
        self._state = state
        self._guard = guard
        self._seconds = seconds
        self._spooling = False
        self._keepers: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        """Every path of this module."""
        return [
            Route("/weights", self.show, methods=["GET"]),
            Route("/weights/checksum", self.checksum, methods=["GET"]),
            Route("/weights/layout", self.layout, methods=["GET"]),
            Route("/weights/updates", self.begin, methods=["POST"]),
            Route("/weights/updates/{id}", self.update, methods=["GET"]),
            Route("/weights/updates/{id}/commit", self.commit, methods=["POST"]),
            Route("/weights/updates/{id}/abort", self.abort, methods=["POST"]),
            Route("/weights/rollback", self.roll_back, methods=["POST"]),
            Route("/pause", self.pause, methods=["POST"]),
            Route("/resume", self.resume, methods=["POST"]),
        ]

    def _enter(self, request: Request) -> Serving:
        self._guard.check(request)
        return self._state.require_serving()

    # -- what is read --------------------------------------------------------------------------------

    async def show(self, request: Request) -> Response:
        """Version, digest, state, history."""
        self._guard.check(request, own_page=True)
        status = self._state.require_serving().client.weights
        body: dict[str, Any] = {"version": status.version, "digest": status.digest, "state": state_word(status)}
        return JsonResponse(body | msgspec.to_builtins(status))

    async def checksum(self, request: Request) -> Response:
        """Digest of every live parameter, computed now."""
        return JsonResponse(await _told(self._enter(request), Checksum()))

    async def layout(self, request: Request) -> Response:
        """What the model's tensors are and where they lie."""
        return JsonResponse(await _told(self._enter(request), Layout()))

    async def update(self, request: Request) -> Response:
        """One update, under way or ended; with ``wait`` when it has ended."""
        serving = self._enter(request)
        given = await _read_given(request, ("wait",))
        name = request.path_params["id"]
        record = find_record(serving.client.weights, name)
        if record is None:
            await serving.client.refresh()
            record = find_record(serving.client.weights, name)
        if record is None:
            raise UnknownUpdate(f"there is no update '{name[:64]}' among the last ones", param="id")
        return await self._answer(serving, record, wait=read_flag(given, "wait"), failure_is_error=False)

    # -- what is changed -----------------------------------------------------------------------------

    async def begin(self, request: Request) -> Response:
        """Start an update, from what a JSON body names or from the body itself."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() == STREAM_TYPE:
            return await self._begin_stream(request)
        serving = self._enter(request)
        body = await read_json_object(request, max_bytes=MAX_BODY_BYTES, max_strings=MAX_BODY_STRINGS)
        asked = read_update(_together(from_query(request.query_params, NUMBERS), body))
        record = await _order(serving, Begin(request=asked.request, id=asked.id))
        return await self._answer_begun(serving, asked, record)

    async def _begin_stream(self, request: Request) -> Response:
        try:
            serving = self._enter(request)
            asked = read_stream_fields(from_query(request.query_params, NUMBERS))
            known = _check_now(serving.client.weights, asked)
            if known is not None:
                return Lingering(await self._answer_begun(serving, asked, known))
            memory = await self._spool(request, serving, asked)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody is there to read it
        except (RequestRejected, EngineFault) as error:
            return Lingering(error_response(error))
        return await self._begin_spooled(serving, asked, memory)

    async def _spool(self, request: Request, serving: Serving, asked: Asked) -> SealedMemory:
        if self._spooling:
            raise UpdateRefused("another body of weights is being received", code="update-under-way")
        length = request.headers.get("content-length", "")
        self._spooling = True
        try:
            return await spool(
                request.stream(),
                logical_tensors(serving.engine.model),
                length=int(length[:20]) if length.isdigit() else None,
                digest=asked.digest,
                seconds=asked.request.deadline_seconds or self._seconds,
                available=read_memory().available,
            )
        finally:
            self._spooling = False

    async def _begin_spooled(self, serving: Serving, asked: Asked, memory: SealedMemory) -> Response:
        order = msgspec.structs.replace(asked.request.order, segment=memory.segment())
        request = msgspec.structs.replace(asked.request, order=order)
        # In a task of its own: the memory must outlive this request, whose client may leave at any time.
        began: asyncio.Future[UpdateRecord] = asyncio.get_running_loop().create_future()
        keeper = asyncio.create_task(_keep(serving, Begin(request=request, id=asked.id), memory, began))
        self._keepers.add(keeper)
        keeper.add_done_callback(self._keepers.discard)
        return await self._answer_begun(serving, asked, await asyncio.shield(began))

    async def commit(self, request: Request) -> Response:
        """Let a verified update serve."""
        serving = self._enter(request)
        given = await _read_given(request, ("wait",))
        record = await _order(serving, Commit(id=request.path_params["id"]))
        return await self._answer(serving, record, wait=read_flag(given, "wait"))

    async def abort(self, request: Request) -> Response:
        """Drop an update that is not committed."""
        serving = self._enter(request)
        given = await _read_given(request, ("reason",))
        reason = read_text(given, "reason", limit=200) or "aborted by the client"
        record = await _order(serving, AbortUpdate(id=request.path_params["id"], reason=reason))
        return await self._answer(serving, record, wait=False)

    async def roll_back(self, request: Request) -> Response:
        """Back to the version before."""
        serving = self._enter(request)
        given = await _read_given(request, ("in_flight", "wait"))
        record = await _order(serving, RollBack(in_flight=read_in_flight(given)))
        return await self._answer(serving, record, wait=read_flag(given, "wait"))

    async def pause(self, request: Request) -> Response:
        """Run no step; vLLM's route, with its default."""
        serving = self._enter(request)
        given = await _read_given(request, ("mode", "clear_cache", "wait_for_inflight_requests"))
        waits = str(given.get("wait_for_inflight_requests", "")).lower() in ("true", "1")  # vLLM's word before modes
        chosen = read_choice(given, "mode", get_args(PauseMode), "wait" if waits else "abort")
        mode: PauseMode = next(word for word in get_args(PauseMode) if word == chosen)
        await _told(serving, Pause(mode=mode))
        return JsonResponse({"status": "paused", "mode": mode, "weight_version": serving.client.weights.version})

    async def resume(self, request: Request) -> Response:
        """Run steps again."""
        serving = self._enter(request)
        await _read_given(request, ())
        await _told(serving, Resume())
        return JsonResponse({"status": "resumed", "weight_version": serving.client.weights.version})

    # -- answers -------------------------------------------------------------------------------------

    async def _answer_begun(self, serving: Serving, asked: Asked, record: UpdateRecord) -> Response:
        """An update that is to be committed by hand is waited for until that can be done."""
        if asked.wait and asked.request.commit == "manual":
            status = await serving.client.wait_weights(lambda now: _is_settled(find_record(now, record.id)))
            record = find_record(status, record.id) or record
        return await self._answer(serving, record, wait=asked.wait and record.state != "verified")

    async def _answer(
        self, serving: Serving, record: UpdateRecord, *, wait: bool, failure_is_error: bool = True
    ) -> Response:
        """202 while it is under way, 200 when it has ended; whoever waited for a failed one gets an error."""
        if wait and not has_ended(record):
            record = await serving.client.wait_update(record.id)
        headers = {"location": f"/weights/updates/{record.id}"}
        body = msgspec.to_builtins(record)
        if not has_ended(record):
            return JsonResponse(body, status_code=202, headers=headers)
        if wait and failure_is_error and not is_good(record):
            error = failure_of(record)
            body = {"update": body, **error_object(error)}
            return JsonResponse(body, status_code=error.http_status, headers=headers)
        return JsonResponse(body, headers=headers)


def state_word(status: WeightsStatus) -> str:
    """What is the matter with the weights, in one word: the worst first."""
    if status.torn:
        return "torn"
    if status.update is not None:
        return status.update.state
    return "paused" if status.paused else "idle"


def find_record(status: WeightsStatus, name: str) -> UpdateRecord | None:
    """The update of this id, under way or ended."""
    records = (*((status.update,) if status.update is not None else ()), *status.history)
    return next((record for record in records if record.id == name), None)


def has_ended(record: UpdateRecord) -> bool:
    """Whether an update is over; a dry run is when it has been verified."""
    return record.state in ("committed", "aborted", "torn") or (record.dry_run and record.state == "verified")


def _is_settled(record: UpdateRecord | None) -> bool:
    """Whether an update is over or waits to be committed."""
    return record is None or record.state == "verified" or has_ended(record)


def is_good(record: UpdateRecord) -> bool:
    """Whether an ended update is what was asked for: committed, or found good by a dry run."""
    return record.state in ("committed", "verified")


def failure_of(record: UpdateRecord) -> UpdateNotTaken:
    """Why an update has ended without being committed, as an error: 409 when somebody dropped it, 504 when it took
    too long, 422 when what came was not good.
    """
    return _not_taken(record.message or "the update was not taken", record.details, record.code)


def _not_taken(message: str, details: Details, code: str) -> UpdateNotTaken:
    error = UpdateNotTaken(message, details, code=code or None)
    if code in _LATE:
        error.http_status = 504
    elif code == "aborted":
        error.http_status = 409
    return error


def _check_now(status: WeightsStatus, asked: Asked) -> UpdateRecord | None:
    """What can be known before a body is read: the record if this update has come before.

    :raises UpdateRefused: when it cannot begin now; the engine decides again when the body is there.
    """
    known = find_record(status, asked.id)
    if known is not None and (known.kind, known.version) == ("safetensors", asked.request.version):
        return known
    if known is not None:
        raise UpdateRefused(f"update {asked.id} is another one", code="id-in-use", param="id")
    if status.update is not None:
        raise UpdateRefused(f"update {status.update.id} is under way", code="update-under-way")
    base = asked.request.base
    if base is not None and base != status.version:
        raise UpdateRefused(f"version {status.version} serves, not {base}", code="base-mismatch", param="base")
    return None


async def _keep(serving: Serving, begin: Begin, memory: SealedMemory, began: asyncio.Future[UpdateRecord]) -> None:
    """Begin an update from a spooled body and keep that until the update has ended."""
    try:
        with contextlib.closing(memory):
            record = await _order(serving, begin)
            began.set_result(record)
            await serving.client.wait_update(record.id)
    except Exception as error:
        if not began.done():
            began.set_exception(error)
        elif not isinstance(error, EngineFault):
            raise


async def _order(serving: Serving, command: object) -> UpdateRecord:
    return msgspec.convert(await _told(serving, command), UpdateRecord)


async def _told(serving: Serving, command: Any) -> Any:
    """The engine's answer to a command.

    :raises RequestRejected: also for what the engine says of a checkpoint or a peer: the operator may know.
    """
    try:
        return await serving.client.control(command)
    except (UpdateFailed, CheckpointError) as error:
        raise _not_taken(error.message, error.details, error.code) from None


async def _read_given(request: Request, known: tuple[str, ...]) -> dict[str, Any]:
    """The few fields of a route, from its query or a JSON body; most requests have neither."""
    given = from_query(request.query_params, _FLAGS)
    headers = request.headers
    if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
        given = _together(given, await read_json_object(request))
    check_names(given, known)
    return given


def _together(query: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Fields of both.

    :raises RequestRejected: for one that is in both.
    """
    twice = next((name for name in body if name in query), None)
    if twice is not None:
        raise RequestRejected(f"'{twice[:64]}' is in the query and in the body", code="duplicate-key", param=twice[:64])
    return query | body
