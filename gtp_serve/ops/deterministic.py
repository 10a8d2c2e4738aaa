"""The reference's arithmetic in an order that depends on a token and its own context alone: ``--deterministic``.

A row's bits are the same alone or in any batch, whatever the chunk of its prompt, and however long its neighbours.
Three rules give that: products come from ``ops.tiles``; sums are folded in an order that the summed length alone
decides; everything else works on single elements.  Attention takes the keys in blocks at fixed positions.
Legend: as in ``ops.reference``, and U tiles of Q query rows, W keys of a block, A tiles that are still at work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gtp_serve.ops.batch import Batch
from gtp_serve.ops.greedy import Greedy
from gtp_serve.ops.table import REFERENCE, Ops
from gtp_serve.ops.tiles import Tiles

QUERY_ROWS = 4
"""Rows of one sequence that are attended together; a decoded token takes a tile of its own."""
KEY_BLOCK = 128
"""Keys of one step of attention; block b holds positions from ``b * KEY_BLOCK`` on, in every sequence."""
_TILES_AT_ONCE = 64
_LOWEST = -1e30
"""The running maximum before any key was seen: finite, so that a block without a visible key changes nothing."""


def deterministic_ops() -> Ops:
    """The table, with memory of its own for what is found out about this machine's products."""
    arithmetic = _Arithmetic(Tiles())
    return replace(
        REFERENCE,
        name="plain torch, deterministic",
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        plan_attention=arithmetic.plan_attention,
        swiglu=swiglu,
        sigmoid=sigmoid,
        linear=arithmetic.tiles.linear,
        route=route,
        greedy=greedy,
        experts=arithmetic.experts,
    )


def ordered_sum(x: Tensor) -> Tensor:
    """Sum over the last axis, kept with length 1: the second half is added to the first, again and again."""
    while (length := x.shape[-1]) > 1:
        half = length // 2
        folded = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((folded, x[..., -1:]), -1) if length % 2 else folded
    return x


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``reference.rms_norm`` with an ordered sum."""
    wide = x_TD.float()
    wide = wide * torch.rsqrt(ordered_sum(wide * wide) / wide.shape[-1] + eps)
    return weight_D * wide.to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + delta), x + delta)``."""
    total_TD = x_TD + delta_TD
    return rms_norm(total_TD, weight_D, eps), total_TD


