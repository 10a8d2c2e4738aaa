"""An engine whose model says noise, over byte tokens, with grammars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from fakes import TINY_MODEL, engine_config
from torch import Tensor

from gtp_serve.engine.engine import Engine
from gtp_serve.engine.grammar import GrammarCompiler
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.kv.pool import KVPool
from gtp_serve.ops.batch import Batch, Taps
from gtp_serve.request import FinishReason, Request

torch.set_num_threads(1)
VOCAB, EOS = 273, 2
MAX_CONTEXT = 4096


class RandomDecoder:
    """Noise for each place of each sequence, a little in favour of what closes strings, lists and objects.

    A place's logits are the same whatever else is in the batch, so that it makes no difference to a reply how many
    steps its grammar took to be compiled.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator()
        closing = {3 + byte for byte in b'"}],:'}
        self._bias = torch.tensor([4.0 * (token in closing) for token in range(VOCAB)])

    def forward(
        self, batch: Batch, keys: Sequence[Tensor], values: Sequence[Tensor], taps: Taps | None = None
    ) -> Tensor:
        sequences, positions = batch.sequence_of_rows(), batch.positions_T.tolist()
        first_blocks = batch.block_tables_SB[:, 0].tolist()
        rows = [self._noise(first_blocks[sequences[row]], positions[row]) for row in batch.logit_rows_S.tolist()]
        return torch.stack(rows) + self._bias

    def _noise(self, block: int, position: int) -> Tensor:
        self._generator.manual_seed(block * MAX_CONTEXT + position)
        return torch.randn(VOCAB, generator=self._generator)


def noise_engine(grammars: GrammarCompiler | None, *, context: int = 1200) -> Engine:
    """:param context: tokens of a prompt and its reply."""
    model = replace(TINY_MODEL, vocab_size=VOCAB, vocab_rows=VOCAB, eos_token_ids=(EOS,), max_context=MAX_CONTEXT)
    config = replace(engine_config(num_blocks=4000), model=model, max_context=context, max_running=64)
    pool = KVPool(
        num_layers=1, num_blocks=4000, block_size=4, num_kv_heads=1, head_dim=4, dtype=torch.float32, device="cpu"
    )
    return Engine(config, ModelRunner(RandomDecoder(), pool, config, grammars=grammars))


def finish_all(engine: Engine, requests: Sequence[Request]) -> dict[str, tuple[list[int], FinishReason]]:
    """(tokens, end) of each request, by its rid."""
    for request in requests:
        engine.add(request)
    tokens: dict[str, list[int]] = {request.rid: [] for request in requests}
    ends: dict[str, FinishReason] = {}
    while engine.has_work():
        for event in engine.step():
            tokens[event.rid] += event.token_ids
            if event.finish is not None:
                ends[event.rid] = event.finish
    return {rid: (tokens[rid], ends[rid]) for rid in tokens}
