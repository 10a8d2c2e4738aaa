"""The functions that autograd runs for the layers: whole weights are gathered for a product and given back after it.

A forward pass keeps its input and not the weight: the backward pass gathers it again.

Legend: T tokens, I input features, O output features of this TP rank, V vocabulary rows of this TP rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtp_serve.training.gather import GatherChain
from gtp_serve.training.shards import GTPShard

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One layer's way of multiplying.

    :param sum_input_grad: the input is the same on all TP ranks and each has a summand of its gradient.
    :param training: whether a backward pass may follow.
    """

    site: object
    chain: GatherChain
    linear: Linear
    sum_input_grad: Callable[[Tensor], Tensor]
    training: bool


class LinearFunction(torch.autograd.Function):
    """``x @ weight.T + bias``, row blocks of ``x`` each with a weight (and bias) of their own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, call: Call, counts: Sequence[int] | None, with_bias: bool, *parameters: Tensor
    ) -> Tensor:
        """
        :param counts: rows of each block; None for one block of any leading shape.
        :param parameters: all weights, then all biases.
        """
        number = len(parameters) // 2 if with_bias else len(parameters)
        weights: list[GTPShard] = list(parameters[:number])  # type: ignore[arg-type]
        biases: list[Tensor | None] = list(parameters[number:]) if with_bias else [None] * number
        lent = call.chain.gather(call.site, weights, training=call.training)
        try:
            if counts is None:
                y = call.linear(x, lent.weights[0], biases[0])
            else:
                y = _blocks(call.linear, x, counts, lent.weights, biases)
        finally:
            call.chain.give_back(lent)
        ctx.save_for_backward(x)
        ctx.call, ctx.counts, ctx.weights, ctx.with_bias = call, counts, weights, with_bias
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """Gradients of ``x`` and the biases; those of the weights arrive through the chain."""
        (x,) = ctx.saved_tensors
        call: Call = ctx.call
        weights: list[GTPShard] = ctx.weights
        x_TI, dy_TO = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        counts = [x_TI.shape[0]] if ctx.counts is None else list(ctx.counts)
        dx: Tensor | None = None
        if ctx.needs_input_grad[0]:
            dx = call.sum_input_grad(_input_gradient(call, weights, dy_TO, counts)).view(x.shape)
        wanted = ctx.needs_input_grad[4:]
        _start_weight_gradients(call.chain, weights, wanted[: len(weights)], x_TI, dy_TO, counts)
        biases: list[Tensor | None] = []
        if ctx.with_bias:
            blocks = torch.split(dy_TO, counts)
            biases = [b.sum(0) if w else None for b, w in zip(blocks, wanted[len(weights) :], strict=True)]
        return dx, None, None, None, *([None] * len(weights)), *biases


def _blocks(
    linear: Linear, x: Tensor, counts: Sequence[int], weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> Tensor:
    y = x.new_empty((x.shape[0], weights[0].shape[0]))
    first = 0
    for count, weight, bias in zip(counts, weights, biases, strict=True):
        if count:
            y[first : first + count] = linear(x[first : first + count], weight, bias)
        first += count
    return y


def _input_gradient(call: Call, weights: Sequence[GTPShard], dy_TO: Tensor, counts: Sequence[int]) -> Tensor:
    lent = call.chain.gather(call.site, weights, backward=True)
    try:
        if len(counts) == 1:
            return dy_TO.mm(lent.weights[0])
        dx_TI = dy_TO.new_empty((dy_TO.shape[0], lent.weights[0].shape[1]))
        blocks = (torch.split(x, list(counts)) for x in (dx_TI, dy_TO))
        for dx, dy, weight in zip(*blocks, lent.weights, strict=True):
            if dy.shape[0]:
                torch.mm(dy, weight, out=dx)
        return dx_TI
    finally:
        call.chain.give_back(lent)


def _start_weight_gradients(
    chain: GatherChain,
    weights: Sequence[GTPShard],
    wanted: Sequence[bool],
    x_TI: Tensor,
    dy_TO: Tensor,
    counts: Sequence[int],
) -> None:
    """Also for a block without rows: its peers may have some, and all of them must meet."""
    shards: list[GTPShard] = []
    grads: list[Tensor] = []
    blocks = (torch.split(x, list(counts)) for x in (x_TI, dy_TO))
    for shard, needed, x, dy in zip(weights, wanted, *blocks, strict=True):
        if needed:
            grad = chain.reducer.memory(shard, dy.dtype)
            if dy.shape[0]:
                torch.mm(dy.t(), x, out=grad)
            else:
                grad.zero_()
            shards.append(shard)
            grads.append(grad)
    if shards:
        chain.reduce(shards, grads)


class EmbeddingFunction(torch.autograd.Function):
    """Rows of a gathered table; ids outside ``0 .. V`` give zeros and get no gradient."""

    @staticmethod
    def forward(
        ctx: Any, ids_T: Tensor, table: GTPShard, call: Call, pick: Callable[[Tensor, Tensor], Tensor], first: int
    ) -> Tensor:
        """
        :param pick: (ids, table) to rows.
        :param first: id of the table's first row.
        """
        lent = call.chain.gather(call.site, [table], training=call.training)
        try:
            whole = lent.weights[0]
            local_T = ids_T - first
            foreign_T = (local_T < 0) | (local_T >= whole.shape[0])
            rows_TD = pick(local_T.masked_fill(foreign_T, 0), whole).masked_fill(foreign_T[:, None], 0)
        finally:
            call.chain.give_back(lent)
        ctx.save_for_backward(local_T, foreign_T)
        ctx.call, ctx.table = call, table
        return rows_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[None, ...]:
        """Nothing through autograd: the table's gradient arrives through the chain."""
        local_T, foreign_T = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            table: GTPShard = ctx.table
            rows = table.logical_shape[0]
            # Row ``rows`` collects what is not ours, and is cut off.
            ids_T = local_T.masked_fill(foreign_T, rows)
            grad = torch.ops.aten.embedding_dense_backward(dy_TD.contiguous(), ids_T, rows + 1, -1, False)
            ctx.call.chain.reduce([table], [grad[:rows]])
        return None, None, None, None, None
