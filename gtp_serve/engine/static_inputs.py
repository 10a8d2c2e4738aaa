"""Buffers that recorded steps read, whose addresses never change.

Legend: T tokens, S sequences, which are the rows of a bucket, W rows that are wanted, B blocks per table,
P positions in a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gtp_serve.engine.step import StepItem
from gtp_serve.ops.batch import Batch, FixedAttention


class StaticInputs:
    """The buffers of a bucket of single tokens; all rows are padding at first.

    A padding row is token 0 at position 0 of the scratch block: it writes there and attends to nothing else.
    """

    def __init__(
        self, size: int, *, max_blocks: int, block_size: int, scratch_block: int, device: torch.device
    ) -> None:
        self._scratch_block, self._scratch_slot = scratch_block, scratch_block * block_size
        self._columns_3S = torch.zeros((3, size), dtype=torch.int64, device=device)
        self._columns_3S[2] = self._scratch_slot
        self._tables_SB = torch.full((size, max_blocks), scratch_block, dtype=torch.int64, device=device)
        self.batch = Batch(
            token_ids_T=self._columns_3S[0],
            positions_T=self._columns_3S[1],
            slots_T=self._columns_3S[2],
            query_starts=tuple(range(size + 1)),
            # Bounds: what is captured goes by positions.
            context_lens=(max_blocks * block_size,) * size,
            block_tables_SB=self._tables_SB,
            logit_rows_S=torch.arange(size, device=device),
            all_logits=True,
        )
        if device.type == "cpu":
            self._arrays = self._columns_3S.numpy(), self._tables_SB.numpy()
        self._attention: FixedAttention | None = None
        self._used = 0
        """Rows that hold what the last batch put there."""
        self._tables: list[tuple[int, ...]] = [()] * size
        """The block table that ``put`` left in each row, while it is there."""

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """The buffers that have one row for each sequence."""
        batch = self.batch
        return batch.token_ids_T, batch.positions_T, batch.slots_T, batch.logit_rows_S

    def use(self, attention: FixedAttention | None) -> None:
        """Let the step attend by this, which is told of each batch that is loaded."""
        self._attention = attention
        self.batch = replace(self.batch, attention=attention)

    def load(self, batch: Batch) -> None:
        """Put a batch into the first rows and padding into the others; two copies to a GPU, neither waited for."""
        count, width = batch.block_tables_SB.shape
        self._tables = [()] * len(self._tables)
        rows = (batch.token_ids_T, batch.positions_T, batch.slots_T)
        if self._columns_3S.device.type == "cpu":
            # At once, by numpy, which needs less time than torch for so little.
            columns, table = [row.numpy() for row in rows], batch.block_tables_SB.numpy()
            stale = slice(count, max(count, self._used))  # where the last batch was
            self._put(columns, table, self._arrays[0], self._arrays[1][:, :width], stale)
        else:
            columns_3S = self._staging(self._columns_3S.shape, batch)
            tables_SB = self._staging((self._tables_SB.shape[0], width), batch)
            self._put(rows, batch.block_tables_SB, columns_3S, tables_SB, slice(count, None))
            self._columns_3S.copy_(columns_3S, non_blocking=True)
            self._tables_SB[:, :width].copy_(tables_SB, non_blocking=True)
        self._used = count
        if self._attention is not None:
            self._attention.load(batch.context_lens)

    def put(self, items: Sequence[StepItem], block_size: int) -> None:
        """Single tokens into the first rows, on a CPU, for a step that computes no others.

        :param items: of a plan; their block tables are no longer than the buffers'.
        """
        count = len(items)
        columns_3S, tables_SB = self._arrays
        columns_3S[:, :count] = (
            [item.token_ids[0] for item in items],
            [item.start for item in items],
            [item.block_table[item.start // block_size] * block_size + item.start % block_size for item in items],
        )
        for row, item in enumerate(items):
            table = item.block_table
            if self._tables[row] != table:  # few change from one step to the next
                tables_SB[row, : len(table)] = self._tables[row] = table

    def _put(self, columns: Sequence[Any], table: Any, columns_3S: Any, tables_SB: Any, padded: slice) -> None:
        """A batch's columns and block table into the first rows of arrays or tensors, padding into others."""
        count = len(table)
        for row, values in enumerate(columns):
            columns_3S[row, :count] = values
        columns_3S[:2, padded] = 0
        columns_3S[2, padded] = self._scratch_slot
        tables_SB[:count] = table
        tables_SB[padded] = self._scratch_block

    def _staging(self, shape: Sequence[int], batch: Batch) -> Tensor:
        source, target = batch.token_ids_T.device, self._columns_3S.device
        # Pinned memory is not handed out again before the copy out of it is done.
        pinned = source.type == "cpu" and target.type == "cuda"
        return torch.empty(tuple(shape), dtype=torch.int64, device=source, pin_memory=pinned)


class PromptInputs:
    """The buffers of a step with prompts, on a CPU, which computes the tokens that there are."""

    def __init__(self, *, tokens: int, sequences: int, max_blocks: int, block_size: int) -> None:
        self._columns_3T = torch.zeros((3, tokens), dtype=torch.int64)
        self._starts = torch.full((sequences + 1,), tokens)
        self._tables_SB = torch.zeros((sequences, max_blocks), dtype=torch.int64)
        token_ids_T, positions_T, slots_T = self._columns_3T.unbind()
        self._wanted_W = torch.zeros(tokens + sequences, dtype=torch.int64)
        self.batch = Batch(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slots_T=slots_T,
            query_starts=(0, *[tokens] * sequences),
            starts=self._starts,
            # Bounds: what is recorded goes by positions.
            context_lens=(max_blocks * block_size,) * sequences,
            block_tables_SB=self._tables_SB,
            logit_rows_S=self._wanted_W,
        )

    def fits(self, batch: Batch) -> bool:
        """Whether there is room for all of it."""
        count, width = batch.block_tables_SB.shape
        sequences, max_blocks = self._tables_SB.shape
        scored = 0 if batch.score_rows_R is None else len(batch.score_rows_R)
        return (
            len(batch.token_ids_T) <= self._columns_3T.shape[1]
            and scored + len(batch.logit_rows_S) <= len(self._wanted_W)
            and count <= sequences
            and width <= max_blocks
        )

    def load(self, batch: Batch) -> int:
        """Put a batch that fits into the first rows; sequences that are not there have no tokens.

        :return: how many rows are wanted.
        """
        tokens = len(batch.token_ids_T)
        count, width = batch.block_tables_SB.shape
        for row, values in enumerate((batch.token_ids_T, batch.positions_T, batch.slots_T)):
            self._columns_3T[row, :tokens] = values
        self._starts[: count + 1] = torch.tensor(batch.query_starts)
        self._starts[count + 1 :] = tokens
        self._tables_SB[:count, :width] = batch.block_tables_SB
        rows = batch.wanted_rows()
        wanted = len(batch.logit_rows_S if rows is None else rows)
        self._wanted_W[:wanted] = torch.arange(wanted) if rows is None else rows
        return wanted
