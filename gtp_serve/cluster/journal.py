"""The fleet's memory of what was decided: written before it is carried out, read when the fleet starts again.

It is one small value in the cluster's own key-value store (Ray's GCS).  A file would lie on one node, and the fleet
may come back on another; a decision must outlive whatever its replicas outlive, and that is the GCS: without it there
is no replica left that could disagree, and with its external store it survives as they do.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from gtp_serve.errors import EngineFault
from gtp_serve.refit.orders import DiskOrder, InFlight, UpdateRecord

RECORDS_KEPT = 50


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """An update that is to be committed, whatever happens from now on."""

    update: str
    version: str
    in_flight: InFlight = "keep"
    roll_back: bool = False
    kind: str = ""
    content: str = ""
    """Digest of what was asked for."""
    base: str = ""
    """The version before, to go back to if nobody could commit."""
    base_initial: bool = False
    base_disk: DiskOrder | None = None


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """All that the fleet must know after a restart."""

    committed: str = ""
    """The version that everybody serves or must come to serve; empty before the first replica was ready."""
    disk: DiskOrder | None = None
    """Where the committed version lies on disk, if it came from there."""
    initial: bool = True
    """The committed version is the one that a replica loads when it starts."""
    deciding: Decision | None = None
    """Decided and perhaps not carried out everywhere."""
    pending: UpdateRecord | None = None
    """An update that was begun and has not ended."""
    replicas: tuple[str, ...] = ()
    """Names of replicas whose actors may exist."""
    next_replica: int = 1
    records: tuple[UpdateRecord, ...] = ()
    """Ended updates, newest first."""
    contents: dict[str, str] = {}
    """Digest of what each of those was asked for."""
    labels: tuple[str, ...] = ()
    """Versions that were committed, oldest first."""


class Store(Protocol):
    """Where the value lies."""

    def get(self) -> bytes | None:
        """The value, if there is one."""
        ...

    def put(self, value: bytes) -> None:
        """Write it; returns when it is there to stay."""
        ...

    def delete(self) -> None:
        """There is no fleet any more."""
        ...


class Journal:
    """The memory and its store; ``write`` returns when a change is durable."""

    def __init__(self, store: Store) -> None:
        self._store = store
        raw = store.get()
        self.is_new = raw is None
        try:
            self.memory = Memory() if raw is None else msgspec.json.decode(raw, type=Memory)
        except msgspec.DecodeError as error:
            raise EngineFault(
                "the fleet's journal cannot be read",
                [("error", str(error)), ("needed", "the same release of gtp-serve that wrote it")],
                code="fleet-journal",
            ) from error

    def write(self, **changes: object) -> None:
        """Change fields of the memory, durably."""
        changed = msgspec.structs.replace(self.memory, **changes)
        self._store.put(msgspec.json.encode(changed))
        self.memory = changed

    def end(self, record: UpdateRecord, content: str, **changes: object) -> None:
        """An update has ended."""
        records = (record, *(one for one in self.memory.records if one.id != record.id))[:RECORDS_KEPT]
        contents = {**self.memory.contents, record.id: content}
        kept = {one.id: contents.get(one.id, "") for one in records}
        self.write(records=records, contents=kept, pending=None, **changes)

    def forget(self) -> None:
        """The fleet is over."""
        self._store.delete()


class InMemory:
    """A store for one process."""

    def __init__(self) -> None:
        self.value: bytes | None = None

    def get(self) -> bytes | None:
        """The value, if there is one."""
        return self.value

    def put(self, value: bytes) -> None:
        """Write it."""
        self.value = value

    def delete(self) -> None:
        """Forget it."""
        self.value = None
