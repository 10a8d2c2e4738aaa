"""Muon over shards: momentum by rows, the orthogonalised update by whole logical matrices.

A matrix is one logical tensor: query, key and value apart (Megatron's default), and also gate and up, which Megatron
orthogonalises as one; each expert by itself.  Its parts are brought together on one of the ranks that hold them,
without padding, and the update goes back to all that hold it; ranks take different matrices at a time.  The bits do
not depend on the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from gtp_serve.errors import UsageError
from gtp_serve.layout.huggingface import EMBEDDING, HEAD
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.training.adamw import ADAMW_SLOTS, AdamWSettings, adamw_update, decay
from gtp_serve.training.exchange import Item, assemble, pack, route, slices, unpack, waves
from gtp_serve.training.mesh import Message
from gtp_serve.training.optimizer import ShardedOptimizer
from gtp_serve.training.shard_map import ShardMap

MOMENTUM = "momentum_buffer"
_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_EPS = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonSettings:
    """As torch's Muon; ``others`` is for what is no hidden matrix: vectors, embedding and head.

    :param scale: of the update of a matrix of R rows and C columns: ``original`` is sqrt(max(1, R / C)),
        ``match_rms_adamw`` is 0.2 sqrt(max(R, C)).
    :param precision: element type of the Newton-Schulz iteration.
    """

    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    scale: Literal["original", "match_rms_adamw"] = "original"
    weight_decay: float = 0.1
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    others: AdamWSettings = field(default_factory=AdamWSettings)

    def __post_init__(self) -> None:
        if not 0 <= self.momentum < 1 or not 0 < self.iterations < 100 or self.weight_decay < 0:
            raise UsageError(f"{self} is no Muon", [("needed", "momentum in [0, 1), 1 to 99 iterations")])
        if self.scale not in ("original", "match_rms_adamw") or self.precision not in ("bfloat16", "float32"):
            raise UsageError(f"scale {self.scale!r} with precision {self.precision!r} is not known")


class Muon(ShardedOptimizer):
    """Muon for hidden matrices, AdamW for the rest.

    :param lr: learning rate of both; the attribute may be set before any step.
    """

    def __init__(self, model: nn.Module | ShardMap, *, lr: float, settings: MuonSettings | None = None) -> None:
        self.muon = settings or MuonSettings()
        super().__init__(model, lr)
        self._items = self._route()
        self._places: dict[tuple[str, int], list[tuple[int, Span]]] = {}
        for rank, shards in enumerate(self.shards.everyone):
            for index, shard in enumerate(shards):
                for span in shard.spans:
                    self._places.setdefault((span.name, rank), []).append((index, span))

    def slots_of(self, index: int) -> tuple[str, ...]:
        """See ``ShardedOptimizer``."""
        return (MOMENTUM,) if _is_hidden_matrix(self.shards.shards[index]) else ADAMW_SLOTS

    def update(self) -> None:
        """See ``ShardedOptimizer``."""
        for index, slots in self.state.items():
            if MOMENTUM in slots:
                slots[MOMENTUM].lerp_(self._gradient(index), 1 - self.muon.momentum)
                decay(self.working(index), self.lr * self.muon.weight_decay)
            else:
                adamw_update(self, index, self.muon.others)
        for wave in waves(self._items, self.shards.mesh.size):
            self._update_matrices(wave)

    def settings(self) -> dict[str, object]:
        """See ``ShardedOptimizer``."""
        return {"lr": self.lr, **asdict(self.muon)}

    def _route(self) -> list[Item]:
        """Who orthogonalises which matrix.  A matrix that some rank trains is trained on all that hold it."""
        extents = self.shards.extents
        frozen = {
            name
            for index, parameter in enumerate(self.shards.parameters)
            if not parameter.requires_grad
            for name in self.shards.names(index)
        }
        told = self.shards.mesh.all_bytes("\n".join(sorted(frozen)).encode())
        frozen = {name for one in told for name in one.decode().split("\n")}
        hidden = {
            name: shape for name, shape in extents.items() if len(shape) == 2 and _hidden(name) and name not in frozen
        }
        # Large ones first: they are what ranks must share out evenly.
        order = sorted(hidden, key=lambda name: (-math.prod(hidden[name]), name))
        want = [Shard(n, hidden[n], "float32", (Span(n, Box.whole(hidden[n]), Box.whole(hidden[n])),)) for n in order]
        return route(self.shards.owned, want, hidden, [0] * self.shards.mesh.size)

    def _gradient(self, index: int) -> Tensor:
        """Zero where there is none: all ranks must take part in a matrix."""
        grad = self.gradient(index)
        return torch.zeros_like(self.state[index][MOMENTUM]) if grad is None else grad

    def _direction(self, index: int) -> Tensor:
        """This rank's rows of what is to be orthogonalised."""
        momentum = self.state[index][MOMENTUM]
        return self._gradient(index).lerp(momentum, self.muon.momentum) if self.muon.nesterov else momentum

    def _update_matrices(self, wave: Sequence[Item]) -> None:
        mesh = self.shards.mesh
        device = self.shards.device
        whole = assemble(mesh, wave, lambda _item, index: self._direction(index), device)
        mine = None if whole is None else orthogonalised(whole, self.muon).float()
        send: list[Message] = []
        receive: list[tuple[Item, Tensor]] = []
        for item in wave:
            if item.worker == mesh.rank:
                assert mine is not None  # the wave has an item of this rank
                for rank in range(mesh.size):
                    boxes = [span.logical for _, span in self._spans(rank, item)]
                    if boxes and rank != mesh.rank:
                        send.append((rank, pack([mine[slices(box)] for box in boxes], torch.float32, device)))
            elif count := sum(span.local.volume for _, span in self._spans(mesh.rank, item)):
                receive.append((item, torch.empty(count, device=device)))
        mesh.exchange(send, [(item.worker, message) for item, message in receive])
        for item, message in receive:
            places = self._spans(mesh.rank, item)
            parts = [message.new_empty(span.local.shape) for _, span in places]
            unpack(message, parts)
            for (index, span), part in zip(places, parts, strict=True):
                self._apply(item, index, span, part)
        for item in wave:
            if item.worker == mesh.rank and mine is not None:
                for index, span in self._spans(mesh.rank, item):
                    self._apply(item, index, span, mine[slices(span.logical)])

    def _spans(self, rank: int, item: Item) -> list[tuple[int, Span]]:
        """(parameter index, span) of everything that a rank holds of a matrix."""
        return self._places.get((item.shard.key, rank), [])

    def _apply(self, item: Item, index: int, span: Span, part: Tensor) -> None:
        rows, columns = item.shard.shape
        larger = math.sqrt(max(1, rows / columns))
        factor = larger if self.muon.scale == "original" else 0.2 * math.sqrt(max(rows, columns))
        self.working(index)[slices(span.local)].add_(part, alpha=-(self.lr * factor))


def orthogonalised(matrix: Tensor, settings: MuonSettings) -> Tensor:
    """The nearest matrix whose singular values are about 1, by Newton-Schulz iteration."""
    x = matrix.to(getattr(torch, settings.precision), copy=True)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=_EPS))
    a, b, c = _COEFFICIENTS
    for _ in range(settings.iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _is_hidden_matrix(shard: Shard) -> bool:
    """Also of a shard that is all padding, which only its key tells from the others."""
    return len(shard.shape) == 2 and all(_hidden(name) for name in (shard.key, *(span.name for span in shard.spans)))


def _hidden(name: str) -> bool:
    return name not in (EMBEDDING, HEAD)
