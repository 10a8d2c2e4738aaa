"""Layers over shards: full-length vectors, tied heads, experts, copies, and calls that are refused."""

from __future__ import annotations

import copy
from typing import Literal

import pytest
import torch
from torch import nn
from training_model import linear_of
from training_ranks import on_threads, thread_groups

from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.training.embedding import VocabParallelEmbedding, VocabParallelHead
from gtp_serve.training.experts import GroupedExpertLinear
from gtp_serve.training.gather import GatherChain
from gtp_serve.training.groups import ParallelGroups
from gtp_serve.training.layer import ShardedLayer, targets_of
from gtp_serve.training.linear import NormColumnLinear, RowParallelLinear
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.replicated import restore_full_length


def placement(groups: ParallelGroups | None = None, alignment: int = 16) -> TrainPlacement:
    return TrainPlacement(dtype=torch.float32, groups=groups or ParallelGroups(), alignment=alignment)


def hundreds(layer: nn.Module) -> None:
    """All biases 100; weights are zero."""
    for name, parameter in layer.named_parameters():
        if name.startswith("bias"):
            nn.init.constant_(parameter, 100.0)


@pytest.mark.parametrize("gtp", [2, 4])
@pytest.mark.parametrize("kind", ["column", "norm", "row", "experts"])
def test_bias_filled_with_100_reaches_every_output(kind: str, gtp: int) -> None:
    grid = Grid(gtp=gtp, egtp=gtp)
    groups = thread_groups(grid, gtp)

    def act(rank: int) -> torch.Tensor:
        if kind == "column":
            layer: nn.Module = linear_of(groups[rank], 40, 16)
        elif kind == "norm":
            layer = NormColumnLinear("n", "norm", 8, 40, placement(groups[rank]), eps=1e-5, bias=True)
        elif kind == "row":
            layer = RowParallelLinear("r", 8, 40, placement(groups[rank]), bias=True)
        else:
            layer = GroupedExpertLinear("e.{e}", 3, 8, 40, placement(groups[rank]), cut="column", bias=True)
        hundreds(layer)
        x = torch.randn(6, 8)
        y: torch.Tensor = layer(x, [1, 2, 3]) if kind == "experts" else layer(x)
        return y

    for y in on_threads(gtp, act):
        assert tuple(y.shape) == (6, 40)
        assert (y == 100).all()


