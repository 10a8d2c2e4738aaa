"""What ``/openapi.json`` says of the routes that change weights: ours from the tables that they are read with and from
the structs that they are answered with, other servers' as their clients send them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from gtp_serve.refit.orders import InFlight, Memory, MemoryOrder, PauseMode, UpdateRecord, WeightsStatus
from gtp_serve.server.compat.base import MAX_LABEL_CHARS
from gtp_serve.server.compat.sglang import MAX_ROWS
from gtp_serve.server.openapi_bodies import number_schema, object_schema
from gtp_serve.server.spool import STREAM_TYPE
from gtp_serve.server.update_fields import (
    BACKENDS,
    DIGEST,
    ID,
    JSON_FIELDS,
    MAX_VERSION_CHARS,
    NUMBERS,
    SOURCE_NUMBERS,
    SOURCES,
    STREAM_FIELDS,
)

Schema = dict[str, Any]

_FLAG: Schema = {"type": "boolean"}
_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": 4096}
_LABEL: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_LABEL_CHARS}
_VERSION: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_VERSION_CHARS, "pattern": "^[!-~]+$"}
_IN_FLIGHT: Schema = {
    "enum": list(get_args(InFlight)),
    "default": "keep",
    "description": "what becomes of running requests",
}


def _inlined(kind: Any) -> Schema:
    """The schema of a struct, without references."""
    (schema,), parts = msgspec.json.schema_components([kind], ref_template="{name}")

    def resolved(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolved(parts[value["$ref"]])
            found = {name: resolved(one) for name, one in value.items()}
            # A tuple of one type is said as a list, which readers of such documents understand better.
            kinds = found.pop("prefixItems", None)
            return found if kinds is None else {**found, "items": kinds[0]}
        return [resolved(one) for one in value] if isinstance(value, list) else value

    return dict(resolved(schema))


def _sources() -> list[Schema]:
    texts: Mapping[str, Schema] = {
        "path": {"type": "string", "pattern": "^/", "maxLength": 4096, "description": "on the server's machine"},
        "backend": {"enum": list(BACKENDS), "default": BACKENDS[0]},
        **{name: one for name, one in _inlined(MemoryOrder)["properties"].items() if name in SOURCES["memory"]},
    }
    needed = {"disk": ("path",), "distributed": ("trainers",), "memory": ("segments", "shards")}
    found = []
    for kind, names in SOURCES.items():
        others = {
            name: {"const": kind} if name == "kind" else texts[name]
            for name in names
            if name not in SOURCE_NUMBERS[kind]
        }
        found.append(object_schema(SOURCE_NUMBERS[kind], others, {}, required=("kind", *needed[kind])))
    return found


_UPDATE_TEXTS: Mapping[str, Schema] = {
    "version": _VERSION,
    "base": {**_VERSION, "description": "the version that must be serving now"},
    "in_flight": _IN_FLIGHT,
    "commit": {"enum": ["auto", "manual"], "default": "auto"},
    "memory": {"enum": list(get_args(Memory)), "description": "as the server was started, when left out"},
    "id": {"type": "string", "pattern": f"^{ID}$"},
    "digest": {"type": "string", "pattern": f"^{DIGEST}$", "description": "xxh3-128 of the body"},
}


def _update() -> Schema:
    texts = {name: schema for name, schema in _UPDATE_TEXTS.items() if name in JSON_FIELDS}
    return object_schema(NUMBERS, {**texts, "source": {"oneOf": _sources()}}, {}, required=("version", "source"))


_WAIT: Mapping[str, Schema] = {"wait": number_schema(NUMBERS["wait"])}


def _small(**fields: Schema) -> Schema:
    """A body of few fields, which may be left out as a whole."""
    return object_schema({}, fields, {})


_OURS: Mapping[str, Schema] = {
    "/weights/updates": _update(),
    "/weights/updates/{id}/commit": _small(**_WAIT),
    "/weights/updates/{id}/abort": _small(reason={"type": "string", "minLength": 1, "maxLength": 200}),
    "/weights/rollback": _small(in_flight=_IN_FLIGHT, **_WAIT),
    "/pause": _small(
        mode={"enum": list(get_args(PauseMode)), "default": "abort"},
        clear_cache={"description": "not looked at: a cache is never stale"},
        wait_for_inflight_requests={**_FLAG, "description": "mode: wait by an older name"},
    ),
    "/resume": _small(),
}


def _theirs(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    """A body of another server's clients: they may send more."""
    plain = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]} for name, schema in fields.items()
    }
    return {"type": "object", "properties": plain, **({"required": [*required]} if required else {})}


