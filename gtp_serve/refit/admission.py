"""Which updates may begin, as things are.  No torch."""

from __future__ import annotations

from gtp_serve.errors import UpdateRefused
from gtp_serve.refit.orders import FedOrder, Memory, UpdateRequest
from gtp_serve.refit.versions import Labels

MAX_DEADLINE_SECONDS = 86_400.0


def check_request(request: UpdateRequest, labels: Labels, memory: Memory) -> Memory:
    """Refuse what cannot be; where the bytes are to go.

    :param memory: as the server was started.
    :raises UpdateRefused: what is wrong with the label, the base, the deadline or the memory.
    """
    labels.check(request.version, any_order=request.any_order or isinstance(request.order, FedOrder))
    _check_base(request.base, labels.live)
    _check_deadline(request.deadline_seconds)
    wanted = request.memory or memory
    if wanted == "staged" and memory == "inplace":
        raise UpdateRefused(
            "there is no memory for a second set of weights",
            [("try", "memory inplace, or a server with --refit-memory staged")],
            code="no-staging-memory",
        )
    if wanted == "inplace" and request.dry_run:
        raise UpdateRefused("a dry run would overwrite the live weights in place", code="dry-run-inplace")
    return wanted


def _check_base(base: str | None, live: str) -> None:
    if base is not None and base != live:
        raise UpdateRefused(
            f"the update is for version {base!r}, and {live!r} is being served",
            [("live", live)],
            code="base-mismatch",
        )


def _check_deadline(seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds <= MAX_DEADLINE_SECONDS:
        raise UpdateRefused(
            f"a deadline of {seconds:g} seconds cannot be",
            [("needed", f"more than 0, at most {MAX_DEADLINE_SECONDS:g}")],
            code="bad-deadline",
        )
