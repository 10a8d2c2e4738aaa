"""vLLM's development routes (as of 0.33) over this server's updates; ``/pause``, ``/resume`` are ``server.weights``'.

A trainer starts an update, sends all tensors in one call or several, and finishes it: only then anything changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gtp_serve.errors import GtpServeError, RequestRejected, UpdateRefused
from gtp_serve.refit.orders import FlushCache, Join, JoinGroup, Leave, PauseMode, Piece, Release, Restore, Resume
from gtp_serve.server.compat.base import MAX_LABEL_CHARS, Front
from gtp_serve.server.compat.reading import (
    first_of,
    read_bool,
    read_piece,
    read_string,
    read_strings,
    read_whole,
)
from gtp_serve.server.http_errors import JsonResponse, error_object
from gtp_serve.server.state import Serving

_GROUP = "vllm"
_TAGS = ("weights", "kv_cache")
_SLEEP_TAGS: Mapping[str, tuple[str, ...]] = {"0": (), "1": ("kv_cache",), "2": _TAGS}
_PAUSES: Mapping[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "keep"}
_MAX_BUCKET_BYTES = 1 << 40
_HANDLES = ("ipc_handles", "ipc_handles_pickled")


class VllmRoutes:
    """The routes over a front that others share."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._group: Mapping[str, Any] = {}
        """What the trainer said of its group."""
        self._tensors: Mapping[str, Any] = {}
        """What came last: a trainer may leave the lists out from the second time on."""
        self._started = False
        self._asleep = False

    def routes(self) -> list[Route]:
        """Every path of this module."""
        table = (
            ("/is_paused", self.is_paused, "GET"),
            ("/abort_requests", self.abort, "POST"),
            ("/init_weight_transfer_engine", self.init_engine, "POST"),
            ("/shutdown_weight_transfer_engine", self.shut_down_engine, "POST"),
            ("/start_weight_update", self.start, "POST"),
            ("/update_weights", self.update, "POST"),
            ("/finish_weight_update", self.finish, "POST"),
            ("/weight_info", self.weight_info, "GET"),
            ("/weight_checker", self.check_weights, "POST"),
            ("/get_world_size", self.world_size, "GET"),
            ("/reset_prefix_cache", self.reset_prefix_cache, "POST"),
            ("/sleep", self.sleep, "POST"),
            ("/wake_up", self.wake_up, "POST"),
            ("/is_sleeping", self.is_sleeping, "GET"),
        )
        return [Route(path, self._front.route(handler, _refused), methods=[method]) for path, handler, method in table]

    # -- weights -------------------------------------------------------------------------------------

    async def init_engine(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Join the trainer's group; answered when all members are there."""
        info = first_of(_needed(body, "init_info"), "init_info")
        if "nccl_unique_id_b64" not in info and "master_address" not in info:
            raise UpdateRefused(
                "this backend hands memory over as pickled handles, which can run code, so none is read",
                [("instead", "backend nccl, or gtp_serve.refit.Publisher(url, transport='memory') on this host")],
                code="pickle-refused",
            )
        unique_id = read_string(info, "nccl_unique_id_b64") if "nccl_unique_id_b64" in info else ""
        group = JoinGroup(
            name=_GROUP,
            host="" if unique_id else read_string(info, "master_address", limit=256),
            port=0 if unique_id else read_whole(info, "master_port", 1, 65535),
            rank_offset=read_whole(info, "rank_offset", 1, 100_000),
            world_size=read_whole(info, "world_size", 2, 100_000),
            backend="nccl" if serving.engine.device == "cuda" or unique_id else "gloo",
            kind="stateless",
            unique_id=unique_id,
        )
        _bucket_bytes(info)
        await self._drop(serving, "its trainer's group is made anew")
        await serving.client.control(Join(group=group))
        self._group = info
        return JsonResponse({"message": "Weight transfer initialized"})

    async def shut_down_engine(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Leave it."""
        await self._drop(serving, "its trainer's group was shut down")
        await serving.client.control(Leave(name=_GROUP))
        self._group = {}
        return JsonResponse({"message": "Weight transfer engine shut down"})

    async def start(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Tensors will come, and their end will be told."""
        if not read_bool(body, "is_checkpoint_format", True):
            raise RequestRejected(
                "tensors are taken under their names in a checkpoint only",
                [("send", "is_checkpoint_format: true")],
                param="is_checkpoint_format",
            )
        if read_bool(body, "include_draft"):
            raise RequestRejected("there is no draft model here", param="include_draft")
        await self._front.session.begin(serving, label_later=True)
        self._started = True
        return JsonResponse({"message": "Weight update started"})

    async def update(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Tensors that the trainer is broadcasting; answered when all ranks have them."""
        if "weight_dir" in body or ("update_info" not in body and not body):
            return await self._update_from_disk(serving, body)
        info = dict(first_of(_needed(body, "update_info"), "update_info"))
        if any(name in info for name in _HANDLES):
            raise UpdateRefused(
                "handles of a GPU's memory come as pickles, which can run code, so none is read",
                [("instead", "backend nccl, or gtp_serve.refit.Publisher(url, transport='memory') on this host")],
                code="pickle-refused",
            )
        if not info.get("names"):
            info = {**self._tensors, **{name: value for name, value in info.items() if value != []}}
        piece = _piece({**{name: self._group[name] for name in self._group if name.startswith("packed")}, **info})
        await self._front.session.take(serving, piece, None, "keep")
        self._tensors = info
        return JsonResponse({"message": "Weights updated"})

    async def _update_from_disk(self, serving: Serving, body: Mapping[str, Any]) -> Response:
        """prime-rl's call: a checkpoint in a folder.  Without one it means a group over which it sends pickles."""
        if "weight_dir" not in body:
            raise UpdateRefused(
                "update_info is missing; a weight_dir of null means tensors whose list comes as a pickle, which can "
                "run code, so it is not read",
                [("instead", "weight_dir: a folder that this server can read, or vLLM's own update_info")],
                code="pickle-refused",
            )
        path = read_string(body, "weight_dir")
        await self._drop(serving, "an update from disk began")
        await self._front.update_from_disk(serving, path, None, "keep")
        return JsonResponse({"message": "Weights updated", "status": "ok"})

    async def finish(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """No more tensors come: check and commit them; answered when they serve."""
        version = read_string(body, "weight_version", limit=MAX_LABEL_CHARS) if "weight_version" in body else None
        started, self._started = self._started, False
        record = await self._front.session.end(serving, version)
        live = serving.client.weights.version
        if record is None and (started or version not in (None, live)):
            raise UpdateRefused(
                "no tensors have come" + ("" if version is None else f" for version '{version}'"),
                [("live", live), ("first", "POST /update_weights")],
                code="tensors-missing",
            )
        return JsonResponse({"message": "Weight update finished", "weight_version": serving.client.weights.version})

    async def _drop(self, serving: Serving, reason: str) -> None:
        self._started = False
        await self._front.session.drop(serving, reason)

    # -- what is told --------------------------------------------------------------------------------

    async def weight_info(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """The live label."""
        return JsonResponse({"weight_version": serving.client.weights.version})

    async def check_weights(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Digests of each rank; ``reset`` empties the weights until an update has filled them again."""
        action = read_string(body, "action")
        if action == "reset":
            await self._front.forget_weights(serving)
            return JsonResponse({"status": "reset"})
        if action not in ("checksum", "compare"):
            raise RequestRejected(
                f"action '{action[:64]}' is not possible", [("possible", "checksum, compare, reset")], param="action"
            )
        baseline = _baseline(body) if action == "compare" else {}
        _, ranks = await self._front.checksums(serving)
        found = {f"rank{at}": digest for at, digest in enumerate(ranks)}
        if action == "checksum":
            return JsonResponse({"checksums": found})
        wrong = sorted(name for name in found | baseline if found.get(name) != baseline.get(name))
        return JsonResponse({"match": not wrong, "mismatches": wrong, "ranks": sorted(found)})

    async def world_size(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Ranks that take part in a group."""
        return JsonResponse({"world_size": serving.engine.tp})

    async def is_paused(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Whether no step is run."""
        return JsonResponse({"is_paused": serving.client.weights.paused})

    # -- requests and memory -------------------------------------------------------------------------

    async def abort(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """End requests; all of them where none is named."""
        names = read_strings(body, "request_ids") if body.get("request_ids") else None
        return JsonResponse({"status": "aborted", "aborted": await self._front.abort(serving, names)})

    async def reset_prefix_cache(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Forget prefixes; running requests keep their KV."""
        await serving.client.control(FlushCache())
        return JsonResponse({"success": True})

    async def sleep(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Pause, and give memory back: 1 the KV cache, 2 the weights too."""
        level = request.query_params.get("level", "1")
        mode = request.query_params.get("mode", "abort")
        if level not in _SLEEP_TAGS or mode not in _PAUSES:
            raise RequestRejected(
                "this level or mode is not possible",
                [("level", ", ".join(_SLEEP_TAGS)), ("mode", ", ".join(_PAUSES))],
                param="level" if level not in _SLEEP_TAGS else "mode",
            )
        await self._front.pause(serving, _PAUSES[mode])
        self._asleep = True
        if tags := _SLEEP_TAGS[level]:
            await serving.client.control(Release(tags=tags))
        return JsonResponse({"status": "sleeping", "level": int(level)})

    async def wake_up(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Take memory again, and run steps once all of it is there."""
        tags = request.query_params.getlist("tags")
        unknown = [tag for tag in tags if tag not in (*_TAGS, "scheduling")]
        if unknown:
            raise RequestRejected(
                f"tag '{unknown[0][:64]}' is not known", [("possible", ", ".join(_TAGS))], param="tags"
            )
        sleeping = set(serving.client.weights.sleeping)
        taken = tuple(tag for tag in _TAGS if tag in sleeping and (not tags or tag in tags))
        if taken:
            await serving.client.control(Restore(tags=taken))
        awake = sleeping <= set(taken)
        if awake:
            self._asleep = False
            await serving.client.control(Resume())
        return JsonResponse({"status": "awake" if awake else "sleeping", "tags": tags or list(_TAGS)})

    async def is_sleeping(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Whether memory is given back, or the engine was sent to sleep and is paused."""
        now = serving.client.weights
        return JsonResponse({"is_sleeping": bool(now.sleeping) or (self._asleep and now.paused)})


def _refused(error: GtpServeError) -> Response:
    body = error_object(error if isinstance(error, RequestRejected) else _as_refusal(error))
    return JsonResponse(body, status_code=400)


def _as_refusal(error: GtpServeError) -> RequestRejected:
    return RequestRejected(error.message, error.details, code=error.code)


def _needed(body: Mapping[str, Any], name: str) -> Any:
    if name not in body:
        raise RequestRejected(f"{name} is missing", code="missing-field", param=name)
    return body[name]


def _piece(info: Mapping[str, Any]) -> Piece:
    packed = read_bool(info, "packed")
    return read_piece(
        info,
        dtypes="dtype_names",
        group=_GROUP,
        packed="vllm_packed" if packed else "",
        bucket_bytes=_bucket_bytes(info),
    )


def _bucket_bytes(info: Mapping[str, Any]) -> int:
    return read_whole(info, "packed_buffer_size_bytes", 1, _MAX_BUCKET_BYTES, 1 << 30)


def _baseline(body: Mapping[str, Any]) -> dict[str, Any]:
    baseline = body.get("baseline")
    if not isinstance(baseline, dict):
        raise RequestRejected("compare needs the baseline, an object of digests", param="baseline")
    return baseline
