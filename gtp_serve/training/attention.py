"""Self-attention of a training model over whole sequences, with the bits of the server's.

The forward pass writes keys and values into a cache of its own and runs the server's attention over it; the backward
pass is written out.  Legend: T tokens of all sequences, L of one, D hidden, H query and K KV heads of this rank,
G = H / K, E head size, R = E / 2, N cache blocks of P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UsageError
from gtp_serve.layout.rows import RowMap, Rows
from gtp_serve.ops.batch import AttentionPlan, Batch
from gtp_serve.ops.reference import apply_rotary
from gtp_serve.ops.rope import rotary_tables
from gtp_serve.ops.table import Ops
from gtp_serve.training.groups import rank_of, size_of
from gtp_serve.training.linear import NormColumnLinear, RowParallelLinear
from gtp_serve.training.norm import RMSNorm
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.tensor_parallel import same_on_tp
from gtp_serve.training.token_ids import check_ids

BLOCK_SIZE = 16
"""Positions of a cache block, as the server's default."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pack:
    """What all layers of one pass over whole sequences share."""

    lengths: tuple[int, ...]
    cos_TR: Tensor
    sin_TR: Tensor
    slots_T: Tensor
    num_blocks: int
    plan: AttentionPlan
    window: int | None
    ops: Ops


def pack_sequences(
    ids_T: Tensor, lengths: Sequence[int], config: ModelConfig, inv_freq_R: Tensor, placement: TrainPlacement
) -> Pack:
    """Sequences one behind another, each from its position 0 on.

    :raises UsageError: when the lengths are not those of ``ids_T``, or an id does not exist.
    """
    batch, num_blocks = whole_batch(ids_T, lengths)
    check_ids(ids_T, config.vocab_size, "ids_T")
    cos_TR, sin_TR = rotary_tables(config.rope, inv_freq_R, batch.positions_T, placement.dtype)
    return Pack(
        lengths=batch.context_lens,
        cos_TR=cos_TR,
        sin_TR=sin_TR,
        slots_T=batch.slots_T,
        num_blocks=num_blocks,
        plan=placement.ops.plan_attention(batch, BLOCK_SIZE, config.sliding_window),
        window=config.sliding_window,
        ops=placement.ops,
    )


def whole_batch(ids_T: Tensor, lengths: Sequence[int]) -> tuple[Batch, int]:
    """(a step of the server that computes whole sequences and wants no logits, cache blocks that it needs).

    :raises UsageError: when the lengths are not those of ``ids_T``.
    """
    if sum(lengths) != ids_T.shape[0] or min(lengths, default=0) < 1:
        raise UsageError(f"{ids_T.shape[0]} ids are no sequences of {list(lengths)}")
    device = ids_T.device
    positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    slots = [first * BLOCK_SIZE + torch.arange(n, device=device) for first, n in zip(firsts, lengths, strict=True)]
    tables = torch.zeros((len(lengths), max(counts)), dtype=torch.int64, device=device)
    for row, first, count in zip(tables, firsts, counts, strict=True):
        row[:count] = torch.arange(first, first + count, device=device)
    batch = Batch(
        token_ids_T=ids_T,
        positions_T=positions_T,
        slots_T=torch.cat(slots),
        query_starts=tuple(sum(lengths[:index]) for index in range(len(lengths) + 1)),
        context_lens=tuple(lengths),
        block_tables_SB=tables,
        logit_rows_S=positions_T[:0],
    )
    return batch, sum(counts)


