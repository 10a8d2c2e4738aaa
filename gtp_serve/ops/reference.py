"""The model's arithmetic in plain torch: the specification that every faster version is tested against.

Legend: T tokens, S sequences, D hidden, F ffn, V vocabulary rows, H query heads, K KV heads, G = H / K,
E head size, R = E / 2, N cache blocks of P positions, L keys attended, Q query rows, M = G x Q, B = S x K,
X experts, C chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gtp_serve.ops.batch import Batch

#: Scores of one head that ``attend`` holds at a time; a longer chunk of a prompt is cut into pieces.
_SCORES = 1 << 19
#: Keys of several sequences that it holds at a time.
_KEYS = 1 << 14


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
    """S sequences with Q query rows each, which see at most L keys of their own."""

    rows: Tensor
    """int64 [S * Q], of T."""
    slots_SL: Tensor
    """int64: cache slots of the keys; a shorter sequence repeats its last one, which is then hidden."""
    hidden_SQL: Tensor
    """True where a row must not see a key."""


def plan_attention(batch: Batch, block_size: int, window: int | None = None) -> tuple[Segment, ...]:
    """Cut a step into segments, once for all layers.

    A chunk of a prompt is a segment, or several when it is long.  Sequences with one new token are joined
    when their padded lengths are equal.  That length depends on the sequence alone, so the shape of its
    arithmetic does not depend on the batch.

    :param window: each token sees this many positions, its own included; None means all before it.
    """
    segments: list[Segment] = []
    single: dict[int, list[int]] = {}
    for index, context in enumerate(batch.context_lens):
        first, stop = batch.query_starts[index : index + 2]
        if stop - first == 1:
            single.setdefault(padded_length(min(context, window or context), block_size), []).append(index)
            continue
        step = max(1, _SCORES // max(context, 1))
        for row in range(first, stop, step):
            segments.append(_chunk(batch, index, row, min(row + step, stop), block_size, window))
    for length, indices in single.items():
        step = max(1, _KEYS // length)
        for at in range(0, len(indices), step):
            segments.append(_decodes(batch, indices[at : at + step], length, block_size, window))
    return tuple(segments)


def padded_length(length: int, block_size: int) -> int:
    """Keys that are computed for a sequence that sees ``length``: whole blocks, at most a quarter more."""
    blocks = -(-length // block_size)
    step = 1 << max(0, blocks.bit_length() - 3)
    return -(-blocks // step) * step * block_size


def _chunk(batch: Batch, index: int, first_row: int, stop_row: int, block_size: int, window: int | None) -> Segment:
    """Rows of one sequence, and the keys that at least one of them sees."""
    device = batch.positions_T.device
    position = batch.context_lens[index] - (batch.query_starts[index + 1] - first_row)
    start = 0 if window is None else max(0, position - window + 1)
    stop = position + stop_row - first_row
    queries_Q1 = torch.arange(position, stop, device=device)[:, None]
    keys_L = torch.arange(start, stop, device=device)
    hidden_QL = keys_L > queries_Q1
    if window is not None:
        hidden_QL |= keys_L <= queries_Q1 - window
    slots_L = batch.block_tables_SB[index][keys_L // block_size] * block_size + keys_L % block_size
    return Segment(torch.arange(first_row, stop_row, device=device), slots_L[None], hidden_QL[None])


def _decodes(batch: Batch, indices: Sequence[int], length: int, block_size: int, window: int | None) -> Segment:
    """Sequences with one new token each."""
    device = batch.positions_T.device
    contexts = [batch.context_lens[index] for index in indices]
    last_S1 = torch.tensor(contexts, device=device)[:, None] - 1
    start_S1 = torch.zeros_like(last_S1) if window is None else (last_S1 - window + 1).clamp(min=0)
    positions_SL = start_S1 + torch.arange(length, device=device)
    hidden_SL = positions_SL > last_S1
    positions_SL = positions_SL.minimum(last_S1)
    tables_SB = batch.block_tables_SB[torch.tensor(indices, device=device)]
    slots_SL = tables_SB.gather(1, positions_SL // block_size) * block_size + positions_SL % block_size
    rows = torch.tensor([batch.query_starts[index] for index in indices], device=device)
    return Segment(rows, slots_SL, hidden_SL[:, None])


def attend(
    q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, segments: tuple[Segment, ...], scale: float
) -> Tensor:
    """Attention of each row over the cached keys of its sequence, in float32; [T, H, E] in the query's dtype.

    Query head h reads KV head h // G.  A sequence reads no other sequence's slots, hidden or not.
    """
    out_THE = torch.empty_like(q_THE)
    for segment in segments:
        q_SQHE = q_THE[segment.rows].view(segment.slots_SL.shape[0], -1, *q_THE.shape[1:])
        k_SLKE, v_SLKE = (_take(cache, segment.slots_SL) for cache in (keys_NPKE, values_NPKE))
        mixed_SQHE = _attend_segment(q_SQHE, k_SLKE, v_SLKE, segment.hidden_SQL, scale)
        out_THE.index_copy_(0, segment.rows, mixed_SQHE.flatten(0, 1))
    return out_THE


def _take(cache_NPKE: Tensor, slots_SL: Tensor) -> Tensor:
    rows = cache_NPKE.flatten(0, 1).index_select(0, slots_SL.flatten())
    return rows.view(*slots_SL.shape, *rows.shape[1:])


def _attend_segment(q_SQHE: Tensor, k_SLKE: Tensor, v_SLKE: Tensor, hidden_SQL: Tensor, scale: float) -> Tensor:
    sequences, rows, heads, size = q_SQHE.shape
    length, kv_heads = k_SLKE.shape[1:3]
    group = heads // kv_heads
    # The G heads that share a KV head, and their rows, are one matrix: no key is repeated.
    q_SKME = q_SQHE.float().view(sequences, rows, kv_heads, group, size).permute(0, 2, 3, 1, 4)
    q_BME = q_SKME.reshape(sequences * kv_heads, group * rows, size)
    k_BLE, v_BLE = (x.float().transpose(1, 2).reshape(-1, length, size) for x in (k_SLKE, v_SLKE))
    scores_BML = torch.bmm(q_BME, k_BLE.transpose(1, 2)) * scale
    scores_SKGQL = scores_BML.view(sequences, kv_heads, group, rows, length)
    scores_SKGQL.masked_fill_(hidden_SQL[:, None, None], -torch.inf)
    mixed_BME = torch.bmm(scores_BML.softmax(-1), v_BLE)
    mixed_SQKGE = mixed_BME.view(sequences, kv_heads, group, rows, size).permute(0, 3, 1, 2, 4)
    return mixed_SQKGE.reshape(q_SQHE.shape).to(q_SQHE.dtype)


def route(logits_TX: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Weights [T, C] float32 and experts [T, C] int64: softmax in float32, then the largest ``top_k``.

    :param normalise: divide the weights by their sum.
    """
    weights_TC, experts_TC = torch.topk(logits_TX.float().softmax(-1), top_k, dim=-1)
    if normalise:
        weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True)
    return weights_TC, experts_TC


def experts(x_TD: Tensor, weights_TC: Tensor, experts_TC: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor) -> Tensor:
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