def sigmoid(x: Tensor) -> Tensor:
    """In float32, cast back.  torch's own differs in the last bit between a tensor's body and its last elements."""
    return (1 / (1 + torch.exp(-x.float()))).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of the last axis; ``silu`` in float32, for the reason of ``sigmoid``."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def route(logits_TX: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """``reference.route``; among equal weights the lowest expert comes first."""
    wide = logits_TX.float()
    powers = torch.exp(wide - wide.amax(-1, keepdim=True))
    ordered_TX, experts_TX = (powers / ordered_sum(powers)).sort(dim=-1, descending=True, stable=True)
    weights_TC, experts_TC = ordered_TX[:, :top_k], experts_TX[:, :top_k]
    return (weights_TC / ordered_sum(weights_TC) if normalise else weights_TC), experts_TC


def greedy(logits: Tensor, vocab_size: int) -> Greedy:
    """``ops.greedy`` with the very log-probabilities that ``ops.sampling`` gives in a batch that is not all greedy."""
    logits_SV = logits[:, :vocab_size]
    finite_S = torch.isfinite(logits_SV).all(-1)
    token_ids_S = torch.where(finite_S, logits_SV.argmax(-1), 0)
    logprobs_S = logits_SV.float().log_softmax(-1).gather(1, token_ids_S[:, None])[:, 0]
    return Greedy(token_ids_S, torch.where(finite_S, logprobs_S, torch.nan), finite_S)


@dataclass(frozen=True, slots=True, eq=False)
class _Arithmetic:
    """What needs matrix products."""

    tiles: Tiles

    def experts(
        self, x_TD: Tensor, weights_TC: Tensor, experts_TC: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """``reference.experts``: a token's chosen experts are added in the order of their numbers."""
        out_TD = torch.zeros_like(x_TD, dtype=torch.float32)
        for expert in sorted(set(experts_TC.flatten().tolist())):
            tokens, places = (experts_TC == expert).nonzero(as_tuple=True)
            hidden = swiglu(self.tiles.linear(x_TD[tokens], gate_up_XFD[expert]))
            y_D = self.tiles.linear(hidden, down_XDF[expert]).float()
            out_TD.index_add_(0, tokens, y_D * weights_TC[tokens, places, None])
        return out_TD.to(x_TD.dtype)

    def plan_attention(self, batch: Batch, block_size: int, window: int | None) -> TilePlan:
        """Tiles of up to QUERY_ROWS rows; those that see most blocks of keys first, so that tiles end in turn."""
        cut = [
            _Rows(sequence, first, min(first + QUERY_ROWS, stop), batch.context_lens[sequence] - stop)
            for sequence, (start, stop) in enumerate(zip(batch.query_starts, batch.query_starts[1:], strict=False))
            for first in range(start, stop, QUERY_ROWS)
        ]
        cut.sort(key=lambda rows: rows.num_blocks(window), reverse=True)
        groups = [cut[at : at + _TILES_AT_ONCE] for at in range(0, len(cut), _TILES_AT_ONCE)]
        return TilePlan(self.tiles, tuple(_group(batch, group, block_size, window) for group in groups))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows ``first`` to ``stop`` of a step; row r is position r + offset of its sequence."""

    sequence: int
    first: int
    stop: int
    offset: int

    def first_block(self, window: int | None) -> int:
        """The first block of keys that any of them sees."""
        return 0 if window is None else max(0, self.first + self.offset - window + 1) // KEY_BLOCK

    def num_blocks(self, window: int | None) -> int:
        """Blocks from the first to the one with the last row's own position."""
        return (self.stop - 1 + self.offset) // KEY_BLOCK - self.first_block(window) + 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Group:
    """Tiles that are computed together."""

    rows_UQ: Tensor
    """int64, of T; a tile that is not full repeats its last row."""
    filled: Tensor
    """int64: which of the U x Q rows are real."""
    blocks: tuple[tuple[Tensor, Tensor], ...]
    """For each step: cache slots of the keys [A, W], and [A, Q, W], true where a row must not see a key."""


