"""A small model of the trainer's layers, the same in plain torch, and the comparison of the two.

It has everything that a decoder's weights have: an embedding, column linears with a norm and biases, row linears with
biases, gate over up, routed experts, and a head that may be tied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gtp_serve.layout.rows import Rows
from gtp_serve.layout.spans import Box, Shape
from gtp_serve.ops import reference
from gtp_serve.training.embedding import VocabParallelEmbedding, VocabParallelHead
from gtp_serve.training.experts import GroupedExpertLinear
from gtp_serve.training.gather import GatherChain
from gtp_serve.training.groups import ParallelGroups, rank_of, size_of
from gtp_serve.training.init import Constant, Init, Normal, draw_blocks, initialise, stream
from gtp_serve.training.layer import parameters_with_targets
from gtp_serve.training.linear import ColumnParallelLinear, NormColumnLinear, RowParallelLinear, sum_over_tp
from gtp_serve.training.norm import RMSNorm
from gtp_serve.training.placement import TrainPlacement

EPS = 1e-5
SEED = 11


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model; the defaults fit TP 2 and need padding nearly everywhere."""

    hidden: int = 12
    ffn: int = 20
    vocab: int = 22
    layers: int = 2
    experts: int = 0
    tied: bool = True


def shapes_of(sizes: Sizes) -> dict[str, Shape]:
    """Logical tensors."""
    d, f = sizes.hidden, sizes.ffn
    found: dict[str, Shape] = {"embed.weight": (sizes.vocab, d), "final_norm.weight": (d,)}
    for n in range(sizes.layers):
        found |= {f"{n}.in_norm.weight": (d,), f"{n}.a.weight": (2 * d, d), f"{n}.a.bias": (2 * d,)}
        found |= {f"{n}.b.weight": (d, 2 * d), f"{n}.b.bias": (d,), f"{n}.ffn_norm.weight": (d,)}
        found |= {f"{n}.gate.weight": (f, d), f"{n}.up.weight": (f, d), f"{n}.down.weight": (d, f)}
        found |= {f"{n}.gate.bias": (f,), f"{n}.up.bias": (f,)}
        for e in range(sizes.experts):
            found |= {f"{n}.{e}.gate.weight": (f, d), f"{n}.{e}.up.weight": (f, d), f"{n}.{e}.down.weight": (d, f)}
            found |= {f"{n}.{e}.gate.bias": (f,), f"{n}.{e}.up.bias": (f,)}
    if not sizes.tied:
        found["head.weight"] = (sizes.vocab, d)
    return found


def choose(name: str) -> Init:
    """Biases are not zero: a wrong one shows."""
    return Constant(1.0) if name.endswith("norm.weight") else Normal(0.3)


class Block(nn.Module):
    """Two linears, two more around SwiGLU, and perhaps routed experts."""

    def __init__(self, n: int, sizes: Sizes, placement: TrainPlacement) -> None:
        super().__init__()
        d, f = sizes.hidden, sizes.ffn
        self.sizes = sizes
        first, count = placement.cut(f, "ffn")
        both = (Rows(0, count, f"{n}.gate", first), Rows(count, count, f"{n}.up", first))
        self.a = NormColumnLinear(f"{n}.a", f"{n}.in_norm", d, 2 * d, placement, eps=EPS, bias=True)
        self.b = RowParallelLinear(f"{n}.b", 2 * d, d, placement, bias=True)
        self.gate_up = NormColumnLinear(
            f"{n}.gate_up", f"{n}.ffn_norm", d, 2 * f, placement, eps=EPS, bias=True, parts=both
        )
        self.down = RowParallelLinear(f"{n}.down", f, d, placement)
        if sizes.experts:
            first, count = placement.cut(f, "ffn", expert=True)
            both = (Rows(0, count, f"{n}.{{e}}.gate", first), Rows(count, count, f"{n}.{{e}}.up", first))
            self.expert_gate_up = GroupedExpertLinear(
                f"{n}.{{e}}.gate_up", sizes.experts, d, 2 * f, placement, cut="column", bias=True, parts=both
            )
            self.expert_down = GroupedExpertLinear(f"{n}.{{e}}.down", sizes.experts, f, d, placement, cut="row")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.b(F.gelu(self.a(x)))
        x = x + self.down(reference.swiglu(self.gate_up(x)))
        if self.sizes.experts:
            order, counts = routes(x, self.sizes.experts)
            y = self.expert_down(reference.swiglu(self.expert_gate_up(x[order], counts)), counts)
            x = x.index_add(0, order, y)
        return x


