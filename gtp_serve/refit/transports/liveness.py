"""Who is still there: every participant beats, and one that has been silent for too long is named.  No torch.

A beat also carries a word on how its sender is: at work, done, or failed and why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

BEAT_SECONDS = 0.5
SILENT_SECONDS = 2.0
LEAST_ROUNDS = 3
"""Rounds of our own in which a peer must have been silent: a process that was itself held up blames nobody."""

State = Literal["working", "done", "failed"]


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A participant, as errors name it."""

    side: Literal["trainer", "engine"]
    rank: int
    pid: int = 0
    """0: it has not been heard of."""
    host: str = ""

    def __str__(self) -> str:
        name = f"{self.side} rank {self.rank}"
        return f"{name} (pid {self.pid}, host {self.host})" if self.pid else name


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """One participant's latest word."""

    count: int
    who: Member
    state: State = "working"
    code: str = ""
    message: str = ""
    details: tuple[tuple[str, str], ...] = ()
    """Why it failed."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the transfer cannot go on."""

    code: str
    message: str
    details: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class _Heard:
    count: int
    since: float
    rounds: int = 0


class Roll:
    """Beats heard so far and what follows from them.

    :param peers: the other participants by their place in the group; as they tell more of themselves, it is kept.
    """

    def __init__(self, peers: Mapping[int, Member], *, silent_seconds: float = SILENT_SECONDS) -> None:
        self.peers = dict(peers)
        self.silent_seconds = silent_seconds
        self.states: dict[int, State] = {}
        self.rounds = 0
        self._heard: dict[int, _Heard] = {}

    def round(self, now: float, beats: Mapping[int, Beat]) -> Verdict | None:
        """Take in what each peer has last said; the first reason to stop, if any.

        A failure that a peer tells comes before another's silence: it tells the cause, and it may have ended
        that other.  A peer that has never been heard of is not silent but ``missing``.
        """
        self.rounds += 1
        for place, beat in beats.items():
            heard = self._heard.get(place)
            if heard is None or heard.count != beat.count:
                self._heard[place] = _Heard(beat.count, now)
            else:
                heard.rounds += 1
            self.peers[place], self.states[place] = beat.who, beat.state
        for beat in beats.values():
            if beat.state == "failed":
                return Verdict(beat.code, beat.message, beat.details)
        return self._silent(now)

    def _silent(self, now: float) -> Verdict | None:
        for place, heard in sorted(self._heard.items()):
            ended = self.states[place] == "done"
            seconds = now - heard.since
            if not ended and seconds >= self.silent_seconds and heard.rounds >= LEAST_ROUNDS:
                return Verdict("peer-silent", f"{self.peers[place]} has been silent for {seconds:.1f} s")
        return None

    def missing(self) -> list[Member]:
        """Peers that have never been heard of."""
        return [peer for place, peer in sorted(self.peers.items()) if place not in self._heard]

    def all_know(self, now: float) -> bool:
        """Whether every peer that has come has told that it failed, or does not beat any more."""
        return all(
            self.states[place] == "failed" or now - heard.since >= 2 * BEAT_SECONDS
            for place, heard in self._heard.items()
        )
