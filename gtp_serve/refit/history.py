"""Updates that have ended, newest last, and no more of them than are worth keeping.  No torch."""

from __future__ import annotations

from collections import deque

from gtp_serve.errors import UnknownUpdate
from gtp_serve.refit.orders import UpdateRecord

KEPT = 200


class History:
    """The last ``KEPT`` records, each with the digest of what was asked for."""

    def __init__(self) -> None:
        self._entries: deque[tuple[UpdateRecord, str]] = deque(maxlen=KEPT)
        self._own_ids = 0
        self.total = 0
        """Updates that have ever ended."""

    def add(self, record: UpdateRecord, content: str = "") -> None:
        """An update has ended."""
        self._entries.append((record, content))
        self.total += 1

    def find(self, update: str) -> tuple[UpdateRecord, str]:
        """By its id: the record and what it was begun with.

        :raises UnknownUpdate: there is none, or too many have ended since.
        """
        found = next((entry for entry in self._entries if entry[0].id == update), None)
        if found is None:
            raise UnknownUpdate(f"there is no update {update!r}", [("kept", f"the last {KEPT}")])
        return found

    def newest_first(self) -> tuple[UpdateRecord, ...]:
        """All that is kept."""
        return tuple(record for record, _ in reversed(self._entries))

    def own_id(self, kind: str) -> str:
        """An id for what was begun without one, which no kept record has."""
        taken = {record.id for record, _ in self._entries}
        while True:
            self._own_ids += 1
            if (name := f"{kind}-{self._own_ids}") not in taken:
                return name
