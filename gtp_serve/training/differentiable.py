"""The server's functions with gradients: forward runs whatever is in a table of ops, backward is written out here.

So a training forward has the very bits of the server that runs the same table (the deterministic one, fused kernels),
whether or not autograd could look through it.  Legend: T tokens, D hidden, F ffn, X experts, C chosen experts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtp_serve.ops.table import Ops


def with_gradients(ops: Ops) -> Ops:
    """The same table, through which gradients flow; its attention and experts are for inference still."""

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y: Tensor = _RmsNorm.apply(x, weight, eps, ops)  # type: ignore[no-untyped-call]
        return y

    def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = _AddRmsNorm.apply(x, delta, weight, eps, ops)  # type: ignore[no-untyped-call]
        return both

    def swiglu(gate_up: Tensor) -> Tensor:
        y: Tensor = _SwiGlu.apply(gate_up, ops)  # type: ignore[no-untyped-call]
        return y

    def sigmoid(x: Tensor) -> Tensor:
        y: Tensor = _Sigmoid.apply(x, ops)  # type: ignore[no-untyped-call]
        return y

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = _Linear.apply(x, weight, bias, ops)  # type: ignore[no-untyped-call]
        return y

    def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        both: tuple[Tensor, Tensor] = _Route.apply(logits, top_k, normalise, ops)  # type: ignore[no-untyped-call]
        return both

    return replace(
        ops,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        swiglu=swiglu,
        sigmoid=sigmoid,
        linear=linear,
        route=route,
    )


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, ops: Ops) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return ops.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight = _norm_gradients(x, weight, dy, ctx.eps)
        return dx.to(x.dtype), dweight.to(weight.dtype), None, None


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor, weight: Tensor, eps: float, ops: Ops) -> tuple[Tensor, Tensor]:
        y, total = ops.add_rms_norm(x, delta, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps = eps
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor) -> tuple[Any, ...]:
        total, weight = ctx.saved_tensors
        dx, dweight = _norm_gradients(total, weight, dy, ctx.eps)
        both = (dx + dtotal.float()).to(total.dtype)
        return both, both, dweight.to(weight.dtype), None, None


def _norm_gradients(x: Tensor, weight: Tensor, dy: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Float32 gradients of x and weight."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normed, dnormed = wide * scale, dy.float() * weight.float()
    dx = scale * (dnormed - normed * (dnormed * normed).mean(-1, keepdim=True))
    return dx, (dy.float() * normed).flatten(0, -2).sum(0)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, ops: Ops) -> Tensor:
        ctx.save_for_backward(gate_up)
        return ops.swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.float().chunk(2, dim=-1)
        gated, wide = torch.sigmoid(gate), dy.float()
        dgate = wide * up * gated * (1 + gate * (1 - gated))
        return torch.cat((dgate, wide * gate * gated), -1).to(gate_up.dtype), None


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ops: Ops) -> Tensor:
        y = ops.sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        y = ctx.saved_tensors[0].float()
        return (dy.float() * y * (1 - y)).to(dy.dtype), None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ops: Ops) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ops.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        rows = dy.flatten(0, -2)
        dx = dy @ weight if wanted[0] else None
        dweight = rows.t() @ x.flatten(0, -2) if wanted[1] else None
        return dx, dweight, rows.sum(0) if wanted[2] else None, None


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TX: Tensor, top_k: int, normalise: bool, ops: Ops) -> tuple[Tensor, Tensor]:
        weights_TC, experts_TC = ops.route(logits_TX, top_k, normalise)
        ctx.save_for_backward(logits_TX, weights_TC, experts_TC)
        ctx.normalise = normalise
        ctx.mark_non_differentiable(experts_TC)
        return weights_TC, experts_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights_TC: Tensor, _dexperts: Tensor | None) -> tuple[Any, ...]:
        logits_TX, weights_TC, experts_TC = ctx.saved_tensors
        if ctx.normalise:
            # A softmax over the chosen logits alone.
            dchosen_TC = weights_TC * (dweights_TC - (weights_TC * dweights_TC).sum(-1, keepdim=True))
            dlogits_TX = torch.zeros_like(logits_TX, dtype=torch.float32).scatter_(1, experts_TC, dchosen_TC)
        else:
            shares_TX = logits_TX.float().softmax(-1)
            dshares_TX = torch.zeros_like(shares_TX).scatter_(1, experts_TC, dweights_TC)
            dlogits_TX = shares_TX * (dshares_TX - (shares_TX * dshares_TX).sum(-1, keepdim=True))
        return dlogits_TX.to(logits_TX.dtype), None, None, None
