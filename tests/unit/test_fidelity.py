"""token_mult_prob_error, its parts, and the cold load that a refit is held against."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from train_twin import DENSE, MOE, weights_of
from training_ranks import on_threads, thread_groups

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.training.decoder import build_train_decoder
from gtp_serve.training.fidelity import (
    TensorSource,
    cold_decoder,
    gather_weights,
    prob_error,
    sequence_logprobs,
    split_error,
    token_mult_prob_error,
)
from gtp_serve.training.publish import publish


def test_the_error_is_the_mean_factor_between_probabilities_and_its_sign_does_not_matter() -> None:
    server, trainer = torch.tensor([0.5, 0.5, 0.25]).log(), torch.tensor([0.25, 0.5, 0.5]).log()

    error = prob_error(server, trainer)

    assert error.mean == pytest.approx((2 + 1 + 2) / 3)
    assert error.largest == pytest.approx(math.log(2))
    assert (error.tokens, error.equal) == (3, 1)
    assert token_mult_prob_error(trainer, server) == error.mean


def test_one_bit_of_difference_is_no_equality() -> None:
    one = torch.tensor([-1.5])

    assert prob_error(one, one.nextafter(torch.tensor([0.0]))).equal == 0
    assert prob_error(one, one.clone()).equal == 1


@pytest.mark.parametrize(
    ("server", "trainer", "words"),
    [
        ([], [], "0 log-probabilities of the server and 0"),
        ([-1.0], [-1.0, -2.0], "1 log-probabilities of the server and 2"),
        ([math.nan], [-1.0], "no numbers"),
        ([-math.inf], [-1.0], "no numbers"),
    ],
)
def test_what_cannot_be_compared_is_refused(server: list[float], trainer: list[float], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        prob_error(torch.tensor(server), torch.tensor(trainer))


def test_each_part_of_a_split_compares_its_own_pair() -> None:
    def at(value: float) -> Tensor:
        return torch.tensor([value])

    split = split_error(sampled=at(-1.0), served=at(-1.5), cold=at(-1.5), same_numbers=at(-1.25), trained=at(-2.0))

    assert split.total.largest == 1.0
    assert split.refit.largest == 0.0
    assert split.kernel.largest == 0.25
    assert split.precision.largest == 0.75
    assert str(split) == "2.718282 (refit 1.000000, kernel 1.284025, precision 2.117000)"


GRIDS = [
    pytest.param(DENSE, Grid(gtp=2, alignment=16), id="gtp 2"),
    pytest.param(DENSE, Grid(tp=2, gtp=2), id="tp 2 gtp 2"),
    pytest.param(MOE, Grid(gtp=4, ep=2, egtp=2, alignment=4), id="ep 2 egtp 2"),
]


class ThreadMesh:
    """All ranks as threads, for whole messages."""

    def __init__(self, rank: int, size: int, group: Any) -> None:
        self.rank, self.size, self._group = rank, size, group

    def all_bytes(self, mine: bytes) -> list[bytes]:
        told = self._group.meeting.exchange(self.rank, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [one.numpy().tobytes() for one in told]

    def exchange(self, send: Any, receive: Any) -> None:
        raise AssertionError("not asked for")

    def total(self, x: Tensor) -> Tensor:
        raise AssertionError("not asked for")


@pytest.mark.parametrize(("config", "grid"), GRIDS)
def test_all_ranks_together_gather_the_whole_model(config: ModelConfig, grid: Grid) -> None:
    world = grid.tp * grid.gtp
    groups, everyone = thread_groups(grid, world), thread_groups(Grid(gtp=world), world)
    weights, shapes = weights_of(config), logical_tensors(config)

    def act(rank: int) -> bool:
        model = build_train_decoder(config, dtype=torch.float32, groups=groups[rank], alignment=grid.alignment)
        model.load_weights(TensorSource(weights))
        found = gather_weights(model, shapes, ThreadMesh(rank, world, everyone[rank].gtp_remat))
        return found.keys() == weights.keys() and all(torch.equal(found[name], x) for name, x in weights.items())

    assert on_threads(world, act) == [True] * world


def test_a_model_that_is_not_whole_is_not_taken_for_it() -> None:
    model = build_train_decoder(DENSE, dtype=torch.float32)
    missing = [pair for pair in publish(model) if "layers.1.mlp.down_proj" not in pair[0].key]

    with pytest.raises(LayoutMismatch, match=r"no rank has all of model\.layers\.1\.mlp\.down_proj\.weight"):
        gather_weights(missing, logical_tensors(DENSE))


def test_a_sequence_is_scored_alone_and_its_length_decides_how_many_there_are() -> None:
    decoder = cold_decoder(DENSE, weights_of(DENSE), dtype=torch.float32, deterministic=True)
    ids = torch.randint(0, DENSE.vocab_size, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    short = ids[:66]

    (whole,), (part,) = sequence_logprobs(decoder, [ids]), sequence_logprobs(decoder, [short])

    assert whole.shape == (69,)
    assert torch.equal(whole[:65], part)
