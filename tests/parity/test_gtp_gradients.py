"""Loss and every gradient of a GTP run are those of the unsharded run.

Ranks are threads whose collectives happen late: memory that is read too early or reused too soon is NaN or wrong.
Sums over ranks are taken in rank order here, so equality is to the last bit wherever TP is 1.
"""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from training_model import Outcome, Sizes, assembled, largest_error, plain_outcome, run_small
from training_ranks import on_threads, thread_groups

from gtp_serve.layout.gtp import Grid
from gtp_serve.training.gather import GatherChain
from gtp_serve.training.groups import rank_of
from gtp_serve.training.reduce import Accumulation, Reduction

MOE = Sizes(experts=3)
DENSE = Sizes()

#: (grid, sizes): alignment 1 and sizes that the ranks do not divide need a little padding, 16 leaves shards empty.
CUTS = [
    (Grid(), DENSE),
    (Grid(gtp=2, alignment=1), DENSE),
    (Grid(gtp=2, alignment=16), DENSE),
    (Grid(gtp=3, alignment=1), DENSE),
    (Grid(gtp=4, alignment=4), Sizes(tied=False)),
    (Grid(gtp=4, alignment=1), Sizes(hidden=16, ffn=16, vocab=32)),
    (Grid(gtp=8, alignment=16), DENSE),
    (Grid(gtp=8, alignment=1), DENSE),
    (Grid(gtp=2, egtp=2, alignment=1), MOE),
    (Grid(gtp=4, egtp=4, alignment=16), MOE),
    (Grid(gtp=4, egtp=2, alignment=4), MOE),
    (Grid(egtp=4, alignment=1), MOE),
    (Grid(gtp=8, egtp=8, alignment=4), MOE),
]


def run(grid: Grid, sizes: Sizes, *, world: int | None = None, **keywords: Any) -> list[Outcome]:
    """Every rank's outcome; each has data of its own unless ranks differ only in TP."""
    world = world or grid.tp * max(grid.gtp, grid.egtp)
    groups = thread_groups(grid, world)
    chain = keywords.pop("chain", {"accumulation": "float32"})
    return on_threads(
        world,
        lambda rank: run_small(
            groups[rank],
            rank // grid.tp,
            sizes=sizes,
            alignment=grid.alignment,
            chain=GatherChain(**chain),
            **keywords,
        ),
    )


