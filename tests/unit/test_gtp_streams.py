"""Gathers and reductions beside arithmetic: on a GPU they run on a stream of their own, slower than the arithmetic.

The group's second rank is a mirror image of the first: the same rows, the same data.  So one process knows what must
come out, and memory that is used before its collective has ended, or lent again too soon, shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gtp_serve.training.gather import GatherChain
from gtp_serve.training.groups import ParallelGroups
from gtp_serve.training.init import Normal, initialise_on_device
from gtp_serve.training.linear import ColumnParallelLinear
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.reduce import Accumulation

CUDA: Any = torch.cuda
SLOW = 2_000_000  # cycles, about a millisecond
WIDTH, DEPTH = 128, 5


@dataclass(eq=False)
class Landing:
    """What a collective's waiter does."""

    land: Callable[[], object]

    def wait(self) -> None:
        self.land()


@dataclass(eq=False)
class MirrorGroup:
    """Rank 0 of two, and the other does the same."""

    device: str
    side: Any = field(init=False)

    def __post_init__(self) -> None:
        self.side = CUDA.Stream() if self.device == "cuda" else None

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def all_gather(self, out: Tensor, mine: Tensor) -> Landing:
        return self._run(out, lambda: out.view(2, -1).copy_(mine.reshape(1, -1).expand(2, -1)))

    def reduce_scatter(self, out: Tensor, full: Tensor) -> Landing:
        return self._run(out, lambda: out.copy_(full[: out.shape[0]] * 2))

    def all_to_all(self, out: Tensor, full: Tensor) -> Landing:
        return self._run(out, lambda: out.view(2, -1).copy_(full.view(2, -1)[:1].expand(2, -1)))

    def all_reduce(self, x: Tensor) -> Landing:
        return self._run(None, lambda: x.mul_(2))

    def _run(self, out: Tensor | None, act: Callable[[], object]) -> Landing:
        if self.side is None:
            if out is not None:
                out.fill_(torch.nan)
            return Landing(act)
        self.side.wait_stream(CUDA.current_stream())
        with CUDA.stream(self.side):
            if out is not None:
                out.fill_(torch.nan)
            CUDA._sleep(SLOW)
            act()
            done = self.side.record_event()
        return Landing(lambda: CUDA.current_stream().wait_event(done))


@pytest.mark.parametrize("accumulation", ["native", "float32"])
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not CUDA.is_available(), reason="needs an NVIDIA GPU")],
        ),
    ],
)
def test_steps_beside_slow_collectives_are_those_of_whole_weights(device: str, accumulation: Accumulation) -> None:
    groups = ParallelGroups(gtp_remat=MirrorGroup(device))
    chain = GatherChain(accumulation=accumulation)
    placement = TrainPlacement(dtype=torch.float32, device=device, groups=groups, alignment=1, chain=chain)
    layers = [ColumnParallelLinear(str(n), WIDTH, WIDTH, placement, bias=True) for n in range(DEPTH)]
    for n, layer in enumerate(layers):
        initialise_on_device(layer.weight, Normal(0.1), seed=n)
    # The mirror image: rows twice.
    weights = [nn.Parameter(torch.cat([layer.weight.local] * 2)) for layer in layers]
    biases = [nn.Parameter(torch.zeros(WIDTH, device=device)) for _ in layers]
    ours = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    plain = torch.optim.SGD([*weights, *biases], lr=0.1)
    for step in range(4):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        y = z = x
        for layer, weight, bias in zip(layers, weights, biases, strict=True):
            y, z = F.gelu(layer(y)), F.gelu(F.linear(z, weight, bias))
        assert torch.equal(y, z)
        assert y.isfinite().all()
        torch.autograd.backward(y.square().mean())
        torch.autograd.backward(z.square().mean())
        chain.finish_gradients()
        for layer, weight, bias in zip(layers, weights, biases, strict=True):
            assert weight.grad is not None
            assert layer.weight.grad is not None
            assert layer.bias is not None
            assert layer.bias.grad is not None
            first = weight.grad[: WIDTH // 2]
            assert torch.equal(layer.weight.grad, first)
            assert torch.equal(layer.bias.grad, bias.grad)  # type: ignore[arg-type]
            weight.grad = torch.cat([first, first])
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert chain.fetched_ahead > chain.fetched_on_demand > 0
    assert chain.pool.lent == 0
