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
        return self._normalised(logits_SV, logits_SV.gather(1, ids_S[:, None]))[:, 0]

    def all_logprobs(self, logits_SV: Tensor) -> Tensor:
        """The same [S, V] of all ids."""
        return self._normalised(logits_SV, logits_SV)

    def _normalised(self, logits_SV: Tensor, some_SN: Tensor) -> Tensor:
        return (some_SN - logits_SV.gather(1, self.token_ids_S[:, None])) + self.logprobs_S[:, None]


def greedy(logits: Tensor, vocab_size: int) -> Greedy:
    """Choose from ``logits[:, :vocab_size]``, float32."""
    logits_SV = logits[:, :vocab_size]
    finite_S = torch.isfinite(logits_SV).all(-1)
    token_ids_S = torch.where(finite_S, logits_SV.argmax(-1), 0)
    logprobs_S = -(logits_SV - logits_SV.amax(-1, keepdim=True)).exp().sum(-1).log()
    return Greedy(token_ids_S, torch.where(finite_S, logprobs_S, torch.nan), finite_S)
