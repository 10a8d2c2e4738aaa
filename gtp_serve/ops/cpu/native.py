"""The native ops as a table for the decoder: each call is one operation, carried out at once or recorded.

Tensors are float32 or bfloat16 on the CPU, their last axis without gaps.  Legend: as in ``ops.reference``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gtp_serve.ops.batch import AttentionPlan, Batch
from gtp_serve.ops.cpu import structs
from gtp_serve.ops.cpu.draw import draw
from gtp_serve.ops.cpu.library import Threads
from gtp_serve.ops.cpu.recording import OfThread, OnlyRecorded, Program, Recording
from gtp_serve.ops.cpu.summaries import Summaries
from gtp_serve.ops.greedy import Greedy
from gtp_serve.ops.table import REFERENCE, WANTED, Ops

COMPUTED = (torch.float32, torch.bfloat16)
"""Types that a model can be served in."""
_CODES = {torch.float32: structs.F32, torch.bfloat16: structs.BF16, torch.int8: structs.I8}


class Native:
    """Functions on tensors, each with the meaning of its namesake in ``ops.reference``; one engine's.

    Batch-invariant: a row's result has the same bits whatever is computed beside it.
    """

    def __init__(self, threads: Threads) -> None:
        self.threads = threads
        self.int8: dict[int, tuple[Tensor, Tensor]] = {}
        """By the address of a weight, its rows as int8 and their scales, which are read instead of it."""
        self._own = OfThread()
        self._summaries = Summaries()

    def record(self, step: Callable[[], Tensor], inputs: Mapping[int, int]) -> tuple[Program, Tensor]:
        """Record a step, none of whose operations is carried out; with it the memory of its result.

        :param inputs: the counter of each input that has a row for each token or for each wanted row, by address.
        :raises EngineFault: part of it is no operation of this table.
        """
        recording = self._own.recording = Recording(inputs)
        try:
            with OnlyRecorded():  # type: ignore[no-untyped-call]
                output = step()
        finally:
            self._own.recording = None
        return recording.finish(output, self.threads), output

    # -- the table ---------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """[T, D] or [T, H, D]."""
        out = self._empty(x.shape, x.dtype, x)
        inner = (x.shape[1], x.stride(1), out.stride(1)) if x.dim() == 3 else (1, 0, 0)
        op = structs.Norm(
            **structs.pointers(x=x, weight=weight_D, out=out),
            inner=inner[0],
            size=x.shape[-1],
            x_row=x.stride(0),
            x_inner=inner[1],
            out_row=out.stride(0),
            out_inner=inner[2],
            dtype=_CODES[x.dtype],
            eps=eps,
        )
        self._emit(op, x, weight_D, out)
        return out

    def add_rms_norm(self, x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of the sum, and the sum."""
        out, total = (self._empty(x_TD.shape, x_TD.dtype, x_TD) for _ in range(2))
        op = structs.Norm(
            **structs.pointers(x=x_TD, delta=delta_TD, weight=weight_D, out=out, total=total),
            inner=1,
            size=x_TD.shape[1],
            x_row=x_TD.stride(0),
            delta_row=delta_TD.stride(0),
            total_row=total.stride(0),
            out_row=out.stride(0),
            dtype=_CODES[x_TD.dtype],
            eps=eps,
        )
        self._emit(op, x_TD, delta_TD, weight_D, out, total)
        return out, total

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, O]."""
        return self._linear(x, weight, bias, x.dtype)

    def logits(self, x_SD: Tensor, weight_VD: Tensor) -> Tensor:
        """[S, V]: rounded as ``linear`` rounds, stored as float32."""
        # What a greedy choice needs of each block is found while the block is in the cache.
        blocks = -(-weight_VD.shape[0] // structs.HEAD_BLOCK)
        partials = self._empty((x_SD.shape[0], blocks, structs.PARTIAL_FLOATS), torch.float32, x_SD)
        out = self._linear(x_SD, weight_VD, None, torch.float32, partials=partials)
        recording = self._own.recording
        if recording is not None:
            recording.keep(partials)
        self._summaries.put(out, partials, recorded=recording is not None)
        return out

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``swiglu(linear(x))``, [T, O / 2], in one operation."""
        return self._linear(x, weight, bias, x.dtype, gated=True)

    def _linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        *,
        gated: bool = False,
        partials: Tensor | None = None,
    ) -> Tensor:
        rows = x.flatten(0, -2) if x.dim() != 2 else x
        out = self._empty((rows.shape[0], weight.shape[0] // (2 if gated else 1)), out_dtype, rows)
        weight, scale = self.int8.get(weight.data_ptr(), (weight, None))
        op = structs.Linear(
            **structs.pointers(x=rows, weight=weight, bias=bias, scale=scale, out=out, partials=partials),
            in_size=weight.shape[1],
            out_size=weight.shape[0],
            x_row=rows.stride(0),
            weight_row=weight.stride(0),
            out_row=out.stride(0),
            dtype=_CODES[x.dtype],
            weight_dtype=_CODES[weight.dtype],
            out_dtype=_CODES[out_dtype],
            swiglu=gated,
            vocab=0 if partials is None else weight.shape[0],
        )
        self._emit(op, rows, weight, out, *(t for t in (bias, scale, partials) if t is not None))
        return out if x.dim() == 2 else out.view(*x.shape[:-1], -1)

    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[T, F]."""
        rows = gate_up.flatten(0, -2) if gate_up.dim() != 2 else gate_up
        size = gate_up.shape[-1] // 2
        out = self._empty((rows.shape[0], size), rows.dtype, rows)
        op = structs.Swiglu(
            **structs.pointers(x=rows, out=out),
            size=size,
            x_row=rows.stride(0),
            out_row=size,
            dtype=_CODES[rows.dtype],
        )
        self._emit(op, rows, out)
        return out if gate_up.dim() == 2 else out.view(*gate_up.shape[:-1], size)

    def take_rows(self, numbers: Tensor, table: Tensor) -> Tensor:
        """Rows of a table [., D]; a number that is none of its rows gives zeros."""
        out = self._empty((numbers.shape[0], table.shape[1]), table.dtype, numbers)
        width = table.element_size()
        op = structs.Gather(
            **structs.pointers(ids=numbers, table=table, out=out),
            table_rows=table.shape[0],
            width_bytes=table.shape[1] * width,
            table_stride_bytes=table.stride(0) * width,
            out_stride_bytes=table.shape[1] * width,
        )
        self._emit(op, numbers, table, out)
        return out

    def rotate_and_cache(
        self,
        q_THE: Tensor,
        k_TKE: Tensor,
        v_TKE: Tensor,
        cos_TR: Tensor,
        sin_TR: Tensor,
        keys_NPKE: Tensor,
        values_NPKE: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        """Rotated queries [T, H, E]; keys and values go to their slots."""
        if not (keys_NPKE.is_contiguous() and values_NPKE.is_contiguous()):
            raise ValueError("the cache must be contiguous")
        q_THE, k_TKE, v_TKE = map(_side_by_side, (q_THE, k_TKE, v_TKE))
        out = self._empty(q_THE.shape, q_THE.dtype, q_THE)
        op = structs.Rope(
            **structs.pointers(q=q_THE, k=k_TKE, v=v_TKE, cos=cos_TR, sin=sin_TR, out_q=out),
            **structs.pointers(keys=keys_NPKE, values=values_NPKE, slots=slots_T),
            heads=q_THE.shape[1],
            kv_heads=k_TKE.shape[1],
            size=q_THE.shape[2],
            q_row=q_THE.stride(0),
            k_row=k_TKE.stride(0),
            v_row=v_TKE.stride(0),
            cos_row=cos_TR.stride(0),
            num_slots=keys_NPKE.shape[0] * keys_NPKE.shape[1],
            dtype=_CODES[q_THE.dtype],
        )
        self._emit(op, q_THE, k_TKE, v_TKE, cos_TR, sin_TR, keys_NPKE, values_NPKE, slots_T, out)
        return out

    def plan_attention(self, batch: Batch, block_size: int, window: int | None) -> AttentionPlan:
        """What the kernel needs beside queries and cache: it reads lengths from positions."""
        starts = batch.starts
        if starts is None and not batch.decode_only:
            starts = torch.tensor(batch.query_starts)
        return NativeAttention(self, batch.positions_T, starts, batch.block_tables_SB, window or 0)

    def attend(
        self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, plan: NativeAttention, scale: float
    ) -> Tensor:
        """[T, H, E]."""
        blocks, block_size, kv_heads, size = keys_NPKE.shape
        q_THE = _side_by_side(q_THE)
        out = self._empty(q_THE.shape, q_THE.dtype, q_THE)
        op = structs.Attention(
            **structs.pointers(q=q_THE, keys=keys_NPKE, values=values_NPKE, out=out),
            **structs.pointers(tables=plan.tables_SB, starts=plan.starts, positions=plan.positions_T),
            sequences=plan.tables_SB.shape[0],
            table_row=plan.tables_SB.stride(0),
            heads=q_THE.shape[1],
            kv_heads=kv_heads,
            size=size,
            q_row=q_THE.stride(0),
            block_size=block_size,
            num_blocks=blocks,
            window=plan.window,
            max_context=plan.tables_SB.shape[1] * block_size,
            dtype=_CODES[q_THE.dtype],
            scale=scale,
        )
        kept = [t for t in (plan.tables_SB, plan.starts, plan.positions_T) if t is not None]
        self._emit(op, q_THE, keys_NPKE, values_NPKE, out, *kept)
        return out

    def add_shared(self, base_TD: Tensor, shared_TD: Tensor, gate_T1: Tensor | None) -> Tensor:
        """``base + shared``, the latter times ``sigmoid(gate)`` where there is one."""
        out = self._empty(base_TD.shape, base_TD.dtype, base_TD)
        op = structs.AddShared(
            **structs.pointers(base=base_TD, y=shared_TD, gate=gate_T1, out=out),
            size=base_TD.shape[1],
            dtype=_CODES[base_TD.dtype],
        )
        self._emit(op, base_TD, shared_TD, out, *(() if gate_T1 is None else (gate_T1,)))
        return out

    def sigmoid(self, x: Tensor) -> Tensor:
        """The same shape: as a share of one, added to nothing."""
        gate_T1 = x.reshape(-1, 1)
        return self.add_shared(torch.zeros_like(gate_T1), torch.ones_like(gate_T1), gate_T1).view(x.shape)

    def route(self, logits_TX: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """Weights [T, C] float32 and experts [T, C] int64."""
        count, num_experts = logits_TX.shape
        weights_TC = self._empty((count, top_k), torch.float32, logits_TX)
        experts_TC = self._empty((count, top_k), torch.int64, logits_TX)
        op = structs.Route(
            **structs.pointers(logits=logits_TX, weights=weights_TC, experts=experts_TC),
            num_experts=num_experts,
            chosen=top_k,
            logits_row=logits_TX.stride(0),
            normalise=normalise,
            dtype=_CODES[logits_TX.dtype],
        )
        self._emit(op, logits_TX, weights_TC, experts_TC)
        return weights_TC, experts_TC

    def experts(
        self, x_TD: Tensor, weights_TC: Tensor, experts_TC: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """[T, D]."""
        if not (gate_up_XFD.is_contiguous() and down_XDF.is_contiguous()):
            raise ValueError("stacks of experts must be contiguous")
        out = self._empty(x_TD.shape, x_TD.dtype, x_TD)
        gate_up_XFD, gate_up_XF = self.int8.get(gate_up_XFD.data_ptr(), (gate_up_XFD, None))
        down_XDF, down_XD = self.int8.get(down_XDF.data_ptr(), (down_XDF, None))
        op = structs.Experts(
            **structs.pointers(x=x_TD, weights=weights_TC, experts=experts_TC),
            **structs.pointers(gate_up=gate_up_XFD, down=down_XDF, out=out),
            **structs.pointers(gate_up_scale=gate_up_XF, down_scale=down_XD),
            size=x_TD.shape[1],
            ffn=down_XDF.shape[2],
            num_experts=down_XDF.shape[0],
            chosen=experts_TC.shape[1],
            x_row=x_TD.stride(0),
            dtype=_CODES[x_TD.dtype],
            weight_dtype=_CODES[gate_up_XFD.dtype],
        )
        scales = [t for t in (gate_up_XF, down_XD) if t is not None]
        self._emit(op, x_TD, weights_TC, experts_TC, gate_up_XFD, down_XDF, out, *scales)
        return out

    def greedy(self, logits: Tensor, vocab_size: int) -> Greedy:
        """See ``ops.greedy``; recorded, it is done for so many rows as WANTED says."""
        count, vocab_size = logits.shape[0], min(vocab_size, logits.shape[1])
        recording = self._own.recording
        token_ids, logprobs, finite = (
            torch.empty(count, dtype=dtype) if recording is None else recording.allocate((count,), dtype, WANTED)
            for dtype in (torch.int64, torch.float32, torch.bool)
        )
        op = structs.Greedy(
            **structs.pointers(partials=self._summaries.of(logits, vocab_size)),
            **structs.pointers(logits=logits, token_ids=token_ids, logprobs=logprobs, finite=finite),
            rows=count,
            vocab=vocab_size,
            logits_row=logits.stride(0),
        )
        if recording is None:
            self.threads.run([op])
        else:
            op.counter = WANTED
            recording.append(op, (logits,))
            for result in (token_ids, logprobs, finite):
                recording.keep(result)
        return Greedy(token_ids, logprobs, finite)

    # -- carrying out ------------------------------------------------------------------------------

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor:
        """Memory for a result with as many rows as ``like``."""
        recording = self._own.recording
        if recording is None:
            return torch.empty(tuple(shape), dtype=dtype)
        return recording.allocate(shape, dtype, recording.counter_of(like))

    def _emit(self, op: structs.Op, rows_of: Tensor, *others: Tensor) -> None:
        """Carry out an operation with the rows of its first tensor, or add it to the step that is being recorded."""
        op.rows = rows_of.shape[0]
        for tensor in (rows_of, *others):
            if tensor.stride(-1) != 1 and tensor.shape[-1] != 1:
                raise ValueError(f"a tensor of shape {list(tensor.shape)} has strides {tensor.stride()}")
        if (recording := self._own.recording) is not None:
            op.counter = recording.counter_of(rows_of)
            recording.append(op, (rows_of, *others))
        else:
            self.threads.run([op])


@dataclass(frozen=True, slots=True, eq=False)
class NativeAttention:
    """One step's attention; the same for a recorded step, whose buffers hold what the kernel reads."""

    ops: Native
    positions_T: Tensor
    starts: Tensor | None
    """int64 [S + 1]; None where each sequence brings one token."""
    tables_SB: Tensor
    window: int

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """[T, H, E]."""
        return self.ops.attend(q_THE, keys_NPKE, values_NPKE, self, scale)


def _side_by_side(x_THE: Tensor) -> Tensor:
    """The same with the heads of a row one behind the other."""
    return x_THE if x_THE.stride(1) == x_THE.shape[2] else x_THE.contiguous()


def native_ops(threads: Threads) -> Ops:
    """The table of one engine."""
    native = Native(threads)
    return replace(
        REFERENCE,
        name=f"native ops ({threads.instruction_set}, {threads.count} threads)",
        capturable=True,
        captures_experts=True,
        int8=native.int8,
        recorder=native,
        tabulates_angles=True,
        rms_norm=native.rms_norm,
        add_rms_norm=native.add_rms_norm,
        rotate_and_cache=native.rotate_and_cache,
        plan_attention=native.plan_attention,
        swiglu=native.swiglu,
        embedding=native.take_rows,
        sigmoid=native.sigmoid,
        linear=native.linear,
        gated_linear=native.gated_linear,
        logits=native.logits,
        add_shared=native.add_shared,
        route=native.route,
        experts=native.experts,
        greedy=native.greedy,
        normalises=True,
        draw=partial(draw, threads),
    )
