"""SwiGLU's activation as one Triton kernel.  Legend: T tokens, F features."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from gtp_serve.ops.triton_jit import kernel, power_of_two, row_stride, warps_for

_TILE = 1024


def swiglu(gate_up: Tensor) -> Tensor:
    """See ``reference.swiglu``; [T, 2F]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out_TF = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    tile = min(_TILE, power_of_two(size))
    if rows:
        _swiglu[(rows, -(-size // tile))](
            gate_up,
            out_TF,
            row_stride(gate_up),
            SIZE=size,
            TILE=tile,
            enable_fp_fusion=False,
            num_warps=warps_for(tile),
        )
    return out_TF


@kernel
def _swiglu(gate_up: tl.tensor, out: tl.tensor, stride: int, SIZE: tl.constexpr, TILE: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = at < SIZE
    gate = tl.load(gate_up + row * stride + at, mask=real)
    up = tl.load(gate_up + row * stride + SIZE + at, mask=real).to(tl.float32)
    wide = gate.to(tl.float32)
    # Rounded before the second factor, as the reference does it.
    opened = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * SIZE + at, (opened * up).to(gate.dtype), mask=real)
