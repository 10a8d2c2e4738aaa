"""Who asks a fleet, and how many requests wait there for a replica."""

from __future__ import annotations

FRONT_SECONDS = 20.0
"""A front that has not asked for so long is gone."""


class Fronts:
    """The fronts that are there; all times are seconds of one steady clock.

    :param now: when the fleet began: nobody has asked before.
    """

    def __init__(self, now: float) -> None:
        self._asked: dict[str, tuple[float, int]] = {}
        self._last = now

    def __contains__(self, front: str) -> bool:
        return front in self._asked

    @property
    def held(self) -> int:
        """Requests that wait in fronts for a replica."""
        return sum(held for _, held in self._asked.values())

    def note(self, front: str, held: int, now: float) -> None:
        """It has asked.

        :param held: its requests that wait for a replica.
        """
        self._last = now
        self._asked[front] = (now, held)

    def leave(self, front: str) -> None:
        """It ends in good order."""
        self._asked.pop(front, None)

    def drop_silent(self, now: float) -> list[str]:
        """Those that are gone, once each."""
        gone = [front for front, (heard, _) in self._asked.items() if now - heard > FRONT_SECONDS]
        for front in gone:
            del self._asked[front]
        return gone

    def alone_seconds(self, now: float) -> float:
        """For how long there has been none: 0 while there is one."""
        return 0.0 if self._asked else now - self._last
