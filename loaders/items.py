"""Where in the items of a ``torch_dist`` file the tensors' bytes lie.

Each item is an archive that must be checked, and thousands of them differ in nothing that the check looks at.  So what
it looked at is remembered: an item that has the same bytes in all those places would be found to be the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from gtp_serve.layout.spans import Shape
from gtp_serve.loaders.files import FileViews
from gtp_serve.loaders.torch_dist import Place
from gtp_serve.loaders.torch_zip import Member, find_tensor
from gtp_serve.refit.native_copy import Checks

#: Places nearer than this are read together.
_NEAR_BYTES = 1024
#: What is remembered at most: kinds of items, forms that items of one kind have; of a form, the bytes to compare and
#: the places that were looked at (an item of torch has about 50).
_MAX_KINDS, _MAX_FORMS, _MAX_BYTES, _MAX_PLACES = 1024, 4, 64 << 10, 1000
#: Bytes that are read at a time, and how many such blocks are kept: the check goes back and forth between the
#: directory at the end and the headers it lists.
_BLOCK_BYTES, _BLOCKS = 16 << 10, 2

_Kind = tuple[int, Shape, str]


@dataclass(frozen=True, slots=True)
class _Window:
    """A range of an item, which of its bits were looked at, and what they were."""

    start: int
    length: int
    mask: int
    value: int

    def bytes(self) -> tuple[int, bytes, bytes]:
        """Where it begins, the mask, and the value."""
        return self.start, self.mask.to_bytes(self.length, "little"), self.value.to_bytes(self.length, "little")


@dataclass(frozen=True, slots=True)
class _Form:
    windows: tuple[_Window, ...]
    found: Member
    checks: Checks


class Items:
    """Finds tensors in items.  Safe to use from threads."""

    def __init__(self, views: FileViews) -> None:
        self._views = views
        self._forms: dict[_Kind, tuple[_Form, ...]] = {}

    def find(self, place: Place, shape: Shape, dtype: str, label: str) -> Place:
        """Where the bytes of the tensor lie in the item at ``place``.

        :param label: of the item, for messages.
        :raises CheckpointCorrupt: when the item is not this tensor.
        """
        kind = (place.length, shape, dtype)
        forms = self._forms.get(kind, ())
        read: dict[tuple[int, int], int] = {}
        for form in forms:
            if self._fits(place, form, read):
                return _within(place, form.found)
        item = _Item(self._views, place)
        found = find_tensor(item, shape, dtype, label)
        windows = item.looked_at()
        small = windows is not None and sum(window.length for window in windows) <= _MAX_BYTES
        if windows and small and len(forms) < _MAX_FORMS and (forms or len(self._forms) < _MAX_KINDS):
            self._forms[kind] = (*forms, _Form(windows, found, Checks([window.bytes() for window in windows])))
        return _within(place, found)

    def usual(self, place: Place, shape: Shape, dtype: str) -> tuple[Member, Checks] | None:
        """Where the bytes lie in an item of this kind if it passes the checks, which are of the item's bytes.

        None when no such item has been found yet.  One that does not pass may still be of another form.
        """
        forms = self._forms.get((place.length, shape, dtype))
        return (forms[0].found, forms[0].checks) if forms else None

    def _fits(self, place: Place, form: _Form, read: dict[tuple[int, int], int]) -> bool:
        for window in form.windows:
            where = (window.start, window.length)
            value = read.get(where)
            if value is None:
                data = self._views.read(place.path, place.offset + window.start, window.length)
                value = read[where] = int.from_bytes(data, "little")
            if value & window.mask != window.value:
                return False
        return True


def _within(place: Place, member: Member) -> Place:
    return Place(place.path, place.offset + member.start, member.size)


class _Item:
    """The bytes of an item, read where they are asked for, and a record of where that was."""

    def __init__(self, views: FileViews, place: Place) -> None:
        self._views, self._place = views, place
        self._seen: dict[tuple[int, int], bytes] = {}
        self._blocks: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return self._place.length

    def __getitem__(self, place: slice) -> bytes:
        start, stop, _ = place.indices(len(self))
        if stop <= start:
            return b""
        data = self._read(start, stop)
        if len(self._seen) <= _MAX_PLACES:
            self._seen[start, stop] = data
        return data

    def _read(self, start: int, stop: int) -> bytes:
        for first, block in self._blocks:
            if first <= start and stop <= first + len(block):
                return block[start - first : stop - first]
        count = min(max(stop - start, _BLOCK_BYTES), len(self) - start)
        block = bytes(self._views.read(self._place.path, self._place.offset + start, count))
        self._blocks = [(start, block), *self._blocks[: _BLOCKS - 1]]
        return block[: stop - start]

    def looked_at(self) -> tuple[_Window, ...] | None:
        """All that has been read; None when that was in too many places."""
        if len(self._seen) > _MAX_PLACES:
            return None
        windows: list[_Window] = []
        group: list[tuple[int, bytes]] = []
        end = 0
        for (start, _), data in sorted(self._seen.items()):
            if group and start > end + _NEAR_BYTES:
                windows.append(_window(group, end))
                group = []
            group.append((start, data))
            end = max(end, start + len(data))
        return (*windows, _window(group, end)) if group else ()


def _window(pieces: list[tuple[int, bytes]], end: int) -> _Window:
    first = pieces[0][0]
    mask, value = bytearray(end - first), bytearray(end - first)
    for start, data in pieces:
        at = start - first
        mask[at : at + len(data)] = b"\xff" * len(data)
        value[at : at + len(data)] = data
    return _Window(first, end - first, int.from_bytes(mask, "little"), int.from_bytes(value, "little"))
