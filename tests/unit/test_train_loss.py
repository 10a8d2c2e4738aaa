"""Log-probabilities from logits that are cut along the vocabulary, and the losses made of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from train_twin import DENSE
from training_ranks import on_threads, thread_groups

from gtp_serve.layout.gtp import Grid
from gtp_serve.training.loss import cross_entropy, group_advantages, policy_loss, target_logprobs
from gtp_serve.training.placement import TrainPlacement

ROWS = 6


def whole_logits(vocab_rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return 5 * torch.randn(ROWS, vocab_rows, generator=generator)


@pytest.mark.parametrize("in_rank_order", [False, True])
@pytest.mark.parametrize(
    ("tp", "vocab_size", "rows"),
    [(1, 21, 23), (2, 21, 24), (4, 21, 24), (4, 3, 16)],
    ids=["solo", "two", "padding in the last", "ranks that hold padding only"],
)
def test_cut_logits_give_the_log_probabilities_and_gradients_of_whole_ones(
    tp: int, vocab_size: int, rows: int, in_rank_order: bool
) -> None:
    config = replace(DENSE, vocab_size=vocab_size, vocab_rows=rows)
    targets = torch.randint(0, vocab_size, (ROWS,), generator=torch.Generator().manual_seed(4))
    weights = torch.linspace(-1, 1, ROWS)
    whole = whole_logits(rows).requires_grad_()
    wanted = whole[:, :vocab_size].log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.autograd.backward((wanted * weights).sum())
    assert whole.grad is not None
    groups = thread_groups(Grid(tp=tp), tp)

    def act(rank: int) -> tuple[Tensor, Tensor]:
        placement = TrainPlacement(dtype=torch.float32, groups=groups[rank], sums_in_rank_order=in_rank_order)
        mine = whole.detach().chunk(tp, -1)[rank].clone().requires_grad_()
        found = target_logprobs(mine, targets, config, placement)
        torch.autograd.backward((found * weights).sum())
        assert mine.grad is not None
        return found.detach(), mine.grad

    got = on_threads(tp, act)

    for found, _ in got:
        if in_rank_order:
            assert torch.equal(found, wanted)
        torch.testing.assert_close(found, wanted.detach())
    torch.testing.assert_close(torch.cat([grad for _, grad in got], -1), whole.grad, rtol=1e-5, atol=1e-6)


def test_cross_entropy_is_the_mean() -> None:
    assert cross_entropy(torch.tensor([-1.0, -3.0])).item() == 2.0


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 3.0, 3.0, 3.0]])

    torch.testing.assert_close(
        group_advantages(rewards), torch.tensor([[1.0, -1.0, -1.0, 1.0], [0.0] * 4]), atol=1e-5, rtol=0
    )
    assert group_advantages(2 * rewards, scale=False).tolist() == [[1.0, -1.0, -1.0, 1.0], [0.0] * 4]


def test_the_policy_gradient_at_the_sampled_probabilities_is_that_of_the_log_probabilities() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])

    torch.autograd.backward(policy_loss(logprobs, logprobs.detach(), advantages, divisor=6))

    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -advantages / 6)


@pytest.mark.parametrize(("moved", "advantage", "counts"), [(0.5, 1, False), (-0.5, 1, True), (0.5, -1, True)])
def test_a_ratio_that_has_moved_far_in_the_wanted_direction_is_held(
    moved: float, advantage: float, counts: bool
) -> None:
    sampled = torch.tensor([-1.0])
    logprobs = (sampled + moved).requires_grad_()

    torch.autograd.backward(policy_loss(logprobs, sampled, torch.tensor([advantage])))

    assert logprobs.grad is not None
    assert bool(logprobs.grad.abs() > 0) == counts