_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_OFFSET: Schema = {"type": "integer", "minimum": 1, "maximum": 100_000}
_WORLD: Schema = {"type": "integer", "minimum": 2, "maximum": 100_000}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 256}
_TEXTS: Schema = {"type": "array", "items": {"type": "string", "minLength": 1}}
_SIZES: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 1 << 40}, "maxItems": 8}
_SHAPES: Schema = {"type": "array", "items": _SIZES}
_SELECTOR: Schema = {"enum": ["all", "target"], "default": "all"}
_TAGS: Schema = {"type": "array", "items": {"enum": ["weights", "kv_cache", "cuda_graph"]}, "maxItems": 16}
_MEMORY = _theirs(tags=_TAGS)
_PICKLES: Schema = {"type": "object", "description": "refused: tensors would come as pickles"}
_INIT_INFO = _theirs(
    ("rank_offset", "world_size"),
    master_address=_NAME,
    master_port=_PORT,
    rank_offset=_OFFSET,
    world_size=_WORLD,
    nccl_unique_id_b64=_TEXT,
    packed=_FLAG,
    packed_buffer_size_bytes={"type": "integer", "minimum": 1, "maximum": 1 << 40},
)
_UPDATE_INFO = _theirs(names=_TEXTS, dtype_names=_TEXTS, shapes=_SHAPES, packed=_FLAG)
_COMPAT: Mapping[str, Schema] = {
    "/update_weights_from_disk": _theirs(
        ("model_path",),
        model_path=_TEXT,
        load_format={"enum": ["auto", "safetensors"], "default": "auto"},
        weight_version=_LABEL,
        keep_pause=_FLAG,
        abort_all_requests=_FLAG,
    ),
    "/init_weights_update_group": _theirs(
        ("master_address", "master_port", "rank_offset", "world_size"),
        master_address=_NAME,
        master_port=_PORT,
        rank_offset=_OFFSET,
        world_size=_WORLD,
        group_name=_NAME,
        backend={"enum": ["nccl", "gloo"], "default": "nccl"},
    ),
    "/destroy_weights_update_group": _theirs(group_name=_NAME),
    "/begin_weight_update": _theirs(selector=_SELECTOR),
    "/end_weight_update": _theirs(selector=_SELECTOR),
    "/update_weights_from_distributed": _theirs(
        ("names", "dtypes", "shapes"),
        names={**_TEXTS, "minItems": 1},
        dtypes={**_TEXTS, "minItems": 1},
        shapes={**_SHAPES, "minItems": 1},
        group_name=_NAME,
        load_format={"enum": ["none", "flattened_bucket"], "default": "none"},
        weight_version=_LABEL,
        abort_all_requests=_FLAG,
        selector=_SELECTOR,
    ),
    "/update_weights_from_tensor": _PICKLES,
    "/update_weights_from_ipc": _PICKLES,
    "/update_weight_version": _theirs(("new_version",), new_version=_LABEL, abort_all_requests=_FLAG),
    "/get_weights_by_name": _theirs(
        ("name",), name=_TEXT, truncate_size={"type": "integer", "minimum": 0, "maximum": MAX_ROWS, "default": 100}
    ),
    "/weights_checker": _theirs(
        action={"enum": ["checksum", "snapshot", "compare", "reset_tensors"], "default": "checksum"},
        selector=_SELECTOR,
    ),
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/flush_cache": _theirs(),
    "/abort_request": _theirs(rid=_TEXT, abort_all=_FLAG),
    "/pause_generation": _theirs(mode={"enum": ["abort", "retract", "in_place"], "default": "abort"}),
    "/continue_generation": _theirs(),
    "/abort_requests": _theirs(request_ids={**_TEXTS, "description": "empty: all of them"}),
    "/init_weight_transfer_engine": _theirs(
        ("init_info",), init_info={"anyOf": [_INIT_INFO, {"type": "array", "items": _INIT_INFO, "minItems": 1}]}
    ),
    "/shutdown_weight_transfer_engine": _theirs(),
    "/start_weight_update": _theirs(
        is_checkpoint_format={"const": True}, include_draft={"const": False, "description": "there is no draft model"}
    ),
    "/update_weights": {
        "anyOf": [
            _theirs(("weight_dir",), weight_dir=_TEXT),
            _theirs(
                ("update_info",),
                update_info={"anyOf": [_UPDATE_INFO, {"type": "array", "items": _UPDATE_INFO, "minItems": 1}]},
            ),
        ]
    },
    "/finish_weight_update": _theirs(weight_version=_LABEL),
    "/weight_checker": {
        "anyOf": [
            _theirs(("action",), action={"enum": ["checksum", "reset"]}),
            _theirs(
                ("action", "baseline"),
                action={"const": "compare"},
                baseline={"type": "object", "description": "digests by rank"},
            ),
        ]
    },
    "/reset_prefix_cache": _theirs(),
    "/sleep": _theirs(),
    "/wake_up": _theirs(),
}
#: Bodies by path.
WEIGHT_BODIES: Mapping[str, Schema] = {**_OURS, **_COMPAT}

