"""The vocabulary table: token embedding, output head, or both at once when the head is tied."""

from __future__ import annotations

import torch
from torch import Tensor

from gtp_serve.layers.parameter import Rows, stacked
from gtp_serve.layers.placement import Placement
from gtp_serve.refit.apply import Target


class VocabularyTable:
    """One row of D numbers for each token id; each rank holds equally many rows, the last ones padded.

    A tied head is this same object, so embedding and head cannot come apart.
    """

    def __init__(self, name: str, rows: int, hidden_size: int, placement: Placement) -> None:
        self.name, self.rows, self.tp, self.ops = name, rows, placement.tp, placement.ops
        held = -(-rows // self.tp.size)
        self.first = min(self.tp.rank * held, rows)
        self.count = min(held, rows - self.first)
        self.weight = placement.empty(held, hidden_size)

    def embed(self, token_ids_T: Tensor) -> Tensor:
        """[T, D]."""
        if self.tp.size == 1:
            return self.ops.embedding(token_ids_T, self.weight)
        local_T = token_ids_T - self.first
        mine_T = (local_T >= 0) & (local_T < self.count)
        rows_TD = self.ops.embedding(torch.where(mine_T, local_T, 0), self.weight)
        return self.tp.all_reduce(rows_TD.masked_fill(~mine_T[:, None], 0))

    def logits(self, x_SD: Tensor) -> Tensor:
        """[S, V] float32 over all vocabulary rows, the same on all ranks."""
        head = self.ops.logits
        part = self.ops.linear(x_SD, self.weight, None) if head is None else head(x_SD, self.weight)
        return self.tp.all_gather(part)[:, : self.rows].float()

    def targets(self) -> list[Target]:
        """This rank's rows."""
        return [stacked(self.name, self.weight, [Rows(self.name, self.first, self.count)])]
