"""Attention through FlashInfer (an extra), which reads the paged cache in place.

FlashInfer works each step out on the host before it runs.  A step of single tokens goes through its decode wrapper,
any other through its prefill wrapper; a recorded step has a decode wrapper of its own, over buffers that never move.
It cuts keys into pieces by what is in the batch: a token's last bits depend on what is computed beside it.
Legend: S sequences, B blocks per table, I blocks in use, T tokens, H query heads, K KV heads, E head size,
N cache blocks of P positions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.ops.batch import AttentionPlan, Batch, FixedAttention
from gtp_serve.ops.table import Ops

WORKSPACE_BYTES = 128 << 20
"""Shared by all wrappers, since no two run at one time; the size that FlashInfer recommends."""
HEAD_SIZES = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)
_LAYOUT = "NHD"


def flashinfer_ops(base: Ops, *, dtype: torch.dtype, head_dim: int) -> Ops:
    """``base`` with its attention replaced.

    :raises EnvironmentFault: FlashInfer is not installed, or cannot be imported.
    :raises UsageError: it does not serve this model.
    """
    try:
        library = importlib.import_module("flashinfer")
    except ImportError as error:
        raise EnvironmentFault(
            f"--attention-backend flashinfer needs FlashInfer, which cannot be imported ({error})",
            [("try", "pip install 'gtp-serve[flashinfer]', or another --attention-backend")],
        ) from error
    if dtype not in _DTYPES or head_dim not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES))
        raise UsageError(
            f"FlashInfer does not serve heads of {head_dim} elements in {dtype}".replace("torch.", ""),
            [("serves", f"heads of {sizes} in bfloat16 and float16"), ("try", "--attention-backend auto")],
        )
    return FlashInfer(library).table(base, getattr(library, "__version__", ""))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pages:
    """The blocks in use of each sequence, as FlashInfer takes them; int32."""

    starts_S: Tensor
    """S + 1, on the host."""
    blocks_I: Tensor
    """Sequence after sequence, on the device."""
    last_lengths_S: Tensor
    """Positions in each sequence's last block, on the host."""


def pages_of(lengths: Sequence[int], tables_SB: Tensor, block_size: int) -> Pages:
    """
    :param lengths: of the first S rows of the tables, at least 1 each.
    """
    device = tables_SB.device
    lengths_S = torch.tensor(lengths, dtype=torch.int64)
    counts_S = (lengths_S + block_size - 1) // block_size
    starts_S = torch.nn.functional.pad(counts_S.cumsum(0), (1, 0))
    row_I = torch.repeat_interleave(torch.arange(len(counts_S)), counts_S)
    column_I = torch.arange(int(starts_S[-1])) - starts_S[row_I]
    places_I = to_device(row_I * tables_SB.shape[1] + column_I, device)
    return Pages(
        starts_S=starts_S.int(),
        blocks_I=tables_SB.flatten().index_select(0, places_I).int(),
        last_lengths_S=(lengths_S - (counts_S - 1) * block_size).int(),
    )


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Of host memory, without waiting for the device."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values


class Wrapper:
    """One of FlashInfer's wrappers, planned no sooner than the last plan has been copied out of its host memory."""

    def __init__(self, wrapper: Any, device: torch.device) -> None:
        self._wrapper, self._device = wrapper, device
        self._copied: torch.cuda.Event | None = None

    def plan(self, *arguments: Any, **options: Any) -> None:
        """FlashInfer's ``plan``."""
        if self._copied is not None:
            self._copied.synchronize()
        self._wrapper.plan(*arguments, **options)
        if self._device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def run(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor) -> Tensor:
        """[T, H, E]."""
        mixed_THE: Tensor = self._wrapper.run(q_THE, (keys_NPKE, values_NPKE))
        return mixed_THE


