"""One rank's weights: the set that serves, and a second one of the same layout to fill beside it.

Made right after the decoder, it moves the decoder's parameters into memory of its own; from then on no parameter
ever moves.  What a decoder computes from its configuration (rotary tables) is no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from gtp_serve.layout.spans import Shard
from gtp_serve.refit.apply import Target
from gtp_serve.refit.arena import Arena, open_arena
from gtp_serve.refit.mapping import ALIGNMENT, MappedRange


class Derived(Protocol):
    """What is computed from parameters and serves in their place, of both sets."""

    def make(self, live: Tensor, source: Tensor, *, staged: bool, keep_on: Callable[[], None]) -> None:
        """Compute what belongs to one parameter anew.

        :param live: the parameter.
        :param source: its values: itself, or what stands for it in the staged set.
        :param staged: write beside what serves.
        :param keep_on: to be called again and again; may raise.
        """
        ...

    def swap(self) -> None:
        """Exchange the two sets' contents."""
        ...

    def release_live(self) -> int:
        """Give its memory back; bytes given back."""
        ...

    def release_staged(self) -> int:
        """The same of the other set."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A parameter's tensor and where it begins in either set."""

    tensor: Tensor
    start: int


class WeightStore:
    """Live and staged parameters of one rank.

    A parameter of the decoder may be covered by several targets (the experts of a stack) and may be used in several
    places (a tied head): it stays one tensor.

    :param targets: as the decoder states them, before they are filled; their contents are not kept.
    :param arena: by default one for the parameters' device.
    :param memory: for that one, as ``open_arena`` takes it.
    :raises DoesNotFit: when there is no memory.
    """

    def __init__(
        self, targets: Sequence[Target], *, arena: Arena | None = None, memory: MappedRange | None = None
    ) -> None:
        owners = _owners(targets)
        starts, self.num_bytes = _lay_out(owners)
        devices = {owner.device for owner in owners}
        if len(devices) > 1:
            raise ValueError(f"parameters lie on several devices: {sorted(map(str, devices))}")
        self._arena = open_arena(self.num_bytes, devices.pop(), memory) if arena is None else arena
        self._places = tuple(_Place(owner, start) for owner, start in zip(owners, starts, strict=True))
        index = {id(owner): n for n, owner in enumerate(owners)}
        self._cuts = tuple(_Cut.of(target, index) for target in targets)
        for place in self._places:
            place.tensor.data = self._arena.live(place.start, place.tensor)
        self.live = tuple(cut.target(self._places[cut.owner].tensor) for cut in self._cuts)
        self._staged: tuple[Target, ...] | None = None
        self._derived: Derived | None = None

    def attach(self, derived: Derived) -> None:
        """Keep this in step with the parameters; ``derive`` computes it."""
        self._derived = derived

    def derive(self, *, staged: bool, keep_on: Callable[[], None] = lambda: None) -> None:
        """Compute what is derived from a set, which was filled.

        :param keep_on: called again and again; may raise.
        """
        if self._derived is None:
            return
        for place in self._places:
            source = self._arena.staged(place.start, place.tensor) if staged else place.tensor
            self._derived.make(place.tensor, source, staged=staged, keep_on=keep_on)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Of the targets, in order."""
        return tuple(target.shard for target in self.live)

    @property
    def staged(self) -> tuple[Target, ...]:
        """The second set, in the order of ``live``; its memory is taken now if it was not before.

        :raises DoesNotFit: when there is none.
        """
        if self._staged is None:
            sets = [self._arena.staged(place.start, place.tensor) for place in self._places]
            self._staged = tuple(cut.target(sets[cut.owner]) for cut in self._cuts)
        return self._staged

    def swap(self) -> None:
        """Exchange the two sets' contents.  No step may be running, and nobody may be reading or writing either."""
        self._arena.swap()
        if self._derived is not None:
            self._derived.swap()

    def release_staged(self) -> int:
        """Give the second set's memory back; its contents are gone.  Bytes given back."""
        self._staged = None
        more = 0 if self._derived is None else self._derived.release_staged()
        return more + self._arena.release_staged()

    def release_live(self) -> int:
        """Give the live set's memory back where that can be done without moving it.  Bytes given back."""
        more = 0 if self._derived is None else self._derived.release_live()
        return more + self._arena.release_live()


@dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """A target as a view of the parameter that it is in."""

    shard: Shard
    owner: int
    strides: tuple[int, ...]
    offset: int
    """Elements."""

    @staticmethod
    def of(target: Target, index: dict[int, int]) -> _Cut:
        tensor, owner = target.tensor, owner_of(target.tensor)
        offset = int(tensor.storage_offset()) - int(owner.storage_offset())
        return _Cut(target.shard, index[id(owner)], tensor.stride(), offset)

    def target(self, owner: Tensor) -> Target:
        if self.offset == 0 and self.shard.shape == tuple(owner.shape):
            return Target(self.shard, owner)
        offset = owner.storage_offset() + self.offset
        return Target(self.shard, owner.detach().as_strided(self.shard.shape, self.strides, offset))


def owner_of(tensor: Tensor) -> Tensor:
    """The parameter that a tensor is, or is a part of."""
    base = tensor._base
    return tensor if base is None else base


def _owners(targets: Sequence[Target]) -> list[Tensor]:
    """Every parameter once, in the order of its first target."""
    owners = {id(owner): owner for owner in (owner_of(target.tensor) for target in targets)}
    seen: dict[int, int] = {}
    for target in targets:
        owner = owner_of(target.tensor)
        if owner.untyped_storage().nbytes() != owner.nbytes or not owner.is_contiguous():
            raise ValueError(f"{target.shard.key}: it is part of a larger parameter that cannot be found from it")
        if owner.nbytes and seen.setdefault(owner.data_ptr(), id(owner)) != id(owner):
            raise ValueError(f"{target.shard.key}: another tensor lies in the same memory")
    return list(owners.values())


def _lay_out(owners: Sequence[Tensor]) -> tuple[list[int], int]:
    """(where each begins, bytes in all)."""
    starts: list[int] = []
    end = 0
    for owner in owners:
        starts.append(end)
        end += -(-owner.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, end
