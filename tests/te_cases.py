"""What the processes of tests/distributed/test_te_layers.py run: TransformerEngine's own classes, sharded, beside the
same classes whole.  Each function takes (groups, rank, keywords) and returns plain values for the test to judge.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import te_cpu
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_ranks import on_threads, thread_groups

from gtp_serve.errors import GtpServeError, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.spans import Shape
from gtp_serve.training import te
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.gather import GatherChain
from gtp_serve.training.groups import ParallelGroups, rank_of, size_of
from gtp_serve.training.init import Normal, draw_blocks, initialise, stream
from gtp_serve.training.layer import parameters_with_targets
from gtp_serve.training.linear import ColumnParallelLinear, NormColumnLinear
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.shards import Content, GTPShard

WIDTH, OUT, TOKENS, EXPERTS, EPS, SEED = 12, 20, 9, 3, 1e-5, 5
COUNTS = [4, 0, 5]
KINDS = ("column", "row", "LayerNorm", "RMSNorm", "grouped")
RENAMED = {"bias": "a.bias", "layer_norm_weight": "n.weight", "layer_norm_bias": "n.bias", "weight": "a.weight"}
RENAMED |= {f"{kind}{e}": f"{e}.a.{kind}" for kind in ("weight", "bias") for e in range(EXPERTS)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    kind: str
    alignment: int = 1
    dtype: str = "float32"
    fused: bool = False
    steps: int = 2
    way: str = "kept"
    out: int = OUT


def built(case: Case, placement: TrainPlacement) -> Any:
    """The sharded layer, filled."""
    fused: Any = {"bias": True, "fuse_wgrad_accumulation": case.fused}
    if case.kind == "column":
        layer = te.column_linear("a", WIDTH, case.out, placement, **fused)
    elif case.kind == "row":
        layer = te.row_linear("a", WIDTH, case.out, placement, **fused)
    elif case.kind == "grouped":
        layer = te.grouped_linear("{e}.a", EXPERTS, WIDTH, case.out, placement, cut="column", **fused)
    else:
        norm: Any = case.kind
        layer = te.norm_column_linear("a", "n", WIDTH, case.out, placement, eps=EPS, normalization=norm, **fused)
    initialise(layer, shapes_of(case), seed=SEED, choose=lambda _: Normal(0.3))
    return layer


def whole(case: Case) -> Any:
    """TransformerEngine's own layer with the same numbers, on one rank."""
    loaded = te_cpu.load()
    common = {"params_dtype": getattr(torch, case.dtype), "device": "cpu", "fuse_wgrad_accumulation": case.fused}
    if case.kind == "grouped":
        layer = loaded.GroupedLinear(EXPERTS, WIDTH, case.out, **common)
    elif case.kind in ("column", "row"):
        layer = loaded.Linear(WIDTH, case.out, parallel_mode=case.kind, **common)
    else:
        layer = loaded.LayerNormLinear(WIDTH, case.out, normalization=case.kind, eps=EPS, **common)
    shapes = shapes_of(case)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            logical = RENAMED[name]
            blocks = draw_blocks(shapes[logical], Normal(0.3), stream(SEED, logical))
            parameter.copy_(torch.cat([block for _, block in blocks]))
    return layer


def shapes_of(case: Case) -> dict[str, Shape]:
    if case.kind == "grouped":
        return {
            f"{e}.a.{kind}": (case.out, WIDTH)[: 2 - n]
            for e in range(EXPERTS)
            for n, kind in enumerate(("weight", "bias"))
        }
    return {"a.weight": (case.out, WIDTH), "a.bias": (case.out,), "n.weight": (WIDTH,), "n.bias": (WIDTH,)}


def data(rank: int, step: int, case: Case) -> tuple[Tensor, Tensor]:
    """(input, gradient of the output) of one micro-batch."""
    generator = stream(step, f"data {rank}")
    x, dy = (torch.randn(TOKENS, width, generator=generator) for width in (WIDTH, case.out))
    return x.to(getattr(torch, case.dtype)).requires_grad_(), dy.to(getattr(torch, case.dtype))


def called(layer: Any, x: Tensor, case: Case) -> Tensor:
    arguments = (x, COUNTS) if case.kind == "grouped" else (x,)
    if case.way in ("reentrant", "non-reentrant"):
        y: Tensor = checkpoint(layer, *arguments, use_reentrant=case.way == "reentrant")
        return y
    place: AbstractContextManager[Any] = (
        torch.autograd.graph.save_on_cpu() if case.way == "saved elsewhere" else nullcontext()
    )
    with place:
        out: Tensor = layer(*arguments)
        return out


