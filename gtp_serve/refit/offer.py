"""What a trainer has, as shards with their bytes: a state dict, a Hugging Face model, one rank's pieces of either.

Nothing is copied before it is sent, and only what is to be sent is copied.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from gtp_serve.errors import UpdateRefused, UsageError
from gtp_serve.layout.huggingface import EMBEDDING, HEAD, logical_name
from gtp_serve.layout.spans import Box, Shape, Shard, Span
from gtp_serve.refit.plan import CONVERTIBLE, ITEM_BYTES
from gtp_serve.refit.source import WeightSource

_SHOWN = 5
_DERIVED_ENDING = ".rotary_emb.inv_freq"
"""Of tensors that old checkpoints hold and every model computes."""

Offered = WeightSource | Mapping[str, Tensor] | nn.Module | Sequence[tuple[Shard, Tensor]]
"""What ``offer`` takes."""


@runtime_checkable
class _Readable(Protocol):
    """As WeightSource; a name of its own because only this one is checked at run time."""

    def shards(self) -> Sequence[Shard]: ...
    def read(self, index: int) -> memoryview: ...
    def close(self) -> None: ...


class Offer(Protocol):
    """Shards of one rank and a way to copy parts of them out."""

    def shards(self) -> Sequence[Shard]:
        """All of them, in a fixed order."""
        ...

    def copy(self, index: int, box: Box, out: npt.NDArray[np.uint8]) -> None:
        """Copy the elements ``box`` of a shard, row-major, into so many bytes."""
        ...


class TensorOffer:
    """Tensors, on a CPU or a GPU, contiguous or not.  They must not change while they are on offer."""

    def __init__(self, pairs: Iterable[tuple[Shard, Tensor]]) -> None:
        self._shards: list[Shard] = []
        self._tensors: list[Tensor] = []
        for shard, tensor in pairs:
            _check_pair(shard, tensor)
            self._shards.append(shard)
            self._tensors.append(tensor.detach())

    def shards(self) -> Sequence[Shard]:
        """All of them, in a fixed order."""
        return tuple(self._shards)

    def copy(self, index: int, box: Box, out: npt.NDArray[np.uint8]) -> None:
        """Copy the elements ``box`` of a shard, row-major, into so many bytes."""
        part = self._tensors[index][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        raw = part.contiguous().reshape(-1).view(torch.uint8)
        torch.from_numpy(out).copy_(raw)


class SourceOffer:
    """A WeightSource, for example a checkpoint that lies on the trainer's disk."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._shards = tuple(source.shards())
        self._open: tuple[int, npt.NDArray[np.uint8]] | None = None

    def shards(self) -> Sequence[Shard]:
        """All of them, in a fixed order."""
        return self._shards

    def copy(self, index: int, box: Box, out: npt.NDArray[np.uint8]) -> None:
        """Copy the elements ``box`` of a shard, row-major, into so many bytes."""
        if self._open is None or self._open[0] != index:
            raw = np.frombuffer(self._source.read(index), np.uint8)
            self._open = (index, raw.reshape(*self._shards[index].shape, ITEM_BYTES[self._shards[index].dtype]))
        part = self._open[1][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
        np.copyto(out.reshape(part.shape), part)


def offer(source: Offered) -> Offer:
    """Whatever a trainer has, as shards.

    - a ``WeightSource``: as it is;
    - a state dict with Hugging Face's names: each tensor is a whole logical tensor;
    - a module: its state dict; a head that is the embedding is left out;
    - pairs of (Shard, Tensor): one rank's pieces; what no span covers is padding and stays here.

    :raises UsageError: for anything else, and for a tensor that is not what its shard says.
    """
    if isinstance(source, nn.Module):
        return TensorOffer(_whole(source.state_dict(), tied=_says_tied(source)))
    if isinstance(source, Mapping):
        return TensorOffer(_whole(source, tied=False))
    if isinstance(source, _Readable):
        return SourceOffer(source)
    if isinstance(source, Sequence) and not isinstance(source, str | bytes):
        return TensorOffer(_pairs(source))
    raise UsageError(
        f"a {type(source).__name__} is no source of weights",
        [("needed", "a state dict, a module, a WeightSource or pairs of (Shard, Tensor)")],
    )


def _pairs(source: Sequence[tuple[Shard, Tensor]]) -> Sequence[tuple[Shard, Tensor]]:
    for pair in source:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], Shard)):
            raise UsageError("a sequence of weights must hold pairs of (Shard, Tensor)")
    return source


