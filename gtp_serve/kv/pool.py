"""The tensors of the paged KV cache; which block belongs to whom is ``kv.blocks``'s business.

Legend: N blocks, B positions in a block, K KV heads, E head size.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Any

import torch

from gtp_serve.errors import DoesNotFit


class KVPool:
    """One K and one V tensor for each layer, ``[N, B, K, E]``, whose addresses never change.

    :param memory: zeros for it on a CPU, which hold their own memory; other memory is taken where they are too few.
    :raises DoesNotFit: when the memory is not there.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device,
        memory: ctypes.Array[Any] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (2, num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self._data = _allocate(shape, dtype, device, memory)
        self.keys: tuple[torch.Tensor, ...] = tuple(self._data[0].unbind(0))
        self.values: tuple[torch.Tensor, ...] = tuple(self._data[1].unbind(0))

    @property
    def num_bytes(self) -> int:
        """Memory that the pool takes."""
        return self._data.numel() * self._data.element_size()


def _allocate(
    shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device, memory: ctypes.Array[Any] | None
) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if memory is not None and ctypes.sizeof(memory) >= count * dtype.itemsize:
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
    # Zeros, not empty: a kernel that reads a whole block and masks afterwards must never meet a NaN there.
    try:
        if torch.device(device).type == "cpu":
            return _zero_pages(shape, dtype)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError, OSError, ValueError) as error:
        gib = torch.Size(shape).numel() * dtype.itemsize / 2**30
        raise DoesNotFit(
            f"the KV cache of {shape[2]} blocks needs {gib:.1f} GiB on {device}, which are not free",
            [("try", "fewer KV blocks or a shorter context")],
        ) from error


def _zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose pages the kernel provides when they are first touched: allocating gigabytes takes no time.

    On huge pages where there are any: a sequence's blocks lie all over the pool, and each read of a small page would
    ask the page tables first, on a virtual machine twice.
    """
    size = torch.Size(shape).numel() * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
