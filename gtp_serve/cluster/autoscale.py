"""How many replicas there should be: by the requests that run or wait, with delays against swinging."""

from __future__ import annotations

from math import ceil

from gtp_serve.cluster.settings import Scale


class Autoscaler:
    """Remembers since when more, or fewer, replicas would have been right."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self.wanted = scale.low
        self._more_since: float | None = None
        self._fewer_since: float | None = None
        self._peak = 0
        """Most that was wanted while fewer are: one lull in a busy minute takes nothing away."""

    def look(self, now: float, requests: int) -> int:
        """The number of replicas that should be there.

        :param now: seconds of a steady clock.
        :param requests: running and waiting, on all replicas and in all fronts.
        """
        scale = self._scale
        right = min(scale.high, max(scale.low, ceil(requests / scale.target)))
        if right > self.wanted:
            self._fewer_since = None
            self._more_since = now if self._more_since is None else self._more_since
            if now - self._more_since >= scale.up_seconds:
                self.wanted, self._more_since = right, None
        elif right < self.wanted:
            self._more_since = None
            if self._fewer_since is None:
                self._fewer_since, self._peak = now, right
            self._peak = max(self._peak, right)
            if now - self._fewer_since >= scale.down_seconds:
                self.wanted, self._fewer_since = self._peak, None
        else:
            self._more_since = self._fewer_since = None
        return self.wanted
