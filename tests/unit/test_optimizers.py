"""AdamW, Muon and the gradient norm over shards, against torch's own on whole matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoint_model import Axis, check, dense_config, fill, moe_config, on_grid, on_grid_alone, truth_of
from torch import Tensor, nn

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import EMBEDDING
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.apply import Target
from gtp_serve.training.adamw import AdamW, AdamWSettings
from gtp_serve.training.checkpoint_load import _Filling
from gtp_serve.training.checkpoint_plan import rank_tensor
from gtp_serve.training.gradients import clip_gradients, gradient_norm, gradient_of
from gtp_serve.training.groups import ParallelGroups
from gtp_serve.training.linear import ColumnParallelLinear
from gtp_serve.training.mesh import SoloMesh
from gtp_serve.training.muon import Muon, MuonSettings
from gtp_serve.training.optimizer import MASTER
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.shard_map import ShardMap, high_precision
from gtp_serve.training.shards import GTPShard

LR = 0.02
GRIDS = [
    (dense_config(dtype="float32"), Grid(), 1),
    (dense_config(dtype="float32"), Grid(gtp=4, alignment=32), 1),
    (dense_config(dtype="float32"), Grid(tp=2, gtp=2, alignment=16), 2),
    (moe_config(dtype="float32"), Grid(tp=2, gtp=2, etp=2, egtp=2, alignment=16), 1),
    (moe_config(dtype="float32"), Grid(gtp=2, ep=2, egtp=2, alignment=8), 2),
]


def _vectors_last(name: str) -> bool:
    return name.endswith(("norm.weight", "bias"))


def _put_gradients(shards: ShardMap, config: ModelConfig, step: int, dtype: torch.dtype = torch.float32) -> None:
    truth = truth_of(config, 100 + step, torch.float32)
    for parameter, shard in zip(shards.parameters, shards.shards, strict=True):
        grad = torch.zeros(shard.shape, dtype=dtype)
        fill(shard, grad, truth)
        held: Any = parameter
        held.grad = grad


def _start(shards: ShardMap, config: ModelConfig, dtype: torch.dtype) -> None:
    truth = truth_of(config, 1, dtype)
    for parameter, shard in zip(shards.parameters, shards.shards, strict=True):
        fill(shard, parameter.detach(), truth)


def _compare(shards: ShardMap, wanted: Mapping[str, Tensor]) -> None:
    for parameter, shard in zip(shards.parameters, shards.shards, strict=True):
        check(shard, parameter.detach(), wanted)


def _torch_adamw(config: ModelConfig, steps: int, decay_vectors: bool) -> dict[str, Tensor]:
    weights = {name: nn.Parameter(x.clone()) for name, x in truth_of(config, 1, torch.float32).items()}
    groups = [
        {"params": [p for n, p in weights.items() if not _vectors_last(n)], "weight_decay": 0.1},
        {"params": [p for n, p in weights.items() if _vectors_last(n)], "weight_decay": 0.1 if decay_vectors else 0.0},
    ]
    theirs = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-6, foreach=False)
    for step in range(steps):
        for name, grad in truth_of(config, 100 + step, torch.float32).items():
            weights[name].grad = grad.clone()
        theirs.step()
    return {name: x.detach() for name, x in weights.items()}


@pytest.mark.parametrize("decay_vectors", [False, True])
@pytest.mark.parametrize(("config", "grid", "dp"), GRIDS)
def test_adamw_on_any_grid_gives_the_bits_of_torchs(
    config: ModelConfig, grid: Grid, dp: int, decay_vectors: bool
) -> None:
    wanted = _torch_adamw(config, 3, decay_vectors)

    def act(shards: ShardMap) -> None:
        _start(shards, config, torch.float32)
        settings = AdamWSettings(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1, decay_vectors=decay_vectors)
        optimizer = AdamW(shards, lr=LR, settings=settings)
        for step in range(3):
            _put_gradients(shards, config, step)
            optimizer.step()
            optimizer.zero_gradients()
        _compare(shards, wanted)

    on_grid_alone(config, grid, act)


def _torch_muon(config: ModelConfig, steps: int, scale: str) -> dict[str, Tensor]:
    weights = {name: nn.Parameter(x.clone()) for name, x in truth_of(config, 1, torch.float32).items()}
    hidden = [
        n for n, p in weights.items() if p.dim() == 2 and n not in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    theirs: list[torch.optim.Optimizer] = [
        torch.optim.Muon([weights[n] for n in hidden], lr=LR, weight_decay=0.1, momentum=0.9, adjust_lr_fn=scale),
        torch.optim.AdamW([p for n, p in weights.items() if n not in hidden], lr=LR, weight_decay=0.0, foreach=False),
    ]
    for step in range(steps):
        for name, grad in truth_of(config, 100 + step, torch.float32).items():
            weights[name].grad = grad.clone()
        for optimizer in theirs:
            optimizer.step()
    return {name: x.detach() for name, x in weights.items()}


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize(("config", "grid", "dp"), GRIDS)
def test_muon_on_any_grid_gives_the_bits_of_torchs_on_whole_logical_matrices(
    config: ModelConfig, grid: Grid, dp: int, scale: Any
) -> None:
    wanted = _torch_muon(config, 2, scale)

    def act(shards: ShardMap) -> None:
        _start(shards, config, torch.float32)
        settings = MuonSettings(momentum=0.9, scale=scale, others=AdamWSettings(weight_decay=0.0))
        optimizer = Muon(shards, lr=LR, settings=settings)
        for step in range(2):
            _put_gradients(shards, config, step)
            optimizer.step()
        _compare(shards, wanted)

    on_grid(config, grid, act, dp=dp)


def test_muon_sends_the_same_work_to_no_two_ranks_and_no_padding() -> None:
    config, grid = dense_config(dtype="float32"), Grid(gtp=4, alignment=32)

    def act(shards: ShardMap) -> tuple[int, int, int]:
        _start(shards, config, torch.float32)
        optimizer = Muon(shards, lr=LR)
        _put_gradients(shards, config, 0)
        optimizer.step()
        mesh: Any = shards.mesh
        mine = sum(math.prod(item.shard.shape) for item in optimizer._items if item.worker == shards.mesh.rank)
        return mine, sum(math.prod(item.shard.shape) for item in optimizer._items), sum(mesh.sent)

    told = on_grid(config, grid, act)
    elements = told[0][1]
    assert sum(mine for mine, _, _ in told) == elements
    # Each element travels at most once to where it is orthogonalised and once back.
    assert sum(sent for _, _, sent in told) <= 2 * 4 * elements


def test_a_shard_that_is_all_padding_has_the_state_of_its_kind() -> None:
    config, grid = dense_config(dtype="float32"), Grid(gtp=4, alignment=32)

    def act(shards: ShardMap) -> list[tuple[str, tuple[str, ...], int]]:
        optimizer = Muon(shards, lr=LR)
        return [(s.key, tuple(optimizer.state[i]), len(s.spans)) for i, s in enumerate(shards.shards)]

    last = on_grid(config, grid, act)[3]
    table = next(slots for key, slots, spans in last if key == EMBEDDING and not spans)
    assert table == ("exp_avg", "exp_avg_sq")
    assert any(slots == ("momentum_buffer",) and not spans for _, slots, spans in last)


@pytest.mark.parametrize(("config", "grid", "dp"), GRIDS)
def test_the_norm_counts_each_element_once_and_no_padding(config: ModelConfig, grid: Grid, dp: int) -> None:
    gradients = truth_of(config, 100, torch.float32)
    wanted = math.sqrt(sum(x.double().square().sum().item() for x in gradients.values()))

    def act(shards: ShardMap) -> None:
        truth = truth_of(config, 100, torch.float32)
        for parameter, shard in zip(shards.parameters, shards.shards, strict=True):
            grad = torch.zeros(shard.shape)
            fill(shard, grad, truth, padding=1e3)
            held: Any = parameter
            held.grad = grad
        assert gradient_norm(shards) == pytest.approx(wanted, rel=1e-12)
        before = {i: g.clone() for i, p in enumerate(shards.parameters) if (g := gradient_of(p)) is not None}
        assert clip_gradients(shards, wanted / 4) == pytest.approx(wanted, rel=1e-12)
        for index, grad in before.items():
            now = gradient_of(shards.parameters[index])
            assert now is not None
            torch.testing.assert_close(now, grad / 4)
        assert clip_gradients(shards, wanted) == pytest.approx(wanted / 4, rel=1e-5)
        assert gradient_norm(shards) == pytest.approx(wanted / 4, rel=1e-5)

    on_grid(config, grid, act, dp=dp)


def test_a_norm_that_is_not_finite_changes_nothing_and_a_bound_must_be_positive() -> None:
    shards = _linear_map()
    held: Any = shards.parameters[0]
    held.grad = torch.full((8, 4), float("inf"))
    assert clip_gradients(shards, 1.0) == math.inf
    assert held.grad.isinf().all()
    with pytest.raises(UsageError, match="max_norm is 0"):
        clip_gradients(shards, 0.0)


def test_half_precision_weights_move_by_their_masters() -> None:
    config, grid = dense_config(), Grid(tp=2, gtp=2, alignment=16)
    whole = truth_of(config, 1, torch.bfloat16)
    masters = {name: nn.Parameter(x.float()) for name, x in whole.items()}
    theirs = torch.optim.AdamW(masters.values(), lr=1e-4, weight_decay=0.0, foreach=False)
    for step in range(4):
        for name, grad in truth_of(config, 100 + step, torch.float32).items():
            masters[name].grad = grad.bfloat16().float()
        theirs.step()

    def act(shards: ShardMap) -> None:
        _start(shards, config, torch.bfloat16)
        optimizer = AdamW(shards, lr=1e-4, settings=AdamWSettings(weight_decay=0.0))
        for step in range(4):
            _put_gradients(shards, config, step, torch.bfloat16)
            optimizer.step()
        for index, (parameter, shard) in enumerate(zip(shards.parameters, shards.shards, strict=True)):
            check(shard, optimizer.state[index][MASTER], {n: p.detach() for n, p in masters.items()})
            check(shard, parameter.detach(), {n: p.detach().bfloat16() for n, p in masters.items()})
            assert optimizer.state[index]["exp_avg"].shape == parameter.shape

    on_grid_alone(config, grid, act)


def _linear_map(rank: int = 0, ranks: int = 1, alignment: int = 1) -> ShardMap:
    groups = ParallelGroups(gtp_remat=Axis(ranks, rank)) if ranks > 1 else ParallelGroups()
    placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=alignment)
    return ShardMap.of(ColumnParallelLinear("linear", 4, 8, placement), SoloMesh())


def test_main_grad_is_what_counts_and_is_cleared_in_place() -> None:
    shards = _linear_map()
    weight = shards.parameters[0]
    assert isinstance(weight, GTPShard)
    weight.main_grad = torch.full((8, 4), 2.0)
    weight.grad = torch.full((8, 4), 100.0)
    held: Any = weight
    held.grad_added_to_main_grad = True
    buffer = weight.main_grad
    assert gradient_norm(shards) == pytest.approx(2 * math.sqrt(32))
    optimizer = AdamW(shards, lr=LR, settings=AdamWSettings(betas=(0.0, 0.0), eps=0.0))
    optimizer.step()
    torch.testing.assert_close(optimizer.state[0]["exp_avg"], torch.full((8, 4), 2.0))
    optimizer.zero_gradients()
    assert weight.main_grad is buffer
    assert not buffer.any()
    assert weight.grad is None
    assert not held.grad_added_to_main_grad


def test_a_gradient_that_is_still_being_reduced_is_an_error_and_not_a_stale_one() -> None:
    shards = _linear_map()
    weight = shards.parameters[0]
    assert isinstance(weight, GTPShard)
    optimizer = AdamW(shards, lr=LR)
    weight.state.reductions_pending = 1
    for act in (optimizer.step, lambda: gradient_norm(shards)):
        with pytest.raises(UsageError, match="still being reduced"):
            act()


def test_trimmed_rows_lead_to_the_untrimmed_state_of_their_live_parameter() -> None:
    shards = _linear_map(rank=1, ranks=2, alignment=5)
    weight = shards.parameters[0]
    assert isinstance(weight, GTPShard)
    optimizer = AdamW(shards, lr=LR)
    trimmed = weight.trimmed()
    assert tuple(trimmed.shape) == (3, 4)
    assert optimizer.state_of(trimmed) is optimizer.state[0]
    assert optimizer.state_of(weight.detach()) is optimizer.state[0]
    # What a gather would size itself by: both ranks' shards are alike, their real rows are not.
    assert tuple(optimizer.state_of(trimmed)["exp_avg"].shape) == (5, 4)
    with pytest.raises(UsageError, match="no parameter of this model"):
        optimizer.state_of(torch.zeros(3, 4))


def test_frozen_parameters_have_no_state_and_do_not_move() -> None:
    shards = _linear_map()
    shards.parameters[0].requires_grad_(False)
    for optimizer in (AdamW(shards, lr=LR), Muon(shards, lr=LR)):
        assert optimizer.state == {}
        optimizer.step()
        assert not shards.parameters[0].detach().any()


def test_settings_that_mean_nothing_are_refused() -> None:
    for make in (
        lambda: AdamWSettings(betas=(1.0, 0.9)),
        lambda: AdamWSettings(weight_decay=-1.0),
        lambda: MuonSettings(momentum=1.0),
        lambda: MuonSettings(iterations=0),
        lambda: MuonSettings(scale="other"),  # type: ignore[arg-type]
        lambda: AdamW(_quantised_map()[0], lr=-1e-3),
        lambda: Muon(_quantised_map()[0], lr=math.nan),
        lambda: AdamW(_quantised_map()[0], lr=math.inf),
    ):
        with pytest.raises(UsageError):
            make()


class Quantised(torch.Tensor):
    """A weight that is kept as whole numbers and a scale, with a float type on the outside."""

    codes: Tensor
    scale = 1 / 64

    @staticmethod
    def __new__(cls, value: Tensor) -> Quantised:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=torch.bfloat16)
        made.codes = torch.round(value.float() / cls.scale).to(torch.int16)
        return made  # type: ignore[no-any-return]

    def dequantize(self) -> Tensor:
        return (self.codes.float() * self.scale).bfloat16()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its stub takes it for an instance's method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            twin = Quantised(torch.zeros(args[0].shape))
            twin.codes = args[0].codes
            return twin
        if func is torch.ops.aten.copy_.default:
            args[0].codes.copy_(torch.round(args[1].float() / cls.scale).to(torch.int16))
            return args[0]
        return func(*[a.dequantize() if isinstance(a, Quantised) else a for a in args], **(kwargs or {}))


def _quantised_map() -> tuple[ShardMap, Any]:
    held: Any = nn.Parameter(Quantised(torch.zeros(4, 4)))
    box = Box.whole((4, 4))
    shard = Shard("w", (4, 4), "bfloat16", (Span("w", box, box),))
    return ShardMap([(held, Target(shard, held.data))], SoloMesh()), held


def test_a_quantised_weight_has_a_master_from_its_high_precision_value() -> None:
    shards, weight = _quantised_map()
    exact = torch.linspace(-1, 1, 16).view(4, 4)
    weight._high_precision_init_val = exact
    optimizer = AdamW(shards, lr=LR)
    assert torch.equal(optimizer.state[0][MASTER], exact)
    weight.grad = torch.ones(4, 4, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(high_precision(weight), Quantised(optimizer.state[0][MASTER]).dequantize())
    written = rank_tensor(shards, optimizer, None, 0)
    assert type(written) is torch.Tensor
    assert torch.equal(written, weight.data.dequantize())


def test_a_quantised_weight_is_filled_by_value_and_its_first_value_kept_in_step() -> None:
    shards, weight = _quantised_map()
    weight._high_precision_init_val = torch.full((4, 4), 9.0)
    value = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    source = _One(shards.shards[0], value)
    _Filling(1, None).weights(source, [(weight, shards.shards[0])], {"w": (4, 4)})
    assert torch.equal(weight.data.dequantize(), Quantised(value).dequantize())
    assert torch.equal(weight._high_precision_init_val, value)


class _One:
    """A source of one float32 tensor."""

    def __init__(self, shard: Shard, value: Tensor) -> None:
        self._shard = replace(shard, dtype="float32")
        self._value = value

    def shards(self) -> list[Shard]:
        return [self._shard]

    def read(self, index: int) -> memoryview:
        return memoryview(self._value.numpy().tobytes())

    def close(self) -> None: ...
