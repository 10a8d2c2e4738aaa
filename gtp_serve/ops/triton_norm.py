"""RMSNorm, alone or after a residual addition, as one Triton kernel each.

One program a row: a row's sums are taken in one order whatever else is in the batch.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gtp_serve.ops.triton_jit import kernel, power_of_two, row_stride, warps_for


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """See ``reference.rms_norm``; the last axis of [T, D] or [T, H, D]."""
    size, inner = x.shape[-1], x.shape[1:-1].numel()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile = power_of_two(size)
    if x.numel():
        _rms_norm[(x.shape[0] * inner,)](
            x,
            weight_D,
            out,
            row_stride(x),
            eps,
            INNER=inner,
            SIZE=size,
            TILE=tile,
            enable_fp_fusion=False,
            num_warps=warps_for(tile),
        )
    return out


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See ``reference.add_rms_norm``."""
    rows, size = x_TD.shape
    out_TD, total_TD = (torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) for _ in range(2))
    tile = power_of_two(size)
    if rows:
        _add_rms_norm[(rows,)](
            x_TD,
            delta_TD,
            weight_D,
            out_TD,
            total_TD,
            row_stride(x_TD),
            row_stride(delta_TD),
            eps,
            SIZE=size,
            TILE=tile,
            enable_fp_fusion=False,
            num_warps=warps_for(tile),
        )
    return out_TD, total_TD


@kernel
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    stride: int,
    eps: float,
    INNER: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    real = at < SIZE
    narrow = tl.load(x + (row // INNER) * stride + (row % INNER) * SIZE + at, mask=real, other=0.0)
    wide = narrow.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    # Rounded before the weight is applied, as the reference does it.
    normed = wide.to(narrow.dtype).to(tl.float32) * tl.load(weight + at, mask=real).to(tl.float32)
    tl.store(out + row * SIZE + at, normed.to(narrow.dtype), mask=real)


@kernel
def _add_rms_norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    x_stride: int,
    delta_stride: int,
    eps: float,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    real = at < SIZE
    first = tl.load(x + row * x_stride + at, mask=real, other=0.0)
    second = tl.load(delta + row * delta_stride + at, mask=real, other=0.0)
    narrow = (first.to(tl.float32) + second.to(tl.float32)).to(first.dtype)
    tl.store(total + row * SIZE + at, narrow, mask=real)
    wide = narrow.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    normed = wide.to(narrow.dtype).to(tl.float32) * tl.load(weight + at, mask=real).to(tl.float32)
    tl.store(out + row * SIZE + at, normed.to(narrow.dtype), mask=real)
