"""The most probable token of each row with its log-probability: all that a greedy batch needs of its logits.

The plain twin of ``ops.triton_greedy``.  Legend: S rows, V vocabulary ids that exist.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Greedy(NamedTuple):
    """One choice for each row."""

    token_ids_S: Tensor
    """int64: the lowest id among equals; 0 where ``finite_S`` is false."""
    logprobs_S: Tensor
    """float32, of the unscaled distribution; NaN where ``finite_S`` is false."""
    finite_S: Tensor
    """bool: all of the row's logits are finite."""

    def take(self, which: Tensor) -> Greedy:
        """Of these rows."""
        return Greedy(*(part[which] for part in self))

    def logprobs_of(self, logits_SV: Tensor, ids_S: Tensor) -> Tensor:
        """Log-probabilities [S] of one id of each row, normalised as the most probable one's, whose bits are kept."""
        return self.logprobs_of_all(logits_SV, ids_S[:, None])[:, 0]

    def logprobs_of_all(self, logits_SV: Tensor, ids_SN: Tensor | None = None) -> Tensor:
        """The same [S, N] of some ids of each row, or [S, V] of all."""
        largest_S1 = logits_SV.gather(1, self.token_ids_S[:, None])
        some_SN = logits_SV if ids_SN is None else logits_SV.gather(1, ids_SN)
        return (some_SN - largest_S1) + self.logprobs_S[:, None]


def greedy(logits: Tensor, vocab_size: int) -> Greedy:
    """Choose from ``logits[:, :vocab_size]``, float32."""
    logits_SV = logits[:, :vocab_size]
    finite_S = torch.isfinite(logits_SV).all(-1)
    token_ids_S = torch.where(finite_S, logits_SV.argmax(-1), 0)
    logprobs_S = -(logits_SV - logits_SV.amax(-1, keepdim=True)).exp().sum(-1).log()
    return Greedy(token_ids_S, torch.where(finite_S, logprobs_S, torch.nan), finite_S)
