"""Which weights the requests of the last minutes were made by: how far behind the live ones a fleet of clients is."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WINDOW_SECONDS = 300.0
MAX_KEPT = 8192
"""Requests; of a busier window only the newest are told."""


class VersionCounts:
    """Ended requests by the version that made their first token."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: deque[tuple[float, str, bool, int]] = deque(maxlen=MAX_KEPT)

    def note(self, spans: Sequence[Mapping[str, Any]]) -> None:
        """A request has ended.

        :param spans: ``weight_versions`` of its reply; one without a token counts nowhere.
        """
        if spans:
            tokens = spans[-1]["end"] - spans[0]["start"]
            self._ended.append((self._clock(), str(spans[0]["version"]), len(spans) > 1, tokens))

    def read(self) -> dict[str, Any]:
        """Counts by version, the one that was seen last at the end; ``mixed`` of them went on with newer weights."""
        oldest = self._clock() - WINDOW_SECONDS
        while self._ended and self._ended[0][0] < oldest:
            self._ended.popleft()
        requests: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        mixed: Counter[str] = Counter()
        for _, version, is_mixed, count in self._ended:
            # Put at the end again: versions come in the order in which they were last seen.
            requests[version] = requests.pop(version, 0) + 1
            tokens[version] += count
            mixed[version] += is_mixed
        return {
            "window_seconds": WINDOW_SECONDS,
            "versions": [
                {"version": version, "requests": count, "tokens": tokens[version], "mixed": mixed[version]}
                for version, count in requests.items()
            ],
        }
