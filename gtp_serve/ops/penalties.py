"""Penalties and bias on logits, for a whole batch at once, and the token counts that they need.

Counts live on the device in one row for each penalised sequence and are brought up to date by the tokens that are
new, never rebuilt from a sequence.  Legend: S rows of a step, V vocabulary ids, N rows of the table.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FIRST_ROWS = 4


def penalise(
    logits_SV: Tensor,
    *,
    output_SV: Tensor,
    in_prompt_SV: Tensor,
    repetition_S: Tensor,
    presence_S: Tensor,
    frequency_S: Tensor,
) -> Tensor:
    """Repetition penalty, then presence and frequency penalties; neutral values leave a logit's bits alone.

    :param output_SV: how often each id is in the output so far.
    :param in_prompt_SV: bool: the id is in the prompt.
    """
    appeared_SV = output_SV > 0
    repetition_S1 = repetition_S[:, None]
    repeated_SV = torch.where(logits_SV > 0, logits_SV / repetition_S1, logits_SV * repetition_S1)
    shaped_SV = torch.where(appeared_SV | in_prompt_SV, repeated_SV, logits_SV)
    shaped_SV = shaped_SV - presence_S[:, None] * appeared_SV
    return shaped_SV - frequency_S[:, None] * output_SV


def add_bias(logits_SV: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """``logits[rows[i], ids[i]] + values[i]``; each (row, id) at most once."""
    return logits_SV.index_put((rows, ids), values, accumulate=True)


class TokenCounts:
    """Which ids a sequence's prompt holds and how often each is in its output, one table row a sequence.

    A row costs five bytes for each id of the vocabulary; the table grows by doubling and is never shrunk.
    """

    def __init__(self, vocab_size: int, device: str | torch.device) -> None:
        self._output_NV = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        self._prompt_NV = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._free: list[int] = []

    @property
    def num_used(self) -> int:
        """Rows that belong to a sequence."""
        return self._output_NV.shape[0] - len(self._free)

    def take(self, prompt: Sequence[int]) -> int:
        """A row for a new sequence."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self._output_NV[row].zero_()
        self._prompt_NV[row].zero_()
        self._prompt_NV[row, torch.tensor(sorted(set(prompt)), device=self._prompt_NV.device)] = True
        return row

    def release(self, row: int) -> None:
        """The sequence has ended."""
        self._free.append(row)

    def count(self, rows: Sequence[int], ids: Sequence[int]) -> None:
        """Note new output tokens: ``ids[i]`` of the sequence that has ``rows[i]``."""
        if not rows:
            return
        at = torch.tensor([rows, ids], device=self._output_NV.device)
        one = torch.ones((), dtype=torch.int32, device=self._output_NV.device)
        self._output_NV.index_put_((at[0], at[1]), one, accumulate=True)

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """(counts in the output, presence in the prompt) of these rows."""
        return self._output_NV[rows], self._prompt_NV[rows]

    def _grow(self) -> None:
        held, vocab = self._output_NV.shape
        added = max(held, _FIRST_ROWS)
        self._output_NV = torch.cat([self._output_NV, self._output_NV.new_zeros((added, vocab))])
        self._prompt_NV = torch.cat([self._prompt_NV, self._prompt_NV.new_zeros((added, vocab))])
        self._free += range(held, held + added)
