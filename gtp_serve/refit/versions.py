"""Labels of weight versions: what one may be, which may follow which, which comes next when nobody says.  No torch."""

from __future__ import annotations

import re

from gtp_serve.errors import UpdateRefused

MAX_LABEL_CHARS = 128
_REMEMBERED = 100_000
"""Labels that were committed in this life; the oldest are forgotten beyond that."""
_TRAILING = re.compile(r"(.*?)(\d+)", re.DOTALL)


def check_form(label: str) -> None:
    """Refuse what cannot be a label (or an update's id).

    :raises UpdateRefused: unless it is 1 to 128 printable characters without spaces.
    """
    if not 1 <= len(label) <= MAX_LABEL_CHARS or not label.isprintable() or any(char.isspace() for char in label):
        raise UpdateRefused(
            f"{label[:MAX_LABEL_CHARS]!r} is no label",
            [("needed", f"1 to {MAX_LABEL_CHARS} printable characters without spaces")],
            code="bad-label",
        )


class Labels:
    """The live label and those before it.

    :param live: of the weights that were loaded first.
    """

    def __init__(self, live: str) -> None:
        self.live = live
        self._used: dict[str, None] = {live: None}

    def check(self, version: str, *, any_order: bool = False) -> None:
        """Whether weights of this label may come next.

        :param any_order: whoever asks keeps no order: only the form counts.
        :raises UpdateRefused: no label, one that was served before, or a number that is not above the live one.
        """
        check_form(version)
        if any_order:
            return
        if version in self._used:
            raise UpdateRefused(
                f"version {version!r} {'is being served' if version == self.live else 'was served before'}",
                [("live", self.live)],
                code="version-repeated",
            )
        if _is_number(version) and _is_number(self.live) and int(version) <= int(self.live):
            raise UpdateRefused(
                f"version {version!r} is not above {self.live!r}, which is being served", code="version-reordered"
            )

    def set_live(self, version: str) -> None:
        """Weights of this label serve from now on."""
        self.live = version
        self._used.pop(version, None)
        self._used[version] = None
        if len(self._used) > _REMEMBERED:
            del self._used[next(iter(self._used))]


def _is_number(label: str) -> bool:
    return label.isascii() and label.isdigit()


def next_label(current: str) -> str:
    """The label after this one: its trailing number plus one (leading zeros are kept), or ``-1`` behind a word."""
    match = _TRAILING.fullmatch(current)
    if match is None:
        return f"{current[: MAX_LABEL_CHARS - 2]}-1"
    word, number = match.groups()
    return f"{word}{str(int(number) + 1).zfill(len(number))}"[-MAX_LABEL_CHARS:]