def parity(groups: ParallelGroups, rank: int, *, case: Case) -> list[str]:
    """What differs, in any bit, from the whole layer: outputs, input gradients, every parameter's gradient."""
    te_cpu.load()
    ranks = size_of(groups.gtp_remat)
    me = rank_of(groups.gtp_remat)
    chain = GatherChain(accumulation="float32")
    placement = TrainPlacement(dtype=getattr(torch, case.dtype), groups=groups, alignment=case.alignment, chain=chain)
    layer = built(case, placement)
    shards = te.shards_of(layer)
    if case.fused:
        for shard in shards:
            shard.main_grad = torch.zeros(shard.shape)
    wrong: list[str] = []
    mine = []
    for step in range(case.steps):
        x, dy = data(me, step, case)
        y = called(layer, x, case)
        torch.autograd.backward(y, dy)
        assert x.grad is not None
        mine.append((y.detach().clone(), x.grad))
    chain.finish_gradients()
    reference = whole(case)
    grads: list[list[dict[str, Tensor]]] = []
    for other in range(ranks):
        grads.append([])
        for step in range(case.steps):
            reference.zero_grad()
            held: dict[str, Any] = dict(reference.named_parameters())
            for name in held:
                if case.fused and name.startswith("weight"):
                    held[name].main_grad = torch.zeros(held[name].shape)
            x, dy = data(other, step, case)
            y = called(reference, x, Case(kind=case.kind, dtype=case.dtype))
            torch.autograd.backward(y, dy)
            found = {name: getattr(p, "main_grad", p.grad) for name, p in held.items()}
            grads[other].append({name: grad.clone() for name, grad in found.items()})
            if other == me:
                assert x.grad is not None
                wrong += [f"y of step {step}"] * (not torch.equal(mine[step][0], y))
                wrong += [f"dx of step {step}"] * (not torch.equal(mine[step][1], x.grad))
    for name, parameter in layer.named_parameters():
        wrong += compared(name, parameter, [[grads[r][s][name] for r in range(ranks)] for s in range(case.steps)], case)
    return wrong


def compared(name: str, parameter: Any, by_step: list[list[Tensor]], case: Case) -> list[str]:
    """A parameter's gradient beside the whole one, summed as the trainer sums: ranks in order, in float32."""
    ranks = len(by_step[0])
    if not isinstance(parameter, GTPShard):
        by_step = [[sum(of_rank[1:], of_rank[0]) for of_rank in zip(*by_step, strict=True)]]
    total = torch.zeros(by_step[0][0].shape, dtype=torch.float32 if case.fused else parameter.dtype)
    if not isinstance(parameter, GTPShard):
        total = total.to(parameter.dtype)
    for one in by_step:
        total += mean(one, ranks)
    got = parameter.main_grad if case.fused and isinstance(parameter, GTPShard) else parameter.grad
    if got is None:
        return [f"{name} has no gradient"]
    if isinstance(parameter, GTPShard):
        first, count = parameter.row_range
        faults = [f"{name}: padding has a gradient"] * bool(got[count:].any())
        faults += [f"{name}: autograd has one too"] * (case.fused and parameter.grad is not None)
        got, total = got[:count], total[first : first + count]
    else:
        faults = [f"{name} has {list(got.shape)}"] * (got.shape != total.shape)
    return faults or [f"gradient of {name}"] * (not torch.equal(got, total))


def mean(grads: list[Tensor], ranks: int) -> Tensor:
    if ranks == 1:
        return grads[0]
    total = grads[0].to(torch.float32, copy=True)
    for grad in grads[1:]:
        total += grad
    return total / ranks


def beside_torch(groups: ParallelGroups, rank: int) -> dict[str, float]:
    """Largest difference of each whole layer's outputs and gradients from torch's own functions."""
    te_cpu.load()
    return {kind: difference(Case(kind=kind)) for kind in KINDS}


