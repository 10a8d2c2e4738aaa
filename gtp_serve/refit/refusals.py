"""Calls that an update's state does not allow, in words.  No torch."""

from __future__ import annotations

from gtp_serve.errors import UpdateRefused
from gtp_serve.refit.orders import UpdateRecord


def another_content(record: UpdateRecord) -> UpdateRefused:
    """The id is in use."""
    return UpdateRefused(f"update {record.id} exists with another content", _state(record), code="id-in-use")


def under_way(record: UpdateRecord) -> UpdateRefused:
    """One update at a time."""
    return UpdateRefused(
        f"update {record.id} to version {record.version!r} is under way",
        [*_state(record), ("try", "again when it has ended, or abort it")],
        code="update-under-way",
    )


def not_verified(record: UpdateRecord) -> UpdateRefused:
    """There is nothing to commit yet."""
    return UpdateRefused(f"update {record.id} is not verified", _state(record), code="not-verified")


def ended_otherwise(record: UpdateRecord) -> UpdateRefused:
    """There is nothing to commit any more."""
    return UpdateRefused(
        f"update {record.id} has ended without a commit",
        [*_state(record), ("why", record.message or "it was a dry run")],
        code="update-ended",
    )


def committed(record: UpdateRecord) -> UpdateRefused:
    """It is too late to abort."""
    return UpdateRefused(f"update {record.id} is committed", [("try", "rollback")], code="update-committed")


def not_fed(record: UpdateRecord) -> UpdateRefused:
    """Its bytes come from elsewhere."""
    return UpdateRefused(f"update {record.id} does not come piece by piece", code="not-fed")


def fed_up(record: UpdateRecord) -> UpdateRefused:
    """Its last piece was announced, or it has ended."""
    return UpdateRefused(f"update {record.id} takes no more tensors", _state(record), code="feed-ended")


def _state(record: UpdateRecord) -> list[tuple[str, str]]:
    return [("state", record.state)]
