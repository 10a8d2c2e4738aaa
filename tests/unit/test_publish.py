"""What a trainer offers: every element of every logical tensor, from the ranks that hold it, and no padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from megatron_double import Place, megatron_model, places
from torch import Tensor, nn
from train_twin import CONFIGS, DENSE, FULL, MOE, weights_of
from training_model import slices
from training_ranks import on_threads, thread_groups

from gtp_serve.config import ModelConfig
from gtp_serve.errors import GtpServeError, LayoutMismatch, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.refit.offer import check_offers, offer
from gtp_serve.refit.transports.shares import sole_owners
from gtp_serve.training.decoder import build_train_decoder
from gtp_serve.training.fidelity import TensorSource
from gtp_serve.training.publish import Pairs, publish, publish_megatron

GRIDS = {
    "dense": [Grid(), Grid(gtp=2, alignment=16), Grid(gtp=4, alignment=16), Grid(tp=2, gtp=2, alignment=8)],
    "full": [Grid(gtp=2, alignment=4), Grid(tp=2, gtp=2)],
    "moe": [Grid(gtp=2, ep=2), Grid(tp=2, gtp=2, etp=2, egtp=2, alignment=8)],
    "plain-moe": [Grid(gtp=4, ep=2, egtp=2, alignment=16)],
}
CASES = [pytest.param(CONFIGS[name], grid, id=f"{name} {grid}") for name, grids in GRIDS.items() for grid in grids]


def check(everyone: Sequence[Pairs], config: ModelConfig) -> None:
    """All ranks' pieces together are the weights: each element sent once, by somebody who has it."""
    shapes, wanted = logical_tensors(config), weights_of(config)
    shards = [list(offer(pairs).shards()) for pairs in everyone]
    check_offers(shards, shapes, dict.fromkeys(shapes, frozenset(["float32"])))
    parts = sole_owners(shards, shapes)
    assert sum(span.logical.volume for part in parts for shard in part for span in shard.spans) == sum(
        map(prod, shapes.values())
    )
    found = {name: torch.full(shape, torch.nan) for name, shape in shapes.items()}
    for pairs in everyone:
        for shard, tensor in pairs:
            for span in shard.spans:
                there = found[span.name][slices(span.logical)]
                piece = tensor[slices(span.local)]
                assert (there.isnan() | (there == piece)).all(), shard.key
                there.copy_(piece)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("config", "grid"), CASES)
def test_a_models_ranks_offer_all_of_it_and_no_padding(config: ModelConfig, grid: Grid) -> None:
    world = grid.tp * grid.gtp
    groups = thread_groups(grid, world)

    def act(rank: int) -> Pairs:
        model = build_train_decoder(config, dtype=torch.float32, groups=groups[rank], alignment=grid.alignment)
        model.load_weights(TensorSource(weights_of(config)))
        for parameter in model.parameters():
            spoil_padding(parameter)
        return publish(model)

    check(on_threads(world, act), config)


def spoil_padding(parameter: Any) -> None:
    if getattr(parameter, "pad_length", 0):
        parameter.local[parameter.row_range[1] :] = torch.nan


def test_what_is_offered_is_the_live_memory() -> None:
    model = build_train_decoder(DENSE, dtype=torch.float32)
    held = {parameter.data_ptr() for parameter in model.parameters()}

    assert {tensor.data_ptr() for _, tensor in publish(model)} == held


def test_a_parameter_without_spans_is_refused() -> None:
    model = build_train_decoder(DENSE, dtype=torch.float32)
    model.extra = nn.Linear(2, 2)

    with pytest.raises(UsageError, match=r"extra\.weight states no spans"):
        publish(model)


MEGATRON = {
    "dense": [Grid(), Grid(tp=2), Grid(gtp=2, alignment=16), Grid(tp=2, gtp=4, alignment=16), Grid(gtp=2, pp=2)],
    "full": [Grid(tp=2, gtp=2, pp=2, alignment=4)],
    "moe": [Grid(gtp=4, ep=2, egtp=2, alignment=8), Grid(tp=2, gtp=2, ep=2, etp=2, pp=2)],
    "plain-moe": [Grid(gtp=2, egtp=2, alignment=16), Grid(tp=2, gtp=2, ep=4, alignment=1)],
}
MEGATRON_CASES = [
    pytest.param(CONFIGS[name], grid, id=f"{name} {grid}") for name, grids in MEGATRON.items() for grid in grids
]


