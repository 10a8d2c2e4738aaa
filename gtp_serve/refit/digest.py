"""Digests of bytes, of one rank's parameters, and of a model on all its ranks: xxh3-128, 32 hexadecimal digits.

A rank's digest covers name, shape, type and bytes of every parameter in order, padding included, so that a cold load
and a refit of the same weights have the same one.  No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import xxhash

from gtp_serve.layout.spans import Shard

Data = bytes | bytearray | memoryview


def digest_bytes(data: Data) -> str:
    """Of one run of bytes."""
    return xxhash.xxh3_128_hexdigest(data)


class Digest:
    """Of bytes that come piece by piece."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def add(self, data: Data) -> None:
        """The next piece."""
        self._state.update(data)

    def text(self) -> str:
        """Of all pieces so far."""
        return self._state.hexdigest()


def head_of(shard: Shard) -> bytes:
    """What stands for a parameter's name, shape and type: no two heads run into one another."""
    return "\0".join([shard.key, shard.dtype, *map(str, shard.shape), "\n"]).encode()


def digest_parameter(shard: Shard, pieces: Iterable[Data]) -> str:
    """Of one parameter: what it is, then its bytes."""
    digest = Digest()
    digest.add(head_of(shard))
    for piece in pieces:
        digest.add(piece)
    return digest.text()


def combine(digests: Sequence[str]) -> str:
    """Of a rank from its parameters', or of a model from its ranks', in order."""
    return digest_bytes("".join(digests).encode())
