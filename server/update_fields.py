"""The fields of ``POST /weights/updates``: a table of names and ranges, read into one ``UpdateRequest``."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from gtp_serve.errors import RequestRejected
from gtp_serve.refit.orders import (
    DiskOrder,
    GroupOrder,
    InFlight,
    Memory,
    MemoryOrder,
    Order,
    Segment,
    StreamOrder,
    UpdateRequest,
)
from gtp_serve.server.fields import check_names, read_choice, read_flag, read_text
from gtp_serve.server.schemas import Number, describe, read_number

MAX_DEADLINE_SECONDS = 86400.0
MAX_VERSION_CHARS = 128

NUMBERS: Mapping[str, Number] = {
    "deadline_seconds": Number(
        kind="float", default=None, low=0, high=MAX_DEADLINE_SECONDS, above=True, help="until it is verified"
    ),
    "dry_run": Number(kind="bool", default=False, help="verify, and drop it"),
    "wait": Number(kind="bool", default=False, help="answer when it has ended"),
}
"""The fields of any update that are no texts."""

_COMMON = ("version", "base", "in_flight", "commit", "memory", "deadline_seconds", "dry_run", "wait", "id")
JSON_FIELDS = ("source", *_COMMON)
STREAM_FIELDS = (*_COMMON, "digest")

_SYNONYMS = {
    "weight_version": "version",
    "new_version": "version",
    "label": "version",
    "base_version": "base",
    "policy": "in_flight",
    "mode": "in_flight",
    "timeout": "deadline_seconds",
    "timeout_seconds": "deadline_seconds",
    "order": "source",
    "path": "source",
    "model_path": "source",
    "ckpt": "source",
}

SOURCES: Mapping[str, tuple[str, ...]] = {
    "disk": ("kind", "path", "iteration", "max_bytes_per_second"),
    "distributed": ("kind", "trainers", "backend", "bucket_bytes"),
    "memory": ("kind", "segments", "shards"),
}
_SOURCE_SYNONYMS = {"model_path": "path", "ckpt": "path", "type": "kind", "transport": "kind", "world_size": "trainers"}

SOURCE_NUMBERS: Mapping[str, Mapping[str, Number]] = {
    "disk": {
        "iteration": Number(kind="int", default=None, low=0, high=(1 << 63) - 1, help="the newest, when left out"),
        "max_bytes_per_second": Number(kind="int", default=None, low=1 << 16, high=1 << 50),
    },
    "distributed": {
        "trainers": Number(kind="int", default=None, low=1, high=1 << 16, help="ranks that send"),
        "bucket_bytes": Number(kind="int", default=32 << 20, low=1 << 16, high=1 << 30),
    },
    "memory": {},
}
"""The fields of each kind of source that are no texts."""
BACKENDS = ("gloo", "nccl")

ID = "[A-Za-z0-9][A-Za-z0-9._:-]{0,63}"
DIGEST = "[0-9a-fA-F]{32}"
_ID, _DIGEST = re.compile(ID), re.compile(DIGEST)
_PLACE = re.compile(r" - at `\$\.?([^`]*)`$")


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """An update as a client asks for it, with what concerns only the answer."""

    request: UpdateRequest
    id: str
    wait: bool
    digest: str = ""
    """xxh3-128 of a streamed body; empty: any."""


def new_update_id() -> str:
    """An id that no other update has."""
    return uuid.uuid4().hex


def read_update(body: Mapping[str, Any]) -> Asked:
    """The update that a JSON body asks for.

    :raises RequestRejected: naming the field, what is possible and, for a name, the nearest right one.
    """
    check_names(body, JSON_FIELDS, synonyms=_SYNONYMS)
    return _asked(body, _read_source(body.get("source")))


def read_stream_fields(query: Mapping[str, Any]) -> Asked:
    """The same from the query beside a streamed body; the order's segment is empty, and filled in once the body
    is there.
    """
    check_names(query, STREAM_FIELDS, synonyms={**_SYNONYMS, "checksum": "digest"})
    digest = read_text(query, "digest") or ""
    if digest and not _DIGEST.fullmatch(digest):
        raise RequestRejected("digest must be the body's xxh3-128 as 32 hexadecimal digits", param="digest")
    asked = _asked(query, StreamOrder(segment=Segment(pid=0, fd=0, size=0), digest=digest.lower()))
    return msgspec.structs.replace(asked, digest=digest.lower())


def _asked(given: Mapping[str, Any], order: Order) -> Asked:
    memory = read_choice(given, "memory", get_args(Memory), "")
    deadline = read_number(given, "deadline_seconds", NUMBERS["deadline_seconds"], "")
    name = read_text(given, "id")
    if name is not None and not _ID.fullmatch(name):
        raise RequestRejected("id must be 1 to 64 letters, digits, dots, colons, dashes or underscores", param="id")
    request = UpdateRequest(
        order=order,
        version=read_version(given, "version"),
        base=None if given.get("base") is None else read_version(given, "base"),
        in_flight=read_in_flight(given),
        commit="manual" if read_choice(given, "commit", ("auto", "manual"), "auto") == "manual" else "auto",
        memory=None if not memory else "inplace" if memory == "inplace" else "staged",
        deadline_seconds=None if deadline is None else float(deadline),
        dry_run=read_flag(given, "dry_run"),
    )
    return Asked(request=request, id=name or new_update_id(), wait=read_flag(given, "wait"))


def read_in_flight(given: Mapping[str, Any]) -> InFlight:
    """What becomes of running requests; ``keep`` when it is not said."""
    word: InFlight
    chosen = read_choice(given, "in_flight", get_args(InFlight), "keep")
    for word in get_args(InFlight):
        if word == chosen:
            return word
    raise AssertionError(chosen)


def read_version(given: Mapping[str, Any], name: str) -> str:
    """A label of weights.

    :raises RequestRejected: when it is missing, or not 1 to 128 printable characters without spaces.
    """
    value = given.get(name)
    if value is None:
        raise RequestRejected(
            f"{name} is missing", [("send", "a label of the new weights")], code="missing-field", param=name
        )
    if not isinstance(value, str) or not _is_label(value):
        raise RequestRejected(
            f"{name} must be a string of 1 to {MAX_VERSION_CHARS} printable characters without spaces,"
            f" not {describe(value) if not isinstance(value, str) else 'this'}",
            param=name,
        )
    return value


def _is_label(text: str) -> bool:
    return 1 <= len(text) <= MAX_VERSION_CHARS and text.isprintable() and not any(char.isspace() for char in text)


def _read_source(source: object) -> Order:
    if source is None:
        raise RequestRejected(
            "source is missing",
            [("send", 'for example {"kind": "disk", "path": "/ckpts/run"}')],
            code="missing-field",
            param="source",
        )
    if not isinstance(source, dict):
        raise RequestRejected(f"source must be an object, not {describe(source)}", param="source")
    if source.get("kind") is None:
        check_names(source, tuple(dict.fromkeys(sum(SOURCES.values(), ()))), "source.", _SOURCE_SYNONYMS)
        raise RequestRejected(
            "source.kind is missing", [("possible", ", ".join(SOURCES))], code="missing-field", param="source.kind"
        )
    kind = read_choice(source, "kind", tuple(SOURCES), "", "source.")
    check_names(source, SOURCES[kind], "source.", _SOURCE_SYNONYMS)
    return {"disk": _read_disk, "distributed": _read_group, "memory": _read_memory}[kind](source)


def _read_disk(source: Mapping[str, Any]) -> Order:
    path = read_text(source, "path", prefix="source.", needed=True) or ""
    if not path.startswith("/") or "\0" in path:
        raise RequestRejected("source.path must be an absolute path on the server's machine", param="source.path")
    iteration = read_number(source, "iteration", SOURCE_NUMBERS["disk"]["iteration"], "source.")
    rate = read_number(source, "max_bytes_per_second", SOURCE_NUMBERS["disk"]["max_bytes_per_second"], "source.")
    return DiskOrder(
        path=path,
        iteration=None if iteration is None else int(iteration),
        max_bytes_per_second=None if rate is None else int(rate),
    )


def _read_group(source: Mapping[str, Any]) -> Order:
    trainers = read_number(source, "trainers", SOURCE_NUMBERS["distributed"]["trainers"], "source.")
    if trainers is None:
        raise RequestRejected("source.trainers is missing", code="missing-field", param="source.trainers")
    backend = read_choice(source, "backend", BACKENDS, "gloo", "source.")
    bucket = read_number(source, "bucket_bytes", SOURCE_NUMBERS["distributed"]["bucket_bytes"], "source.")
    return GroupOrder(
        trainers=int(trainers), backend="nccl" if backend == "nccl" else "gloo", bucket_bytes=int(bucket or 0)
    )


def _read_memory(source: Mapping[str, Any]) -> Order:
    fields = {name: source[name] for name in ("segments", "shards") if name in source}
    try:
        return msgspec.convert(fields, MemoryOrder)
    except msgspec.ValidationError as error:
        text = str(error)
        place = _PLACE.search(text)
        where = f"source.{place.group(1)}" if place is not None and place.group(1) else "source"
        raise RequestRejected(f"{where}: {_PLACE.sub('', text)}", param=where) from None
