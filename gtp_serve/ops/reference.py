"""The model's arithmetic in plain torch: the specification that every faster version is tested against.

Legend: T tokens, S sequences, D hidden, F ffn, V vocabulary rows, H query heads, K KV heads, G = H / K,
E head size, R = E / 2, N cache blocks of P positions, L keys attended, Q query rows, X experts, C chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_serve.ops.batch import Batch

#: Scores of one head that ``attend`` holds at a time; a longer chunk of a prompt is cut into pieces.
_SCORES = 1 << 19


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Normalise the last axis in float32, cast back, then multiply by the weight."""
    wide = x_TD.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight_D * wide.to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + delta), x + delta)``."""
    total_TD = x_TD + delta_TD
    return rms_norm(total_TD, weight_D, eps), total_TD


def apply_rotary(x_THE: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """Rotate pairs (i, i + R) of each head."""
    first, second = x_THE.chunk(2, dim=-1)
    cos, sin = cos_TR[:, None], sin_TR[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last axis."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def embedding(token_ids_T: Tensor, table_VD: Tensor) -> Tensor:
    """Rows of the table, [T, D]."""
    return table_VD.index_select(0, token_ids_T)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``."""
    return F.linear(x, weight, bias)


def write_kv(k_TKE: Tensor, v_TKE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, slots_T: Tensor) -> None:
    """Put each token's key and value into its slot of the cache."""
    # view, not flatten: a cache that is not contiguous must fail here and not be copied.
    keys_NPKE.view(-1, *k_TKE.shape[1:]).index_copy_(0, slots_T, k_TKE)
    values_NPKE.view(-1, *v_TKE.shape[1:]).index_copy_(0, slots_T, v_TKE)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Query rows of one sequence and the keys they see."""

    rows: slice
    """Of T."""
    blocks: Tensor
    """int64: cache blocks that hold the keys."""
    keys: slice
    """Positions within those blocks, laid end to end."""
    hidden_QL: Tensor | None
    """True where a row must not see a key; None when each row sees all."""


def plan_attention(batch: Batch, block_size: int, window: int | None = None) -> tuple[Segment, ...]:
    """Cut a step into segments, once for all layers.

    :param window: each token sees this many positions, its own included; None means all before it.
    """
    return tuple(
        segment
        for index in range(len(batch.context_lens))
        for segment in _segments(batch, index, block_size, window)
    )


def _segments(batch: Batch, index: int, block_size: int, window: int | None) -> Iterator[Segment]:
    first_row, end_row = batch.query_starts[index : index + 2]
    context = batch.context_lens[index]
    step = max(1, _SCORES // max(context, 1))
    for row in range(first_row, end_row, step):
        count = min(step, end_row - row)
        position = context - (end_row - row)
        start = 0 if window is None else max(0, position - window + 1)
        stop = position + count
        block = start // block_size
        base = block * block_size
        yield Segment(
            slice(row, row + count),
            batch.block_tables_SB[index, block : -(-stop // block_size)],
            slice(start - base, stop - base),
            _hidden(position, count, start, stop, window, batch.block_tables_SB.device),
        )


def _hidden(
    position: int, count: int, start: int, stop: int, window: int | None, device: torch.device
) -> Tensor | None:
    if count == 1:
        return None
    queries_Q1 = torch.arange(position, position + count, device=device)[:, None]
    keys_L = torch.arange(start, stop, device=device)
    hidden_QL = keys_L > queries_Q1
    return hidden_QL if window is None else hidden_QL | (keys_L <= queries_Q1 - window)


def attend(
    q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, segments: tuple[Segment, ...], scale: float
) -> Tensor:
    """Attention of each row over the cached keys of its sequence, in float32; [T, H, E] in the query's dtype.

    Query head h reads KV head h // G.  Each sequence is computed alone: its result does not depend on others.
    """
    out_THE = torch.empty_like(q_THE)
    for segment in segments:
        k_LKE = keys_NPKE.index_select(0, segment.blocks).flatten(0, 1)[segment.keys]
        v_LKE = values_NPKE.index_select(0, segment.blocks).flatten(0, 1)[segment.keys]
        out_THE[segment.rows] = _attend_one(q_THE[segment.rows], k_LKE, v_LKE, segment.hidden_QL, scale)
    return out_THE


def _attend_one(
    q_QHE: Tensor, k_LKE: Tensor, v_LKE: Tensor, hidden_QL: Tensor | None, scale: float
) -> Tensor:
    rows, heads, size = q_QHE.shape
    length, kv_heads = k_LKE.shape[:2]
    group = heads // kv_heads
    # The G heads that share a KV head, and their rows, are one matrix: no key is repeated.
    q_KME = q_QHE.float().view(rows, kv_heads, group, size).permute(1, 2, 0, 3).reshape(kv_heads, -1, size)
    scores_KML = torch.bmm(q_KME, k_LKE.float().permute(1, 2, 0)) * scale
    if hidden_QL is not None:
        scores_KML.view(kv_heads, group, rows, length).masked_fill_(hidden_QL, -torch.inf)
    out_KME = torch.bmm(scores_KML.softmax(-1), v_LKE.float().transpose(0, 1))
    out_QHE = out_KME.view(kv_heads, group, rows, size).permute(2, 0, 1, 3).reshape(rows, heads, size)
    return out_QHE.to(q_QHE.dtype)


def route(logits_TX: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Weights [T, C] float32 and experts [T, C] int64: softmax in float32, then the largest ``top_k``.

    :param normalise: divide the weights by their sum.
    """
    weights_TC, experts_TC = torch.topk(logits_TX.float().softmax(-1), top_k, dim=-1)
    if normalise:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    return weights_TC, experts_TC


def experts(
    x_TD: Tensor, weights_TC: Tensor, experts_TC: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
) -> Tensor:
    """Each token through its chosen experts, weighted and summed in float32 in the order of experts; [T, D].

    :param gate_up_XFD: [X, 2F, D], gate above up.
    """
    num_experts, chosen = gate_up_XFD.shape[0], experts_TC.shape[1]
    order = experts_TC.flatten().argsort(stable=True)
    counts: list[int] = torch.bincount(experts_TC.flatten(), minlength=num_experts).tolist()
    tokens, weights = order // chosen, weights_TC.flatten()[order, None]
    out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
    first = 0
    for expert, count in enumerate(counts):
        if count:
            mine = slice(first, first + count)
            y_D = linear(swiglu(linear(x_TD[tokens[mine]], gate_up_XFD[expert])), down_XDF[expert])
            out_TD.index_add_(0, tokens[mine], y_D.float() * weights[mine])
            first += count
    return out_TD.to(x_TD.dtype)
