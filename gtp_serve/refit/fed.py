"""A fed update on one rank: whole tensors arrive one after another, and the rank keeps its own parts of each.

Names are checked before a byte is taken: each logical tensor must come exactly once, in its shape, in a type
that converts.  What cannot be used is still received where that is possible, so that its sender, which is in the
middle of a broadcast, is not left hanging; then it is refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from gtp_serve.errors import UpdateFailed
from gtp_serve.layout.huggingface import EMBEDDING, HEAD, logical_name
from gtp_serve.layout.spans import Box, Shape, Shard, Span, overlaps
from gtp_serve.layout.stacked import stacked_spans
from gtp_serve.refit.apply import Target
from gtp_serve.refit.orders import Piece
from gtp_serve.refit.plan import CONVERTIBLE, ITEM_BYTES, build_plan

Take = Callable[[int, Tensor], None]
"""Called with each tensor's index in the piece and its elements, in the piece's order."""

_SHOWN = 5
_MAX_NAMES = 100_000
_DRAIN_FACTOR = 4
"""A refused piece of up to so many times the model's elements is still received."""


class FedStaging:
    """Fills the targets tensor by tensor and knows which are missing.

    :param targets: this rank's parameters in the set to be filled.
    :param shapes: each logical tensor with its shape.
    :param writing: called once before the first byte of a target is written.
    :param discard: take everything in and write nothing; ``finish`` then always fails.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        shapes: Mapping[str, Shape],
        writing: Callable[[], None] = lambda: None,
        *,
        discard: bool = False,
    ) -> None:
        self.received_bytes = 0
        self._discard = discard
        self._writing: Callable[[], None] | None = writing
        self._targets, self._shapes = targets, shapes
        self._wanted: dict[str, list[tuple[int, Span]]] = {}
        self._dtypes: dict[str, set[str]] = {}
        for index, target in enumerate(targets):
            for span in target.shard.spans:
                self._wanted.setdefault(span.name, []).append((index, span))
                self._dtypes.setdefault(span.name, set()).add(target.shard.dtype)
        self._fills = build_plan(self._whole(), [target.shard for target in targets], shapes).fills
        self._arrived: dict[str, str] = {}
        """Logical name: the name under which it came."""
        self._has_embedding = False
        self._early_head: Tensor | None = None
        self._heads_differ = False

    def _whole(self) -> list[Shard]:
        """What a sender of everything offers, in types that fit."""
        return [
            Shard(name, shape, min(self._dtypes.get(name, {"bfloat16"})), (_span(name, shape),))
            for name, shape in self._shapes.items()
        ]

    def feed(self, piece: Piece, receive: Callable[[Piece, Take], int]) -> int:
        """Take the next tensors in.

        :param receive: brings the piece's tensors and returns their bytes.
        :raises UpdateFailed: naming each tensor that is unknown, doubled, misshapen or mistyped; none of the piece
            counts as arrived then.
        """
        shards, problems = self._decide(piece)
        if self._discard and self._can_drain(piece):
            return receive(piece, lambda index, tensor: None)
        if problems:
            if self._can_drain(piece):
                receive(piece, lambda index, tensor: None)
            raise _refusal(problems)
        self._begin_writing()
        taken = receive(piece, lambda index, tensor: self._take(shards[index], tensor))
        self.received_bytes += taken
        if self._heads_differ:
            raise _refusal([f"{HEAD} differs from {EMBEDDING}, but in this model they are one tensor"])
        for name, shard in zip(piece.names, shards, strict=True):
            self._arrived |= dict.fromkeys((span.name for span in shard.spans), name)
        return taken

    def finish(self) -> None:
        """There are no more tensors.

        :raises UpdateFailed: naming those that never came.
        """
        missing = [name for name in self._shapes if name not in self._arrived]
        if self._discard:
            raise UpdateFailed("these tensors were received to be thrown away", code="tensors-refused")
        if missing:
            raise UpdateFailed(
                f"{len(missing)} of {len(self._shapes)} tensors never came: {_list(missing)}",
                [("try", "send the whole model before the update is ended")],
                code="tensors-missing",
            )

    # -- decide ----------------------------------------------------------------------------------------------------

    def _decide(self, piece: Piece) -> tuple[list[Shard], list[str]]:
        """What each tensor is, and everything that is wrong with the piece."""
        if not len(piece.names) == len(piece.dtypes) == len(piece.shapes):
            counts = f"{len(piece.names)} names, {len(piece.dtypes)} dtypes, {len(piece.shapes)} shapes"
            return [], [f"the lists differ in length: {counts}"]
        if not piece.names or len(piece.names) > _MAX_NAMES:
            return [], [f"{len(piece.names)} tensors in one message; possible are 1 to {_MAX_NAMES}"]
        shards: list[Shard] = []
        problems: list[str] = []
        names: set[str] = set()
        for name, dtype, shape in zip(piece.names, piece.dtypes, piece.shapes, strict=True):
            shard = self._shard(name, dtype, shape)
            shards.append(shard)
            problem = self._problem(name, shard, names)
            if problem is not None:
                near = _near(name, self._shapes) if len(problems) < _SHOWN and "has no" in problem else ""
                problems.append(problem + near)
            names |= {span.name for span in shard.spans}
        return shards, problems

    def _shard(self, name: str, dtype: str, shape: Shape) -> Shard:
        logical = logical_name(name)
        stacked = stacked_spans(logical, shape) if logical not in self._shapes else None
        if stacked is not None:
            return Shard(name, stacked[0], dtype, stacked[1])
        return Shard(name, shape, dtype, (_span(logical, shape),))

    def _problem(self, name: str, shard: Shard, before: set[str]) -> str | None:
        """The first thing that is wrong with one tensor."""
        if shard.dtype not in ITEM_BYTES:
            return f"{name} is of type {shard.dtype}, which is not known"
        for span in shard.spans:
            shape = self._shape(span.name)
            if shape is None:
                return f"this model has no {name}"
            if span.logical.shape != shape:
                seen = f" (its part {span.name})" if len(shard.spans) > 1 else ""
                return f"{name}{seen} comes as {list(span.logical.shape)}, but is {list(shape)}"
            if span.name in self._arrived or span.name in before:
                came = self._arrived.get(span.name, name)
                return f"{name} comes twice" if came == name else f"{name} has come as {came} before"
            kinds = self._dtypes.get(EMBEDDING if self._is_tied_head(span.name) else span.name, set())
            wrong = [kind for kind in kinds if kind != shard.dtype and not {kind, shard.dtype} <= CONVERTIBLE]
            if wrong:
                return f"{name} is of type {shard.dtype}, which does not convert to {wrong[0]}"
        return None

    def _shape(self, name: str) -> Shape | None:
        return self._shapes.get(EMBEDDING if self._is_tied_head(name) else name)

    def _is_tied_head(self, name: str) -> bool:
        """The embedding under another name: some senders send both."""
        return name == HEAD and HEAD not in self._shapes

    def _can_drain(self, piece: Piece) -> bool:
        if not len(piece.names) == len(piece.dtypes) == len(piece.shapes) or not set(piece.dtypes) <= set(ITEM_BYTES):
            return False
        if any(size < 0 for shape in piece.shapes for size in shape):
            return False
        elements = sum(prod(shape) for shape in piece.shapes)
        return 0 < elements <= _DRAIN_FACTOR * sum(prod(shape) for shape in self._shapes.values())

    # -- do --------------------------------------------------------------------------------------------------------

    def _begin_writing(self) -> None:
        if self._writing is None:
            return
        self._writing()
        self._writing = None
        for fill in self._fills:
            self._targets[fill.target].tensor.detach()[_slices(fill.box)].zero_()

    def _take(self, shard: Shard, tensor: Tensor) -> None:
        if self._is_tied_head(shard.spans[0].name):
            self._take_tied_head(tensor)
            return
        matrix = tensor.reshape(shard.shape)
        for have in shard.spans:
            for index, want in self._wanted.get(have.name, ()):
                found = overlaps(have, want)
                if found is not None:
                    self._targets[index].tensor.detach()[_slices(found[1])].copy_(matrix[_slices(found[0])])
            if have.name == EMBEDDING:
                self._has_embedding = True
                head, self._early_head = self._early_head, None
                if head is not None:
                    self._check_tied_head(head)

    def _take_tied_head(self, tensor: Tensor) -> None:
        if self._has_embedding:
            self._check_tied_head(tensor)
        else:
            self._early_head = tensor.clone()

    def _check_tied_head(self, head: Tensor) -> None:
        """Each rank looks at its own rows; together they are all."""
        whole = _span(EMBEDDING, tuple(head.shape))
        for index, want in self._wanted.get(EMBEDDING, ()):
            found = overlaps(whole, want)
            mine = self._targets[index].tensor
            if found is not None and not torch.equal(
                mine[_slices(found[1])], head[_slices(found[0])].to(device=mine.device, dtype=mine.dtype)
            ):
                self._heads_differ = True  # told when the whole piece is there: its sender is in a broadcast


def _span(name: str, shape: Shape) -> Span:
    return Span(name, Box.whole(shape), Box.whole(shape))


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def _refusal(problems: Sequence[str]) -> UpdateFailed:
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return UpdateFailed("; ".join(problems[:_SHOWN]) + more, code="tensors-refused")


def _list(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _near(name: str, known: Mapping[str, Shape]) -> str:
    near = difflib.get_close_matches(name[:256], known, n=1, cutoff=0.8) if len(known) <= 2_000 else []
    return f" (but {near[0]})" if near else ""
