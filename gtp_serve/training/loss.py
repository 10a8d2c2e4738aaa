"""From logits that are cut along the vocabulary to log-probabilities of tokens and to losses.

Legend: S rows, V vocabulary rows of this TP rank, W those of all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gtp_serve.config import ModelConfig
from gtp_serve.ops.logprobs import Normalise, logprobs_of
from gtp_serve.training.groups import AxisGroup, rank_of, size_of
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.token_ids import check_ids
from gtp_serve.training.wire import wire_of


def target_logprobs(logits_SV: Tensor, targets_S: Tensor, config: ModelConfig, placement: TrainPlacement) -> Tensor:
    """Natural-log probability of each row's target, [S] float32, the same on all TP ranks.

    Ids from ``config.vocab_size`` on are padding and have no part in it.  Where sums are taken in rank order the whole
    rows are gathered, for the bits of the server's; otherwise no rank sees more than its own columns.

    :raises UsageError: for a target that does not exist.
    """
    check_ids(targets_S, config.vocab_size, "targets_S")
    tp, normalise = placement.tp(), placement.ops.normalise
    if size_of(tp) == 1 and normalise is None:
        return logprobs_of(logits_SV, targets_S, config.vocab_size, None)
    whole_rows = size_of(tp) == 1 or placement.sums_in_rank_order
    logprobs: Tensor = _ParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        logits_SV, targets_S, tp, config, whole_rows, normalise
    )
    return logprobs


class _ParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_SV: Tensor,
        targets_S: Tensor,
        tp: AxisGroup,
        config: ModelConfig,
        whole_rows: bool,
        normalise: Normalise | None,
    ) -> Tensor:
        held = logits_SV.shape[1]
        first = rank_of(tp) * held
        real = max(0, min(held, config.vocab_size - first))
        mine_SV = logits_SV.float()
        mine_S = (targets_S >= first) & (targets_S < first + real)
        local_S = (targets_S - first).masked_fill(~mine_S, 0)
        if whole_rows:
            rows_SW = mine_SV if size_of(tp) == 1 else gather_columns(mine_SV, tp)
            logprobs_S = logprobs_of(rows_SW, targets_S, config.vocab_size, normalise)
            total_S = rows_SW[:, : config.vocab_size].logsumexp(-1)
        else:
            # A rank whose columns are all padding has nothing to add: the logarithm of zero.
            own_S = mine_SV[:, :real].logsumexp(-1) if real else mine_SV.new_full(mine_S.shape, -torch.inf)
            total_S = gather_columns(own_S[:, None], tp).logsumexp(-1)
            chosen_S = mine_SV.gather(1, local_S[:, None])[:, 0].masked_fill(~mine_S, 0)
            wire_of(tp).all_reduce(chosen_S).wait()
            logprobs_S = chosen_S - total_S
        ctx.save_for_backward(logits_SV, total_S, local_S, mine_S)
        ctx.real = real
        return logprobs_S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprobs_S: Tensor) -> tuple[Any, ...]:
        logits_SV, total_S, local_S, mine_S = ctx.saved_tensors
        dlogits_SV = (logits_SV.float() - total_S[:, None]).exp().mul_(-dlogprobs_S[:, None])
        dlogits_SV[:, ctx.real :] = 0
        dlogits_SV.scatter_add_(1, local_S[:, None], (dlogprobs_S * mine_S)[:, None])
        return dlogits_SV.to(logits_SV.dtype), None, None, None, None, None


def gather_columns(x_SV: Tensor, group: AxisGroup) -> Tensor:
    """All ranks' columns side by side in rank order, [S, W]; without gradients."""
    out = x_SV.new_empty((size_of(group), *x_SV.shape))
    wire_of(group).all_gather(out.view(-1), x_SV.contiguous().view(-1)).wait()
    return out.transpose(0, 1).flatten(1)


def cross_entropy(logprobs_S: Tensor) -> Tensor:
    """Mean negative log-probability of the targets."""
    return -logprobs_S.mean()


def group_advantages(rewards_GN: Tensor, *, scale: bool = True) -> Tensor:
    """How much better each of a group's N samples is than their mean, [G, N].

    :param scale: in units of the group's standard deviation; a group of equals has no advantages.
    """
    centred_GN = rewards_GN - rewards_GN.mean(-1, keepdim=True)
    return centred_GN / (rewards_GN.std(-1, keepdim=True, correction=0) + 1e-6) if scale else centred_GN


def policy_loss(
    logprobs_S: Tensor, sampled_S: Tensor, advantages_S: Tensor, *, clip: float = 0.2, divisor: float | None = None
) -> Tensor:
    """The clipped policy gradient loss over tokens.

    :param sampled_S: log-probabilities that the tokens were sampled with.
    :param advantages_S: of each token.
    :param clip: how far the probability's ratio may move from 1 before it is held.
    :param divisor: of the sum over tokens; their number when None.
    """
    ratios_S = (logprobs_S - sampled_S).exp()
    held_S = ratios_S.clamp(1 - clip, 1 + clip)
    total = -torch.minimum(ratios_S * advantages_S, held_S * advantages_S).sum()
    return total / (logprobs_S.shape[0] if divisor is None else divisor)
