"""What one render of a chat template may still use: characters, work, time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import cast

from jinja2.exceptions import SecurityError, TemplateError
from jinja2.runtime import Context, Undefined

#: Work that an element of a container costs; a text costs its length.
ITEM_COST = 16
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, type({}.keys()), type({}.values()), type({}.items()))
_CLOCK_STEPS = 1000


class BoundExceeded(TemplateError):
    """The template is too large, too slow or makes too much text."""


class Meter:
    """Counts down while a template renders.

    :param characters: longest single text.
    :param work: characters made plus operations done, over the whole render.
    :param seconds: wall time from now.
    """

    __slots__ = ("_characters", "_deadline", "_seconds", "_work")

    def __init__(self, *, characters: int, work: int, seconds: float) -> None:
        self._characters = characters
        self._work = work
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds

    def spend(self, amount: int) -> None:
        """Pay for work.

        :raises BoundExceeded: when it or the time is used up.
        """
        self._work -= amount
        if self._work < 0:
            raise BoundExceeded("it does more work than a chat template may")
        if time.monotonic() > self._deadline:
            raise BoundExceeded(f"it takes more than {self._seconds:g} seconds")

    def check(self, characters: int) -> None:
        """A text may have this length."""
        if characters > self._characters:
            raise BoundExceeded(f"it makes a text of more than {self._characters} characters")

    def produce(self, characters: int) -> None:
        """Pay for a text of this length before it is made."""
        self.check(characters)
        self.spend(characters + 1)

    def walk(self, value: object) -> None:
        """Pay for work in C over all parts of a value; parts that are shared count each time they are met."""
        if isinstance(value, _CONTAINERS):
            self.produce(self._length(value))

    def text(self, value: object) -> str:
        """``str(value)``, paid for before it is made."""
        self.produce(len(value) if isinstance(value, str) else self._length(value))
        return str(value)

    def _length(self, value: object) -> int:
        """About the length of ``str(value)``; stops counting above the longest text."""
        total, steps, todo = 0, 0, [value]
        while todo and total <= self._characters:
            item = todo.pop()
            total += _own_length(item)
            if isinstance(item, dict):
                todo.extend(item.keys())
                todo.extend(item.values())
            elif isinstance(item, _CONTAINERS):
                todo.extend(cast(Iterable[object], item))
            steps += 1
            if steps % _CLOCK_STEPS == 0:
                self.spend(0)
        return total


def size(value: object) -> int:
    """Work that making this value cost; of a container its own elements only."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple | set | dict | range):
        return len(value) * ITEM_COST
    return 1


def _own_length(value: object) -> int:
    if isinstance(value, str):
        return len(value) + 4
    if isinstance(value, int):
        return value.bit_length() // 3 + 2
    if value is None or isinstance(value, (float, Undefined, range, *_CONTAINERS)):
        return ITEM_COST
    raise SecurityError(f"a {type(value).__name__} cannot be turned into text")


def meter_of(context: Context) -> Meter:
    """The meter of the render that this context belongs to."""
    meter = getattr(context.environment, "meter", None)
    if not isinstance(meter, Meter):
        raise TypeError("a bounded template was run in another environment")
    return meter