class HeadNorm(RMSNorm):
    """RMSNorm of each of this TP rank's heads; its weight is that of all ranks' heads."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return self.placement.ops.rms_norm(x, same_on_tp(self.placement, self.weight), self.eps)


class TrainAttention(nn.Module):
    """A norm, projections, optional norms of queries and keys, rotary embedding, attention.

    :raises UsageError: for more TP ranks than KV heads; the server repeats heads, a trainer would have to tie them.
    """

    def __init__(self, prefix: str, norm: str, config: ModelConfig, placement: TrainPlacement) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.heads = placement.cut(config.num_heads, "attention heads")[1]
        self.kv_heads = placement.cut(config.num_kv_heads, "KV heads")[1]
        self.qkv = NormColumnLinear(
            f"{prefix}.qkv_proj",
            norm,
            config.hidden_size,
            config.q_rows + 2 * config.kv_rows,
            placement,
            eps=config.norm_eps,
            bias=config.qkv_bias,
            parts=_qkv_rows(prefix, config, placement),
        )
        self.out = RowParallelLinear(
            f"{prefix}.o_proj", config.q_rows, config.hidden_size, placement, bias=config.proj_bias
        )
        self.q_norm: HeadNorm | None = None
        self.k_norm: HeadNorm | None = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                HeadNorm(f"{prefix}.{name}", config.head_dim, placement, eps=config.norm_eps)
                for name in ("q_norm", "k_norm")
            )

    def forward(self, x_TD: Tensor, delta_TD: Tensor | None, pack: Pack) -> tuple[Tensor, Tensor]:
        """(what attention adds, the stream that it is to be added to), [T, D] each."""
        qkv, x_TD = self.qkv.after_adding(x_TD, delta_TD)
        split = qkv.view(qkv.shape[0], -1, self.head_dim)
        q_THE, k_TKE, v_TKE = torch.tensor_split(split, (self.heads, self.heads + self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THE, k_TKE = self.q_norm(q_THE), self.k_norm(k_TKE)
        mixed_THE: Tensor = _Attend.apply(q_THE, k_TKE, v_TKE, pack)  # type: ignore[no-untyped-call]
        return self.out(mixed_THE.flatten(1)), x_TD


def _qkv_rows(prefix: str, config: ModelConfig, placement: TrainPlacement) -> RowMap:
    """Query heads, then key heads, then value heads of this rank, as the server has them."""
    size, tp = config.head_dim, placement.tp()
    rows: list[Rows] = []
    start = 0
    for name, heads in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
        count = heads // size_of(tp) * size
        rows.append(Rows(start, count, f"{prefix}.{name}_proj", rank_of(tp) * count))
        start += count
    return tuple(rows)


class _Attend(torch.autograd.Function):
    """Rotary embedding and attention of packed sequences, [T, H, E]."""

    @staticmethod
    def forward(ctx: Any, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, pack: Pack) -> Tensor:
        shape = (pack.num_blocks, BLOCK_SIZE, *k_TKE.shape[1:])
        keys, values = k_TKE.new_zeros(shape), v_TKE.new_zeros(shape)
        rotated = pack.ops.rotate_and_cache(q_THE, k_TKE, v_TKE, pack.cos_TR, pack.sin_TR, keys, values, pack.slots_T)
        ctx.save_for_backward(q_THE, k_TKE, v_TKE)
        ctx.pack = pack
        return pack.plan.attend(rotated, keys, values, q_THE.shape[-1] ** -0.5)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dmixed_THE: Tensor) -> tuple[Any, ...]:
        q_THE, k_TKE, v_TKE = ctx.saved_tensors
        pack: Pack = ctx.pack
        q_THE, k_TKE = (apply_rotary(x, pack.cos_TR, pack.sin_TR) for x in (q_THE, k_TKE))
        q, k, v, dmixed = (torch.split(x, list(pack.lengths)) for x in (q_THE, k_TKE, v_TKE, dmixed_THE))
        found = [_gradients(*one, window=pack.window) for one in zip(q, k, v, dmixed, strict=True)]
        dq_THE, dk_TKE, dv_TKE = (torch.cat(pieces).to(q_THE.dtype) for pieces in zip(*found, strict=True))
        # Back through a rotation is a rotation the other way.
        dq_THE, dk_TKE = (apply_rotary(x, pack.cos_TR, -pack.sin_TR) for x in (dq_THE, dk_TKE))
        return dq_THE, dk_TKE, dv_TKE, None


def _gradients(
    q_LHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, dmixed_LHE: Tensor, *, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 gradients of one sequence's rotated queries, rotated keys and values, a KV head at a time."""
    length, kv_heads, size = k_LKE.shape
    at = torch.arange(length, device=q_LHE.device)
    hidden_LL = at > at[:, None]
    if window is not None:
        hidden_LL |= at <= at[:, None] - window
    q_KGLE, dmixed_KGLE = (x.float().view(length, kv_heads, -1, size).permute(1, 2, 0, 3) for x in (q_LHE, dmixed_LHE))
    k_KLE, v_KLE = (x.float().transpose(0, 1) for x in (k_LKE, v_LKE))
    heads = [
        _head_gradients(*one, hidden_LL, size**-0.5) for one in zip(q_KGLE, k_KLE, v_KLE, dmixed_KGLE, strict=True)
    ]
    dq_KGLE, dk_KLE, dv_KLE = (torch.stack(pieces) for pieces in zip(*heads, strict=True))
    return dq_KGLE.permute(2, 0, 1, 3).reshape(q_LHE.shape), dk_KLE.transpose(0, 1), dv_KLE.transpose(0, 1)


def _head_gradients(
    q_GLE: Tensor, k_LE: Tensor, v_LE: Tensor, dmixed_GLE: Tensor, hidden_LL: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the queries that share one KV head, of its keys and of its values."""
    shares_GLL = (q_GLE @ k_LE.t() * scale).masked_fill_(hidden_LL, -torch.inf).softmax(-1)
    dshares_GLL = dmixed_GLE @ v_LE.t()
    dscores_GLL = shares_GLL * (dshares_GLL - (dshares_GLL * shares_GLL).sum(-1, keepdim=True)) * scale
    dv_LE = (shares_GLL.transpose(1, 2) @ dmixed_GLE).sum(0)
    return dscores_GLL @ k_LE, (dscores_GLL.transpose(1, 2) @ q_GLE).sum(0), dv_LE
