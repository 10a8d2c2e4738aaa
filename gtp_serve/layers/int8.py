"""Weights as int8 with one scale for each row, derived from the parameters and kept beside them.

The parameters stay what they are, for updates, digests and whoever reads them back; products read the derived form.
Rows are symmetric: ``w ~ scale * q`` with ``scale = max |w| / 127`` and q rounded to the nearest, ties to even.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gtp_serve.native_library import open_library
from gtp_serve.refit.arena import Arena, open_arena

_ALIGNMENT = 256
_PIECE = 1 << 20
"""Elements that are derived at a time: they stay in the cache, and a deadline is looked at after each."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Where one matrix's rows and scales begin."""

    rows: int
    scales: int


def quantise(matrix: Tensor, rows: Tensor, scales: Tensor) -> None:
    """Write the int8 form of a matrix.

    :param matrix: [N, K], of a floating type, finite.
    :param rows: [N, K] int8.
    :param scales: [N] float32; 0 for a row of zeros, and of numbers whose scale would have no inverse.
    """
    wide = matrix.float()
    largest = wide.abs().amax(1)
    torch.mul(largest, 1 / 127, out=scales)
    scales[scales < torch.finfo(torch.float32).tiny] = 0
    inverse = torch.where(scales > 0, 1 / scales, 0.0)
    # The largest element of a row may round to 127.00001.
    rows.copy_((wide * inverse[:, None]).round_().clamp_(-127, 127))


def quantise_natively(matrix: Tensor, rows: Tensor, scales: Tensor) -> bool:
    """The same by the compiled library, bit for bit; False, and nothing written, for what it does not do."""
    function = _native()
    if function is None or matrix.dtype not in (torch.bfloat16, torch.float32) or matrix.stride(1) != 1:
        return False
    count, columns = matrix.shape
    bf16 = matrix.dtype == torch.bfloat16
    function(matrix.data_ptr(), bf16, count, columns, matrix.stride(0), rows.data_ptr(), scales.data_ptr())
    return True


@cache
def _native() -> Any:
    library = open_library()
    if library is None or not hasattr(library, "gtp_quantise"):
        return None
    function = library.gtp_quantise
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    function.argtypes, function.restype = (pointer, count, count, count, count, pointer, pointer), None
    return function


class Int8Weights:
    """The int8 form of some parameters: of the set that serves and of the one beside it.

    :param matrices: live parameters, [.., K] each; a stack of matrices is its rows, one below the other.
    :param table: takes, by the address of each live parameter, its rows (of its shape) and scales (without the last
        axis), whose addresses never change.
    """

    def __init__(self, matrices: Sequence[Tensor], table: MutableMapping[int, tuple[Tensor, Tensor]]) -> None:
        self._places: dict[int, _Place] = {}
        end = 0
        for matrix in matrices:
            rows, scales = end, end + _rounded(matrix.numel())
            end = scales + _rounded(4 * matrix.numel() // matrix.shape[-1])
            self._places[matrix.data_ptr()] = _Place(rows, scales)
        self.num_bytes = end
        self._arena: Arena = open_arena(end, torch.device("cpu"))
        for matrix in matrices:
            table[matrix.data_ptr()] = self._form(self._arena.live, self._places[matrix.data_ptr()], matrix)

    def make(self, live: Tensor, source: Tensor, *, staged: bool, keep_on: Callable[[], None]) -> None:
        """Derive one parameter's form anew; one that has none is passed over.

        :param live: the parameter.
        :param source: its values: itself, or what stands for it in the staged set.
        :param staged: write beside what serves.
        :param keep_on: called again and again; may raise.
        """
        place = self._places.get(live.data_ptr())
        if place is None:
            return
        rows, scales = self._form(self._arena.staged if staged else self._arena.live, place, live)
        flat, to_rows, to_scales = source.detach().flatten(0, -2), rows.flatten(0, -2), scales.flatten()
        step = max(1, _PIECE // flat.shape[1])
        for first in range(0, flat.shape[0], step):
            keep_on()
            piece = slice(first, first + step)
            form = flat[piece], to_rows[piece], to_scales[piece]
            if not quantise_natively(*form):
                quantise(*form)

    @staticmethod
    def _form(take: Callable[[int, Tensor], Tensor], place: _Place, like: Tensor) -> tuple[Tensor, Tensor]:
        rows = take(place.rows, torch.empty(like.shape, dtype=torch.int8, device="meta"))
        return rows, take(place.scales, torch.empty(like.shape[:-1], dtype=torch.float32, device="meta"))

    def swap(self) -> None:
        """Exchange the two sets' contents."""
        self._arena.swap()

    def release_live(self) -> int:
        """Give its memory back; bytes given back."""
        return self._arena.release_live()

    def release_staged(self) -> int:
        """The same of the other set."""
        return self._arena.release_staged()


def _rounded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
