"""Routed experts as three Triton kernels over blocks of pairs, whose number depends on the batch's size alone.

A step through them asks the host nothing, so it can be captured.  Results are rounded where ``reference.experts``
rounds, and a token's experts are added in the order of their numbers, without atomic additions.
Legend: T tokens, D hidden, F inner features, X experts, C chosen, N = T x C pairs, M rows of a block.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gtp_serve.ops.grouping import group_pairs
from gtp_serve.ops.triton_jit import INTERPRETED, kernel, power_of_two, row_stride, warps_for

_FEW_ROWS, _MANY_ROWS = 16, 64
"""Rows of a block: what a matrix product takes at least, and what is read for that many rows of weights at once."""
_MANY = 32
"""Pairs for each expert, on average, from which blocks of many rows are filled well enough."""
_COLUMNS = 64
"""Outputs of one program."""
_INNER_BYTES = 128
"""Of each row, read at once."""
_COMBINED = 1024
_DOT = 16
"""Least side of a matrix product."""


def experts(x_TD: Tensor, weights_TC: Tensor, experts_TC: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
    """See ``reference.experts``."""
    if not (gate_up_XFD.is_contiguous() and down_XDF.is_contiguous()):
        raise ValueError("experts that are not one contiguous stack cannot be read by number")
    tokens, hidden = x_TD.shape
    chosen, num_experts, features = experts_TC.shape[1], gate_up_XFD.shape[0], down_XDF.shape[2]
    out_TD = torch.empty((tokens, hidden), dtype=x_TD.dtype, device=x_TD.device)
    if not tokens:
        return out_TD
    experts_TC, places_TC = experts_TC.sort(dim=-1)
    weights_TC = weights_TC.gather(1, places_TC).contiguous()
    rows = _MANY_ROWS if tokens * chosen >= _MANY * num_experts else _FEW_ROWS
    groups = group_pairs(experts_TC, num_experts, rows)
    blocks = len(groups.experts_B)
    of_blocks = groups.order_N, groups.experts_B, groups.starts_B, groups.stops_B
    inner_NF = torch.empty((tokens * chosen, features), dtype=x_TD.dtype, device=x_TD.device)
    results_ND = torch.empty((tokens * chosen, hidden), dtype=x_TD.dtype, device=x_TD.device)
    options = {"ROWS": rows, "EXPERTS": num_experts, "WIDE": INTERPRETED, "enable_fp_fusion": False}
    options |= {"num_warps": 4, "num_stages": 2}
    columns, step = _tile(features, hidden, x_TD)
    _gate_and_up[(blocks, -(-features // columns))](
        x_TD, gate_up_XFD, *of_blocks, inner_NF, row_stride(x_TD), CHOSEN=chosen, INNER=hidden, OUTER=features,
        COLUMNS=columns, STEP=step, **options,
    )  # fmt: skip
    columns, step = _tile(hidden, features, x_TD)
    _down[(blocks, -(-hidden // columns))](
        inner_NF, down_XDF, *of_blocks, results_ND, INNER=features, OUTER=hidden, COLUMNS=columns, STEP=step, **options
    )
    tile = min(_COMBINED, power_of_two(hidden))
    _combine[(tokens, -(-hidden // tile))](
        results_ND, weights_TC, out_TD,
        CHOSEN=chosen, SIZE=hidden, TILE=tile, enable_fp_fusion=False, num_warps=warps_for(tile),
    )  # fmt: skip
    return out_TD


def _tile(outputs: int, inputs: int, x: Tensor) -> tuple[int, int]:
    """Outputs of a program, and inputs that it reads at once."""
    step = _INNER_BYTES // x.element_size()
    return min(_COLUMNS, power_of_two(outputs, _DOT)), min(step, power_of_two(inputs, _DOT))


@kernel
def _gate_and_up(
    x: tl.tensor,
    gate_up: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    out: tl.tensor,
    x_stride: int,
    CHOSEN: tl.constexpr,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """``silu(gate(x)) * up(x)`` of one block's pairs, to the places that they have in ``order``."""
    block = tl.program_id(0)
    expert = tl.load(experts + block)
    if expert < EXPERTS:
        start, stop = tl.load(starts + block), tl.load(stops + block)
        row = start + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        real_row, real_column = row < stop, column < OUTER
        token = tl.load(order + row, mask=real_row, other=0) // CHOSEN
        weight = gate_up + (expert * 2 * OUTER + column) * INNER
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, INNER, STEP):
            at = first + tl.arange(0, STEP)
            real = at < INNER
            mine = real_column[:, None] & real[None, :]
            a = tl.load(x + token[:, None] * x_stride + at[None, :], mask=real_row[:, None] & real[None, :], other=0.0)
            g = tl.load(weight[:, None] + at[None, :], mask=mine, other=0.0)
            u = tl.load(weight[:, None] + OUTER * INNER + at[None, :], mask=mine, other=0.0)
            if WIDE:
                a, g, u = a.to(tl.float32), g.to(tl.float32), u.to(tl.float32)
            gate += tl.dot(a, tl.trans(g), input_precision="ieee")
            up += tl.dot(a, tl.trans(u), input_precision="ieee")
        # Rounded after the products and before the second factor, as the reference does it.
        dtype = out.dtype.element_ty
        wide = gate.to(dtype).to(tl.float32)
        opened = (wide / (1.0 + tl.exp(-wide))).to(dtype).to(tl.float32)
        both = (opened * up.to(dtype).to(tl.float32)).to(dtype)
        tl.store(out + row[:, None] * OUTER + column[None, :], both, mask=real_row[:, None] & real_column[None, :])


@kernel
def _down(
    inner: tl.tensor,
    down: tl.tensor,
    order: tl.tensor,
    experts: tl.tensor,
    starts: tl.tensor,
    stops: tl.tensor,
    out: tl.tensor,
    INNER: tl.constexpr,
    OUTER: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    """``down(inner)`` of one block's pairs, each to the place of its pair."""
    block = tl.program_id(0)
    expert = tl.load(experts + block)
    if expert < EXPERTS:
        start, stop = tl.load(starts + block), tl.load(stops + block)
        row = start + tl.arange(0, ROWS)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        real_row, real_column = row < stop, column < OUTER
        pair = tl.load(order + row, mask=real_row, other=0)
        weight = down + (expert * OUTER + column) * INNER
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for first in range(0, INNER, STEP):
            at = first + tl.arange(0, STEP)
            real = at < INNER
            a = tl.load(inner + row[:, None] * INNER + at[None, :], mask=real_row[:, None] & real[None, :], other=0.0)
            w = tl.load(weight[:, None] + at[None, :], mask=real_column[:, None] & real[None, :], other=0.0)
            if WIDE:
                a, w = a.to(tl.float32), w.to(tl.float32)
            total += tl.dot(a, tl.trans(w), input_precision="ieee")
        target = out + pair[:, None] * OUTER + column[None, :]
        tl.store(target, total.to(out.dtype.element_ty), mask=real_row[:, None] & real_column[None, :])


@kernel
def _combine(
    results: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """A token's results, weighted and added in float32, in the order of its experts."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = at < SIZE
    total = tl.zeros([TILE], tl.float32)
    for place in range(CHOSEN):
        pair = token * CHOSEN + place
        result = tl.load(results + pair * SIZE + at, mask=real, other=0.0).to(tl.float32)
        total += result * tl.load(weights + pair)
    tl.store(out + token * SIZE + at, total.to(out.dtype.element_ty), mask=real)
