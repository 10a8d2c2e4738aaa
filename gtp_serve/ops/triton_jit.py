"""Triton's decorator with a type, and the sizes of its tiles.

Imported only where Triton is installed.  Kernels run on a CPU when TRITON_INTERPRET=1 is set before Triton
is imported; that is how the tests run them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

kernel: Callable[[Callable[..., None]], Any] = triton.jit
"""Makes a function a kernel: ``function[grid](arguments)``."""


INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""The interpreter multiplies no matrices of bfloat16: there they are made float32 first."""


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least ``size`` and ``least``: how long a tile must be."""
    return 1 << (max(size, least) - 1).bit_length()


def warps_for(elements: int) -> int:
    """Warps of a program that handles this many elements at once."""
    return min(16, max(1, elements // 512))


def row_stride(x: Tensor) -> int:
    """Elements from one row of the first axis to the next; what lies behind a row must be contiguous."""
    expected = 1
    for size, stride in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            raise ValueError(f"rows of a tensor {list(x.shape)} with strides {x.stride()} are not contiguous")
        expected *= size
    return x.stride(0)
