"""Pieces of an update that is sent tensor by tensor: when they are taken, and when the last one has come.  No torch."""

from __future__ import annotations

from msgspec.structs import replace

from gtp_serve.refit import refusals
from gtp_serve.refit.orders import UpdateRecord
from gtp_serve.refit.under_way import UnderWay
from gtp_serve.refit.versions import check_form


def announce(record: UpdateRecord, current: UnderWay | None, now: float) -> int:
    """One more piece is to come: its number, counted from 1.

    :param current: the update if it is under way.
    :raises UpdateRefused: it takes no pieces (now).
    """
    current = _open(record, current, now)
    current.pieces += 1
    return current.pieces


def end(record: UpdateRecord, current: UnderWay | None, version: str | None, now: float) -> bool:
    """No more pieces: whether the ranks must be told, which a repeated call does not.

    :param version: another label than the one it was begun with.
    :raises UpdateRefused: it takes no pieces, or that is no label.
    """
    has_ended = current is not None and current.end_of_feed and current.phase != "failing"
    if record.state == "committed" or has_ended:
        return False
    if version is not None:
        check_form(version)
    current = _open(record, current, now)
    if version is not None:
        current.record = replace(current.record, version=version)
    current.end_of_feed = True
    return True


def _open(record: UpdateRecord, current: UnderWay | None, now: float) -> UnderWay:
    """The update, with its full time again."""
    if record.kind != "fed":
        raise refusals.not_fed(record)
    if current is None or current.phase != "staging" or current.end_of_feed:
        raise refusals.fed_up(record)
    current.wait_from(now)
    return current