def test_row_parallel_bias_is_added_once_and_every_tp_rank_gets_its_gradient() -> None:
    groups = thread_groups(Grid(tp=2), 2)

    def act(rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = RowParallelLinear("r", 8, 5, placement(groups[rank]), bias=True)
        hundreds(layer)
        y = layer(torch.ones(3, 4))
        torch.autograd.backward(y.sum())
        assert layer.bias is not None
        return y, layer.bias.grad

    for y, grad in on_threads(2, act):
        assert (y == 100).all()
        assert grad is not None
        assert (grad == 3).all()


class Presharded(nn.Module):
    """A layer built with a shard's ``out_features``, as TransformerEngine's are."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(4)))


def test_vectors_of_a_layer_built_as_a_shard_get_full_length_in_place() -> None:
    layer = Presharded("bias", "bias0", "bias1", "layer_norm_weight")
    before = dict(layer.named_parameters())
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    restore_full_length(layer, 10, ["bias", "bias0", "bias1", "bias2"])
    restore_full_length(layer, 10, ["layer_norm_weight"], fill=1.0)

    for name, parameter in layer.named_parameters():
        assert parameter is before[name]
        assert tuple(parameter.shape) == (10,)
    assert layer.get_parameter("layer_norm_weight").eq(1).all()
    torch.autograd.backward(layer.get_parameter("bias").sum())
    optimizer.step()
    assert layer.get_parameter("bias").eq(-1).all()


def test_packed_bias_of_a_grouped_layer_is_refused() -> None:
    layer = nn.Module()
    layer.bias = nn.Parameter(torch.zeros(4, 10))
    with pytest.raises(UsageError, match="bias of Module is packed"):
        restore_full_length(layer, 40, ["bias"])


@pytest.mark.parametrize("gtp", [1, 2, 4])
def test_head_takes_the_embeddings_shard_and_refuses_a_wrong_weight(gtp: int) -> None:
    """21 rows over the ranks: no rank's own shape is the head's, and the logical shape is."""
    groups = thread_groups(Grid(gtp=gtp), gtp)[gtp - 1]
    where = placement(groups)
    embedding = VocabParallelEmbedding("e", 21, 6, where)

    head = VocabParallelHead("e", 21, 6, where, tied=embedding.weight)
    assert head.weight is embedding.weight
    assert len(targets_of(nn.ModuleList([embedding, head]))) == 1
    for rows, hidden in ((20, 6), (21, 5), (42, 6)):
        wrong = VocabParallelEmbedding("e", rows, hidden, where).weight
        with pytest.raises(UsageError, match=rf"weight of \[{rows}, {hidden}\]; needed: \[21, 6\]"):
            VocabParallelHead("e", 21, 6, where, tied=wrong)
        with pytest.raises(UsageError, match="needed"):
            head(torch.zeros(1, 6), wrong)
    with pytest.raises(UsageError, match="needed"):
        head(torch.zeros(1, 6), embedding.weight.local[:5])


def test_head_multiplies_with_the_shard_or_the_whole_weight_that_it_is_handed() -> None:
    groups = thread_groups(Grid(gtp=2), 2)
    whole = torch.randn(21, 6)

    def act(rank: int) -> list[torch.Tensor]:
        embedding = VocabParallelEmbedding("e", 21, 6, placement(groups[rank]))
        first, count = embedding.weight.row_range
        embedding.weight.local[:count] = whole[first : first + count]
        head = VocabParallelHead("h", 21, 6, placement(groups[rank]))
        x = torch.ones(2, 6)
        return [head(x, embedding.weight), head(x, whole)]

    for by_shard, by_whole in on_threads(2, act):
        assert torch.equal(by_shard, by_whole)
        assert torch.equal(by_shard, torch.ones(2, 6) @ whole.t())


def test_vocabulary_that_tp_does_not_divide_is_padded_on_the_last_ranks() -> None:
    embeddings = [VocabParallelEmbedding("e", 9, 4, placement(g)) for g in thread_groups(Grid(tp=4, gtp=2), 8)]

    assert {tuple(e.weight.logical_shape) for e in embeddings} == {(3, 4)}
    rows = {(span.logical.start[0], span.logical.stop[0]) for e in embeddings for span in e.weight.shard().spans}
    assert rows == {(0, 3), (3, 6), (6, 9)}  # the fourth rank has none


@pytest.mark.parametrize("cut", ["column", "row"])
def test_experts_without_tokens_take_part(cut: Literal["column", "row"]) -> None:
    """One rank has no token at all, the other none for one expert: nobody waits for ever."""
    groups = thread_groups(Grid(egtp=2), 2)

    def act(rank: int) -> list[torch.Tensor | None]:
        layer = GroupedExpertLinear("e.{e}", 2, 4, 6, placement(groups[rank], 1), cut=cut, bias=True)
        counts = [3, 0] if rank else [0, 0]
        y = layer(torch.ones(sum(counts), 4, requires_grad=True), counts)
        y.sum().backward()
        layer.placement.chain.finish_gradients()
        assert tuple(y.shape) == (sum(counts), 6)
        return [w.grad for w in layer.weights] + [b.grad for b in layer.biases]

    for first, second, first_bias, second_bias in on_threads(2, act):
        assert first is not None
        assert (first == 1.5).all()
        assert second is not None
        assert not second.any()
        assert first_bias is not None
        assert (first_bias == 1.5).all()
        assert second_bias is not None
        assert not second_bias.any()


def test_expert_parallel_ranks_have_their_own_experts_and_a_mean_divides_by_them_too() -> None:
    layers = [
        GroupedExpertLinear("e.{e}", 4, 8, 6, placement(g), cut="row")
        for g in thread_groups(Grid(ep=2, egtp=2, etp=1, gtp=2, tp=2), 4)
    ]

    assert [layer.weights[0].shard().key for layer in layers] == ["e.0.weight", "e.2.weight"] * 2
    assert layers[0].weights[0].state.mean_divisor == 4
    assert [w.expert_idx for w in layers[1].weights] == [0, 1]
    assert layers[0].weights[0].is_routed_expert


def test_counts_that_do_not_fit_are_refused() -> None:
    layer = GroupedExpertLinear("e.{e}", 2, 4, 6, placement(), cut="column")
    for counts in ([1, 1], [3], [1, 1, 1]):
        with pytest.raises(UsageError, match="blocks"):
            layer(torch.zeros(3, 4), counts)


def test_sizes_that_the_ranks_do_not_divide_are_refused() -> None:
    tp = placement(thread_groups(Grid(tp=2), 2)[0])
    with pytest.raises(UsageError, match="5 rows of linear"):
        linear_of(thread_groups(Grid(tp=2), 2)[0], 5, 1)
    with pytest.raises(UsageError, match="5 columns of r"):
        RowParallelLinear("r", 5, 4, tp)
    with pytest.raises(UsageError, match="3 experts"):
        GroupedExpertLinear("e.{e}", 3, 4, 4, placement(thread_groups(Grid(ep=2), 2)[0]), cut="row")


def test_copy_of_a_layer_reduces_its_own_gradients() -> None:
    groups = thread_groups(Grid(gtp=2), 2)

    def act(rank: int) -> list[torch.Tensor | None]:
        layer = linear_of(groups[rank], 6, 1)
        twin = copy.deepcopy(layer)
        assert twin.placement is layer.placement
        torch.autograd.backward((rank + 1) * twin(torch.ones(1, 8)).sum())
        twin.placement.chain.finish_gradients()
        assert layer.weight.grad is None
        assert twin.bias is not None
        return [twin.weight.grad, twin.bias.grad]

    for weight, bias in on_threads(2, act):
        assert weight is not None
        assert (weight == 1.5).all()
        assert bias is not None
        assert (bias == 1.5).all()


def test_asking_autograd_for_a_replicated_gradient_loses_none_that_is_there() -> None:
    groups = thread_groups(Grid(gtp=2), 2)

    def act(rank: int) -> torch.Tensor | None:
        where = placement(groups[rank])
        vector = where.vector(3)
        torch.autograd.backward(vector.sum())
        where.chain.finish_gradients()
        (asked,) = torch.autograd.grad((vector * 5).sum(), [vector])
        assert (asked == 5).all()
        where.chain.finish_gradients()
        return vector.grad

    for grad in on_threads(2, act):
        assert grad is not None
        assert (grad == 1).all()


def test_replicated_gradients_are_the_mean_or_the_sum_of_all_ranks() -> None:
    groups = thread_groups(Grid(gtp=4), 4)
    for reduction, wanted in (("mean", 2.5), ("sum", 10.0)):

        def act(rank: int, reduction: Literal["mean", "sum"] = reduction) -> torch.Tensor | None:  # type: ignore[assignment]
            chain = GatherChain(reduction=reduction)
            layer = ShardedLayer(TrainPlacement(dtype=torch.float32, groups=groups[rank], chain=chain))
            router = nn.Parameter(torch.zeros(3, 2))
            layer.placement.replicate(router)
            layer.placement.replicate(router)
            torch.autograd.backward((router * (rank + 1)).sum())
            assert router.grad is None
            chain.finish_gradients()
            chain.finish_gradients()
            return router.grad

        for grad in on_threads(4, act):
            assert grad is not None
            assert (grad == wanted).all()
