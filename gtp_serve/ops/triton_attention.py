"""Attention of single tokens over the paged cache, as two Triton kernels.

A row's keys are cut into pieces whose length depends on that row's length alone, and the pieces are joined
in order: a row's bits do not depend on the batch, on the width of the tables, or on capture.
Legend: R query rows, H query heads, K KV heads, G = H / K, E head size, N cache blocks of P positions,
B blocks per table, C pieces.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gtp_serve.ops.triton_jit import INTERPRETED, kernel, power_of_two, row_stride

_TILE = 64
"""Keys read at once, and half as many where a key has more than _WIDE_KEY bytes."""
_WIDE_KEY = 512
_PIECE = 256
"""Least keys of a piece."""
_PIECES = 64
"""Most pieces of a row: from _PIECE x _PIECES keys on, pieces grow."""
_DOT = 16
"""Least rows of a matrix product."""


def paged_attention(
    q_RHE: Tensor,
    keys_NPKE: Tensor,
    values_NPKE: Tensor,
    tables_RB: Tensor,
    lengths_R: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    """See ``paged.paged_attention``.  Products are of the cache's dtype, sums are float32."""
    rows, heads, size = q_RHE.shape
    block_size, kv_heads = keys_NPKE.shape[1:3]
    if not (keys_NPKE.is_contiguous() and values_NPKE.is_contiguous()):
        raise ValueError("a cache that is not contiguous cannot be read by slot")
    longest = tables_RB.shape[1] * block_size
    columns = power_of_two(size, _DOT)
    tile = _TILE if columns * keys_NPKE.element_size() <= _WIDE_KEY else _TILE // 2
    pieces = min(_PIECES, -(-min(longest, window or longest) // _PIECE))
    parts_RHCE = torch.empty((rows, heads, pieces, size), dtype=torch.float32, device=q_RHE.device)
    sums_RHC = torch.empty((rows, heads, pieces), dtype=torch.float32, device=q_RHE.device)
    out_RHE = torch.empty(q_RHE.shape, dtype=q_RHE.dtype, device=q_RHE.device)
    if rows:
        _attend_to_piece[(rows, kv_heads, pieces)](
            q_RHE,
            keys_NPKE,
            values_NPKE,
            tables_RB,
            lengths_R,
            parts_RHCE,
            sums_RHC,
            row_stride(q_RHE),
            row_stride(tables_RB),
            scale,
            pieces,
            BLOCK=block_size,
            KV_HEADS=kv_heads,
            GROUP=heads // kv_heads,
            SIZE=size,
            WINDOW=window or 0,
            ROWS=power_of_two(heads // kv_heads, _DOT),
            COLUMNS=columns,
            TILE=tile,
            PIECE=_PIECE,
            PIECES=_PIECES,
            WIDE=INTERPRETED,
            enable_fp_fusion=False,
            num_warps=4,
            num_stages=2,
        )
        _join_pieces[(rows, heads)](
            parts_RHCE,
            sums_RHC,
            lengths_R,
            out_RHE,
            heads,
            pieces,
            SIZE=size,
            COLUMNS=columns,
            WINDOW=window or 0,
            TILE=tile,
            PIECE=_PIECE,
            PIECES=_PIECES,
            enable_fp_fusion=False,
            num_warps=1,
        )
    return out_RHE


@kernel
def _attend_to_piece(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    parts: tl.tensor,
    sums: tl.tensor,
    q_stride: int,
    table_stride: int,
    scale: float,
    pieces: int,
    BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """The G heads of one KV head over one piece: the normalised result and the log of its sum."""
    row, kv_head, piece = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    seen = length
    if WINDOW > 0:
        seen = tl.minimum(length, WINDOW)
    step = tl.maximum(PIECE, tl.cdiv(tl.cdiv(seen, PIECES), TILE) * TILE)
    first = length - seen + piece * step
    last = tl.minimum(first + step, length)
    if first < last:
        head = kv_head * GROUP + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        real_head, real_column = tl.arange(0, ROWS) < GROUP, column < SIZE
        real = real_head[:, None] & real_column[None, :]
        query = tl.load(q + row * q_stride + head[:, None] * SIZE + column[None, :], mask=real, other=0.0)
        if WIDE:
            query = query.to(tl.float32)
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(first, last, TILE):
            position = start + tl.arange(0, TILE)
            visible = position < last
            block = tl.load(tables + row * table_stride + position // BLOCK, mask=visible, other=0)
            place = ((block * BLOCK + position % BLOCK) * KV_HEADS + kv_head) * SIZE
            mine = visible[:, None] & real_column[None, :]
            key = tl.load(keys + place[:, None] + column[None, :], mask=mine, other=0.0)
            value = tl.load(values + place[:, None] + column[None, :], mask=mine, other=0.0)
            if WIDE:
                key, value = key.to(tl.float32), value.to(tl.float32)
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            scores = tl.where(visible[None, :], scores, float("-inf"))
            higher = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp(scores - higher[:, None])
            shrink = tl.exp(largest - higher)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            total = total * shrink + tl.sum(weights, axis=1)
            largest = higher
        target = (row * KV_HEADS * GROUP + head) * pieces + piece
        tl.store(parts + target[:, None] * SIZE + column[None, :], mixed / total[:, None], mask=real)
        tl.store(sums + target, largest + tl.log(total), mask=real_head)


@kernel
def _join_pieces(
    parts: tl.tensor,
    sums: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    heads: int,
    pieces: int,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    PIECE: tl.constexpr,
    PIECES: tl.constexpr,
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seen = tl.load(lengths + row)
    if WINDOW > 0:
        seen = tl.minimum(seen, WINDOW)
    step = tl.maximum(PIECE, tl.cdiv(tl.cdiv(seen, PIECES), TILE) * TILE)
    column = tl.arange(0, COLUMNS)
    real = column < SIZE
    place = (row * heads + head) * pieces
    largest = tl.load(sums + place)
    mixed = tl.load(parts + place * SIZE + column, mask=real, other=0.0)
    total = tl.full([], 1.0, tl.float32)
    for piece in range(1, tl.cdiv(seen, step)):
        log_sum = tl.load(sums + place + piece)
        part = tl.load(parts + (place + piece) * SIZE + column, mask=real, other=0.0)
        higher = tl.maximum(largest, log_sum)
        shrink, weight = tl.exp(largest - higher), tl.exp(log_sum - higher)
        mixed = mixed * shrink + part * weight
        total = total * shrink + weight
        largest = higher
    tl.store(out + (row * heads + head) * SIZE + column, (mixed / total).to(out.dtype.element_ty), mask=real)
