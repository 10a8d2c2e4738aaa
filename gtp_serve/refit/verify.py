"""What is looked at before new weights may serve: every element finite, and the digest of all.

One pass over memory does both.  It runs beside a serving engine: numpy's loops use one core and let go of the
interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gtp_serve.errors import UpdateFailed
from gtp_serve.layout.spans import Shard
from gtp_serve.refit.apply import Target
from gtp_serve.refit.digest import Digest, combine, head_of
from gtp_serve.refit.native_verify import native_verifier

_PIECE = 1 << 20
"""Bytes looked at in a row: they stay in a core's cache from the first look to the second."""

Words = npt.NDArray[np.unsignedinteger[npt.NBitBase]]


@dataclass(frozen=True, slots=True)
class _Bits:
    """How a type's elements lie: an unsigned integer of their size, and the bits that are all set in inf and NaN."""

    word: npt.DTypeLike
    mask: int


_BITS = {
    "bfloat16": _Bits(np.uint16, 0x7F80),
    "float16": _Bits(np.uint16, 0x7C00),
    "float32": _Bits(np.uint32, 0x7F800000),
    "float64": _Bits(np.uint64, 0x7FF0000000000000),
}


def rank_digest(targets: Sequence[Target], *, threads: int = 1, keep_on: Callable[[], None] = lambda: None) -> str:
    """Digest of one rank's parameters (see ``refit.digest``).

    :param keep_on: called between pieces; what it raises ends the work.
    """
    return _over(targets, threads, lambda target: _look(target, keep_on, finite=False))


def verify(targets: Sequence[Target], *, threads: int = 1, keep_on: Callable[[], None] = lambda: None) -> str:
    """The digest, as ``rank_digest``, of parameters that are all finite.

    :raises UpdateFailed: naming the tensor and the row of the first NaN or infinity of a parameter.
    """
    return _over(targets, threads, lambda target: _look(target, keep_on, finite=True))


def _over(targets: Sequence[Target], threads: int, look: Callable[[Target], str]) -> str:
    if threads == 1:
        return combine([look(target) for target in targets])
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        futures = [pool.submit(look, target) for target in targets]
        try:
            return combine([future.result() for future in futures])
        finally:
            for future in futures:
                future.cancel()


def _look(target: Target, keep_on: Callable[[], None], *, finite: bool) -> str:
    known = _look_native(target, finite=finite)
    if known is not None:
        keep_on()
        return known
    digest = Digest()
    digest.add(head_of(target.shard))
    bits = _BITS.get(target.shard.dtype) if finite else None
    done = 0
    for piece in _pieces(target.tensor.detach()):
        keep_on()
        digest.add(piece.data)
        if bits is not None:
            _check_finite(target.shard, piece.view(bits.word), bits.mask, done)
            done += piece.nbytes // np.dtype(bits.word).itemsize
    return digest.text()


def _look_native(target: Target, *, finite: bool) -> str | None:
    """The digest by the compiled library; None where that cannot be, or something is not finite."""
    verifier, tensor = native_verifier(), target.tensor
    if verifier is None or tensor.device.type != "cpu" or (finite and target.shard.dtype == "float64"):
        return None
    dtype = target.shard.dtype if finite else None
    found = verifier.look(head_of(target.shard), tensor.data_ptr(), tensor.nbytes, dtype)
    return found[0] if found is not None and found[1] else None


def _pieces(tensor: Tensor) -> Iterator[npt.NDArray[np.uint8]]:
    """A contiguous tensor's bytes in order, a GPU's through the host's memory."""
    flat = tensor.reshape(-1).view(torch.uint8)
    for first in range(0, flat.numel(), _PIECE):
        yield flat[first : first + _PIECE].cpu().numpy()


def _check_finite(shard: Shard, words: Words, mask: int, first: int) -> None:
    exponents = words & words.dtype.type(mask)
    if exponents.size and int(exponents.max()) == mask:
        raise _not_finite(shard, first + int(np.argmax(exponents == mask)))


def _not_finite(shard: Shard, index: int) -> UpdateFailed:
    place = tuple(int(axis) for axis in np.unravel_index(index, shard.shape)) if shard.shape else ()
    for span in shard.spans:
        offset = tuple(at - start for at, start in zip(place, span.local.start, strict=True))
        if all(0 <= at < size for at, size in zip(offset, span.local.shape, strict=True)):
            name = span.name
            place = tuple(at + start for at, start in zip(offset, span.logical.start, strict=True))
            break
    else:
        name = shard.key
    where = f"row {place[0]}" if place else "its value"
    if len(place) > 1:
        where += f" (element {list(place)})"
    return UpdateFailed(f"{name}: {where} is not a finite number", [("in", shard.key)], code="not-finite")
