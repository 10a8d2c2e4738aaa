"""FlashInfer and flash-attn as far as we call them, computed by ``ops.reference`` on any device.

Each call is bound to the signature that the real package publishes.  What the real kernels read from memory when they
run (recorded buffers above all), the doubles read from that memory when they run.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gtp_serve.ops import reference
from gtp_serve.ops.batch import Batch

_WRAPPER = "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, "
_BUFFERS = "paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, "
_DECODE_PLAN = "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
_PREFILL_PLAN = (
    "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads, "
    "head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, "
    "pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, "
    "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, o_data_type=None, non_blocking=True"
)
_PREFILL_WRAPPER = (
    _WRAPPER + "qo_indptr_buf=None, paged_kv_indptr_buf=None, paged_kv_indices_buf=None, "
    "paged_kv_last_page_len_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None"
)
_RUN = "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False"
FLASHINFER: dict[str, dict[str, str]] = {
    "0.6.0": {
        "decode": _WRAPPER + "use_tensor_cores=False, " + _BUFFERS + "backend='auto', jit_args=None",
        "decode plan": _DECODE_PLAN + "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, "
        "q_data_type='float16', kv_data_type=None, o_data_type=None, data_type=None, sm_scale=None",
        "prefill": _PREFILL_WRAPPER,
        "prefill plan": _PREFILL_PLAN,
        "run": _RUN,
    },
    "0.7.4": {
        "decode": _WRAPPER + "use_tensor_cores=False, " + _BUFFERS + "backend='auto', jit_args=None, jit_kwargs=None",
        "decode plan": _DECODE_PLAN + "*, pos_encoding_mode='NONE', window_left=-1, window_right=0, "
        "logits_soft_cap=None, q_data_type='float16', kv_data_type=None, o_data_type=None, data_type=None, "
        "sm_scale=None",
        "prefill": _PREFILL_WRAPPER + ", jit_kwargs=None, variant_owns_mask=False, max_total_num_rows=None",
        "prefill plan": _PREFILL_PLAN,
        "run": _RUN,
    },
}
"""Parameters of what we call, as published, up to the last one that we name or could come to by place."""
FLASH_ATTN = {
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
    "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
    "flash_attn_varlen_func": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
    "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, "
    "return_attn_probs=False, block_table=None",
}
"""Of version 2.8."""


def signature(parameters: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {parameters}: None"))


def bound(parameters: str, *arguments: Any, **options: Any) -> SimpleNamespace:
    """What each parameter got."""
    call = signature(parameters).bind(*arguments, **options)
    call.apply_defaults()
    return SimpleNamespace(**call.arguments)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    starts: list[int],
    lengths: list[int],
    tables: list[list[int]],
    window: int | None,
    scale: float,
) -> Tensor:
    """By the reference, with nothing but this metadata."""
    counts = [stop - start for start, stop in pairwise(starts)]
    positions = [p for count, length in zip(counts, lengths, strict=True) for p in range(length - count, length)]
    width = max(map(len, tables))
    batch = Batch(
        token_ids_T=torch.zeros(len(positions), dtype=torch.int64),
        positions_T=torch.tensor(positions),
        slots_T=torch.zeros(len(positions), dtype=torch.int64),
        query_starts=tuple(starts),
        context_lens=tuple(lengths),
        block_tables_SB=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        logit_rows_S=torch.arange(len(lengths)),
    ).to(q.device)
    segments = reference.plan_attention(batch, keys.shape[1], window)
    return reference.attend(q, keys, values, segments, scale)


class FlashInferDouble:
    """The package, of one version.  ``recording``: a step is being recorded or replayed, and the host has no say."""

    def __init__(self, version: str) -> None:
        self.__version__ = version
        self.signatures = FLASHINFER[version]
        self.recording = False
        self.plans = 0
        self.wrappers: list[tuple[str, SimpleNamespace]] = []

    def BatchDecodeWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> Any:
        return self._wrapper("decode", *arguments, **options)

    def BatchPrefillWithPagedKVCacheWrapper(self, *arguments: Any, **options: Any) -> Any:
        return self._wrapper("prefill", *arguments, **options)

    def _wrapper(self, kind: str, *arguments: Any, **options: Any) -> _WrapperDouble:
        assert not self.recording
        made = bound(self.signatures[kind], None, *arguments, **options)
        assert made.kv_layout == "NHD"
        assert made.float_workspace_buffer.dtype == torch.uint8
        self.wrappers.append((kind, made))
        return _WrapperDouble(self, kind, made)


class _WrapperDouble:
    def __init__(self, package: FlashInferDouble, kind: str, made: SimpleNamespace) -> None:
        self._package, self._kind, self._made = package, kind, made
        self._numbers: SimpleNamespace | None = None
        self._metadata: tuple[Tensor, ...] = ()

    def plan(self, *arguments: Any, **options: Any) -> None:
        assert not self._package.recording, "the host was asked while a step was recorded"
        self._package.plans += 1
        call = bound(self._package.signatures[f"{self._kind} plan"], self, *arguments, **options)
        metadata: tuple[Tensor, ...]
        if self._kind == "decode":
            metadata = (call.indptr, call.indices, call.last_page_len)
        else:
            metadata = (call.paged_kv_indptr, call.paged_kv_indices, call.paged_kv_last_page_len, call.qo_indptr)
            assert call.causal
        assert all(part.dtype == torch.int32 for part in metadata)
        assert metadata[0].device.type == metadata[2].device.type == "cpu", "a device would have to be waited for"
        assert call.pos_encoding_mode == "NONE"
        assert len(metadata[0]) == len(metadata[2]) + 1
        assert len(metadata[1]) == metadata[0][-1]
        self._metadata = self._into_buffers(metadata) if self._made.use_cuda_graph else metadata
        self._numbers = call

    def _into_buffers(self, metadata: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        made = self._made
        buffers = (
            made.paged_kv_indptr_buffer, made.paged_kv_indices_buffer, made.paged_kv_last_page_len_buffer,
        )  # fmt: skip
        assert len(metadata[2]) == len(buffers[2]), "the number of rows is fixed"
        for buffer, part in zip(buffers, metadata, strict=True):
            buffer[: len(part)].copy_(part)
        return buffers

    def run(self, *arguments: Any, **options: Any) -> Tensor:
        call = bound(self._package.signatures["run"], self, *arguments, **options)
        keys, values = call.paged_kv_cache
        numbers = self._numbers
        assert numbers is not None
        heads, size = call.q.shape[1:]
        planned = numbers.head_dim if self._kind == "decode" else numbers.head_dim_qk
        assert (numbers.num_qo_heads, planned) == (heads, size)
        assert (numbers.page_size, numbers.num_kv_heads, size) == tuple(keys.shape[1:])
        assert (numbers.q_data_type, numbers.kv_data_type) == (call.q.dtype, keys.dtype)
        indptr, indices, last = (part.tolist() for part in self._metadata[:3])
        tables = [indices[a:b] for a, b in pairwise(indptr)]
        starts = self._metadata[3].tolist() if self._kind == "prefill" else list(range(len(tables) + 1))
        return attend(
            call.q,
            keys,
            values,
            starts=starts,
            lengths=[(len(table) - 1) * numbers.page_size + n for table, n in zip(tables, last, strict=True)],
            tables=tables,
            window=None if numbers.window_left < 0 else numbers.window_left + 1,
            scale=numbers.sm_scale,
        )


class FlashAttnDouble:
    """The package."""

    __version__ = "2.8.4"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flash_attn_with_kvcache(self, *arguments: Any, **options: Any) -> Tensor:
        call = bound(FLASH_ATTN["flash_attn_with_kvcache"], *arguments, **options)
        self.calls.append("kvcache")
        assert call.cache_seqlens.dtype == torch.int32
        assert call.q.shape[1] == 1
        lengths = call.cache_seqlens.tolist()
        return self._attend(call, call.q[:, 0], call.k_cache, call.v_cache, list(range(len(lengths) + 1)), lengths)[
            :, None
        ]

    def flash_attn_varlen_func(self, *arguments: Any, **options: Any) -> Tensor:
        call = bound(FLASH_ATTN["flash_attn_varlen_func"], *arguments, **options)
        self.calls.append("varlen")
        assert call.cu_seqlens_q.dtype == call.cu_seqlens_k.dtype == torch.int32
        lengths = call.cu_seqlens_k.diff().tolist()
        assert call.max_seqlen_q == call.cu_seqlens_q.diff().max()
        assert call.max_seqlen_k == max(lengths)
        return self._attend(call, call.q, call.k, call.v, call.cu_seqlens_q.tolist(), lengths)

    def _attend(
        self, call: SimpleNamespace, q: Tensor, keys: Tensor, values: Tensor, starts: list[int], lengths: list[int]
    ) -> Tensor:
        assert call.causal
        assert keys.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
        assert call.block_table.dtype == torch.int32
        assert len(call.block_table) == len(lengths)
        left, right = call.window_size
        assert right == (-1 if left < 0 else 0)
        return attend(
            q,
            keys,
            values,
            starts=starts,
            lengths=lengths,
            tables=call.block_table.tolist(),
            window=None if left < 0 else left + 1,
            scale=call.softmax_scale,
        )
