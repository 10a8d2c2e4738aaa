"""What clients of other servers send: fields by name and type; fields that are not known are theirs to have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from starlette.requests import Request

from gtp_serve.errors import RequestRejected
from gtp_serve.layout.spans import Shape
from gtp_serve.refit.orders import Piece
from gtp_serve.server.body import read_json_object
from gtp_serve.server.schemas import describe

_MAX_BODY_BYTES = 64 << 20
_MAX_BODY_STRINGS = 2_000_000
"""A body may name every tensor of a model."""
_MAX_TENSORS = 100_000
_MAX_AXES = 8
_MAX_SIZE = 1 << 40

Packed = Literal["", "flattened_bucket", "vllm_packed"]


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON body; empty where there is none.

    :raises RequestRejected: for a body that is not a JSON object.
    """
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return {}
    body = await read_json_object(request, max_bytes=_MAX_BODY_BYTES, max_strings=_MAX_BODY_STRINGS)
    return {name: value for name, value in body.items() if value is not None}


def read_whole(given: Mapping[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    """A whole number."""
    value = given.get(name, default)
    if value is None:
        raise RequestRejected(f"{name} is missing", code="missing-field", param=name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RequestRejected(
            f"{name} must be a whole number from {least} to {most}, not {describe(value)}", param=name
        )
    return value


def read_string(given: Mapping[str, Any], name: str, default: str | None = None, limit: int = 4096) -> str:
    """A string that is not empty."""
    value = given.get(name, default)
    if value is None:
        raise RequestRejected(f"{name} is missing", code="missing-field", param=name)
    if not isinstance(value, str) or not 1 <= len(value) <= limit:
        raise RequestRejected(f"{name} must be a string of 1 to {limit} characters, not {describe(value)}", param=name)
    return value


def read_bool(given: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """True or false."""
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise RequestRejected(f"{name} must be true or false, not {describe(value)}", param=name)
    return value


def read_strings(given: Mapping[str, Any], name: str, most: int = _MAX_TENSORS) -> tuple[str, ...]:
    """A list of strings."""
    value = given.get(name)
    if value is None:
        raise RequestRejected(f"{name} is missing", code="missing-field", param=name)
    if not isinstance(value, list) or len(value) > most or not all(isinstance(one, str) and one for one in value):
        raise RequestRejected(f"{name} must be a list of at most {most} strings", param=name)
    return tuple(value)


def read_piece(
    given: Mapping[str, Any], *, dtypes: str, group: str, packed: Packed, bucket_bytes: int = 1 << 30
) -> Piece:
    """Which tensors come, from ``names``, ``shapes`` and the list of types under its name."""
    names = read_strings(given, "names")
    types = tuple(one.removeprefix("torch.") for one in read_strings(given, dtypes))
    shapes = _read_shapes(given)
    if not names or not len(names) == len(types) == len(shapes):
        raise RequestRejected(
            f"names, {dtypes} and shapes must have one length from 1 on, not {len(names)}, {len(types)} and "
            f"{len(shapes)}",
            param="names",
        )
    return Piece(names=names, dtypes=types, shapes=shapes, packed=packed, bucket_bytes=bucket_bytes, group=group)


def _read_shapes(given: Mapping[str, Any]) -> tuple[Shape, ...]:
    value = given.get("shapes")
    if not isinstance(value, list) or len(value) > _MAX_TENSORS or not all(map(_is_shape, value)):
        raise RequestRejected("shapes must be a list of lists of sizes", param="shapes")
    return tuple(tuple(shape) for shape in value)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_AXES and all(map(_is_size, value))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_SIZE


def first_of(given: Any, param: str) -> Mapping[str, Any]:
    """An object, or a list with the same object for each rank.

    :raises RequestRejected: when ranks are told different things: here all are told the same.
    """
    one = given[0] if isinstance(given, Sequence) and not isinstance(given, str) and given else given
    if not isinstance(one, dict):
        raise RequestRejected(f"{param} must be an object, not {describe(given)}", param=param)
    if one is not given and any(other != one for other in given):
        raise RequestRejected(f"{param} tells the ranks different things; here all take part in the same", param=param)
    return {name: value for name, value in one.items() if value is not None}
