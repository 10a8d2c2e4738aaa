"""From a step's logits to its result: what shapes the logits of each sequence, sampling, log-probabilities.

``begin`` starts what needs no logits (grammar masks) beside the model's pass; ``finish`` puts sampling on the
device; ``Pending.wait`` brings everything to the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gtp_serve.engine.details import Details
from gtp_serve.engine.grammar import GrammarCompiler, GrammarParser, fill_masks, mask_of
from gtp_serve.engine.inputs import build_rows
from gtp_serve.engine.pending import Masks, PendingTokens, Prepared
from gtp_serve.engine.step import (
    COMPLETE,
    DEAD_END,
    NOT_YET,
    SampleSpec,
    Shaping,
    StepPlan,
)
from gtp_serve.ops.greedy import Greedy
from gtp_serve.ops.penalties import TokenCounts, add_bias, penalise
from gtp_serve.ops.sampling import BY_TORCH, GREEDY_BELOW, Chooser, sample

_COMPILE_WAIT_SECONDS = 0.05
"""A step in which every sequence waits for its grammar waits with them, up to this long."""


@dataclass(kw_only=True, slots=True)
class _History:
    """What is kept for one shaped sequence."""

    counts_row: int | None = None
    counted: int = 0
    """Output tokens that the counts have seen."""
    parser: Future[GrammarParser] | None = None
    bias_ids: Tensor | None = None
    bias_values: Tensor | None = None
    allowed_W: NDArray[np.int32] | None = None
    allowed_V: Tensor | None = None


class Sampler:
    """Samples for the sequences of one engine, and keeps what their shaping needs while they live.

    :param grammars: None: a sequence with a grammar is a dead end.
    :param chooser: the device's own ways.  Unless it normalises, log-probabilities of steps that are all greedy may
        differ in the last bits from those of other steps.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        device: str | torch.device,
        grammars: GrammarCompiler | None = None,
        chooser: Chooser = BY_TORCH,
    ) -> None:
        self._vocab_size = vocab_size
        self._greedy, self._draw = chooser.greedy, chooser.draw
        self._normalise = chooser.greedy if chooser.normalises else None
        self._device = torch.device(device)
        self._grammars = grammars
        self._counts = TokenCounts(vocab_size, device)
        self._histories: weakref.WeakKeyDictionary[Shaping, _History] = weakref.WeakKeyDictionary()
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="masks")

    @property
    def num_histories(self) -> int:
        """Sequences that something is kept for."""
        return len(self._histories)

    def is_greedy(self, plan: StepPlan) -> bool:
        """Of each item nothing but the most probable token is wanted, and ``greedy`` may choose it."""
        return self._greedy is not None and all(item.sample and _only_greedy(item.sample) for item in plan.items)

    def begin(self, plan: StepPlan) -> Prepared:
        """Start what can be done before the logits are there."""
        prepared = Prepared(plan, self._vocab_size, self._normalise)
        with_grammar = [
            (row, spec)
            for row, spec in enumerate(prepared.specs)
            if spec.shaping is not None and spec.shaping.params.grammar is not None
        ]
        if with_grammar:
            everyone = len(with_grammar) == len(prepared.specs)
            parsers = [(row, spec, self._parser(spec)) for row, spec in with_grammar]
            prepared.masks = self._beside.submit(self._masks, parsers, everyone)
        return prepared

    def finish(self, prepared: Prepared, logits: Tensor, best: Greedy | None = None) -> PendingTokens:
        """Put sampling on the device.

        :param logits: of the plan's samplers.
        :param best: what the chooser's ``greedy`` gives of them, where that is known.
        """
        if self._greedy is not None and all(map(_only_greedy, prepared.specs)):
            return PendingTokens(prepared, self._greedy(logits, self._vocab_size), None, ())
        masks = None if prepared.masks is None else prepared.masks.result()
        dead = [(row, DEAD_END) for row, spec in enumerate(prepared.specs) if self._nothing_left(spec)]
        overruled = (*(() if masks is None else masks.overruled), *dead)
        ignored = {row for row, _ in overruled}
        rows = build_rows(prepared.plan, ignored)
        shaped = any(spec.shaping is not None for spec in prepared.specs)
        sampled = sample(
            logits,
            rows,
            vocab_size=self._vocab_size,
            shape=(lambda logits_SV: self._shape(logits_SV, prepared.specs, masks, ignored)) if shaped else None,
            draw=self._draw,
            best=self._best(logits, best),
        )
        return PendingTokens(prepared, sampled, Details.of(prepared.specs, rows, sampled), overruled)

    def _best(self, logits: Tensor, known: Greedy | None) -> Greedy | None:
        """By which log-probabilities are normalised."""
        if self._normalise is None:
            return None
        return known or self._normalise(logits, self._vocab_size)

    # -- grammars ----------------------------------------------------------------------------------

    def _parser(self, spec: SampleSpec) -> Future[GrammarParser] | None:
        shaping = spec.shaping
        if shaping is None or shaping.params.grammar is None or self._grammars is None:
            return None
        history = self._history(shaping)
        if history.parser is None:
            history.parser = self._grammars.compile(shaping.params.grammar)
        return history.parser

    def _masks(self, wanted: Sequence[tuple[int, SampleSpec, Future[GrammarParser] | None]], everyone: bool) -> Masks:
        overruled: list[tuple[int, int]] = []
        ready: list[tuple[int, SampleSpec, GrammarParser]] = []
        patience = _COMPILE_WAIT_SECONDS if everyone else 0.0
        for row, spec, future in wanted:
            try:
                if future is None:
                    overruled.append((row, DEAD_END))
                else:
                    ready.append((row, spec, future.result(timeout=patience)))
            except FutureTimeout:
                overruled.append((row, NOT_YET))
            except Exception:
                overruled.append((row, DEAD_END))
            patience = 0.0
        return self._fill(ready, overruled)

    def _fill(self, ready: Sequence[tuple[int, SampleSpec, GrammarParser]], overruled: list[tuple[int, int]]) -> Masks:
        for _, spec, parser in ready:
            if spec.shaping is not None:
                parser.feed(spec.shaping.tokens, spec.shaping.prompt_len)
        if self._grammars is None or not ready:
            return Masks(overruled=tuple(overruled))
        words = fill_masks(self._grammars.executor, [parser for *_, parser in ready], self._vocab_size)
        kept: list[int] = []
        for at, (row, spec, parser) in enumerate(ready):
            ends = () if spec.shaping is None else spec.shaping.end_ids
            if parser.settle(words[at], end_ids=ends, banned=spec.banned, allowed_W=self._allowed_words(spec)):
                kept.append(at)
            else:
                overruled.append((row, COMPLETE if parser.complete else DEAD_END))
        return Masks(rows=tuple(ready[at][0] for at in kept), words=words[kept], overruled=tuple(overruled))

    # -- logits ------------------------------------------------------------------------------------

    def _history(self, shaping: Shaping) -> _History:
        history = self._histories.get(shaping)
        if history is None:
            history = self._histories[shaping] = _History()
        return history

    def _shape(
        self, logits_SV: Tensor, specs: Sequence[SampleSpec], masks: Masks | None, ignored: Collection[int]
    ) -> Tensor:
        logits_SV = self._biased(self._penalised(logits_SV, specs), specs)
        logits_SV = self._only_allowed(logits_SV, specs, ignored)
        if masks is None or not masks.rows:
            return logits_SV
        rows = torch.tensor(masks.rows, device=logits_SV.device)
        allowed_RV = _unpack(torch.from_numpy(masks.words).to(logits_SV.device), self._vocab_size)
        return logits_SV.index_put((rows,), logits_SV[rows].masked_fill(~allowed_RV, -torch.inf))

    def _nothing_left(self, spec: SampleSpec) -> bool:
        """All ids are forbidden; of a grammar its own mask tells."""
        params = None if spec.shaping is None else spec.shaping.params
        if not spec.banned or (params is not None and params.grammar is not None):
            return False
        if params is None or not params.allowed_token_ids:
            return len(spec.banned) >= self._vocab_size
        return set(spec.banned).issuperset(params.allowed_token_ids)

    def _allowed_words(self, spec: SampleSpec) -> NDArray[np.int32] | None:
        """The mask of ``allowed_token_ids``."""
        if spec.shaping is None or not spec.shaping.params.allowed_token_ids:
            return None
        history = self._history(spec.shaping)
        if history.allowed_W is None:
            history.allowed_W = mask_of(spec.shaping.params.allowed_token_ids, self._vocab_size)
        return history.allowed_W

    def _only_allowed(self, logits_SV: Tensor, specs: Sequence[SampleSpec], ignored: Collection[int]) -> Tensor:
        """Without the ids that ``allowed_token_ids`` leaves out; a grammar's mask has done it for its row."""
        rows: list[int] = []
        masks: list[Tensor] = []
        for row, spec in enumerate(specs):
            shaping = spec.shaping
            if shaping is None or row in ignored or shaping.params.grammar is not None:
                continue
            if shaping.params.allowed_token_ids:
                rows.append(row)
                masks.append(self._allowed(shaping))
        if not rows:
            return logits_SV
        at = torch.tensor(rows, device=logits_SV.device)
        return logits_SV.index_put((at,), logits_SV[at].masked_fill(~torch.stack(masks), -torch.inf))

    def _allowed(self, shaping: Shaping) -> Tensor:
        history = self._history(shaping)
        if history.allowed_V is None:
            history.allowed_V = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            history.allowed_V[torch.tensor(shaping.params.allowed_token_ids, device=self._device)] = True
        return history.allowed_V

    def _penalised(self, logits_SV: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
        chosen = [(row, spec.shaping) for row, spec in enumerate(specs) if _has_penalty(spec.shaping)]
        if not chosen:
            return logits_SV
        table_rows = self._count([shaping for _, shaping in chosen if shaping is not None])
        device = logits_SV.device
        rows = torch.tensor([row for row, _ in chosen], device=device)
        output_RV, prompt_RV = self._counts.of(torch.tensor(table_rows, device=device))
        params = [shaping.params for _, shaping in chosen if shaping is not None]
        penalised_RV = penalise(
            logits_SV[rows],
            output_SV=output_RV,
            in_prompt_SV=prompt_RV,
            repetition_S=torch.tensor([p.repetition_penalty for p in params], device=device),
            presence_S=torch.tensor([p.presence_penalty for p in params], device=device),
            frequency_S=torch.tensor([p.frequency_penalty for p in params], device=device),
        )
        return logits_SV.index_put((rows,), penalised_RV)

    def _count(self, shapings: Sequence[Shaping]) -> list[int]:
        """Bring the counts of these sequences up to date; returns their rows of the table."""
        table_rows: list[int] = []
        new: list[tuple[int, int]] = []
        for shaping in shapings:
            history = self._history(shaping)
            if history.counts_row is None:
                history.counts_row = self._counts.take(shaping.tokens[: shaping.prompt_len])
                weakref.finalize(shaping, self._counts.release, history.counts_row)
            fresh = shaping.tokens[shaping.prompt_len + history.counted :]
            history.counted += len(fresh)
            new += [(history.counts_row, token) for token in fresh]
            table_rows.append(history.counts_row)
        self._counts.count([row for row, _ in new], [token for _, token in new])
        return table_rows

    def _biased(self, logits_SV: Tensor, specs: Sequence[SampleSpec]) -> Tensor:
        rows: list[Tensor] = []
        ids: list[Tensor] = []
        values: list[Tensor] = []
        for row, spec in enumerate(specs):
            if spec.shaping is None or not spec.shaping.params.logit_bias:
                continue
            own_ids, own_values = self._bias(spec.shaping)
            rows.append(torch.full_like(own_ids, row))
            ids.append(own_ids)
            values.append(own_values)
        return add_bias(logits_SV, torch.cat(rows), torch.cat(ids), torch.cat(values)) if rows else logits_SV

    def _bias(self, shaping: Shaping) -> tuple[Tensor, Tensor]:
        history = self._history(shaping)
        if history.bias_ids is None or history.bias_values is None:
            bias = sorted(shaping.params.logit_bias.items())
            history.bias_ids = torch.tensor([token for token, _ in bias], device=self._device)
            history.bias_values = torch.tensor([value for _, value in bias], device=self._device)
        return history.bias_ids, history.bias_values


def _only_greedy(spec: SampleSpec) -> bool:
    asks = spec.logprobs
    details = asks is not None and (asks.top_n or asks.token_ids or asks.processed)
    return spec.temperature < GREEDY_BELOW and spec.shaping is None and not spec.banned and not details


def _has_penalty(shaping: Shaping | None) -> bool:
    if shaping is None:
        return False
    params = shaping.params
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)


def _unpack(words_RW: Tensor, vocab_size: int) -> Tensor:
    """[R, vocab_size] bool from 32 ids in each int32."""
    bits = torch.arange(32, dtype=torch.int32, device=words_RW.device)
    return ((words_RW[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocab_size]
