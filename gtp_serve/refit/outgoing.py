"""Weights on their way out of a trainer without a group: sealed memory on this machine, or one safetensors stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import msgspec
import numpy as np

from gtp_serve.errors import UpdateRefused
from gtp_serve.layout.spans import Box, Shape, Shard, Span
from gtp_serve.refit.digest import digest_bytes
from gtp_serve.refit.offer import Offer
from gtp_serve.refit.orders import StoredShard
from gtp_serve.refit.plan import ITEM_BYTES, item_bytes
from gtp_serve.refit.shared import SealedMemory, lay_out
from gtp_serve.refit.transports.shares import sole_owners

_SAFETENSORS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def fill_segment(offered: Offer, owned: Sequence[Shard]) -> tuple[SealedMemory | None, list[StoredShard]]:
    """Write what a rank is to give into memory once; not sealed yet.  None when there is nothing to give.

    :param owned: the offer's shards with only those spans that this rank gives.
    """
    pieces = [(index, span) for index, shard in enumerate(owned) for span in shard.spans]
    shards = [_piece(owned[index], span) for index, span in pieces]
    starts, size = lay_out(shards)
    if not size:
        return None, []
    memory = SealedMemory(size, reserve=True)
    stored: list[StoredShard] = []
    try:
        for at, ((index, span), shard) in enumerate(zip(pieces, shards, strict=True)):
            data = np.empty(prod(shard.shape) * item_bytes(shard), np.uint8)
            offered.copy(index, span.local, data)
            memory.write(starts[at], data.data)
            stored.append(StoredShard(shard=shard, segment=0, offset=starts[at], digest=digest_bytes(data.data)))
    except BaseException:
        memory.close()
        raise
    return memory, stored


def _piece(shard: Shard, span: Span) -> Shard:
    """A shard that is one span and nothing else."""
    return replace(shard, shape=span.local.shape, spans=(Span(span.name, Box.whole(span.local.shape), span.logical),))


class Stream:
    """All logical tensors of one rank's offer as a safetensors file, made piece by piece.

    :raises UpdateRefused: for a type that such a stream does not take.
    :raises LayoutMismatch: for spans that do not fit the model.
    """

    def __init__(self, offered: Offer, shapes: Mapping[str, Shape]) -> None:
        self._offered = offered
        self._owned = sole_owners([offered.shards()], shapes)[0]
        self._held: dict[str, list[tuple[int, Span]]] = {}
        for index, shard in enumerate(self._owned):
            for span in shard.spans:
                self._held.setdefault(span.name, []).append((index, span))
        header: dict[str, object] = {}
        end = 0
        for name, held in self._held.items():
            dtype = self._owned[held[0][0]].dtype
            if dtype not in _SAFETENSORS:
                raise UpdateRefused(
                    f"{name} is {dtype}", [("needed", ", ".join(_SAFETENSORS))], code="weights-mismatch"
                )
            size = prod(shapes[name]) * ITEM_BYTES[dtype]
            header[name] = {
                "dtype": _SAFETENSORS[dtype],
                "shape": list(shapes[name]),
                "data_offsets": [end, end + size],
            }
            end += size
        raw = msgspec.json.encode(header)
        raw += b" " * (-len(raw) % 8)
        self._head = len(raw).to_bytes(8, "little") + raw
        self._shapes = shapes
        self.payload_bytes = end
        self.size = len(self._head) + end
        """Of the whole file."""

    def pieces(self) -> Iterator[bytes]:
        """The file, one tensor at a time."""
        yield self._head
        for name, held in self._held.items():
            item = item_bytes(self._owned[held[0][0]])
            whole = np.empty((*self._shapes[name], item), np.uint8)
            for index, span in held:
                part = np.empty((*span.local.shape, item), np.uint8)
                self._offered.copy(index, span.local, part.reshape(-1))
                whole[tuple(slice(a, b) for a, b in zip(span.logical.start, span.logical.stop, strict=True))] = part
            yield whole.tobytes()
