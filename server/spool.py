"""A safetensors file that a client sends, kept in sealed memory until every rank has read it.

Its header is held against the model first: whatever is missing, unknown, misshapen or mistyped is refused by
name before a byte of a tensor is read.  A body that is too long, too slow or cut off leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from math import prod
from pathlib import Path

import xxhash

from gtp_serve.errors import CheckpointError, RequestRejected, UpdateFailed
from gtp_serve.layout.huggingface import HEAD, logical_name
from gtp_serve.layout.spans import Shape
from gtp_serve.loaders.safetensors_file import LENGTH_BYTES, MAX_HEADER_BYTES, Header, StoredTensor, parse_header
from gtp_serve.loaders.whole_tensors import Found, check_complete
from gtp_serve.refit.shared import SealedMemory
from gtp_serve.server.body import BodyTooLarge, BodyTooSlow

STREAM_TYPE = "application/octet-stream"
SILENT_SECONDS = 30.0
"""Longest wait for the next bytes."""

_DTYPES = ("F32", "BF16", "F16")
_WIDEST = 4
"""Bytes of an element."""
_WHERE = Path("the body")
_IGNORED_ENDING = ".rotary_emb.inv_freq"


class BadStream(RequestRejected):
    """The body is no safetensors file of this model."""

    default_code = "bad-stream"
    http_status = 422


class NoRoom(RequestRejected):
    """This machine has not the memory to keep the body."""

    default_code = "no-room"
    http_status = 503


async def spool(
    body: AsyncIterator[bytes],
    shapes: Mapping[str, Shape],
    *,
    length: int | None,
    digest: str,
    seconds: float,
    available: int,
    silent: float = SILENT_SECONDS,
) -> SealedMemory:
    """The whole body in memory that is sealed; the caller closes it.

    :param shapes: every tensor of the model.
    :param length: of the body, if the client said it.
    :param digest: xxh3-128 that the body must have; empty: any.
    :param seconds: for all of it.
    :param available: bytes of memory that may be taken.
    :raises RequestRejected: with what is wrong.
    """
    limit = LENGTH_BYTES + MAX_HEADER_BYTES + _WIDEST * sum(prod(shape) for shape in shapes.values())
    if length is not None and length > limit:
        raise BodyTooLarge(f"the body has {length} bytes; weights of this model have at most {limit}")
    reader = _Reader(body, silent)
    try:
        async with asyncio.timeout(seconds):
            header, start = await _read_header(reader, shapes)
            _check_size(header.size, length, available)
            return await _collect(reader, start, header.size, digest)
    except UpdateFailed as error:
        raise NoRoom(error.message, error.details) from error
    except TimeoutError:
        raise BodyTooSlow(
            f"the body did not arrive within {seconds:g} s, or nothing of it came for {silent:g} s"
        ) from None


class _Reader:
    """Chunks of a body as they are asked for: some bytes exactly, or whatever comes."""

    def __init__(self, body: AsyncIterator[bytes], silent: float) -> None:
        self._body = body
        self._silent = silent
        self._kept = bytearray()

    async def some(self) -> bytes:
        """The next bytes; none at the end."""
        if self._kept:
            kept, self._kept = bytes(self._kept), bytearray()
            return kept
        while True:
            try:
                async with asyncio.timeout(self._silent):
                    chunk = await anext(self._body)
            except StopAsyncIteration:
                return b""
            if chunk:
                return chunk

    async def exactly(self, count: int) -> bytes:
        """So many bytes; fewer at the end."""
        found = bytearray()
        while len(found) < count and (chunk := await self.some()):
            found += chunk
        self._kept = found[count:]
        return bytes(found[:count])


async def _read_header(reader: _Reader, shapes: Mapping[str, Shape]) -> tuple[Header, bytes]:
    """The header and the bytes so far."""
    prefix = await reader.exactly(LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < LENGTH_BYTES or not 2 <= length <= MAX_HEADER_BYTES:
        raise BadStream(
            "the body is not a safetensors file: it does not begin with the length of a header",
            [("limit", f"{MAX_HEADER_BYTES} bytes of header")],
        )
    raw = await reader.exactly(length)
    if len(raw) < length:
        raise BadStream(f"the body ends in its header, after {LENGTH_BYTES + len(raw)} bytes", code="cut-off")
    return await asyncio.to_thread(check_header, raw, shapes), prefix + raw


def check_header(raw: bytes, shapes: Mapping[str, Shape]) -> Header:
    """A header that names every tensor of the model once, in its shape and as floating-point numbers.

    :raises BadStream: naming what is wrong.
    """
    try:
        header = parse_header(_WHERE, raw)
        found: dict[str, Found] = {}
        for name, tensor in header.tensors.items():
            if name.endswith(_IGNORED_ENDING):
                continue
            _check_type(tensor)
            logical = logical_name(name)
            if logical in found:
                raise BadStream(f"{name} comes twice", code="doubled-tensor", param=name[:128])
            found[logical] = Found(name, tensor.shape, _WHERE)
        if HEAD in found and HEAD not in shapes:
            raise BadStream(
                f"{HEAD} is unknown: this model's output head is its embedding",
                [("try", "leave it out")],
                code="unknown-tensor",
                param=HEAD,
            )
        check_complete(found, shapes, _WHERE)
    except CheckpointError as error:
        raise BadStream(error.message, error.details, code=error.code) from None
    return header


def _check_type(tensor: StoredTensor) -> None:
    if tensor.kind not in _DTYPES:
        raise BadStream(
            f"{tensor.name[:128]} has the element type {tensor.kind}",
            [("possible", ", ".join(_DTYPES))],
            code="wrong-dtype",
            param=tensor.name[:128],
        )


def _check_size(size: int, length: int | None, available: int) -> None:
    if length is not None and length != size:
        raise BadStream(
            f"the body has {length} bytes, its header tells of {size}", code="cut-off" if length < size else "too-long"
        )
    if size > available:
        raise NoRoom(
            f"the body needs {size >> 20} MiB of memory, {available >> 20} MiB are free",
            [("try", "a path on the server's disk, or torch.distributed: neither is kept twice")],
        )


async def _collect(reader: _Reader, start: bytes, size: int, digest: str) -> SealedMemory:
    hashed = xxhash.xxh3_128(start)
    with contextlib.ExitStack() as undo:
        memory = undo.enter_context(SealedMemory(size))
        memory.write(0, start)
        done = len(start)
        while chunk := await reader.some():
            if done + len(chunk) > size:
                raise BadStream(f"the body goes on after the {size} bytes that its header tells of", code="too-long")
            memory.write(done, chunk)
            hashed.update(chunk)
            done += len(chunk)
        if done < size:
            raise BadStream(f"the body ends after {done} of {size} bytes", code="cut-off")
        if digest and hashed.hexdigest() != digest:
            raise BadStream(
                f"the body's xxh3-128 is {hashed.hexdigest()}, not {digest}", code="digest-mismatch", param="digest"
            )
        memory.seal()
        undo.pop_all()
        return memory
