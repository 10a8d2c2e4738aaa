"""The trainer's ranks among themselves: bytes handed round over torch's default group, or one rank alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed

from gtp_serve.errors import GtpServeError, UpdateFailed, UpdateRefused

_DIST: Any = torch.distributed
_T = TypeVar("_T")


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's step came to."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    refused: int = 0
    """HTTP status of a refusal; 0: it is none."""
    code: str = ""
    """Empty: it went well."""
    message: str = ""
    details: tuple[tuple[str, str], ...] = ()


class TrainerRanks:
    """All ranks of a trainer, which call the same methods in the same order.

    :param group: a torch.distributed group; None: the default one if there is one, else this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        many = group is not None or (_DIST.is_available() and _DIST.is_initialized())
        self.rank = int(_DIST.get_rank(group)) if many else 0
        self.size = int(_DIST.get_world_size(group)) if many else 1

    def together(self, step: Callable[[], _T], kind: type[_T], deadline: float) -> list[_T]:
        """Do a step on each rank and hand round what came of it: all ranks go on, or all raise.

        :param kind: type of the step's value, which must be plain data.
        :param deadline: instant of ``time.monotonic``.
        :raises GtpServeError: the first rank's whose step failed, on every rank.
        """
        outcomes = self._hand_round(_attempt(step), deadline)
        for rank, outcome in enumerate(outcomes):
            if outcome.code:
                raise self._failure(rank, outcome)
        return [msgspec.json.decode(outcome.value, type=kind) for outcome in outcomes]

    def from_first(self, step: Callable[[], _T], kind: type[_T], deadline: float) -> _T:
        """Do a step on rank 0 only; every rank gets its value, or raises what it raised."""
        outcome = _attempt(step) if self.rank == 0 else _Outcome()
        first = self._hand_round(outcome, deadline)[0]
        if first.code:
            raise self._failure(0, first)
        return msgspec.json.decode(first.value, type=kind)

    def _failure(self, rank: int, outcome: _Outcome) -> GtpServeError:
        details = list(outcome.details)
        if rank != self.rank:
            details.append(("on", f"trainer rank {rank}"))
        if not outcome.refused:
            return UpdateFailed(outcome.message, details, code=outcome.code)
        refusal = UpdateRefused(outcome.message, details, code=outcome.code)
        refusal.http_status = outcome.refused
        return refusal

    def _hand_round(self, outcome: _Outcome, deadline: float) -> list[_Outcome]:
        if self.size == 1:
            return [outcome]
        told = self._all_gather(msgspec.json.encode(outcome), deadline)
        return [msgspec.json.decode(one, type=_Outcome) for one in told]

    def _all_gather(self, mine: bytes, deadline: float) -> list[bytes]:
        device = self._device()
        size = torch.tensor([len(mine)], dtype=torch.int64, device=device)
        sizes = [torch.zeros_like(size) for _ in range(self.size)]
        self._wait(_DIST.all_gather(sizes, size, group=self._group, async_op=True), deadline)
        longest = max(int(one) for one in sizes)
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
        parts = [torch.zeros_like(padded) for _ in range(self.size)]
        self._wait(_DIST.all_gather(parts, padded, group=self._group, async_op=True), deadline)
        return [part[: int(count)].cpu().numpy().tobytes() for part, count in zip(parts, sizes, strict=True)]

    def _device(self) -> str:
        """Where bytes must lie for this group's backend."""
        return "cpu" if "gloo" in str(_DIST.get_backend(self._group)) else f"cuda:{torch.cuda.current_device()}"

    def _wait(self, work: Any, deadline: float) -> None:
        try:
            work.wait(timedelta(seconds=max(1.0, deadline - time.monotonic())))
        except RuntimeError as error:
            raise UpdateFailed(
                "another trainer rank did not take part",
                [("error", str(error).splitlines()[0])],
                code="trainer-lost",
            ) from None


def _attempt(step: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(value=msgspec.Raw(msgspec.json.encode(step())))
    except GtpServeError as error:
        details = tuple((str(label), str(text)) for label, text in error.details)
        refused = 0 if isinstance(error, UpdateFailed) else getattr(error, "http_status", UpdateRefused.http_status)
        return _Outcome(refused=refused, code=error.code, message=error.message, details=details)
    except Exception as error:
        return _Outcome(code="internal", message=f"{type(error).__name__}: {error}")
