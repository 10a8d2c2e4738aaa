"""Matrix products whose rows do not depend on what is computed beside them, to the last bit.

A matrix library chooses its order of summation by the shape of the product.  So rows are computed in tiles of a few
fixed sizes, and which sizes may be mixed is not assumed but found out on this machine, once for each shape.
Legend: T rows, I input features, O output features, R rows of a tile, B matrices of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_serve.errors import EnvironmentFault

TILE_ROWS = (1, 4, 16, 64)
"""Sizes that are tried."""
_MIDDLE = 16
"""Preferred when no two sizes agree."""
_SHARED_ROWS = 16
"""Rows of the probe that every size computes."""
_PROBED_BATCHES = (2, 7, 33)

Product = Callable[[Tensor], Tensor]


class Tiles:
    """Products of one process; remembers what it found out about each shape."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._joined: dict[tuple[object, ...], bool] = {}

    def linear(self, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``; a row's bits depend on that row and the weight alone.

        :raises EnvironmentFault: when this machine's matrix library cannot keep that for any tile size.
        """
        sizes = self._sizes_for(weight_OI, bias_O)
        rows = x_TI.shape[0]
        parts = [F.linear(_tile(x_TI, first, size), weight_OI, bias_O) for first, size in cut(rows, sizes)]
        return torch.cat(parts)[:rows] if parts else F.linear(x_TI, weight_OI, bias_O)

    def bmm(self, a_BTI: Tensor, b_BIO: Tensor) -> Tensor:
        """Product of each pair of matrices; a row's bits do not depend on the other rows or the other pairs.

        :param a_BTI: of one number of rows T throughout the caller's life: it is the tile.
        """
        key = (a_BTI.shape[1:], b_BIO.shape[1:], a_BTI.dtype, a_BTI.device)
        if key not in self._joined:
            self._joined[key] = _probe_bmm(a_BTI, b_BIO)
        if self._joined[key]:
            return torch.bmm(a_BTI, b_BIO)
        alone = [torch.bmm(a_BTI[i : i + 1].clone(), b_BIO[i : i + 1].clone()) for i in range(a_BTI.shape[0])]
        return torch.cat(alone)

    def _sizes_for(self, weight_OI: Tensor, bias_O: Tensor | None) -> tuple[int, ...]:
        key = (weight_OI.shape, weight_OI.dtype, weight_OI.device, bias_O is None)
        if key not in self._sizes:
            self._sizes[key] = find_sizes(weight_OI, with_bias=bias_O is not None)
        return self._sizes[key]


def cut(rows: int, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first row, size) of tiles that cover ``rows``, the largest first; the last one may stick out by half.

    :param sizes: ascending.
    """
    first = 0
    for size in reversed(sizes):
        while rows - first > size // 2:
            yield first, size
            first += size
    if first < rows:
        yield first, sizes[0]


def _tile(x_TI: Tensor, first: int, size: int) -> Tensor:
    """These rows in memory of their own, so that all tiles are aligned alike; zeros where there are none."""
    rows_RI = x_TI[first : first + size]
    missing = size - rows_RI.shape[0]
    return F.pad(rows_RI, (0, 0, 0, missing)) if missing else rows_RI.clone(memory_format=torch.contiguous_format)


def find_sizes(weight_OI: Tensor, *, with_bias: bool) -> tuple[int, ...]:
    """Tile sizes, ascending, that give a row the same bits at any place of a tile and among one another.

    :param weight_OI: its shape, dtype and device count, not its values.
    :raises EnvironmentFault: when there is none.
    """
    x_TI, probe_OI = _cancelling(weight_OI, TILE_ROWS[-1])
    bias_O = probe_OI[:, 0].clone() if with_bias else None

    def product(rows_RI: Tensor) -> Tensor:
        return F.linear(rows_RI, probe_OI, bias_O)

    found = {size: _steady(product, x_TI[: max(size, _SHARED_ROWS)], size) for size in TILE_ROWS}
    steady = {size: y_TO[:_SHARED_ROWS] for size, y_TO in found.items() if y_TO is not None}
    groups = [tuple(b for b, y in steady.items() if torch.equal(x, y)) for x in steady.values()]
    if not groups:
        raise EnvironmentFault(
            f"the matrix library of this machine gives a row of a {tuple(weight_OI.shape)} product other bits at "
            "another place of a tile, so --deterministic cannot be kept",
            [("torch", torch.__version__), ("try", "another --dtype, or leave --deterministic out")],
        )
    return max(groups, key=lambda group: (len(group), _MIDDLE in group))


def _steady(product: Product, x_TI: Tensor, size: int) -> Tensor | None:
    """The product in tiles; None when a row's place in its tile or its neighbours change it."""
    y_TO = _in_tiles(product, x_TI, size)
    for shift in {1, size // 2 + 1}:
        moved_TO = _in_tiles(product, x_TI.roll(shift, 0), size)
        if not torch.equal(moved_TO, y_TO.roll(shift, 0)):
            return None
    return y_TO


def _in_tiles(product: Product, x_TI: Tensor, size: int) -> Tensor:
    return torch.cat([product(x_TI[first : first + size].clone()) for first in range(0, x_TI.shape[0], size)])


def _cancelling(like_OI: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows [rows, I] and a matrix [O, I] whose product is nothing but rounding error.

    Each term has its opposite somewhere else, so another order of summation shows in nearly every element, also
    where results are rounded to fewer bits afterwards.
    """
    outputs, inputs = like_OI.shape
    device, dtype, pairs = like_OI.device, like_OI.dtype, inputs // 2
    generator = torch.Generator(device).manual_seed(inputs)
    places = torch.randperm(inputs, generator=generator, device=device)
    x_TI = torch.zeros(rows, inputs, dtype=dtype, device=device)
    matrix_OI = torch.zeros(outputs, inputs, dtype=dtype, device=device)
    scale_P = torch.randint(-6, 7, (pairs,), generator=generator, device=device).float().exp2()
    half_TP = (torch.randn(rows, pairs, generator=generator, device=device) * scale_P).to(dtype)
    half_OP = torch.randn(outputs, pairs, generator=generator, device=device).to(dtype)
    x_TI[:, places[:pairs]], x_TI[:, places[pairs : 2 * pairs]] = half_TP, half_TP
    matrix_OI[:, places[:pairs]], matrix_OI[:, places[pairs : 2 * pairs]] = half_OP, -half_OP
    return x_TI, matrix_OI


def _probe_bmm(a_BTI: Tensor, b_BIO: Tensor) -> bool:
    """Whether pairs may be multiplied together.

    :raises EnvironmentFault: when not even one pair alone is steady.
    """
    rows, outputs = a_BTI.shape[1], b_BIO.shape[2]
    like_OI = a_BTI.new_empty(outputs, b_BIO.shape[1])
    x_TI, matrix_OI = _cancelling(like_OI, rows)
    b_1IO = matrix_OI.T.contiguous()[None]
    alone_TO = _steady(lambda tile_RI: torch.bmm(tile_RI[None], b_1IO)[0], x_TI, rows)
    if alone_TO is None:
        raise EnvironmentFault(
            f"the matrix library of this machine gives a row of a {rows} by {outputs} product other bits at another "
            "place, so --deterministic cannot be kept",
            [("torch", torch.__version__)],
        )
    joined = [torch.bmm(x_TI.repeat(n, 1, 1), b_1IO.repeat(n, 1, 1)) for n in _PROBED_BATCHES]
    return all(torch.equal(y_TO, alone_TO) for y_BTO in joined for y_TO in y_BTO)
