"""Rectangles of ranks' tensors, put together on other ranks: whole matrices for Muon, Megatron's chunks for a file.

Every rank knows the whole route.  Items are put together in waves, one item at a time on each rank, so that all
ranks work side by side and none holds more than one item and its messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from gtp_serve.layout.spans import Box, Shape, Shard
from gtp_serve.refit.plan import Copy, build_plan
from gtp_serve.training.mesh import Mesh, Message
from gtp_serve.training.ownership import Owned


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements ``source_box`` of shard ``index`` of rank ``source`` are elements ``target_box`` of an item."""

    source: int
    index: int
    source_box: Box
    target_box: Box


@dataclass(frozen=True, slots=True)
class Item:
    """What one rank puts together, and from where."""

    number: int
    shard: Shard
    worker: int
    pieces: tuple[Piece, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        found: torch.dtype = getattr(torch, self.shard.dtype)
        return found

    @property
    def lies_whole(self) -> bool:
        """Whether the worker has all of it in one piece of one of its own tensors."""
        if len(self.pieces) != 1 or self.pieces[0].source != self.worker:
            return False
        return self.pieces[0].target_box.shape == self.shard.shape

    def part_of(self, source: int) -> list[Piece]:
        """The pieces that one rank has."""
        return [piece for piece in self.pieces if piece.source == source]


def route(owned: Sequence[Owned], want: Sequence[Shard], shapes: Mapping[str, Shape], load: list[int]) -> list[Item]:
    """Decide who puts what together: of the owners of an item's parts, one with little to do and little to be sent.

    :param shapes: of the logical tensors that ``want`` is about; what else is owned is left out.
    :param load: elements that each rank has to put together already; it is added to.
    :raises LayoutMismatch: when the ranks together do not have every element exactly once.
    """
    have = [replace(one.shard, spans=tuple(span for span in one.shard.spans if span.name in shapes)) for one in owned]
    plan = build_plan(have, want, shapes)
    copies: list[list[Copy]] = [[] for _ in want]
    for copy in plan.copies:
        copies[copy.target].append(copy)
    shares = [_shares(owned, found) for found in copies]
    workers = [0] * len(want)
    # Those that one rank has all of are settled first: the others then even out what is left.
    for number in sorted(range(len(want)), key=lambda number: len(shares[number]) > 1):
        size = prod(want[number].shape)
        share = shares[number]
        workers[number] = min(share, key=lambda rank: (load[rank] + size - share[rank], rank), default=0)
        load[workers[number]] += size
    return [
        Item(
            number,
            shard,
            workers[number],
            tuple(
                Piece(owned[c.source].rank, owned[c.source].index, c.source_box, c.target_box) for c in copies[number]
            ),
        )
        for number, shard in enumerate(want)
    ]


def _shares(owned: Sequence[Owned], copies: Sequence[Copy]) -> dict[int, int]:
    """Elements of an item by the rank that owns them."""
    found: dict[int, int] = {}
    for copy in copies:
        rank = owned[copy.source].rank
        found[rank] = found.get(rank, 0) + copy.source_box.volume
    return found


def waves(items: Sequence[Item], ranks: int) -> Iterator[list[Item]]:
    """The first item of each rank, then the second of each, and so on."""
    queues: list[list[Item]] = [[] for _ in range(ranks)]
    for item in items:
        queues[item.worker].append(item)
    for n in range(max((len(queue) for queue in queues), default=0)):
        yield [queue[n] for queue in queues if n < len(queue)]


def assemble(
    mesh: Mesh, wave: Sequence[Item], tensor: Callable[[Item, int], Tensor], device: torch.device
) -> Tensor | None:
    """This rank's item of a wave, of the item's own dtype; None when it has none.  Collective.

    An item that lies whole in one tensor is handed out as a view of it.

    :param tensor: this rank's tensor for an item, by the index of its shard.
    :param device: where messages lie.
    """
    mine = next((item for item in wave if item.worker == mesh.rank), None)
    send: list[Message] = []
    for item in wave:
        pieces = item.part_of(mesh.rank) if item.worker != mesh.rank else []
        if pieces:
            parts = [tensor(item, piece.index)[slices(piece.source_box)] for piece in pieces]
            send.append((item.worker, pack(parts, item.dtype, device)))
    receive: list[Message] = []
    if mine is not None:
        for source in sorted({piece.source for piece in mine.pieces} - {mesh.rank}):
            count = sum(piece.source_box.volume for piece in mine.part_of(source))
            receive.append((source, torch.empty(count, dtype=mine.dtype, device=device)))
    mesh.exchange(send, receive)
    return None if mine is None else _put_together(mine, mesh.rank, tensor, receive, device)


def _put_together(
    item: Item,
    rank: int,
    tensor: Callable[[Item, int], Tensor],
    received: Sequence[Message],
    device: torch.device,
) -> Tensor:
    if item.lies_whole:
        (piece,) = item.pieces
        return tensor(item, piece.index)[slices(piece.source_box)]
    out = torch.zeros(item.shard.shape, dtype=item.dtype, device=device)
    for piece in item.part_of(rank):
        out[slices(piece.target_box)] = tensor(item, piece.index)[slices(piece.source_box)]
    for source, message in received:
        unpack(message, [out[slices(piece.target_box)] for piece in item.part_of(source)])
    return out


def pack(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One contiguous vector of all elements, in order."""
    counts = [part.numel() for part in parts]
    message = torch.empty(sum(counts), dtype=dtype, device=device)
    for room, part in zip(torch.split(message, counts), parts, strict=True):
        room.view(part.shape).copy_(part)
    return message


def unpack(message: Tensor, places: Sequence[Tensor]) -> None:
    """The inverse of ``pack``."""
    for part, place in zip(torch.split(message, [place.numel() for place in places]), places, strict=True):
        place.copy_(part.view(place.shape))


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))