_RECORD = _inlined(UpdateRecord)
#: Answers by path, and the statuses that they come with.
WEIGHT_REPLIES: Mapping[str, tuple[tuple[str, ...], Schema]] = {
    "/weights": (("200",), _inlined(WeightsStatus)),
    "/weights/updates": (("200", "202"), _RECORD),
    "/weights/updates/{id}": (("200", "202"), _RECORD),
    "/weights/updates/{id}/commit": (("200", "202"), _RECORD),
    "/weights/updates/{id}/abort": (("200", "202"), _RECORD),
    "/weights/rollback": (("200", "202"), _RECORD),
    "/weights/checksum": (("200",), {"type": "object"}),
    "/weights/layout": (("200",), {"type": "object"}),
    "/pause": (("200",), {"type": "object", "required": ["status", "mode"]}),
    "/resume": (("200",), {"type": "object", "required": ["status"]}),
}


def _query(name: str, schema: Schema, *, required: bool = False) -> Schema:
    return {"name": name, "in": "query", "required": required, "schema": schema}


#: Queries by path and method.
WEIGHT_QUERIES: Mapping[tuple[str, str], tuple[Schema, ...]] = {
    ("/weights/updates/{id}", "GET"): (_query("wait", _WAIT["wait"]),),
    ("/sleep", "POST"): (
        _query("level", {"enum": [0, 1, 2], "default": 1}),
        _query("mode", {"enum": ["abort", "wait", "keep"], "default": "abort"}),
    ),
    ("/wake_up", "POST"): (
        _query("tags", {"type": "array", "items": {"enum": ["weights", "kv_cache", "scheduling"]}}),
    ),
    ("/flush_cache", "GET"): (_query("timeout", {"type": "number", "minimum": 0, "description": "not waited for"}),),
    ("/flush_cache", "POST"): (_query("timeout", {"type": "number", "minimum": 0, "description": "not waited for"}),),
}
#: Bodies that are no JSON: type and, for the reader, which fields then come in the query.
WEIGHT_STREAMS: Mapping[str, tuple[str, Schema]] = {
    "/weights/updates": (
        STREAM_TYPE,
        {
            "type": "string",
            "format": "binary",
            "description": "a safetensors file; in the query: " + ", ".join(STREAM_FIELDS),
        },
    ),
}
