"""Sequences of token ids that an output must not hold.  No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class BadWords:
    """Of one request.  A word's last id is forbidden where the output ends with all the others.

    :param words: none of them empty.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = frozenset(word[0] for word in words if len(word) == 1)
        self._by_end: dict[int, list[tuple[list[int], int]]] = {}
        """By the last id of what must stand before: (all of that, the id that must not follow)."""
        for word in words:
            if len(word) > 1:
                *before, last = word
                self._by_end.setdefault(before[-1], []).append((before, last))

    def after(self, tokens: Sequence[int], prompt_len: int) -> Iterator[int]:
        """Ids that must not come next.

        :param tokens: prompt, then output; what a word begins in the prompt does not count.
        """
        yield from self._always
        output = len(tokens) - prompt_len
        if output == 0 or not self._by_end:
            return
        for before, last in self._by_end.get(tokens[-1], ()):
            if len(before) <= output and list(tokens[-len(before) :]) == before:
                yield last