def plain(config: ModelConfig) -> ModelConfig:
    """Without what Megatron's double leaves out; its tensor-parallel ranks need an even vocabulary."""
    moe = None if config.moe is None else replace(config.moe, shared_ffn_size=0, shared_gate=False)
    return replace(config, moe=moe, proj_bias=False, mlp_bias=False, vocab_rows=24)


@pytest.mark.parametrize(("config", "grid"), MEGATRON_CASES)
@pytest.mark.parametrize("te_experts", [True, False])
def test_a_megatron_models_ranks_offer_all_of_it_and_no_padding(
    config: ModelConfig, grid: Grid, te_experts: bool
) -> None:
    config = plain(config)
    weights = weights_of(config)

    check(
        [
            publish_megatron(megatron_model(weights, config, place, te_experts=te_experts), config, place.groups)
            for place in places(grid)
        ],
        config,
    )


def test_the_chunks_of_a_virtual_pipeline_are_one_model() -> None:
    config, grid = plain(DENSE), Grid(gtp=2, pp=2)
    weights = weights_of(config)
    everyone = []
    for rank in range(2):
        chunks = [megatron_model(weights, config, Place(grid, rank, stage)) for stage in range(2)]
        everyone.append(publish_megatron(chunks, config, Place(grid, rank, 0).groups))

    check(everyone, config)


def test_rows_that_the_trainers_vocabulary_has_beyond_the_servers_stay_at_home() -> None:
    """Megatron rounds its vocabulary up, so the last tensor-parallel rank may hold more rows than the server has."""
    config, grid = plain(FULL), Grid(tp=2, gtp=2, alignment=4)
    weights = weights_of(config)
    grown = {**weights}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        extra = weights[name].new_full((16, config.hidden_size), torch.nan)
        grown[name] = torch.cat((weights[name], extra))

    check(
        [publish_megatron(megatron_model(grown, config, place), config, place.groups) for place in places(grid)], config
    )


FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def no_number(model: nn.Module) -> None:
    del model.get_submodule("module.module.decoder.layers.0").layer_number


def change(name: str, **attributes: Any) -> Callable[[nn.Module], None]:
    def act(model: nn.Module) -> None:
        parameter: Any = model.get_parameter(f"module.module.{name}")
        for key, value in attributes.items():
            setattr(parameter, key, value)

    return act


def stranger(model: nn.Module) -> None:
    model.get_submodule("module.module.decoder").register_parameter("mtp", nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (stranger, r"the parameter module\.module\.decoder\.mtp is not known"),
        (change(FC1, pad_length=0), "linear_fc1.weight is .* 0 rows of it padding"),
        (change(FC1, gtp_remat_size=4), "on each of 4 GTP ranks"),
        (change(FC1, partition_dim=1), "is cut along axis 1"),
        (change(FC1, partition_stride=3), "stride 3"),
        (no_number, "does not say which layer"),
    ],
)
def test_a_megatron_model_that_is_not_what_its_attributes_say_is_refused(
    damage: Callable[[nn.Module], None], words: str
) -> None:
    config, place = plain(DENSE), Place(Grid(tp=2, gtp=2, pp=2, alignment=16), 0, 0)
    model = megatron_model(weights_of(config), config, place)
    damage(model)

    with pytest.raises((LayoutMismatch, UsageError), match=words):
        publish_megatron(model, config, place.groups)


def test_weights_of_another_model_are_refused_by_name() -> None:
    place = Place(Grid(), 0, 0)
    model = megatron_model(weights_of(plain(FULL)), plain(FULL), place)

    with pytest.raises(GtpServeError, match=r"linear_qkv\.bias is not known"):
        publish_megatron(model, plain(DENSE), place.groups)


def test_the_same_pieces_reach_a_quantised_weights_plain_numbers() -> None:
    config, place = plain(MOE), Place(Grid(), 0, 0)
    model = megatron_model(weights_of(config), config, place)
    router: Any = model.get_submodule("module.module.decoder.layers.0.mlp.router")
    values = router.weight.detach().clone()
    router.weight = nn.Parameter(Eighths(values * 8), requires_grad=False)

    pairs = publish_megatron(model, config, place.groups)

    (found,) = [tensor for shard, tensor in pairs if "layers.0.mlp.router" in shard.key]
    assert torch.equal(found, values)


class Eighths(torch.Tensor):
    """A tensor that holds eight times its value."""

    def dequantize(self) -> Tensor:
        return self.detach().as_subclass(torch.Tensor) / 8
