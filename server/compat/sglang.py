"""SGLang's weight routes (as of 0.5.23) over this server's updates: fields, answers and statuses are SGLang's.

What differs is what they promise: buckets change nothing before the last one, and a failed update changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from gtp_serve.errors import GtpServeError, RequestRejected, UpdateRefused
from gtp_serve.layout.huggingface import EMBEDDING, HEAD, logical_name
from gtp_serve.refit.orders import FlushCache, Join, JoinGroup, Leave, PauseMode, ReadTensor, Release, Restore, Resume
from gtp_serve.server.compat.base import MAX_LABEL_CHARS, Front, in_flight_of
from gtp_serve.server.compat.reading import Packed, read_bool, read_piece, read_string, read_strings, read_whole
from gtp_serve.server.http_errors import JsonResponse
from gtp_serve.server.state import Serving

_PAUSES: Mapping[str, PauseMode] = {"abort": "abort", "retract": "recompute", "in_place": "keep"}
_DISK_FORMATS = frozenset({"auto", "safetensors"})
_BUCKET_FORMATS: Mapping[str, Packed] = {"": "", "flattened_bucket": "flattened_bucket"}
_TAGS = ("weights", "kv_cache")
_KNOWN_TAGS = frozenset({*_TAGS, "cuda_graph"})
_GROUP = "weight_update_group"
MAX_ROWS = 10_000
_SAFE_WAY = (
    "over this route tensors come as pickles, which can run code, so none is read",
    [
        ("instead, over torch.distributed", "/init_weights_update_group and /update_weights_from_distributed"),
        ("instead, on this host", "gtp_serve.refit.Publisher(url, transport='memory')"),
        ("instead, over HTTP", "POST /weights/updates with a safetensors body"),
    ],
)


class SglangRoutes:
    """The routes over a front that others share."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._snapshot = ""
        """Digest that ``compare`` compares with."""

    def routes(self) -> list[Route]:
        """Every path of this module."""
        both = ("GET", "POST")
        table = (
            ("/update_weights_from_disk", self.update_from_disk, ("POST",)),
            ("/init_weights_update_group", self.init_group, ("POST",)),
            ("/destroy_weights_update_group", self.destroy_group, ("POST",)),
            ("/begin_weight_update", self.begin, ("POST",)),
            ("/end_weight_update", self.end, ("POST",)),
            ("/update_weights_from_distributed", self.update_from_distributed, ("POST",)),
            ("/update_weights_from_tensor", self.refuse_pickles, ("POST",)),
            ("/update_weights_from_ipc", self.refuse_pickles, ("POST",)),
            ("/update_weight_version", self._front.update_weight_version, ("POST",)),
            ("/get_weight_version", self.weight_version, ("GET",)),
            ("/get_weights_by_name", self.read_weights, both),
            ("/weights_checker", self.check_weights, both),
            ("/release_memory_occupation", self.release, both),
            ("/resume_memory_occupation", self.restore, both),
            ("/flush_cache", self.flush_cache, both),
            ("/abort_request", self.abort, ("POST",)),
            ("/pause_generation", self.pause, ("POST",)),
            ("/continue_generation", self.resume, ("POST",)),
        )
        return [
            Route(path, self._front.route(handler, _refused), methods=list(methods)) for path, handler, methods in table
        ]

    # -- weights -------------------------------------------------------------------------------------

    async def update_from_disk(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """A checkpoint of this server's disk; answered when it serves."""
        path = read_string(body, "model_path")
        form = read_string(body, "load_format", "auto")
        if form not in _DISK_FORMATS:
            raise RequestRejected(
                f"load_format '{form[:64]}' is not possible", [("possible", "auto, safetensors")], param="load_format"
            )
        if body.get("manifest"):
            raise RequestRejected(
                "a manifest is not read: the checkpoint is checked against the model", param="manifest"
            )
        paused = serving.client.weights.paused
        if read_bool(body, "keep_pause") and not paused:
            await self._front.pause(serving, "keep")
            paused = True
        if read_bool(body, "abort_all_requests"):
            await self._front.abort(serving, None)
        await self._front.session.drop(serving, "an update from disk began")
        await self._front.update_from_disk(serving, path, _version(body), in_flight_of(serving, otherwise="wait"))
        stats = serving.client.stats()
        return _done(
            "Succeeded to update model weights.", num_paused_requests=stats.running + stats.waiting if paused else 0
        )

    async def init_group(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Join the trainer's group; answered when all members are there."""
        group = JoinGroup(
            name=read_string(body, "group_name", _GROUP, limit=256),
            host=read_string(body, "master_address", limit=256),
            port=read_whole(body, "master_port", 1, 65535),
            rank_offset=read_whole(body, "rank_offset", 1, 100_000),
            world_size=read_whole(body, "world_size", 2, 100_000),
            backend=_backend(body),
        )
        await self._front.session.drop(serving, "its trainer's group is made anew")
        await serving.client.control(Join(group=group))
        return _done("Succeeded to initialize custom process group.")

    async def destroy_group(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Leave it."""
        await self._front.session.drop(serving, "its trainer's group was destroyed")
        await serving.client.control(Leave(name=read_string(body, "group_name", _GROUP, limit=256)))
        return _done("Succeeded to destroy custom process group.")

    async def begin(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Buckets will come."""
        _check_selector(body)
        await self._front.session.begin(serving)
        return _done("Succeeded to begin weight update.")

    async def end(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """No more buckets come."""
        _check_selector(body)
        await self._front.session.end(serving)
        return _done("Succeeded to end weight update.")

    async def update_from_distributed(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """One bucket, which the trainer is broadcasting; answered when all ranks have it."""
        _check_selector(body)
        form = read_string(body, "load_format", "none")
        if form not in ("none", *_BUCKET_FORMATS):
            raise RequestRejected(
                f"load_format '{form[:64]}' is not possible",
                [("possible", "none or flattened_bucket")],
                param="load_format",
            )
        packed = _BUCKET_FORMATS.get(form, "")
        group = read_string(body, "group_name", _GROUP, limit=256)
        piece = read_piece(body, dtypes="dtypes", group=group, packed=packed)
        version = _version(body)
        ending = read_bool(body, "abort_all_requests")
        if ending:
            await self._front.abort(serving, None)
        in_flight = in_flight_of(serving, otherwise="abort" if ending else "wait")
        record = await self._front.session.take(serving, piece, version, in_flight)
        message = "Succeeded to update parameter online."
        return _done(message if record is None else f"{message} Weight version updated to {record.version}.")

    async def refuse_pickles(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Tensors as pickles."""
        raise UpdateRefused(*_SAFE_WAY, code="pickle-refused")

    # -- what is told --------------------------------------------------------------------------------

    async def weight_version(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """The live label."""
        return JsonResponse({"weight_version": serving.client.weights.version})

    async def read_weights(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """The first rows of a tensor."""
        name = logical_name(read_string(body, "name"))
        rows = read_whole(body, "truncate_size", 0, MAX_ROWS, 100)
        if name == HEAD and serving.engine.model.tied:
            name = EMBEDDING
        told = await serving.client.control(ReadTensor(name=name, limit=rows))
        return JsonResponse(told["values"])

    async def check_weights(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Digests, and whether they are those of a moment before.

        ``reset_tensors`` empties the weights: nothing is generated until an update has filled them again.
        """
        _check_selector(body)
        action = read_string(body, "action", "checksum")
        if body.get("skip_tensor_list"):
            raise RequestRejected("digests are of whole ranks: no tensor can be skipped", param="skip_tensor_list")
        if action == "reset_tensors":
            await self._front.forget_weights(serving)
            return _done("The weights are empty; nothing is generated until an update has filled them.")
        if action not in ("checksum", "snapshot", "compare"):
            raise RequestRejected(
                f"action '{action[:64]}' is not possible",
                [("possible", "checksum, snapshot, compare, reset_tensors")],
                param="action",
            )
        digest, ranks = await self._front.checksums(serving)
        if action == "snapshot":
            self._snapshot = digest
            return _done("Success.")
        if action == "compare":
            return self._compare(digest)
        return _done("Success.", ranks=[_rank(at, ranks) for at in range(len(ranks))], per_engine_checksum=digest)

    def _compare(self, digest: str) -> Response:
        if not self._snapshot:
            raise RequestRejected("there is no snapshot to compare with", [("try", "action: snapshot first")])
        if digest != self._snapshot:
            raise RequestRejected(f"the weights differ: digest {digest}, the snapshot's {self._snapshot}")
        return _done("Success.")

    # -- requests and memory -------------------------------------------------------------------------

    async def release(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Give memory back."""
        if tags := _tags(body):
            await serving.client.control(Release(tags=tags))
        return JsonResponse(None)

    async def restore(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Take it again."""
        if tags := _tags(body):
            await serving.client.control(Restore(tags=tags))
        return JsonResponse(None)

    async def flush_cache(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Forget prefixes; running requests keep their KV, so it need not wait for them."""
        timeout = request.query_params.get("timeout", "0")
        if not _is_duration(timeout):
            raise RequestRejected("timeout must be a number of seconds from 0 on", param="timeout")
        await serving.client.control(FlushCache())
        return PlainTextResponse("Cache flushed.\n")

    async def abort(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """End requests; a name that is unknown is no error."""
        if read_bool(body, "abort_all"):
            await self._front.abort(serving, None)
        elif body.get("rid"):
            await self._front.abort(serving, [read_string(body, "rid")])
        return Response(status_code=200)

    async def pause(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Run no step; what becomes of running requests is the mode's to say."""
        mode = read_string(body, "mode", "abort")
        if mode not in _PAUSES:
            raise RequestRejected(
                f"mode '{mode[:64]}' is not possible", [("possible", ", ".join(_PAUSES))], param="mode"
            )
        await self._front.pause(serving, _PAUSES[mode])
        return JsonResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, serving: Serving, request: Request, body: dict[str, Any]) -> Response:
        """Run steps again, on the new weights if buckets have come; if some are missing, it stays paused."""
        await self._front.session.end(serving)
        await serving.client.control(Resume())
        return JsonResponse({"message": "Generation continued successfully.", "status": "ok"})


def _refused(error: GtpServeError) -> Response:
    return JsonResponse({"success": False, "message": str(error)}, status_code=400)


def _done(message: str, **more: Any) -> Response:
    return JsonResponse({"success": True, "message": message, **more})


def _version(body: Mapping[str, Any]) -> str | None:
    return read_string(body, "weight_version", limit=MAX_LABEL_CHARS) if "weight_version" in body else None


def _backend(body: Mapping[str, Any]) -> Literal["gloo", "nccl"]:
    backend = read_string(body, "backend", "nccl")
    if backend == "gloo":
        return "gloo"
    if backend == "nccl":
        return "nccl"
    raise RequestRejected(f"backend '{backend[:64]}' is not possible", [("possible", "gloo, nccl")], param="backend")


def _check_selector(body: Mapping[str, Any]) -> None:
    """``draft`` alone would leave the model as it is: there is none here."""
    if read_string(body, "selector", "all") not in ("all", "target"):
        raise RequestRejected("there is no draft model here", [("possible", "all, target")], param="selector")


def _tags(body: Mapping[str, Any]) -> tuple[str, ...]:
    """What is meant; captured graphs hold no memory of their own here."""
    if "tags" not in body:
        return _TAGS
    tags = read_strings(body, "tags", most=16)
    unknown = [tag for tag in tags if tag not in _KNOWN_TAGS]
    if unknown:
        raise RequestRejected(
            f"tag '{unknown[0][:64]}' is not known", [("possible", ", ".join(sorted(_KNOWN_TAGS)))], param="tags"
        )
    return tuple(tag for tag in _TAGS if tag in tags)


def _rank(at: int, digests: list[str]) -> dict[str, Any]:
    place = {"role": "target", "tp_rank": at, "tp_size": len(digests), "dp_rank": 0, "dp_size": 1}
    place |= {"pp_rank": 0, "pp_size": 1, "rank": at, "size": len(digests)}
    return {"checksums": {"all": digests[at]}, "per_gpu_checksum": digests[at], "parallelism_info": place}


def _is_duration(text: str) -> bool:
    try:
        return math.isfinite(float(text)) and float(text) >= 0
    except ValueError:
        return False
