"""What the head found out about each block of logits while it computed them, for a greedy choice to read.

Legend: S rows, V vocabulary rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Summary:
    """Logits, which are kept so that their memory holds nothing else meanwhile, and the blocks'."""

    logits_SV: Tensor
    partials: Tensor
    version: int
    """Of the logits: a trainer may change its own in place."""


class Summaries:
    """Those of each recorded step, whose memory stays, and of the last step that was not recorded."""

    def __init__(self) -> None:
        self._recorded: dict[int, _Summary] = {}
        self._last: _Summary | None = None

    def put(self, logits_SV: Tensor, partials: Tensor, *, recorded: bool) -> None:
        """Take a head's; a thread may record a step while another one carries out its own."""
        summary = _Summary(logits_SV, partials, _version_of(logits_SV))
        if recorded:
            self._recorded[logits_SV.data_ptr()] = summary
        else:
            self._last = summary

    def of(self, logits_SV: Tensor, vocab_size: int) -> Tensor | None:
        """Those of these logits, or of the first rows of a step's, if all columns are ids; else None."""
        found = self._recorded.get(logits_SV.data_ptr(), self._last)
        if found is None or found.logits_SV.data_ptr() != logits_SV.data_ptr():
            return None
        known = found.logits_SV
        now = (known.shape[1], known.stride(0), _version_of(logits_SV))
        return found.partials if now == (vocab_size, logits_SV.stride(0), found.version) else None


def _version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
