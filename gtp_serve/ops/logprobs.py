"""The most probable ids and listed ids of log-probability rows, and what a prompt's tokens had.

Legend: R rows, V vocabulary ids that exist, N top ids, L listed ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gtp_serve.ops.greedy import Greedy
from gtp_serve.ops.sampling import in_order

Normalise = Callable[[Tensor, int], Greedy]
"""``ops.greedy.greedy`` or its like."""
Details = tuple[tuple[tuple[tuple[int, float], ...], tuple[float, ...]], ...]
"""For each row: ((id, log-probability) of the top ids, log-probabilities of the listed ids)."""


def logprobs_of(logits: Tensor, ids_R: Tensor, vocab_size: int, normalise: Normalise | None) -> Tensor:
    """Log-probabilities [R] float32 of one id of each row of logits ``[R, vocab_rows]``.

    :param normalise: finds the most probable ids, as which others are normalised; None: ``log_softmax``.
    """
    logits = logits.float()
    logits_RV = logits[:, :vocab_size]
    if normalise is None:
        return logits_RV.log_softmax(-1).gather(1, ids_R[:, None])[:, 0]
    return normalise(logits, vocab_size).logprobs_of(logits_RV, ids_R)


def all_logprobs(logits: Tensor, vocab_size: int, normalise: Normalise | None) -> Tensor:
    """The same of all ids, [R, V]."""
    logits = logits.float()
    logits_RV = logits[:, :vocab_size]
    if normalise is None:
        return logits_RV.log_softmax(-1)
    return normalise(logits, vocab_size).all_logprobs(logits_RV)


class DetailRows:
    """Top and listed log-probabilities of some rows, on their device until ``on_host``.

    :param logprobs_RV: float32.
    :param top_n: how many of the most probable each row wants; equals are in order of ids.
    :param listed: the ids that each row wants.
    """

    def __init__(self, logprobs_RV: Tensor, top_n: Sequence[int], listed: Sequence[Sequence[int]]) -> None:
        self._top_n, self._num_listed = tuple(top_n), tuple(map(len, listed))
        widest = min(max(self._top_n, default=0), logprobs_RV.shape[1])
        self._top = in_order(logprobs_RV, widest) if widest else None
        self._listed_RL = _listed(logprobs_RV, listed)

    def on_host(self) -> Details:
        """The numbers; waits for the device."""
        if self._top is None:
            tops: list[tuple[tuple[int, float], ...]] = [()] * len(self._top_n)
        else:
            values, ids = self._top[0].tolist(), self._top[1].tolist()
            tops = [
                tuple(zip(row_ids[:n], row[:n], strict=True))
                for n, row_ids, row in zip(self._top_n, ids, values, strict=True)
            ]
        listed = [[]] * len(tops) if self._listed_RL is None else self._listed_RL.tolist()
        return tuple((top, tuple(row[:n])) for top, row, n in zip(tops, listed, self._num_listed, strict=True))


def _listed(logprobs_RV: Tensor, listed: Sequence[Sequence[int]]) -> Tensor | None:
    widest = max(map(len, listed), default=0)
    if not widest:
        return None
    padded = [[*ids, *([0] * (widest - len(ids)))] for ids in listed]
    return logprobs_RV.gather(1, torch.tensor(padded, device=logprobs_RV.device))


class PromptLogprobs:
    """Collects the log-probabilities of a prompt's next tokens, piece by piece as the model gives logits.

    :param targets: the next token of each row.
    :param top_n: as in DetailRows, likewise ``listed``; no row's logits are kept.
    :param normalise: as in ``logprobs_of``.
    """

    def __init__(
        self,
        targets: Sequence[int],
        top_n: Sequence[int],
        listed: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        normalise: Normalise | None = None,
    ) -> None:
        self._targets, self._top_n, self._listed = targets, top_n, listed
        self._vocab_size, self._normalise = vocab_size, normalise
        self._done = 0
        self._logprobs: list[Tensor] = []
        self._details: list[DetailRows] = []

    def add(self, logits: Tensor) -> None:
        """Take the next rows' logits, ``[rows, vocab_rows]`` float32."""
        part = slice(self._done, self._done + logits.shape[0])
        self._done = part.stop
        targets_R = torch.tensor(self._targets[part], device=logits.device)
        top_n, listed = self._top_n[part], self._listed[part]
        if not any(top_n) and not any(listed):  # few ask for more than their tokens'
            self._logprobs.append(logprobs_of(logits, targets_R, self._vocab_size, self._normalise))
            self._details.append(DetailRows(logits, top_n, listed))
            return
        logprobs_RV = all_logprobs(logits, self._vocab_size, self._normalise)
        self._logprobs.append(logprobs_RV.gather(1, targets_R[:, None])[:, 0])
        self._details.append(DetailRows(logprobs_RV, top_n, listed))

    def on_host(self) -> tuple[tuple[float, ...], Details]:
        """(log-probabilities, details), one for each target; waits for the device."""
        logprobs = tuple(value for piece in self._logprobs for value in piece.tolist())
        return logprobs, tuple(row for piece in self._details for row in piece.on_host())
