"""What sequences asked for beside the raw log-probability of their token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gtp_serve.engine.step import SampleSpec, TokenDetails
from gtp_serve.ops.logprobs import DetailRows
from gtp_serve.ops.sampling import Sampled, SamplingRows, drawn_from
from gtp_serve.request import LogprobOptions

_NOTHING = LogprobOptions()


class Details:
    """What sequences asked for beside the raw log-probability of their token."""

    def __init__(
        self, rows: tuple[int, ...], processed: tuple[int, ...], chosen_P: Tensor | None, details: DetailRows | None
    ) -> None:
        self._rows, self._processed = rows, processed
        self._chosen_P, self._details = chosen_P, details

    @staticmethod
    def of(specs: Sequence[SampleSpec], rows: SamplingRows, sampled: Sampled) -> Details | None:
        """None when nobody did."""
        options = [spec.logprobs or _NOTHING for spec in specs]
        wanting = [row for row, o in enumerate(options) if o.top_n or o.token_ids or o.processed]
        if not wanting:
            return None
        device = sampled.raw_SV.device
        logprobs_RV = sampled.raw_logprobs(torch.tensor(wanting, device=device))
        processed = [row for row in wanting if options[row].processed]
        chosen_P = None
        if processed:
            at = torch.tensor(processed, device=device)
            drawn_PV = drawn_from(sampled.allowed_SV[at], rows.take(processed))
            chosen_P = drawn_PV.gather(1, sampled.token_ids_S[at][:, None])[:, 0]
            logprobs_RV[torch.tensor([wanting.index(row) for row in processed], device=device)] = drawn_PV
        details = DetailRows(
            logprobs_RV, [options[row].top_n for row in wanting], [options[row].token_ids for row in wanting]
        )
        return Details(tuple(wanting), tuple(processed), chosen_P, details)

    def add_to(self, logprobs: list[float], count: int) -> tuple[TokenDetails | None, ...]:
        """Details of ``count`` samplers; corrects the log-probabilities of those who asked for processed ones."""
        if self._chosen_P is not None:
            for row, value in zip(self._processed, self._chosen_P.tolist(), strict=True):
                logprobs[row] = value
        found: list[TokenDetails | None] = [None] * count
        if self._details is not None:
            for row, (top, listed) in zip(self._rows, self._details.on_host(), strict=True):
                found[row] = TokenDetails(top=top, listed=listed)
        return tuple(found)
