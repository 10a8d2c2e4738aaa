"""Steps with prompts, recorded once as a program of native CPU ops: any number of tokens of each sequence.

What an eager step costs beside its arithmetic (the interpreter between operations, fresh memory for what each of them
gives, threads that are woken for each) is a third of a short prompt's time.
Legend: T tokens, S rows whose logits are wanted, W these and rows that are scored, D hidden, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from gtp_serve.engine.static_inputs import PromptInputs
from gtp_serve.kv.pool import KVPool
from gtp_serve.ops.batch import Batch, FixedAttention, Taps
from gtp_serve.ops.table import WANTED, RecordedStep, Recorder


class HiddenModel(Protocol):
    """What recorded prompts need of a decoder."""

    def fix_attention(self, batch: Batch, block_size: int) -> FixedAttention | None:
        """As ``graphs.CapturableModel`` has it."""
        ...

    def hidden(self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
        """Write the batch's K and V; return what the head reads of the rows that are wanted, [W, D]."""
        ...

    def logits(self, hidden_WD: Tensor, batch: Batch, taps: Taps | None = None) -> Tensor:
        """[S, V] of what ``hidden`` gave."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Recorded:
    inputs: PromptInputs
    program: RecordedStep
    hidden_WD: Tensor


class RecordedPrompts:
    """A decoder's step for batches of any kind, recorded by ``record``; the head's part is carried out at once, since
    how many rows it has depends on what is wanted.

    :param tokens: most of one step, as ``sequences``.
    :param max_blocks: the longest block table of a sequence.
    """

    def __init__(
        self, model: HiddenModel, pool: KVPool, recorder: Recorder, *, tokens: int, sequences: int, max_blocks: int
    ) -> None:
        self._model, self._pool, self._recorder = model, pool, recorder
        self._tokens, self._sequences, self._max_blocks = tokens, sequences, max_blocks
        self._recorded: _Recorded | None = None

    @torch.inference_mode()
    def record(self) -> None:
        """Record it; raises what hinders that."""
        block_size = self._pool.block_size
        inputs = PromptInputs(
            tokens=self._tokens, sequences=self._sequences, max_blocks=self._max_blocks, block_size=block_size
        )
        batch = replace(inputs.batch, attention=self._model.fix_attention(inputs.batch, block_size))
        keys, values = self._pool.keys, self._pool.values
        rows = {column.data_ptr(): 0 for column in (batch.token_ids_T, batch.positions_T, batch.slots_T)}
        rows[batch.logit_rows_S.data_ptr()] = WANTED
        program, hidden_WD = self._recorder.record(lambda: self._model.hidden(batch, keys, values), rows)
        self._recorded = _Recorded(inputs, program, hidden_WD)

    def fits(self, batch: Batch, taps: Taps | None) -> bool:
        """It is recorded, has room for the batch, and gives all that is wanted."""
        taps_layers = taps is not None and taps.routes is not None
        return self._recorded is not None and not taps_layers and self._recorded.inputs.fits(batch)

    @torch.inference_mode()
    def run(self, batch: Batch, taps: Taps | None = None) -> Tensor:
        """Logits [S, V] float32 of a batch that fits.

        :raises ValueError: it does not.
        """
        recorded = self._recorded
        if recorded is None or not self.fits(batch, taps):
            raise ValueError(f"a batch of {len(batch.token_ids_T)} tokens fits no recorded step")
        wanted = recorded.inputs.load(batch)
        recorded.program.run(len(batch.token_ids_T), wanted)
        return self._model.logits(recorded.hidden_WD, batch, taps)