def _says_tied(module: nn.Module) -> bool:
    return bool(getattr(getattr(module, "config", None), "tie_word_embeddings", False))


def _whole(tensors: Mapping[str, Any], *, tied: bool) -> list[tuple[Shard, Tensor]]:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise UsageError(f"{name} is a {type(tensor).__name__}, not a tensor")
    named = {logical_name(name): one for name, one in tensors.items() if not name.endswith(_DERIVED_ENDING)}
    head, embedding = named.get(HEAD), named.get(EMBEDDING)
    if head is not None and embedding is not None and (tied or _same_storage(head, embedding)):
        del named[HEAD]
    return [(whole_shard(name, tensor), tensor) for name, tensor in named.items()]


def whole_shard(name: str, tensor: Tensor) -> Shard:
    """The shard that is a whole logical tensor."""
    shape = tuple(tensor.shape)
    return Shard(
        name, shape, str(tensor.dtype).removeprefix("torch."), (Span(name, Box.whole(shape), Box.whole(shape)),)
    )


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.shape == b.shape and a.data_ptr() == b.data_ptr() and a.numel() > 0


def _check_pair(shard: Shard, tensor: Tensor) -> None:
    found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if found != f"{shard.dtype} {list(shard.shape)}":
        raise UsageError(f"{shard.key}: the tensor is {found}, its shard {shard.dtype} {list(shard.shape)}")
    if tensor.is_meta or tensor.is_sparse:
        raise UsageError(f"{shard.key}: a tensor without plain values cannot be sent")


def check_offers(
    ranks: Sequence[Sequence[Shard]], shapes: Mapping[str, Shape], dtypes: Mapping[str, frozenset[str]]
) -> None:
    """Compare what all trainer ranks have with what the server wants, before anything is sent.

    :param shapes: every logical tensor of the served model.
    :param dtypes: of the parameters that each logical tensor goes to.
    :raises UpdateRefused: naming what is unknown, missing, misshapen or mistyped, the first few by name.
    """
    problems: list[str] = []
    offered: dict[str, set[Box]] = {}
    for span in (span for shards in ranks for shard in shards for span in shard.spans):
        offered.setdefault(span.name, set()).add(span.logical)
    for rank, shards in enumerate(ranks):
        for shard in shards:
            for span in shard.spans:
                alone = len(offered[span.name]) == 1  # else it is a piece, and coverage is checked by the plan
                problem = _misfit(shard, span, shapes, dtypes, alone=alone)
                if problem:
                    problems.append(problem if len(ranks) == 1 else f"{problem} (trainer rank {rank})")
    problems += [f"{name} is missing" for name in shapes if name not in offered]
    problems = list(dict.fromkeys(problems))
    if problems:
        rest = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise UpdateRefused(
            problems[0] if len(problems) == 1 else f"the weights do not fit the served model in {len(problems)} places",
            [(str(n), text) for n, text in enumerate(problems[:_SHOWN] + rest, 1)] if len(problems) > 1 else (),
            code="weights-mismatch",
        )


def _misfit(
    shard: Shard, span: Span, shapes: Mapping[str, Shape], dtypes: Mapping[str, frozenset[str]], *, alone: bool
) -> str:
    """What is wrong with a span, in words; empty when nothing is."""
    shape = shapes.get(span.name)
    if shape is None:
        near = difflib.get_close_matches(span.name, shapes, 1)
        if span.name == HEAD and EMBEDDING in shapes:
            return f"{HEAD} is not known: the served model's head is its embedding"
        return f"{span.name} is not known" + (f"; did you mean {near[0]}?" if near else "")
    if not span.logical.inside(shape) or (alone and _is_whole(shard, span) and shard.shape != shape):
        return f"{span.name} has the shape {list(shard.shape)} where {list(shape)} is needed"
    for dtype in dtypes.get(span.name, frozenset()):
        if shard.dtype != dtype and not {shard.dtype, dtype} <= CONVERTIBLE:
            return f"{span.name} is {shard.dtype}, which cannot become {dtype}"
    return ""


def _is_whole(shard: Shard, span: Span) -> bool:
    """Whether a shard stands for a whole logical tensor of its own name."""
    return shard.key == span.name and len(shard.spans) == 1 and span.logical == Box.whole(shard.shape)