def routes(x: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Tokens in the order of their experts, and how many each has; the last expert has none."""
    chosen = torch.arange(x.shape[0]) % max(1, experts - 1)
    return chosen.argsort(stable=True), torch.bincount(chosen, minlength=experts).tolist()


class Small(nn.Module):
    """The trainer's model.

    :param recompute: run blocks under activation checkpointing: None, or whether it is the reentrant kind.
    """

    def __init__(self, sizes: Sizes, placement: TrainPlacement, *, recompute: bool | None = None) -> None:
        super().__init__()
        self.sizes, self.placement, self.recompute = sizes, placement, recompute
        self.embed = VocabParallelEmbedding("embed.weight", sizes.vocab, sizes.hidden, placement)
        self.blocks = nn.ModuleList([Block(n, sizes, placement) for n in range(sizes.layers)])
        self.norm = RMSNorm("final_norm", sizes.hidden, placement, eps=EPS)
        name = "embed.weight" if sizes.tied else "head.weight"
        tied = self.embed.weight if sizes.tied else None
        self.head = VocabParallelHead(name, sizes.vocab, sizes.hidden, placement, tied=tied)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self._all_logits(self.head(self.norm(x)))

    def _all_logits(self, mine: Tensor) -> Tensor:
        tp = self.placement.tp()
        if size_of(tp) == 1:
            return mine
        parts = [mine if rank == rank_of(tp) else torch.zeros_like(mine) for rank in range(size_of(tp))]
        return sum_over_tp(self.placement, torch.cat(parts, -1))[:, : self.sizes.vocab]


def plain_weights(sizes: Sizes, dtype: torch.dtype) -> dict[str, Tensor]:
    """The whole model, drawn tensor by tensor from the same streams."""
    return {
        name: torch.cat([block for _, block in draw_blocks(shape, choose(name), stream(SEED, name))])
        .to(dtype)
        .requires_grad_()
        for name, shape in shapes_of(sizes).items()
    }


def plain_logits(w: Mapping[str, Tensor], ids: Tensor, sizes: Sizes) -> Tensor:
    """The same model on whole weights, by torch's own functions and autograd."""
    x = F.embedding(ids, w["embed.weight"])
    for n in range(sizes.layers):
        h = reference.rms_norm(x, w[f"{n}.in_norm.weight"], EPS)
        h = F.gelu(F.linear(h, w[f"{n}.a.weight"], w[f"{n}.a.bias"]))
        x = x + F.linear(h, w[f"{n}.b.weight"], w[f"{n}.b.bias"])
        h = reference.rms_norm(x, w[f"{n}.ffn_norm.weight"], EPS)
        x = x + _plain_mlp(w, f"{n}.", h)
        if sizes.experts:
            order, counts = routes(x, sizes.experts)
            parts = torch.split(x[order], counts)
            y = [_plain_mlp(w, f"{n}.{e}.", part) for e, part in enumerate(parts)]
            x = x.index_add(0, order, torch.cat(y))
    return F.linear(reference.rms_norm(x, w["final_norm.weight"], EPS), w["head.weight"])


def _plain_mlp(w: Mapping[str, Tensor], prefix: str, h: Tensor) -> Tensor:
    weight = torch.cat([w[f"{prefix}gate.weight"], w[f"{prefix}up.weight"]])
    bias = torch.cat([w[f"{prefix}gate.bias"], w[f"{prefix}up.bias"]])
    return F.linear(reference.swiglu(F.linear(h, weight, bias)), w[f"{prefix}down.weight"])


def batch(data_rank: int, step: int, sizes: Sizes, tokens: int = 9) -> tuple[Tensor, Tensor]:
    """Ids and labels of one micro-batch."""
    drawn = torch.randint(0, sizes.vocab, (2, tokens), generator=stream(step, f"data {data_rank}"))
    return drawn[0], drawn[1]


@dataclass(frozen=True)
class Outcome:
    """Losses of the micro-batches and each logical tensor's gradient in pieces: (box in the tensor, gradient)."""

    losses: list[float]
    grads: dict[str, list[tuple[Box, Tensor]]]


def plain_outcome(
    sizes: Sizes,
    data_ranks: int,
    *,
    steps: int = 1,
    dtype: torch.dtype = torch.float32,
    mean: bool = True,
    wide: bool = True,
    held: torch.dtype | None = None,
    first_data_rank: int = 0,
) -> list[Outcome]:
    """What each data rank must see, computed in one place on whole weights.

    Sums are taken in the order in which the trainer takes them: a weight's gradient is reduced over ranks for each use
    of it and added up over uses; a vector's is added up over micro-batches and reduced once.

    :param wide: sums over ranks are in float32, in rank order; otherwise in ``dtype``.
    :param held: dtype in which gradients are added up; ``dtype`` when None.
    """
    w = plain_weights(sizes, dtype)
    if sizes.tied:
        w["head.weight"] = w["embed.weight"].detach().clone().requires_grad_()
    losses: list[list[float]] = [[] for _ in range(data_ranks)]
    grads: list[list[dict[str, Tensor]]] = [[] for _ in range(data_ranks)]
    for rank in range(data_ranks):
        for step in range(steps):
            ids, labels = batch(first_data_rank + rank, step, sizes)
            loss = F.cross_entropy(plain_logits(w, ids, sizes).float(), labels)
            losses[rank].append(loss.item())
            grads[rank].append(dict(zip(w, torch.autograd.grad(loss, list(w.values())), strict=True)))

    def reduced(pieces: list[Tensor]) -> Tensor:
        total = pieces[0].to(torch.float32 if wide else pieces[0].dtype, copy=True)
        for piece in pieces[1:]:
            total += piece
        return total / data_ranks if mean else total

    total: dict[str, Tensor] = {}
    for name in ["head.weight", *(name for name in w if name != "head.weight")]:
        uses = [[grads[rank][step][name] for rank in range(data_ranks)] for step in range(steps)]
        if w[name].dim() == 1:
            uses = [[sum(by_rank[1:], by_rank[0]) for by_rank in zip(*uses, strict=True)]]
        total[name] = _added([reduced(use) for use in uses], held or dtype)
    if sizes.tied:
        both = zip(grads[0], range(steps), strict=True)
        order = [(name, step) for _, step in both for name in ("head.weight", "embed.weight")]
        uses = [[grads[rank][step][name] for rank in range(data_ranks)] for name, step in order]
        total["embed.weight"] = _added([reduced(use) for use in uses], held or dtype)
        del total["head.weight"]
    whole = {name: [(Box.whole(tuple(grad.shape)), grad)] for name, grad in total.items()}
    return [Outcome(one, whole) for one in losses]


def _added(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    total = pieces[0].to(dtype, copy=True)
    for piece in pieces[1:]:
        total.add_(piece)
    return total


def run_small(
    groups: ParallelGroups,
    data_rank: int,
    *,
    sizes: Sizes,
    alignment: int,
    steps: int = 1,
    dtype: torch.dtype = torch.float32,
    chain: GatherChain | None = None,
    recompute: bool | None = None,
    main_grad: torch.dtype | None = None,
    between: Callable[[Small], None] | None = None,
) -> Outcome:
    """Forward and backward of some micro-batches, then all gradients by the parameters' own spans."""
    placement = TrainPlacement(dtype=dtype, groups=groups, chain=chain or GatherChain(), alignment=alignment)
    model = Small(sizes, placement, recompute=recompute)
    initialise(model, shapes_of(sizes), seed=SEED, choose=choose)
    if main_grad is not None:
        for parameter in model.parameters():
            held: Any = parameter
            held.main_grad = torch.zeros(parameter.shape, dtype=main_grad)
    losses = []
    for step in range(steps):
        ids, labels = batch(data_rank, step, sizes)
        loss = F.cross_entropy(model(ids).float(), labels)
        losses.append(loss.item())
        torch.autograd.backward(loss)
        if between is not None:
            between(model)
    placement.chain.finish_gradients()
    return Outcome(losses, gradients(model))


def gradients(model: nn.Module) -> dict[str, list[tuple[Box, Tensor]]]:
    """Every parameter's gradient by its spans; padding must have got none."""
    found: dict[str, list[tuple[Box, Tensor]]] = {}
    for parameter, target in parameters_with_targets(model):
        main_grad = getattr(parameter, "main_grad", None)
        grad = parameter.grad if main_grad is None else main_grad
        assert grad is not None, target.shard.key
        rest = grad.clone()
        for span in target.shard.spans:
            local = slices(span.local)
            found.setdefault(span.name, []).append((span.logical, grad[local].clone()))
            rest[local] = 0
        assert not rest.any(), f"the padding of {target.shard.key} has a gradient"
    return found


def largest_error(got: Outcome, wanted: Outcome) -> float:
    """Largest difference of any gradient element or loss, relative to the largest of its tensor; 0 is every bit."""
    worst = max(abs(a - b) for a, b in zip(got.losses, wanted.losses, strict=True))
    for name, pieces in got.grads.items():
        ((_, whole),) = wanted.grads[name]
        for box, piece in pieces:
            there = whole[slices(box)]
            assert piece.isfinite().all(), name
            assert piece.dtype == there.dtype, name
            scale = whole.abs().max().item() or 1.0
            worst = max(worst, (piece.double() - there.double()).abs().max().item() / scale)
    return worst


def assembled(outcomes: list[Outcome], sizes: Sizes) -> dict[str, Tensor]:
    """Every logical tensor's gradient from all ranks' pieces; an element that no rank has is NaN, and ranks that have
    the same one must agree."""
    found = {}
    for name, shape in shapes_of(sizes).items():
        found[name] = torch.full(shape, torch.nan, dtype=torch.float64)
        for outcome in outcomes:
            for box, piece in outcome.grads.get(name, []):
                there = found[name][slices(box)]
                assert (there.isnan() | (there == piece)).all(), name
                there.copy_(piece)
    return found


def slices(box: Box) -> tuple[slice, ...]:
    """Of a tensor."""
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def linear_of(groups: ParallelGroups, out: int, alignment: int, *, bias: bool = True) -> ColumnParallelLinear:
    """One column linear in a chain of its own."""
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=alignment)
    return ColumnParallelLinear("linear", 8, out, placement, bias=bias)
