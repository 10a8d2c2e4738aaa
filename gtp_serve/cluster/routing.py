"""Which replica takes a request: by room in its KV cache, its queue, and what of the prompt it has computed before.

Each front remembers which replicas it has sent which prompt beginnings to, block by block, in a table of bounded
size.  A beginning that nobody has yet goes to a place that all fronts agree on (rendezvous hashing), unless that
replica has more to do than another.  Decides everything, does nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

MOST_ENTRIES = 200_000
MOST_BLOCKS = 64
"""Of one prompt's beginning that are remembered."""
BALANCE_REQUESTS = 4
"""A replica may have so many requests more than the one that has least, ..."""
BALANCE_RATIO = 1.5
"""... or so many times as many, before a shared beginning is no reason any more to send it another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A replica that could take a request."""

    name: str
    version: str
    load: int
    """Requests that run or wait there."""
    kv_free: int
    """Blocks."""
    kv_total: int
    waiting: int = 0
    """Of its requests, those that have no place in the KV cache."""


class Router:
    """One front's memory of where prompts went.

    :param block_size: tokens of one block of the engines' prefix caches.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = max(1, block_size)
        self._places: OrderedDict[int, tuple[str, ...]] = OrderedDict()

    def choose(self, candidates: Sequence[Candidate], ids: Sequence[int], salt: str = "") -> Candidate | None:
        """Where a prompt goes; None when there is no candidate."""
        roomy = self._roomy(candidates, ids)
        if not roomy:
            return None
        least = min(candidate.load for candidate in roomy)
        most = max(least + BALANCE_REQUESTS, least * BALANCE_RATIO)
        fair = [candidate for candidate in roomy if candidate.load <= most]
        found = self._longest(fair, ids, salt)
        if found is not None:
            return found
        lowest = [candidate for candidate in fair if candidate.load == least]
        first = self._first(ids, salt)
        return max(lowest, key=lambda candidate: xxhash.xxh3_64_intdigest(candidate.name.encode(), seed=first))

    def note(self, candidate: Candidate, ids: Sequence[int], salt: str = "") -> None:
        """A prompt went there: its blocks will be in that replica's cache."""
        for key in self._keys(ids, salt, candidate.version):
            before = self._places.pop(key, ())
            self._places[key] = (candidate.name, *(name for name in before if name != candidate.name))[:4]
        while len(self._places) > MOST_ENTRIES:
            self._places.popitem(last=False)

    def _roomy(self, candidates: Sequence[Candidate], ids: Sequence[int]) -> list[Candidate]:
        """Those that can begin at once, if there are any."""
        needed = -(-len(ids) // self._block_size) + 1
        free = [one for one in candidates if one.waiting == 0 and one.kv_free >= min(needed, one.kv_total)]
        return free or list(candidates)

    def _longest(self, candidates: Sequence[Candidate], ids: Sequence[int], salt: str) -> Candidate | None:
        """Who has the longest beginning of a prompt; among several the one with the least to do."""
        best: list[Candidate] = []
        by_version: dict[str, list[Candidate]] = {}
        for candidate in candidates:
            by_version.setdefault(candidate.version, []).append(candidate)
        deepest = 0
        for version, group in by_version.items():
            left = {candidate.name: candidate for candidate in group}
            for depth, key in enumerate(self._keys(ids, salt, version), 1):
                places = self._places.get(key, ())
                left = {name: candidate for name, candidate in left.items() if name in places}
                if not left:
                    break
                if depth > deepest:
                    deepest, best = depth, list(left.values())
                elif depth == deepest:
                    best = [*best, *(one for one in left.values() if one not in best)]
        return min(best, key=lambda candidate: (candidate.load, candidate.name), default=None)

    def _first(self, ids: Sequence[int], salt: str) -> int:
        return next(iter(self._keys(ids, salt, "")), 0)

    def _keys(self, ids: Sequence[int], salt: str, version: str) -> list[int]:
        """Of each whole block, with all before it; a version's cache is another's no use."""
        size = self._block_size
        key = xxhash.xxh3_64_intdigest(f"{len(salt)}:{salt}{version}".encode())
        keys: list[int] = []
        for start in range(0, min(len(ids) - 1, MOST_BLOCKS * size) - size + 1, size):
            block = b"".join(token.to_bytes(4, "little") for token in ids[start : start + size])
            key = xxhash.xxh3_64_intdigest(block, seed=key)
            keys.append(key)
        return keys