def errors(outcomes: list[Outcome], wanted: list[Outcome], tp: int = 1) -> float:
    return max(largest_error(got, wanted[rank // tp]) for rank, got in enumerate(outcomes))


def same_groups(grid: Grid) -> bool:
    """Dense and expert weights are reduced over the same ranks."""
    return grid.gtp == grid.egtp or grid.egtp == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("grid", "sizes"), [cut for cut in CUTS if same_groups(cut[0]) and cut[1].experts == 0])
def test_dense_gradients_are_the_unsharded_runs_to_the_last_bit(grid: Grid, sizes: Sizes, dtype: torch.dtype) -> None:
    outcomes = run(grid, sizes, steps=2, dtype=dtype)

    wanted = plain_outcome(sizes, grid.gtp, steps=2, dtype=dtype, wide=grid.gtp > 1)
    assert errors(outcomes, wanted) == 0
    assert all(not whole.isnan().any() for whole in assembled(outcomes, sizes).values())


@pytest.mark.parametrize("grid", [cut[0] for cut in CUTS if cut[1].experts])
def test_expert_gradients_are_the_unsharded_runs_to_the_last_bit(grid: Grid) -> None:
    """Dense and expert weights may be cut over different groups: each is reduced over its own."""
    world = max(grid.gtp, grid.egtp)
    outcomes = run(grid, MOE, steps=2)

    for rank, got in enumerate(outcomes):
        for size, expert in ((grid.gtp, False), (grid.egtp, True)):
            first = rank // size * size
            wanted = outcome_of_data(range(first, first + size))
            mine = {name: pieces for name, pieces in got.grads.items() if is_expert(name) == expert}
            assert mine
            assert largest_error(Outcome(got.losses, mine), wanted[rank - first]) == 0
    assert all(not whole.isnan().any() for whole in assembled(first_of_each(outcomes, grid, world), MOE).values())


def is_expert(name: str) -> bool:
    return name.count(".") == 3


def first_of_each(outcomes: list[Outcome], grid: Grid, world: int) -> list[Outcome]:
    """Pieces of one dense group and one expert group: others have other data and other gradients."""
    dense = [Outcome([], {n: p for n, p in o.grads.items() if not is_expert(n)}) for o in outcomes[: grid.gtp]]
    return dense + [Outcome([], {n: p for n, p in o.grads.items() if is_expert(n)}) for o in outcomes[: grid.egtp]]


@cache
def outcome_of_data(ranks: range) -> list[Outcome]:
    return plain_outcome(MOE, len(ranks), steps=2, wide=len(ranks) > 1, first_data_rank=ranks.start)


@pytest.mark.parametrize("gtp", [1, 2, 4])
@pytest.mark.parametrize("sizes", [Sizes(tied=False), Sizes(tied=False, experts=3)])
def test_gtp_adds_nothing_to_what_tensor_parallelism_does(sizes: Sizes, gtp: int) -> None:
    """TP 2 sums partial products, so it differs from TP 1 by rounding; GTP beside it changes no bit."""
    egtp = gtp if sizes.experts else 1
    outcomes = run(Grid(tp=2, etp=2, gtp=gtp, egtp=egtp, alignment=4), sizes)

    alone = [run_on_data(sizes, data) for data in range(gtp)]
    both = assembled(outcomes, sizes)
    for name, whole in both.items():
        total = sum((pieces[name].float() for pieces in alone[1:]), alone[0][name].float())
        assert torch.equal(whole.float(), total / gtp), name
    wanted = plain_outcome(sizes, gtp, wide=gtp > 1)
    assert errors(outcomes, wanted, tp=2) < 1e-5


def run_on_data(sizes: Sizes, data_rank: int) -> dict[str, torch.Tensor]:
    """TP 2 without GTP."""
    groups = thread_groups(Grid(tp=2, etp=2), 2)
    outcomes = on_threads(2, lambda rank: run_small(groups[rank], data_rank, sizes=sizes, alignment=4))
    return assembled(outcomes, sizes)


@pytest.mark.parametrize("recompute", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("sizes", [DENSE, MOE], ids=["dense", "experts"])
def test_activation_checkpointing_changes_no_bit(sizes: Sizes, recompute: bool) -> None:
    grid = Grid(gtp=4, egtp=4 if sizes.experts else 1, alignment=4)

    outcomes = run(grid, sizes, steps=3, recompute=recompute)

    assert errors(outcomes, plain_outcome(sizes, 4, steps=3)) == 0


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("accumulation", ["native", "float32"])
@pytest.mark.parametrize("held", [None, torch.float32])
def test_micro_batches_add_up_in_main_grad_or_grad(
    reduction: Reduction, accumulation: Accumulation, held: torch.dtype | None
) -> None:
    outcomes = run(
        Grid(gtp=4, alignment=4),
        DENSE,
        steps=3,
        dtype=torch.bfloat16,
        main_grad=held,
        chain={"accumulation": accumulation, "reduction": reduction},
    )

    wanted = plain_outcome(
        DENSE,
        4,
        steps=3,
        dtype=torch.bfloat16,
        mean=reduction == "mean",
        wide=accumulation == "float32",
        held=held,
    )
    assert errors(outcomes, wanted) == 0


@pytest.mark.parametrize(("prefetch", "late"), list(product([True, False], repeat=2)))
def test_fetching_ahead_changes_no_bit(prefetch: bool, late: bool) -> None:
    groups = thread_groups(Grid(gtp=3, alignment=1), 3, late=late)
    chains = [GatherChain(accumulation="float32", prefetch=prefetch) for _ in range(3)]

    outcomes = on_threads(
        3, lambda rank: run_small(groups[rank], rank, sizes=DENSE, alignment=1, steps=3, chain=chains[rank])
    )

    assert errors(outcomes, plain_outcome(DENSE, 3, steps=3)) == 0
    assert all((chain.fetched_ahead > 0) == prefetch for chain in chains)


def test_finishing_after_each_micro_batch_gives_the_same_mean_and_the_same_sum() -> None:
    """What is reduced already is not reduced again, also for biases, whose gradients autograd adds to ``grad``."""
    for reduction in ("mean", "sum"):
        outcomes = run(
            Grid(gtp=2, alignment=1),
            DENSE,
            steps=3,
            chain={"accumulation": "float32", "reduction": reduction},
            between=lambda model: model.placement.chain.finish_gradients(),
        )

        assert errors(outcomes, plain_outcome(DENSE, 2, steps=3, mean=reduction == "mean")) < 1e-6


def test_group_of_one_rank_is_byte_identical_to_no_group_and_gathers_nothing() -> None:
    single = thread_groups(Grid(), 1)[0]
    chain = GatherChain()

    (outcome,) = (run_small(single, 0, sizes=MOE, alignment=16, steps=2, dtype=torch.bfloat16, chain=chain),)

    assert largest_error(outcome, plain_outcome(MOE, 1, steps=2, dtype=torch.bfloat16, wide=False)[0]) == 0
    assert (chain.pool.lent, chain.fetched_on_demand, rank_of(single.gtp_remat)) == (0, 0, 0)