class Attention:
    """One step: planned when its first layer says how many heads there are and of what type."""

    def __init__(self, wrapper: Wrapper, metadata: Sequence[Tensor], block_size: int, window: int | None) -> None:
        """
        :param metadata: what ``plan`` takes first; the starts of query rows make it the prefill wrapper's.
        """
        self._wrapper, self._metadata = wrapper, metadata
        self._block_size, self._window = block_size, window
        self._plan: Callable[[Sequence[Tensor]], None] | None = None

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """See ``AttentionPlan``."""
        if self._plan is None:
            self._plan = self._planner(q_THE, keys_NPKE, scale)
            self._plan(self._metadata)
        return self._wrapper.run(q_THE, keys_NPKE, values_NPKE)

    def plan_again(self, metadata: Sequence[Tensor]) -> None:
        """For other lengths and blocks; before the first ``attend`` they are kept for it."""
        self._metadata = metadata
        if self._plan is not None:
            self._plan(metadata)

    def _planner(self, q_THE: Tensor, keys_NPKE: Tensor, scale: float) -> Callable[[Sequence[Tensor]], None]:
        _, heads, size = q_THE.shape
        numbers = heads, keys_NPKE.shape[2], size, self._block_size
        options: dict[str, Any] = {"sm_scale": scale, "q_data_type": q_THE.dtype, "kv_data_type": keys_NPKE.dtype}
        # A window counts the token itself, FlashInfer what is to its left.
        options["window_left"] = -1 if self._window is None else self._window - 1
        if len(self._metadata) == 4:
            options["causal"] = True
        return lambda metadata: self._wrapper.plan(*metadata, *numbers, **options)


class FixedDecode:
    """A recorded step's attention over buffers of its own."""

    def __init__(self, attention: Attention, batch: Batch, block_size: int) -> None:
        self._attention, self._tables_SB, self._block_size = attention, batch.block_tables_SB, block_size
        self.load(())

    def load(self, lengths: Sequence[int]) -> None:
        """See ``FixedAttention``."""
        padding = (1,) * (len(self._tables_SB) - len(lengths))
        self._attention.plan_again(_decode_metadata((*lengths, *padding), self._tables_SB, self._block_size))

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """See ``AttentionPlan``."""
        return self._attention.attend(q_THE, keys_NPKE, values_NPKE, scale)


def _decode_metadata(lengths: Sequence[int], tables_SB: Tensor, block_size: int) -> tuple[Tensor, ...]:
    pages = pages_of(lengths, tables_SB, block_size)
    return pages.starts_S, pages.blocks_I, pages.last_lengths_S


class FlashInfer:
    """The wrappers of one model on one device, made when they are first needed.

    :param library: the package ``flashinfer``.
    """

    def __init__(self, library: Any, *, workspace_bytes: int = WORKSPACE_BYTES) -> None:
        self._library, self._workspace_bytes = library, workspace_bytes
        self._workspace: Tensor | None = None
        self._eager: dict[str, Wrapper] = {}

    def table(self, base: Ops, version: str = "") -> Ops:
        """``base`` with this attention."""
        return replace(
            base,
            name=f"{base.name.split(',')[0]}, attention by FlashInfer {version}".rstrip(),
            capturable=True,
            plan_attention=self.plan_attention,
            fix_attention=self.fix_attention,
        )

    def plan_attention(self, batch: Batch, block_size: int, window: int | None) -> AttentionPlan:
        """Of a step that is not recorded."""
        device = batch.block_tables_SB.device
        metadata = _decode_metadata(batch.context_lens, batch.block_tables_SB, block_size)
        if batch.decode_only:
            return Attention(self._decode(device), metadata, block_size, window)
        starts_S = torch.tensor(batch.query_starts, dtype=torch.int32)
        return Attention(self._prefill(device), (starts_S, *metadata), block_size, window)

    def fix_attention(self, batch: Batch, block_size: int, window: int | None) -> FixedAttention:
        """Of a recorded step of single tokens."""
        rows, columns = batch.block_tables_SB.shape
        device = batch.block_tables_SB.device

        def buffer(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._shared(device),
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=buffer(rows + 1),
            paged_kv_indices_buffer=buffer(rows * columns),
            paged_kv_last_page_len_buffer=buffer(rows),
            backend="fa2",
        )
        return FixedDecode(Attention(Wrapper(wrapper, device), (), block_size, window), batch, block_size)

    def _decode(self, device: torch.device) -> Wrapper:
        if "decode" not in self._eager:
            # Tensor cores: any number of query heads for a KV head.  "fa2": what is chosen for them anyhow, and in
            # recorded steps too, so that the two agree.
            wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
                self._shared(device), _LAYOUT, use_tensor_cores=True, backend="fa2"
            )
            self._eager["decode"] = Wrapper(wrapper, device)
        return self._eager["decode"]

    def _prefill(self, device: torch.device) -> Wrapper:
        if "prefill" not in self._eager:
            wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._shared(device), _LAYOUT)
            self._eager["prefill"] = Wrapper(wrapper, device)
        return self._eager["prefill"]

    def _shared(self, device: torch.device) -> Tensor:
        if self._workspace is None:
            self._workspace = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=device)
        return self._workspace
