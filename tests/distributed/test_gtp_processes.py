"""GTP over real process groups: four processes joined by gloo."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from training_model import Sizes
from training_ranks import ProcessRanks, gloo_processes

from gtp_serve.layout.gtp import Grid

pytestmark = pytest.mark.distributed

CASES = "training_cases"
DENSE, MOE = Sizes(), Sizes(experts=3)


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    with gloo_processes(4) as running:
        yield running


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("grid", "sizes"),
    [
        (Grid(gtp=4, alignment=1), DENSE),
        (Grid(gtp=4, alignment=16), Sizes(tied=False)),
        (Grid(gtp=2, alignment=4), DENSE),  # and two data-parallel replicas
        (Grid(gtp=4, egtp=4, alignment=4), MOE),
        (Grid(gtp=2, egtp=2, alignment=16), MOE),
    ],
)
def test_sums_in_rank_order_give_the_unsharded_runs_bits(
    ranks: ProcessRanks, grid: Grid, sizes: Sizes, dtype: str
) -> None:
    found = ranks.run(CASES, "small", grid, sizes=sizes, alignment=grid.alignment, dtype=dtype, accumulation="float32")

    assert found == [0, 0, 0, 0]


@pytest.mark.parametrize(("gtp", "bound"), [(2, 0.0), (4, 1e-6)])
def test_gloos_own_order_of_sums_differs_by_rounding_at_most(ranks: ProcessRanks, gtp: int, bound: float) -> None:
    """Two summands have one order only."""
    found = ranks.run(CASES, "small", Grid(gtp=gtp), sizes=DENSE, alignment=1, dtype="float32", accumulation="native")

    assert max(found) <= bound


@pytest.mark.parametrize("recompute", [None, True, False], ids=["kept", "reentrant", "non-reentrant"])
def test_tensor_parallelism_beside_gtp_differs_by_rounding_at_most(ranks: ProcessRanks, recompute: bool | None) -> None:
    grid = Grid(tp=2, etp=2, gtp=2, egtp=2, alignment=4)

    found = ranks.run(
        CASES,
        "small",
        grid,
        sizes=MOE,
        alignment=4,
        dtype="float32",
        accumulation="native",
        recompute=recompute,
    )

    assert 0 < max(found) < 1e-5


def test_three_ranks_share_weights_that_three_does_not_divide(ranks: ProcessRanks) -> None:
    assert ranks.run(CASES, "small_on_three", Grid(), sizes=DENSE, alignment=1) == [0, 0, 0, 0]


@pytest.mark.parametrize("gtp", [2, 4])
def test_bias_filled_with_100_reaches_every_output(ranks: ProcessRanks, gtp: int) -> None:
    found = ranks.run(CASES, "bias_of_100", Grid(gtp=gtp), out=48)

    assert found == [([48], 100.0, 100.0)] * 4


def test_inference_model_beside_a_trainer_has_whole_weights(ranks: ProcessRanks) -> None:
    found: list[dict[str, Any]] = ranks.run(CASES, "inference_beside", Grid(gtp=4))

    for one in found:
        assert one == {"trainer": [8, 8], "served": [32, 8], "unsaid": [8, 8], "rows": 32, "axes": [None, None]}


def test_making_a_weight_takes_a_quarter_of_its_memory_on_each_of_four_ranks(ranks: ProcessRanks) -> None:
    """128 MiB over four ranks: 32 MiB each, and nothing near the whole at any moment."""
    found = ranks.run(CASES, "growth", Grid(gtp=4), mebibytes=128)

    assert all(mebibytes < 48 for mebibytes in found), found
