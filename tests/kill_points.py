"""Makes the product's own calls tell a board where a process is.  Only helper processes of tests install this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any

from kill_board import Board

from gtp_serve.engine import follower, peer, ranks
from gtp_serve.refit import publisher, rank, staging, update
from gtp_serve.refit.orders import Vote
from gtp_serve.refit.transports import group, liveness, pulse, session
from gtp_serve.server import update_fields

SILENT_SECONDS = 2.0
"""Beats come every 0.15 s: a machine that runs other things too must not look like somebody who is stopped."""


def be_impatient() -> None:
    """The product's waits for somebody who is stopped, shortened: what is tested is that they end, not how long."""
    for module in (pulse, liveness):
        _set(module, "BEAT_SECONDS", 0.15)
    group.JOIN_SECONDS = 6.0
    _set(ranks, "Patience", lambda: peer.Patience(silence=4.0))
    follower._BEAT_SECONDS = 0.3
    numbers = update_fields.SOURCE_NUMBERS["distributed"]
    small = numbers["bucket_bytes"]
    assert isinstance(numbers, dict)
    numbers["bucket_bytes"] = replace(small, low=1)  # a small model is to have many buckets
    receiver = group.GroupReceiver.__init__
    _set(group.GroupReceiver, "__init__", lambda self, **of: receiver(self, **{**of, "silent_seconds": SILENT_SECONDS}))


def watch_points(board: Board) -> None:
    """From now on each point that this process comes to is told to the board."""

    def after(owner: Any, name: str, point: str, holds: Callable[[Any], bool] = lambda result: True) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def told(*args: Any, **named: Any) -> Any:
            result = original(*args, **named)
            if holds(result):
                board.reach(point)
            return result

        _set(owner, name, told)

    def before(owner: Any, name: str, point: str) -> None:
        original = getattr(owner, name)

        @wraps(original)
        def told(*args: Any, **named: Any) -> Any:
            board.reach(point)
            return original(*args, **named)

        _set(owner, name, told)

    # Rank 0 decides, the ranks carry out, trainers take part: each is at the point in its own way.
    after(update.UpdateMachine, "begin", "begin", lambda result: result[1] is not None)
    after(rank.RankWeights, "stage", "begin")
    after(publisher.Publisher, "_begin", "begin")
    after(group.GroupReceiver, "open", "store open")
    before(group.GroupReceiver, "receive", "store open")
    before(publisher, "send", "store open")
    after(session, "connect", "joined")
    after(session.Session, "agree", "shards exchanged")
    _watch_buckets(board)
    before(staging, "verify", "verifying")
    after(staging.Staging, "run", "verified", lambda vote: isinstance(vote, Vote) and vote.error is None)
    after(update.UpdateMachine, "_note_verified", "verified")
    before(rank.RankWeights, "commit", "commit")
    after(rank.RankWeights, "commit", "committed")
    after(update.UpdateMachine, "committed", "committed")
    before(rank.RankWeights, "roll_back", "rollback")


def _watch_buckets(board: Board) -> None:
    advance = session.Session.advance

    def told(self: session.Session, count: int) -> None:
        before = self.done
        advance(self, count)
        if before == 0:
            board.reach("first bucket")
        if 2 * before < self.total <= 2 * self.done:
            board.reach("middle bucket")
        if self.done == self.total:
            board.reach("last bucket")

    _set(session.Session, "advance", told)


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)
