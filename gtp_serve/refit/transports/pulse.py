"""A participant's heartbeat: a thread that tells the others how it is and hears how they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from gtp_serve.refit.transports.liveness import BEAT_SECONDS, Beat, Member, Roll, State, Verdict
from gtp_serve.refit.transports.stores import Terms, connect


class Pulse(threading.Thread):
    """Beats through the store until ``close``.

    :param me: this participant, at ``place`` of the group.
    :param peers: the others.
    """

    def __init__(self, terms: Terms, place: int, me: Member, peers: Mapping[int, Member]) -> None:
        super().__init__(name="refit-pulse", daemon=True)
        self.verdict: Verdict | None = None
        """What the others' beats say against going on."""
        self.lost = ""
        """Why the store cannot be reached any more."""
        self.last_answer = time.monotonic()
        """Of the store, to whatever was asked: where this process gets little time, a whole round may take long."""
        self._terms, self._place, self._me = terms, place, me
        self._roll = Roll(peers, silent_seconds=terms.silent_seconds)
        self._lock = threading.Condition()
        self._word = Beat(count=0, who=me)
        self._asked = self._answered = 0
        self._closing = False

    def say(self, state: State, verdict: Verdict | None = None) -> None:
        """From now on tell this; it goes out at once."""
        with self._lock:
            why = verdict or Verdict("", "")
            self._word = Beat(
                count=self._word.count,
                who=self._me,
                state=state,
                code=why.code,
                message=why.message,
                details=why.details,
            )
            self._asked += 1
            self._lock.notify_all()

    def fresh_round(self, seconds: float) -> bool:
        """Whether a round that begins after this call has ended within so many seconds."""
        with self._lock:
            self._asked += 1
            mine = self._asked
            self._lock.notify_all()
            return self._lock.wait_for(lambda: self._answered >= mine or bool(self.lost), seconds) and not self.lost

    def member(self, place: int) -> Member:
        """A participant, as far as it is known."""
        with self._lock:
            return self._me if place == self._place else self._roll.peers[place]

    def missing(self) -> list[Member]:
        """Participants that have not come yet."""
        with self._lock:
            return self._roll.missing()

    def all_know(self) -> bool:
        """Whether every participant that is still there knows that it is over."""
        with self._lock:
            return self._roll.all_know(time.monotonic())

    def close(self, seconds: float) -> bool:
        """End the thread; whether it has ended."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self.join(seconds)
        return not self.is_alive()

    def run(self) -> None:
        """Beat."""
        try:
            store = connect(self._terms)
            while self._round(store):
                pass
        except Exception as error:  # whatever it is: without the store nobody can be heard
            with self._lock:
                self.lost = str(error).splitlines()[0] if str(error) else type(error).__name__
                self._lock.notify_all()

    def _round(self, store: Any) -> bool:
        """One round and the pause after it; whether there is to be another."""
        with self._lock:
            asked = self._asked
            word = self._word = msgspec.structs.replace(self._word, count=self._word.count + 1)
        store.set(f"beat/{self._place}", msgspec.json.encode(word))
        self._note_answer()
        beats = self._hear(store)
        with self._lock:
            now = time.monotonic()
            found = self._roll.round(now, beats)  # also when there is a verdict: it keeps count of who knows
            self.verdict = self.verdict or found
            self._answered = asked
            self._lock.notify_all()
            return self._pause()

    def _pause(self) -> bool:
        self._lock.wait_for(lambda: self._closing or self._asked > self._answered, BEAT_SECONDS)
        return not self._closing or self._asked > self._answered

    def _hear(self, store: Any) -> dict[int, Beat]:
        places = [place for place in range(self._terms.size) if place != self._place]
        there = [place for place in places if self._known(place) or self._has_come(store, place)]
        words = store.multi_get([f"beat/{place}" for place in there]) if there else []
        self._note_answer()
        return {place: msgspec.json.decode(word, type=Beat) for place, word in zip(there, words, strict=True)}

    def _has_come(self, store: Any, place: int) -> bool:
        found = bool(store.check([f"beat/{place}"]))
        self._note_answer()
        return found

    def _note_answer(self) -> None:
        self.last_answer = time.monotonic()

    def _known(self, place: int) -> bool:
        with self._lock:
            return place in self._roll.states
