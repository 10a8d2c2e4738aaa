"""From logits to tokens: greedy or drawn, each row by its own parameters, seed and index alone.

A row's ids are put in order (logit descending, id ascending); top-k, top-p and min-p, in this order, each
keep a prefix of it; a counter-based random number picks from what is left.  Only as much of the order is
computed as the row needs, and how much that is depends on the row alone, so a token does not depend on what
else is in the batch.
Legend: S rows, V vocabulary ids that exist, W ids of the order that were computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from gtp_serve.ops.greedy import Greedy

GREEDY_BELOW = 1e-6
_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_LARGEST_ID = (1 << 31) - 1
_NARROW = 64
_WIDTHS = (256, 4096)
_CPU_CHUNK = 1 << 17
"""Logits that are put in order at once on a CPU: more would not stay in its caches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """Parameters of each row, on the host; all of one length."""

    temperature: tuple[float, ...]
    """Below GREEDY_BELOW: the most probable id, the lowest among equals."""
    top_k: tuple[int, ...]
    """-1 keeps all."""
    top_p: tuple[float, ...]
    min_p: tuple[float, ...]
    """Keep ids with at least this fraction of the best id's probability (after temperature)."""
    seed: tuple[int, ...]
    index: tuple[int, ...]
    """Which token of its sequence a row draws."""
    banned: tuple[tuple[int, ...], ...]
    """Ids that must not be chosen; never all of a row's."""

    def __len__(self) -> int:
        return len(self.temperature)

    def take(self, rows: Sequence[int]) -> SamplingRows:
        """The parameters of these rows."""
        return SamplingRows(**{f.name: tuple(getattr(self, f.name)[row] for row in rows) for f in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sampled:
    """The choice for each row; tensors on the logits' device."""

    token_ids_S: Tensor
    """int64; meaningless where ``finite_S`` is false."""
    logprobs_S: Tensor
    """float32: natural-log probability of the token in the raw distribution: temperature 1, unfiltered."""
    finite_S: Tensor
    """bool: the row's logits were all finite numbers."""
    raw_SV: Tensor
    """The logits; zero in rows that are not finite."""
    allowed_SV: Tensor
    """What was chosen from: shaped, with -inf for what is banned."""
    best: Greedy | None = None
    """By which log-probabilities are normalised; None: by ``log_softmax``."""

    def raw_logprobs(self, which: Tensor) -> Tensor:
        """Log-probabilities [R, V] of these rows in the raw distribution."""
        raw_RV = self.raw_SV[which]
        return raw_RV.log_softmax(-1) if self.best is None else self.best.take(which).all_logprobs(raw_RV)


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) for token ``index`` of a sequence: splitmix64, started from the mixed seed."""
    start = _mix64(seed + _GOLDEN)
    return (_mix64(start + (index + 1) * _GOLDEN) >> 11) * 2.0**-53


Draw = Callable[[Tensor, Sequence[int], SamplingRows], Tensor]
"""``draw_rows`` or its like."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chooser:
    """How a device chooses tokens where it has ways of its own."""

    greedy: Callable[[Tensor, int], Greedy] | None = None
    """For steps in which every row is greedy and nothing else is asked of the logits."""
    normalises: bool = False
    """``greedy`` gives a row the same bits in every step, and all log-probabilities are normalised as its are."""
    draw: Draw | None = None
    """A faster ``draw_rows``."""


BY_TORCH = Chooser()
"""No ways of its own."""


def sample(
    logits: Tensor,
    rows: SamplingRows,
    *,
    vocab_size: int,
    shape: Callable[[Tensor], Tensor] | None = None,
    draw: Draw | None = None,
    best: Greedy | None = None,
) -> Sampled:
    """Choose one id for each row.

    :param logits: ``[S, vocab_rows]``, float32; columns from ``vocab_size`` on are padding and are never
        looked at.
    :param shape: what is done to the logits ``[S, vocab_size]`` before anything is chosen; it may forbid ids with
        -inf, but not all of a row's.  Log-probabilities are those of the logits without it.
    :param draw: a faster ``draw_rows``.
    :param best: the most probable ids, where they are known; log-probabilities are normalised as theirs.
    """
    logits_SV = logits[:, :vocab_size].float()
    if best is None:
        # Both ends are NaN when any element is: two quick passes instead of a slow elementwise test.
        finite_S = torch.isfinite(logits_SV.amax(-1)) & torch.isfinite(logits_SV.amin(-1))
        raw_SV = torch.where(finite_S[:, None], logits_SV, 0.0)
    else:
        finite_S = best.finite_S
        raw_SV = logits_SV if bool(finite_S.all()) else torch.where(finite_S[:, None], logits_SV, 0.0)
    allowed_SV = _without_banned(raw_SV if shape is None else shape(raw_SV), rows.banned)
    drawn = [row for row, temperature in enumerate(rows.temperature) if temperature >= GREEDY_BELOW]
    drawn_ids = (draw or draw_rows)(allowed_SV, drawn, rows) if drawn else None
    if drawn_ids is not None and len(drawn) == len(rows):
        token_ids_S = drawn_ids
    else:
        # The first of several equals, as documented.
        known = best is not None and allowed_SV is logits_SV
        token_ids_S = best.token_ids_S.clone() if best is not None and known else allowed_SV.argmax(-1)
        if drawn_ids is not None:
            token_ids_S[torch.tensor(drawn, device=logits.device)] = drawn_ids
    if best is None:
        logprobs_S = raw_SV.log_softmax(-1).gather(1, token_ids_S[:, None])[:, 0]
    else:
        logprobs_S = best.logprobs_of(raw_SV, token_ids_S)
    return Sampled(
        token_ids_S=token_ids_S,
        logprobs_S=logprobs_S,
        finite_S=finite_S,
        raw_SV=raw_SV,
        allowed_SV=allowed_SV,
        best=best,
    )


def drawn_from(allowed_SV: Tensor, rows: SamplingRows) -> Tensor:
    """Log-probabilities [S, V] that ids are drawn with: after temperature and filters, -inf for what they drop.

    A greedy row is certain of one id.

    :param allowed_SV: as in ``Sampled``, of the same rows.
    """
    params = _Params.of(rows, allowed_SV.device)
    vocab = allowed_SV.shape[1]
    greedy_S = params.temperature < GREEDY_BELOW
    temperature_S1 = torch.where(greedy_S, 1.0, params.temperature)[:, None]
    top_SV, ids_SV = in_order(allowed_SV, vocab)
    weights_SV = _weights(top_SV, top_SV[:, :1], temperature_S1)
    sums_SV = weights_SV.cumsum(-1, dtype=torch.float64)
    kept_S, _ = _kept(weights_SV, sums_SV, params, vocab)
    kept_S1 = torch.where(greedy_S, 1, kept_S)[:, None]
    mass_S1 = sums_SV.gather(1, kept_S1 - 1)
    logprobs_SV = (top_SV - top_SV[:, :1]).double() / temperature_S1 - mass_S1.log()
    place_V = torch.arange(vocab, device=allowed_SV.device)
    logprobs_SV = logprobs_SV.masked_fill(place_V >= kept_S1, -torch.inf)
    return torch.empty_like(allowed_SV).scatter_(1, ids_SV, logprobs_SV.float())


def _mix64(x: int) -> int:
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _without_banned(logits_SV: Tensor, banned: Sequence[tuple[int, ...]]) -> Tensor:
    pairs = [(row, token) for row, ids in enumerate(banned) for token in ids]
    if not pairs:
        return logits_SV
    at = torch.tensor(pairs, device=logits_SV.device).unbind(1)
    return logits_SV.index_put(at, torch.tensor(-torch.inf, device=logits_SV.device))


def draw_rows(logits_SV: Tensor, which: Sequence[int], rows: SamplingRows) -> Tensor:
    """The ids that some rows draw, int64, one for each number in ``which``.

    :param logits_SV: float32, -inf for what must not be drawn.
    :param rows: parameters of all S rows.
    """
    token_ids_S = torch.zeros(len(logits_SV), dtype=torch.int64, device=logits_SV.device)
    params = _Params.of(rows, logits_SV.device)
    narrow = {row for row in which if 1 <= rows.top_k[row] <= _NARROW}
    _settle(token_ids_S, sorted(narrow), logits_SV, params, _NARROW)
    unsettled = [row for row in which if row not in narrow]
    for width in (*_WIDTHS, logits_SV.shape[1]):
        unsettled = _settle(token_ids_S, unsettled, logits_SV, params, width)
    everyone = list(which) == list(range(len(logits_SV)))
    return token_ids_S if everyone else token_ids_S[torch.tensor(which, device=logits_SV.device)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Params:
    """SamplingRows as tensors of one device, with the random numbers drawn."""

    temperature: Tensor  # float32
    top_k: Tensor  # int64, V or more where all are kept
    top_p: Tensor  # float64, as the rest
    min_p: Tensor
    uniform: Tensor

    @staticmethod
    def of(rows: SamplingRows, device: torch.device) -> _Params:
        numbers = [uniform(seed, index) for seed, index in zip(rows.seed, rows.index, strict=True)]
        return _Params(
            temperature=torch.tensor(rows.temperature, dtype=torch.float32, device=device),
            top_k=torch.tensor([k if k >= 1 else 1 << 62 for k in rows.top_k], device=device),
            top_p=torch.tensor(rows.top_p, dtype=torch.float64, device=device),
            min_p=torch.tensor(rows.min_p, dtype=torch.float64, device=device),
            uniform=torch.tensor(numbers, dtype=torch.float64, device=device),
        )

    def take(self, at: Tensor) -> _Params:
        return _Params(
            temperature=self.temperature[at],
            top_k=self.top_k[at],
            top_p=self.top_p[at],
            min_p=self.min_p[at],
            uniform=self.uniform[at],
        )


def _settle(
    token_ids_S: Tensor,
    which: list[int],
    logits_SV: Tensor,
    params: _Params,
    width: int,
) -> list[int]:
    """Draw for rows from the first ``width`` ids of their order; returns the rows that need more of it."""
    vocab = logits_SV.shape[1]
    at_once = max(1, _CPU_CHUNK // vocab) if logits_SV.device.type == "cpu" else max(1, len(which))
    # A narrow order holds all of its top-k and a full one holds all: asking those would only make a GPU wait.
    certain = width == _NARROW or width >= vocab
    unsettled: list[int] = []
    for start in range(0, len(which), at_once):
        part = which[start : start + at_once]
        at = torch.tensor(part, device=logits_SV.device)
        own_SV = logits_SV if len(part) == len(logits_SV) else logits_SV[at]
        token_ids_S[at], settled_S = _draw(own_SV, params.take(at), min(width, vocab))
        if not certain:
            unsettled += [row for row, done in zip(part, settled_S.tolist(), strict=True) if not done]
    return unsettled


def _draw(logits_SV: Tensor, params: _Params, width: int) -> tuple[Tensor, Tensor]:
    """(chosen ids, whether ``width`` sufficed to choose them) for each row."""
    vocab = logits_SV.shape[1]
    top_SW, ids_SW = in_order(logits_SV, width)
    best_S1, temperature_S1 = top_SW[:, :1], params.temperature[:, None]
    weights_SW = _weights(top_SW, best_S1, temperature_S1)
    sums_SW = weights_SW.cumsum(-1, dtype=torch.float64)
    all_S = sums_SW[:, -1]
    if _NARROW < width < vocab:
        all_S = _mass(logits_SV, best_S1, temperature_S1)

    kept_S, top_k_S = _kept(weights_SW, sums_SW, params, vocab, all_S)
    unfiltered_S = (top_k_S == vocab) & (params.top_p >= 1) & (params.min_p <= 0)
    kept_mass_S = torch.where(unfiltered_S, all_S, _prefix(sums_SW, kept_S))
    place_S = (sums_SW <= (params.uniform * kept_mass_S)[:, None]).sum(-1)
    if width == vocab:  # the product may round up to the whole mass: never past the last id that has any
        place_S = torch.minimum(place_S, (weights_SW > 0).sum(-1) - 1)
    mass_known_S = (top_k_S <= width) | (top_k_S == vocab) | (params.top_p >= 1)
    settled_S = torch.where(unfiltered_S, place_S < width, mass_known_S & (kept_S <= width))
    return ids_SW.gather(1, place_S.clamp(max=width - 1)[:, None])[:, 0], settled_S


def _kept(
    weights_SW: Tensor, sums_SW: Tensor, params: _Params, vocab: int, all_S: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(ids of the order that all filters keep, that top-k alone keeps) for each row.

    Each filter keeps a prefix; a length above W only says that the prefix ends somewhere out of sight.

    :param all_S: mass of the whole order, where W is not all of it.
    """
    width = weights_SW.shape[1]
    top_k_S = params.top_k.clamp(max=vocab)
    whole_S = sums_SW[:, -1] if all_S is None else all_S
    mass_S = torch.where(top_k_S == vocab, whole_S, _prefix(sums_SW, top_k_S))
    top_p_S = 1 + (sums_SW < (params.top_p * mass_S)[:, None]).sum(-1)
    top_p_S = torch.where(params.top_p >= 1, top_k_S, top_p_S)
    min_p_S = (weights_SW >= params.min_p[:, None]).sum(-1)
    min_p_S = torch.where(min_p_S == width, vocab, min_p_S)
    return torch.minimum(torch.minimum(top_k_S, top_p_S), min_p_S).clamp(min=1), top_k_S


def _weights(logits: Tensor, best_S1: Tensor, temperature_S1: Tensor) -> Tensor:
    """Probabilities relative to the best id's, after temperature."""
    return ((logits - best_S1) / temperature_S1).exp()


def _mass(logits_SV: Tensor, best_S1: Tensor, temperature_S1: Tensor) -> Tensor:
    """Of all ids, float64.  One after the other: a sum's order would depend on how many rows there are."""
    return _weights(logits_SV, best_S1, temperature_S1).cumsum(-1, dtype=torch.float64)[:, -1]


def _prefix(sums_SW: Tensor, length_S: Tensor) -> Tensor:
    """Mass of the first ``length_S`` ids, as far as they are in sight."""
    return sums_SW.gather(1, length_S.clamp(max=sums_SW.shape[1])[:, None] - 1)[:, 0]


def in_order(logits_SV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The first ``width`` (logits, ids) of each row by logit descending, id ascending."""
    vocab = logits_SV.shape[1]
    # One unique integer for each id: the float's bits, made to sort as the number does, above the reversed
    # id. (torch.topk promises nothing about equals, and bf16 models give many.)  Adding zero turns -0.0
    # into 0.0.
    bits_SV = (logits_SV + 0.0).view(torch.int32)
    sortable_SV = bits_SV ^ ((bits_SV >> 31) & 0x7FFFFFFF)
    reversed_V = _LARGEST_ID - torch.arange(vocab, device=logits_SV.device)
    keys_SV = sortable_SV.long().bitwise_left_shift_(32).add_(reversed_V)
    ordered = keys_SV.topk(width, sorted=True) if width < vocab else keys_SV.sort(-1, descending=True)
    keys_SW = ordered.values
    ids_SW = _LARGEST_ID - (keys_SW & 0xFFFFFFFF)
    return logits_SV.gather(1, ids_SW), ids_SW
