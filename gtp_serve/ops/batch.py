"""One step's input to the model: tokens of many sequences, one after another, without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor


class AttentionPlan(Protocol):
    """What one step's attention needs beside its tensors, worked out once for all layers."""

    def attend(self, q_THE: Tensor, keys_NPKE: Tensor, values_NPKE: Tensor, scale: float) -> Tensor:
        """Attention of each row over the cached keys of its sequence; [T, H, E] in the query's dtype."""
        ...


class FixedAttention(AttentionPlan, Protocol):
    """A plan over buffers that never move, for a step of single tokens that is recorded once and run again.

    Its first ``attend`` may ask the host; those after it, and those after each ``load``, do not.
    """

    def load(self, lengths: Sequence[int]) -> None:
        """Before each run, when the batch's block tables are in their buffer: the length of each sequence.

        :param lengths: of the first rows; the others are padding, of length 1.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """T tokens of S sequences; each sequence brings one token (decode) or several (a chunk of its prompt).

    Sequence ``s`` owns rows ``query_starts[s]`` to ``query_starts[s + 1]``; they are the last of its
    ``context_lens[s]`` positions, and its keys and values lie in the blocks ``block_tables_SB[s]``.
    A token at position p sees p + 1 positions: what runs on a device can know lengths without the host.
    """

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64."""
    slots_T: Tensor
    """int64, ``block * block_size + offset``: where each token's key and value are written."""
    query_starts: tuple[int, ...]
    """S + 1 numbers, on the host."""
    starts: Tensor | None = None
    """int64 [S + 1]: where a recorded step reads them instead; sequences of no tokens are padding."""
    context_lens: tuple[int, ...]
    """S numbers, on the host: keys of each sequence after this step's writes."""
    block_tables_SB: Tensor
    """int64, B blocks per table, padded with 0."""
    logit_rows_S: Tensor
    """int64: rows of T whose logits are wanted."""
    score_rows_R: Tensor | None = None
    """int64: further rows of T whose logits are wanted, a piece at a time (see ``Taps``)."""
    all_logits: bool = False
    """``logit_rows_S`` are all rows in their order, and there are no others: none need be picked."""
    all_routes: bool = False
    """What is tapped are the experts of every row, so that all rows pass through the last layer; on all ranks alike."""
    attention: AttentionPlan | None = None
    """Made beforehand, for a recorded step; None: the step makes its own."""

    @property
    def decode_only(self) -> bool:
        """Each sequence brings exactly one token."""
        return self.query_starts[-1] == len(self.query_starts) - 1

    def wanted_rows(self) -> Tensor | None:
        """int64 [W]: ``score_rows_R``, then ``logit_rows_S``; None where they are all rows in their order."""
        if self.all_logits:
            return None
        if self.score_rows_R is None:
            return self.logit_rows_S
        return torch.cat((self.score_rows_R, self.logit_rows_S))

    def sequence_of_rows(self) -> list[int]:
        """The sequence that each of the T rows belongs to."""
        starts = self.query_starts
        return [s for s in range(len(starts) - 1) for _ in range(starts[s], starts[s + 1])]

    def to(self, device: str | torch.device) -> Batch:
        """The same batch with its tensors on ``device``."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
        return replace(self, **moved)


SCORE_PIECE_ROWS = 64
"""Rows of ``score_rows_R`` whose logits exist at one time: what bounds the memory of prompt log-probabilities."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taps:
    """What is wanted of a pass through the model beside its logits."""

    scored: Callable[[Tensor], None] | None = None
    """Is given the logits of ``score_rows_R``, [at most SCORE_PIECE_ROWS, V] float32, piece after piece in order."""
    routes: list[Tensor] | None = field(default=None)
    """Each MoE layer appends the experts that it chose, int64 [T, C]; the batch has ``all_routes`` then."""