def _group(batch: Batch, tiles: Sequence[_Rows], block_size: int, window: int | None) -> _Group:
    device = batch.block_tables_SB.device

    def column(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)[:, None]

    last_U1 = column([tile.stop - 1 for tile in tiles])
    places_Q = torch.arange(QUERY_ROWS, device=device)
    unclamped_UQ = column([tile.first for tile in tiles]) + places_Q
    rows_UQ = unclamped_UQ.minimum(last_U1)
    offsets_U1 = column([tile.offset for tile in tiles])
    tables_UB = batch.block_tables_SB[column([tile.sequence for tile in tiles])[:, 0]]
    counts = [tile.num_blocks(window) for tile in tiles]
    starts_U1 = column([tile.first_block(window) * KEY_BLOCK for tile in tiles])
    blocks = []
    for step in range(counts[0]):
        at = sum(count > step for count in counts)
        keys_AW = starts_U1[:at] + step * KEY_BLOCK + torch.arange(KEY_BLOCK, device=device)
        # A position past the last row's stands for that one: nothing is read that the sequence does not own.
        seen_AW = keys_AW.minimum(last_U1[:at] + offsets_U1[:at])
        slots_AW = tables_UB[:at].gather(1, seen_AW // block_size) * block_size + seen_AW % block_size
        positions_AQ1 = (rows_UQ[:at] + offsets_U1[:at])[:, :, None]
        hidden_AQW = keys_AW[:, None] > positions_AQ1
        if window is not None:
            hidden_AQW |= keys_AW[:, None] <= positions_AQ1 - window
        blocks.append((slots_AW, hidden_AQW))
    filled = (unclamped_UQ <= last_U1).flatten().nonzero()[:, 0]
    return _Group(rows_UQ=rows_UQ, filled=filled, blocks=tuple(blocks))


@dataclass(frozen=True, slots=True, eq=False)
class TilePlan:
    """One step's attention."""

    tiles: Tiles
    groups: tuple[_Group, ...]

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """Attention of each row over the cached keys of its sequence, in float32; [T, H, E], query's dtype.

        Softmax runs along: after each block of keys a row holds the maximum so far, and the sums relative to it.
        """
        out_THE = torch.empty_like(q_THE)
        for group in self.groups:
            mixed = _Attending(self.tiles, group, q_THE, keys_NPKE.shape[2]).over(keys_NPKE, values_NPKE, scale)
            rows = group.rows_UQ.flatten()[group.filled]
            out_THE.index_copy_(0, rows, mixed[group.filled].to(q_THE.dtype))
        return out_THE


class _Attending:
    """Running softmax of a group of tiles: the G heads of a KV head and a tile's Q rows are one matrix."""

    def __init__(self, tiles: Tiles, group: _Group, q_THE: Tensor, kv_heads: int) -> None:
        self._tiles, self._group = tiles, group
        count, rows = group.rows_UQ.shape
        heads, size = q_THE.shape[1:]
        self._shape = (count, kv_heads, heads // kv_heads, rows, size)
        q_UQKGE = q_THE[group.rows_UQ].float().view(count, rows, kv_heads, heads // kv_heads, size)
        self._q_UKME = q_UQKGE.permute(0, 2, 3, 1, 4).reshape(count, kv_heads, -1, size)
        self._mixed_UKME = torch.zeros_like(self._q_UKME)
        self._sum_UKM1 = torch.zeros_like(self._q_UKME[..., :1])
        self._most_UKM1 = torch.full_like(self._sum_UKM1, _LOWEST)

    def over(self, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """[U * Q, H, E] float32."""
        for slots_AW, hidden_AQW in self._group.blocks:
            k_AWKE, v_AWKE = (cache.flatten(0, 1)[slots_AW].float() for cache in (keys_NPKE, values_NPKE))
            self._add(k_AWKE.permute(0, 2, 3, 1), v_AWKE.permute(0, 2, 1, 3), hidden_AQW, scale)
        mixed_UKGQE = (self._mixed_UKME / self._sum_UKM1).view(self._shape)
        return mixed_UKGQE.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)

    def _add(self, k_AKEW: Tensor, v_AKWE: Tensor, hidden_AQW: Tensor, scale: float) -> None:
        """One block more, for the tiles that have one."""
        at = hidden_AQW.shape[0]
        scores_AKMW = self._product(self._q_UKME[:at], k_AKEW) * scale
        groups = self._shape[2]
        scores_AKMW.masked_fill_(hidden_AQW.repeat(1, groups, 1)[:, None], -torch.inf)
        before, mixed, total = self._most_UKM1[:at], self._mixed_UKME[:at], self._sum_UKM1[:at]
        most = torch.maximum(before, scores_AKMW.amax(-1, keepdim=True))
        weights = torch.exp(scores_AKMW - most)
        fade = torch.exp(before - most)
        mixed.mul_(fade).add_(self._product(weights, v_AKWE))
        total.mul_(fade).add_(ordered_sum(weights))
        before.copy_(most)

    def _product(self, a_AKMX: Tensor, b_AKXY: Tensor) -> Tensor:
        product = self._tiles.bmm(a_AKMX.flatten(0, 1).contiguous(), b_AKXY.flatten(0, 1).contiguous())
        return product.view(*a_AKMX.shape[:3], -1)