def difference(case: Case) -> float:
    layer = whole(case)
    weights = {name: p.detach().clone().requires_grad_() for name, p in layer.named_parameters()}
    (x, dy), (plain, _) = data(0, 0, case), data(0, 0, case)
    y = called(layer, x, case)
    torch.autograd.backward(y, dy)
    h = plain
    if case.kind == "LayerNorm":
        h = F.layer_norm(plain, (WIDTH,), weights["layer_norm_weight"], weights["layer_norm_bias"], EPS)
    elif case.kind == "RMSNorm":
        h = F.rms_norm(plain, (WIDTH,), weights["layer_norm_weight"], EPS)
    numbers = [str(e) for e in range(EXPERTS)] if case.kind == "grouped" else [""]
    blocks = torch.split(h, COUNTS) if case.kind == "grouped" else [h]
    parts = [F.linear(b, weights[f"weight{n}"], weights[f"bias{n}"]) for b, n in zip(blocks, numbers, strict=True)]
    wanted = torch.cat(parts)
    torch.autograd.backward(wanted, dy)
    pairs = [(y, wanted), (x.grad, plain.grad), *((p.grad, weights[name].grad) for name, p in layer.named_parameters())]
    return max(float((a - b).abs().max()) for a, b in pairs)


def virtual(groups: ParallelGroups, rank: int, *, what: str, ranks: int, **keywords: Any) -> list[Any]:
    """A function of this file on threads of the first process, with collectives that happen late."""
    if rank:
        return []
    te_cpu.load()
    ends = thread_groups(Grid(gtp=ranks, egtp=ranks), ranks)
    act: Callable[..., Any] = globals()[what]
    return on_threads(ranks, lambda me: act(ends[me], me, **keywords))


def tensor_parallel(groups: ParallelGroups, rank: int, *, kind: str) -> list[float]:
    """Largest differences of y, dx and weight gradient from the whole layer, TransformerEngine summing over TP."""
    case = Case(kind=kind)
    te_cpu.load()
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1)
    layer, reference = built(case, placement), whole(case)
    me, x, dy = rank_of(groups.tp), *data(0, 0, case)
    rows, columns = (
        (slice(me * OUT // 2, (me + 1) * OUT // 2), slice(None))
        if kind != "row"
        else (slice(None), slice(me * WIDTH // 2, (me + 1) * WIDTH // 2))
    )
    held = x.detach()[:, columns].clone().requires_grad_()
    y = layer(held)
    torch.autograd.backward(y, dy[:, rows])
    placement.chain.finish_gradients()
    wanted = reference(x)
    torch.autograd.backward(wanted, dy)
    assert x.grad is not None
    assert held.grad is not None
    pairs = [
        (y, wanted[:, rows]),
        (held.grad, x.grad[:, columns]),
        (layer.weight.grad, reference.weight.grad[rows, columns]),
    ]
    bias = reference.bias.grad[rows]
    return [(a - b).abs().max().item() for a, b in [*pairs, (layer.bias.grad, bias)]]


def hundred(groups: ParallelGroups, rank: int, *, kind: str) -> list[float]:
    """(smallest, largest) output of a layer whose weights are zero and whose biases are 100."""
    te_cpu.load()
    case = Case(kind=kind)
    layer = built(case, TrainPlacement(dtype=torch.float32, groups=groups, alignment=16))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.fill_(100.0 if name.startswith("bias") else 0.0)
        y = called(layer, data(rank, 0, case)[0], case)
    assert y.shape == (TOKENS, OUT)
    return [y.min().item(), y.max().item()]


def frozen(groups: ParallelGroups, rank: int, *, kind: str) -> dict[str, Any]:
    """A frozen weight: dx and vectors' gradients as of the whole layer, no weight gradient, and nothing of one sent."""
    te_cpu.load()
    case = Case(kind=kind)
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1)
    layer, reference = built(case, placement), whole(case)
    for model in (layer, reference):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith("weight"))
    x, dy = data(rank, 0, case)
    y = called(layer, x, case)
    torch.autograd.backward(y, dy)
    placement.chain.finish_gradients()
    other, _ = data(rank, 0, case)
    torch.autograd.backward(called(reference, other, case), dy)
    group: Any = groups.expt_gtp_remat if kind == "grouped" else groups.gtp_remat
    pairs = zip(layer.parameters(), reference.parameters(), strict=True)
    return {
        "dx": torch.equal(x.grad, other.grad),  # type: ignore[arg-type]
        "same have gradients": all((a.grad is None) == (b.grad is None) for a, b in pairs),
        "weights": [shard.grad for shard in te.shards_of(layer) if shard.grad is not None],
        "sent": group.started.count("reduce_scatter") + group.started.count("all_to_all"),
    }


def without_gradients(groups: ParallelGroups, rank: int, *, kind: str) -> list[bool]:
    """Outputs under no_grad, twice, with the weights changed in between, beside the whole layer's."""
    te_cpu.load()
    case = Case(kind=kind)
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1)
    layer, reference = built(case, placement), whole(case)
    x = data(rank, 0, case)[0].detach()
    same = []
    with torch.no_grad():
        for _ in range(2):
            y = called(layer, x, case)
            same.append(torch.equal(y, called(reference, x, case)) and not y.requires_grad)
            for model in (layer, reference):
                for parameter in model.parameters():
                    parameter.mul_(1.5)
    return same


def trained(groups: ParallelGroups, rank: int) -> list[float]:
    """(largest difference of any parameter from this package's own layer, largest change) after three AdamW steps."""
    te_cpu.load()
    models: list[Any] = []
    for kind in ("te", "own"):
        placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=16)
        make: Any = te.norm_column_linear if kind == "te" else NormColumnLinear
        layer = make("a", "n", WIDTH, OUT, placement, eps=EPS, bias=True)
        initialise(layer, shapes_of(Case(kind="RMSNorm")), seed=SEED, choose=lambda _: Normal(0.3))
        models.append({name: p.detach().clone() for name, p in layer.named_parameters()})
        optimizer = AdamW(layer, lr=0.01)
        for step in range(3):
            x, dy = data(rank, step, Case(kind="RMSNorm"))
            optimizer.zero_gradients()
            torch.autograd.backward(layer(x), dy)
            placement.chain.finish_gradients()
            optimizer.step()
        models.append(dict(layer.named_parameters()))
    before, ours, _, native = models
    return [max(float((ours[n] - other[n]).abs().max()) for n in ours) for other in (native, before)]


