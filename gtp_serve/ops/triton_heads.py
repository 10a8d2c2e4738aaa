"""Rotary embedding of queries and keys and the write into the paged cache, as one Triton kernel.

Legend: T tokens, H query and K KV heads, E head size, R = E / 2, N cache blocks of P positions.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gtp_serve.ops.triton_jit import kernel, power_of_two, row_stride


def rotate_and_cache(
    q_THE: Tensor,
    k_TKE: Tensor,
    v_TKE: Tensor,
    cos_TR: Tensor,
    sin_TR: Tensor,
    keys_NPKE: Tensor,
    values_NPKE: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """See ``table.rotate_and_cache``."""
    tokens, heads, size = q_THE.shape
    kv_heads = k_TKE.shape[1]
    if not (keys_NPKE.is_contiguous() and values_NPKE.is_contiguous()):
        raise ValueError("a cache that is not contiguous cannot be written by slot")
    out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
    if tokens:
        _rotate_and_cache[(tokens, heads + 2 * kv_heads)](
            q_THE,
            k_TKE,
            v_TKE,
            cos_TR.contiguous(),
            sin_TR.contiguous(),
            keys_NPKE,
            values_NPKE,
            slots_T,
            out_THE,
            row_stride(q_THE),
            row_stride(k_TKE),
            row_stride(v_TKE),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HALF=size // 2,
            TILE=power_of_two(size // 2),
            enable_fp_fusion=False,
            num_warps=1,
        )
    return out_THE


@kernel
def _rotate_and_cache(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    q_stride: int,
    k_stride: int,
    v_stride: int,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """One program for each token and head: query heads, then key heads, then value heads."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, TILE)
    real = at < HALF
    slot = tl.load(slots + token)
    if head < HEADS:
        source = q + token * q_stride + head * 2 * HALF
        target = out + (token * HEADS + head) * 2 * HALF
    elif head < HEADS + KV_HEADS:
        source = k + token * k_stride + (head - HEADS) * 2 * HALF
        target = keys + (slot * KV_HEADS + head - HEADS) * 2 * HALF
    else:
        source = v + token * v_stride + (head - HEADS - KV_HEADS) * 2 * HALF
        target = values + (slot * KV_HEADS + head - HEADS - KV_HEADS) * 2 * HALF
    first = tl.load(source + at, mask=real)
    second = tl.load(source + HALF + at, mask=real)
    if head < HEADS + KV_HEADS:
        c = tl.load(cos + token * HALF + at, mask=real).to(tl.float32)
        s = tl.load(sin + token * HALF + at, mask=real).to(tl.float32)
        a, b = first.to(tl.float32), second.to(tl.float32)
        # Each product is rounded to the dtype and then added, as the reference does it.
        ac, bs = (a * c).to(first.dtype), (b * s).to(first.dtype)
        bc, as_ = (b * c).to(first.dtype), (a * s).to(first.dtype)
        first = (ac.to(tl.float32) - bs.to(tl.float32)).to(first.dtype)
        second = (bc.to(tl.float32) + as_.to(tl.float32)).to(second.dtype)
    tl.store(target + at, first, mask=real)
    tl.store(target + HALF + at, second, mask=real)
