"""TransformerEngine's own layers over shards are the whole layers, in every bit; without a GPU through ``te_cpu``.

Everything runs in processes of its own: TransformerEngine stays imported, patched, in whichever process loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import te_cpu
from te_cases import KINDS, Case
from training_ranks import ProcessRanks, gloo_processes

from gtp_serve.layout.gtp import Grid

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not te_cpu.is_installed(), reason="transformer-engine is not installed"),
]

CASES = "te_cases"


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    with gloo_processes(2) as running:
        yield running


def on_virtual_ranks(ranks: ProcessRanks, what: str, count: int = 2, **keywords: Any) -> list[Any]:
    """Each virtual rank's answer; their collectives happen late, and memory is NaN until they have happened."""
    found: list[Any] = ranks.run(CASES, "virtual", Grid(), what=what, ranks=count, **keywords)[0]
    assert len(found) == count
    return found


def test_the_shims_arithmetic_is_torchs(ranks: ProcessRanks) -> None:
    found = ranks.run(CASES, "beside_torch", Grid())

    assert set(found[0]) == set(KINDS)
    assert max(found[0].values()) < 2e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_compute_and_learn_what_the_whole_layer_does(ranks: ProcessRanks, kind: str, dtype: str) -> None:
    found = ranks.run(CASES, "parity", Grid(gtp=2, egtp=2), case=Case(kind=kind, dtype=dtype))

    assert found == [[], []]


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("alignment", [1, 16], ids=["even", "padded"])
@pytest.mark.parametrize("kind", KINDS)
def test_four_virtual_ranks_compute_and_learn_what_the_whole_layer_does(
    ranks: ProcessRanks, kind: str, alignment: int, fused: bool
) -> None:
    """At alignment 16 the third and fourth shard are padding only."""
    case = Case(kind=kind, alignment=alignment, fused=fused, out=18)

    assert on_virtual_ranks(ranks, "parity", 4, case=case) == [[]] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_weight_gradients_of_bfloat16_layers_are_added_up_in_float32(ranks: ProcessRanks, kind: str) -> None:
    assert on_virtual_ranks(ranks, "parity", case=Case(kind=kind, dtype="bfloat16", fused=True)) == [[], []]


@pytest.mark.parametrize("way", ["reentrant", "non-reentrant", "saved elsewhere"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_and_saved_tensor_hooks_find_the_shard_again(ranks: ProcessRanks, kind: str, way: str) -> None:
    assert on_virtual_ranks(ranks, "parity", case=Case(kind=kind, way=way)) == [[], []]


@pytest.mark.parametrize("fused", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_alone_is_the_whole_layer(ranks: ProcessRanks, kind: str, fused: bool) -> None:
    assert on_virtual_ranks(ranks, "parity", 1, case=Case(kind=kind, fused=fused)) == [[]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "grouped"])
def test_transformer_engine_sums_over_tensor_parallel_ranks(ranks: ProcessRanks, kind: str) -> None:
    for differences in ranks.run(CASES, "tensor_parallel", Grid(tp=2), kind=kind):
        assert max(differences) < 1e-5


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_bias_filled_with_100_reaches_every_output(ranks: ProcessRanks, kind: str, count: int) -> None:
    assert on_virtual_ranks(ranks, "hundred", count, kind=kind) == [[100.0, 100.0]] * count


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weight_lets_gradients_through_and_gets_none(ranks: ProcessRanks, kind: str) -> None:
    for one in on_virtual_ranks(ranks, "frozen", kind=kind):
        assert one == {"dx": True, "same have gradients": True, "weights": [], "sent": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_without_gradients_outputs_follow_weights_that_change(ranks: ProcessRanks, kind: str) -> None:
    assert on_virtual_ranks(ranks, "without_gradients", kind=kind) == [[True, True]] * 2


def test_adamw_trains_them_as_it_trains_this_packages_own_layers(ranks: ProcessRanks) -> None:
    for difference, change in ranks.run(CASES, "trained", Grid(gtp=2)):
        assert difference < 1e-4
        assert change > 0.02


def test_weights_are_fetched_one_layer_ahead_in_both_directions(ranks: ProcessRanks) -> None:
    """Only the first weight of each pass is not there when it is asked for."""
    order = ["0.weight", "1.weight", "2.weight", "0.3.weight"]

    for one in on_virtual_ranks(ranks, "prefetch"):
        assert one == {
            "train": order,
            "backward": order[::-1],
            "ahead in the second": 6,
            "on demand in the second": 2,
            "lent": 0,
        }


def test_gradient_that_is_still_being_reduced_cannot_be_read(ranks: ProcessRanks) -> None:
    for said in on_virtual_ranks(ranks, "stale"):
        assert "a.weight is still being reduced" in said
        assert "finish_gradients()" in said


def test_megatrons_flag_is_raised_where_a_parameter_has_it(ranks: ProcessRanks) -> None:
    assert on_virtual_ranks(ranks, "flagged") == [{"flag": True, "arrived": True}] * 2


def test_attached_weight_brings_memory_values_and_attributes_along(ranks: ProcessRanks) -> None:
    for place, one in enumerate(on_virtual_ranks(ranks, "attributes")):
        assert one == {
            "same module": True,
            "memory": True,
            "real rows": True,
            "padding": False,
            "mine": ["kept"],
            "cut": (False, 0, 1),
            "exact": True,
            "cleared": True,
            "meta": True,
            "bias": (True, [20], True),
            "out_features": 20,
            "names": True,
            "state": {"weight": [16, 12], "bias": [20], "_extra_state": [0]},
            "spans": [(16, "a.weight", [16, 4][place]), (20, "a.bias", 20)],
        }


def test_copy_of_a_grouped_layer_gathers_all_its_experts(ranks: ProcessRanks) -> None:
    assert on_virtual_ranks(ranks, "copied") == [True, True]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("mlp", "LayerNormMLP cannot be sharded"),
        ("split", "splits its weight into q_weight, k_weight; needed: no parameters_split"),
        ("delayed", "needed: delay_wgrad_compute=False"),
        ("packed", "packs all experts into one parameter"),
        ("grouped tensor", "with use_grouped_tensor=True cannot be sharded"),
        ("zero-centred", "with zero_centered_gamma=True cannot be sharded"),
        ("quantised", "weight of Linear is a Float8Tensor"),
        ("whole", "a.weight has [20, 12]; needed: [10, 12], the shard's shape"),
        ("vectors", "has 1 weight(s) and bias, layer_norm_bias, layer_norm_weight"),
        ("first", "attached"),
        ("second", "this GTPLinear has been attached before"),
        ("reset", "reset_parameters of GTPLinear would take its shards away"),
    ],
)
def test_what_cannot_be_sharded_is_refused_by_name(ranks: ProcessRanks, what: str, said: str) -> None:
    for one in on_virtual_ranks(ranks, "refusals"):
        assert said in one[what]
