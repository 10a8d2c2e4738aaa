"""From a StepPlan to tensors: the model's ``Batch`` and the sampler's rows."""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate

import torch

from gtp_serve.engine.step import StepPlan
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.sampling import SamplingRows


def build_batch(plan: StepPlan, device: str | torch.device) -> Batch:
    """The plan's tokens, one sequence after another, with the rows whose logits are wanted."""
    items = plan.items

    def column(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    starts = (0, *accumulate(len(item.token_ids) for item in items))
    widest = max(len(item.block_table) for item in items)
    tables = [list(item.block_table) + [0] * (widest - len(item.block_table)) for item in items]
    # One tensor for three: after each step what makes a tensor is no longer in a processor's caches.
    columns_3T = torch.tensor(
        [
            [token for item in items for token in item.token_ids],
            [at for item in items for at in item.positions],
            [slot for item in items for slot in item.slots(plan.block_size)],
        ],
        dtype=torch.int64,
        device=device,
    )
    token_ids_T, positions_T, slots_T = columns_3T.unbind()
    logit_rows = [end - 1 for item, end in zip(items, starts[1:], strict=True) if item.sample]
    scored = _score_rows(plan, starts)
    return Batch(
        token_ids_T=token_ids_T,
        positions_T=positions_T,
        slots_T=slots_T,
        query_starts=starts,
        context_lens=tuple(item.context_len for item in items),
        block_tables_SB=torch.tensor(tables, dtype=torch.int64, device=device),
        all_logits=not scored and len(logit_rows) == starts[-1],
        all_routes=any(item.routes for item in items),
        logit_rows_S=column(logit_rows),
        score_rows_R=column(scored) if scored else None,
    )


def _score_rows(plan: StepPlan, starts: tuple[int, ...]) -> list[int]:
    """Rows of all items whose next token's log-probability is wanted."""
    return [
        start + item.score.first + row
        for item, start in zip(plan.items, starts, strict=False)
        if item.score is not None
        for row in range(len(item.score.targets))
    ]


def build_rows(plan: StepPlan, overruled: Collection[int] = ()) -> SamplingRows:
    """Sampling parameters, one row for each of ``plan.samplers``.

    :param overruled: rows whose choice is not looked at: nothing is banned in them, so that there is one.
    """
    specs = [item.sample for item in plan.items if item.sample is not None]
    return SamplingRows(
        temperature=tuple(spec.temperature for spec in specs),
        top_k=tuple(spec.top_k for spec in specs),
        top_p=tuple(spec.top_p for spec in specs),
        min_p=tuple(spec.min_p for spec in specs),
        seed=tuple(spec.seed for spec in specs),
        index=tuple(spec.index for spec in specs),
        banned=tuple(() if row in overruled else spec.banned for row, spec in enumerate(specs)),
    )