class Stack(nn.Module):
    """TransformerEngine's layers and one of this package's, in one chain."""

    def __init__(self, placement: TrainPlacement) -> None:
        super().__init__()
        self.first = te.column_linear("0", WIDTH, WIDTH, placement)
        self.second = te.norm_column_linear("1", "n", WIDTH, WIDTH, placement, eps=EPS)
        self.third = ColumnParallelLinear("2", WIDTH, WIDTH, placement)
        self.fourth = te.grouped_linear("{e}.3", EXPERTS, WIDTH, WIDTH, placement, cut="column")

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.second(self.first(x))), COUNTS)  # type: ignore[no-any-return]


def prefetch(groups: ParallelGroups, rank: int) -> dict[str, Any]:
    """The order in which weights are asked for, and how many were there already in a second pass."""
    te_cpu.load()
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1)
    model, chain = Stack(placement), placement.chain
    ahead: list[int] = []
    demand: list[int] = []
    for step in range(2):
        x, _ = data(rank, step, Case(kind="column"))
        torch.autograd.backward(model(x).sum())
        ahead.append(chain.fetched_ahead)
        demand.append(chain.fetched_on_demand)
    chain.finish_gradients()
    return {
        "train": [use.shards[0].state.content.key for use in chain.order("train")],
        "backward": [use.shards[0].state.content.key for use in chain.order("backward")],
        "ahead in the second": ahead[1] - ahead[0],
        "on demand in the second": demand[1] - demand[0],
        "lent": chain.pool.lent,
    }


def stale(groups: ParallelGroups, rank: int) -> str:
    """What reading a gradient says while it is being reduced."""
    te_cpu.load()
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1)
    layer = built(Case(kind="column"), placement)
    x, dy = data(rank, 0, Case(kind="column"))
    torch.autograd.backward(layer(x), dy)
    try:
        return str(layer.weight.grad)
    except UsageError as refusal:
        return str(refusal)
    finally:
        placement.chain.finish_gradients()


def flagged(groups: ParallelGroups, rank: int) -> dict[str, Any]:
    """A weight with the flag that Megatron's data parallelism sets."""
    te_cpu.load()
    case = Case(kind="column", fused=True)
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1)
    layer = built(case, placement)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    layer.weight.grad_added_to_main_grad = False
    x, dy = data(rank, 0, case)
    torch.autograd.backward(layer(x), dy)
    placement.chain.finish_gradients()
    return {"flag": layer.weight.grad_added_to_main_grad, "arrived": bool(layer.weight.main_grad.any())}


