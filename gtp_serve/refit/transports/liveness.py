"""Who is still there: every participant beats, and one that has been silent for too long is named.  No torch.

A beat also carries a word on how its sender is: at work, done, or failed and why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

BEAT_SECONDS = 0.5
SILENT_SECONDS = 2.0
LEAST_ROUNDS = 3
"""Rounds of our own in which a peer must have been silent: a process that was itself held up blames nobody."""
MOST_OF_A_ROUND = 1.2 * BEAT_SECONDS
"""What a round counts for at most; one that takes longer has waited for the store, or for a processor."""

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


class Silence:
    """How long nothing has been heard, in time in which this process could have heard it.

    A process that is itself short of processor time looks seldom.  Each look then counts as if it had come almost in
    time, so that the process is slow to blame others in the measure in which it is slow itself.

    :param most: seconds that one look counts for at most.
    """

    def __init__(self, most: float) -> None:
        self.seconds = 0.0
        self._most = most
        self._heard = self._looked = -math.inf

    def look(self, now: float, heard: float) -> float:
        """Seconds of silence until now; it begins anew whenever something was heard.

        :param heard: when the last thing was.
        """
        if heard != self._heard:
            self.seconds, self._heard, self._looked = 0.0, heard, heard
        self.seconds += min(now - self._looked, self._most)
        self._looked = now
        return self.seconds


@dataclass(slots=True)
class _Heard:
    count: int
    since: float
    rounds: int = 0
    silence: Silence = field(default_factory=lambda: Silence(MOST_OF_A_ROUND))


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
            silent = heard.silence.look(now, heard.since) >= self.silent_seconds and heard.rounds >= LEAST_ROUNDS
            if silent and not ended:
                return Verdict("peer-silent", f"{self.peers[place]} has been silent for {now - heard.since:.1f} s")
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
