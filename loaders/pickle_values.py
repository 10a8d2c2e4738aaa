"""What a pickle's objects become when they are read as data: names, records and references, all inert."""

from __future__ import annotations

from dataclasses import dataclass


class Name:
    """A name from the allow-list, standing for the class, function or dtype it names elsewhere."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Name({self.name})"


class Record:
    """What an object would have been: the name of its class, its arguments and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[object, ...]) -> None:
        self.name = name
        self.args = args
        self.state: object = None

    def __repr__(self) -> str:
        return f"Record({self.name})"

    def attributes(self) -> dict[object, object]:
        """Its state when that is a dictionary, else nothing."""
        return self.state if isinstance(self.state, dict) else {}


@dataclass(frozen=True, slots=True)
class Persistent:
    """A reference to something outside the pickle, as it is written there (a storage of a ``torch.save``
    file)."""

    reference: object