def attributes(groups: ParallelGroups, rank: int) -> dict[str, Any]:
    """What a weight brings along, and what the layer looks like afterwards."""
    loaded = te_cpu.load()
    base: Any = __import__("transformer_engine.pytorch.module.base", fromlist=["base"])
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=16)
    module = loaded.Linear(WIDTH, 16, device="cpu", parallel_mode="column")
    old, bias, meta = module.weight, module.bias, module.param_init_meta["weight"]
    values = old.detach().clone()
    old.mine = ["kept"]
    base._attach_high_precision_init_val(old, values.clone())
    module.bias.sequence_parallel = True
    names = [name for name, _ in module.named_parameters()]
    made = te.attach(
        module,
        placement,
        out_features=OUT,
        weights=[Content.of("a.weight", OUT)],
        vectors={"bias": Content.of("a.bias", OUT)},
    )
    new: Any = module.weight
    exact = new.get_high_precision_init_val()
    real = new.row_range[1]
    new.clear_high_precision_init_val()
    return {
        "same module": made is module and isinstance(module, loaded.Linear),
        "memory": new.data_ptr() == old.data_ptr(),
        "real rows": bool((new.local[:real] == values[:real]).all()),
        "padding": bool(new.local[real:].any()),
        "mine": new.mine,
        "cut": (new.tensor_model_parallel, new.partition_dim, new.partition_stride),
        "exact": torch.equal(exact, new.local),
        "cleared": not hasattr(new, "_high_precision_init_val") and hasattr(old, "_high_precision_init_val"),
        "meta": module.param_init_meta["weight"] is meta,
        "bias": (module.bias is bias, list(bias.shape), bias.sequence_parallel),
        "out_features": module.out_features,
        "names": [name for name, _ in module.named_parameters()] == names,
        "state": {key: list(value.shape) for key, value in module.state_dict().items() if isinstance(value, Tensor)},
        "spans": [
            (p.shape[0], t.shard.key, sum(s.local.volume for s in t.shard.spans) // p[0].numel())
            for p, t in parameters_with_targets(module)
        ],
    }


def copied(groups: ParallelGroups, rank: int) -> bool:
    """Whether a copy of a grouped layer computes and learns like the original, and by itself."""
    te_cpu.load()
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1)
    layer = built(Case(kind="grouped"), placement)
    twin = copy.deepcopy(layer)
    outputs = []
    for model in (layer, twin):
        x, dy = data(rank, 0, Case(kind="grouped"))
        y = model(x, COUNTS)
        torch.autograd.backward(y, dy)
        outputs.append(y.detach())
        placement.chain.finish_gradients()
    same = [torch.equal(a.grad, b.grad) for a, b in zip(layer.parameters(), twin.parameters(), strict=True)]
    apart = all(a is not b for a, b in zip(layer.parameters(), twin.parameters(), strict=True))
    return torch.equal(*outputs) and all(same) and apart


def refusals(groups: ParallelGroups, rank: int) -> dict[str, str]:
    """What each layer that cannot be attached is told."""
    loaded = te_cpu.load()
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1)

    def told(module: Any, *, out: int = OUT, weights: int = 1) -> str:
        contents = [Content.of("a.weight", out)] * weights
        named = {n: Content.of(n, out) for n, _ in module.named_parameters() if "bias" in n}
        try:
            te.attach(module, placement, out_features=out, weights=contents, vectors=named)
        except GtpServeError as refusal:
            return str(refusal)
        return "attached"

    half = {"out_features": OUT // 2, "device": "cpu"}
    twice = loaded.Linear(WIDTH, **half)
    packed = loaded.GroupedLinear(2, WIDTH, **half)
    packed.single_grouped_bias = True
    bare = loaded.Linear(WIDTH, **half)
    bare.register_parameter("weight", nn.Parameter(torch.zeros(OUT // 2, WIDTH)))
    bare.weight.__class__ = type("Float8Tensor", (nn.Parameter,), {})
    found = {
        "mlp": told(loaded.LayerNormMLP(WIDTH, 4 * WIDTH, device="cpu")),
        "split": told(loaded.Linear(WIDTH, parameters_split=("q", "k"), **half)),
        "delayed": told(loaded.Linear(WIDTH, delay_wgrad_compute=True, **half)),
        "packed": told(packed, weights=2),
        "grouped tensor": told(loaded.GroupedLinear(2, WIDTH, use_grouped_tensor=True, **half), weights=2),
        "zero-centred": told(loaded.LayerNormLinear(WIDTH, zero_centered_gamma=True, **half)),
        "quantised": told(bare),
        "whole": told(loaded.Linear(WIDTH, OUT, device="cpu")),
        "vectors": told(loaded.LayerNormLinear(WIDTH, **half)),
        "first": told(twice),
        "second": told(twice),
    }
    try:
        twice.reset_parameters()
    except UsageError as refusal:
        found["reset"] = str(refusal)
    return found
