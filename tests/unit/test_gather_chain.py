"""The gather chain: what is fetched ahead, when it is dropped, and what arrives when."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_ranks import ThreadGroup, on_threads, thread_groups

from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.training.gather import GatherChain, Use, UseOrder
from gtp_serve.training.groups import ParallelGroups
from gtp_serve.training.linear import ColumnParallelLinear, RowParallelLinear
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.reduce import GradientReducer
from gtp_serve.training.shards import GTPShard

WIDTH = 6
T = TypeVar("T")


class Stack(nn.Module):
    """Square linears in a row; rank r's weights are known, so the whole ones are."""

    def __init__(self, groups: ParallelGroups, depth: int = 3) -> None:
        super().__init__()
        self.placement = TrainPlacement(dtype=torch.float32, groups=groups, alignment=1, chain=GatherChain())
        self.layers = nn.ModuleList([ColumnParallelLinear(str(n), WIDTH, WIDTH, self.placement) for n in range(depth)])
        for n, layer in enumerate(self.linears):
            fill(layer.weight, n + 1.0)

    @property
    def linears(self) -> list[ColumnParallelLinear]:
        return [layer for layer in self.layers if isinstance(layer, ColumnParallelLinear)]

    @property
    def chain(self) -> GatherChain:
        return self.placement.chain

    def forward(self, x: Tensor, order: tuple[int, ...] | None = None) -> Tensor:
        for n in range(len(self.layers)) if order is None else order:
            x = self.layers[n](x)
        return x


def fill(shard: GTPShard, value: float) -> None:
    """The whole weight becomes ``value`` times a permutation, whatever the rank."""
    whole = value * torch.eye(WIDTH).roll(1, 0)
    first, count = shard.row_range
    with torch.no_grad():
        shard.zero_()
        shard[:count].copy_(whole[first : first + count])


def on_ranks(act: Callable[[Stack], T], *, depth: int = 3, late: bool = True) -> list[T]:
    groups = thread_groups(Grid(gtp=2), 2, late=late)
    return on_threads(2, lambda rank: act(Stack(groups[rank], depth)))


def started(model: Stack) -> list[str]:
    group = model.placement.gtp()
    assert isinstance(group, ThreadGroup)
    return group.started


def counts(model: Stack) -> tuple[int, int]:
    """(on demand, ahead) since the last call."""
    found = (model.chain.fetched_on_demand, model.chain.fetched_ahead)
    model.chain.fetched_on_demand = model.chain.fetched_ahead = 0
    return found


def test_first_pass_gathers_on_demand_and_each_later_one_fetches_one_ahead() -> None:
    def act(model: Stack) -> list[tuple[int, int]]:
        seen = []
        for _ in range(3):
            model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
            seen.append(counts(model))
            model.chain.finish_gradients()
        return seen

    # Three forward, three backward; the first of each pass has nobody before it.
    assert on_ranks(act) == [[(6, 0), (2, 4), (2, 4)]] * 2


def test_backward_order_is_that_of_the_backward_pass() -> None:
    def act(model: Stack) -> list[str]:
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
        return [use.shards[0].state.content.key for use in model.chain.order("backward")]

    assert on_ranks(act)[0] == ["2.weight", "1.weight", "0.weight"]


def test_next_weight_is_under_way_before_this_one_is_used() -> None:
    def act(model: Stack) -> list[int]:
        seen: list[int] = []
        for layer in model.linears:
            layer.register_forward_hook(lambda *_: seen.append(started(model).count("all_gather")))
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
            started(model).clear()
            seen.clear()
            model(torch.ones(1, WIDTH))
        return seen

    assert on_ranks(act)[0] == [2, 3, 3]


def test_changed_order_is_noticed_and_recorded_anew_and_never_gives_a_wrong_weight() -> None:
    orders = [(0, 1, 2), (0, 1, 2), (0, 2, 1), (0, 2, 1), (0,), (2, 1), (2, 1), (0, 1, 1, 2), (0, 1, 1, 2), (0, 1, 2)]

    def act(model: Stack) -> list[tuple[float, int]]:
        seen = []
        with torch.no_grad():
            for order in orders:
                model.chain.begin_pass()
                y = model(torch.ones(1, WIDTH), order)
                seen.append((y[0, 0].item(), counts(model)[0]))
        assert model.chain.pool.lent == (1 if model.chain._ahead is not None else 0)
        return seen

    for found in on_ranks(act):
        assert [value for value, _ in found] == [6, 6, 6, 6, 1, 6, 6, 12, 12, 6]
        # Known orders need one gather on demand, new ones more.
        assert [found[n][1] for n in (1, 3, 6, 8)] == [1, 1, 1, 1]
        assert found[2][1] > 1


def test_weights_changed_between_passes_are_seen_in_the_next_one() -> None:
    """Also when they are written where torch does not see it: nothing is fetched across the end of a pass."""

    def act(model: Stack) -> list[float]:
        seen = []
        with torch.no_grad():
            for step in range(4):
                seen.append(model(torch.ones(1, WIDTH))[0, 0].item())
                for layer in model.linears:
                    layer.weight.local.numpy()[:] *= 2 if step % 2 else 3
        return seen

    assert on_ranks(act) == [[6, 6 * 27, 6 * 27 * 8, 6 * 27 * 8 * 27]] * 2


def test_weight_written_after_it_was_fetched_ahead_is_fetched_again() -> None:
    def act(model: Stack) -> float:
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
            x = model.linears[0](torch.ones(1, WIDTH))
            fill(model.linears[1].weight, 10.0)
            return float(model.linears[2](model.linears[1](x))[0, 0])

    # The gather has happened when the weight is written.
    assert on_ranks(act, late=False) == [30, 30]


def test_replaced_parameter_is_used_and_not_the_one_that_was_recorded() -> None:
    def act(model: Stack) -> tuple[float, float, tuple[int, int]]:
        with torch.no_grad():
            model(torch.ones(1, WIDTH))
            model(torch.ones(1, WIDTH))
            model.linears[1].weight = copy.deepcopy(model.linears[1].weight)
            fill(model.linears[1].weight, 20.0)
            first = float(model(torch.ones(1, WIDTH))[0, 0])
            model.chain.begin_pass()
            counts(model)
            return first, float(model(torch.ones(1, WIDTH))[0, 0]), counts(model)

    # The pass after it fetches the new one ahead.
    assert on_ranks(act) == [(60, 60, (1, 2))] * 2


def test_two_models_beside_one_another_have_chains_of_their_own() -> None:
    groups = thread_groups(Grid(gtp=2), 2)

    def act(rank: int) -> list[float]:
        first, second = Stack(groups[rank]), Stack(groups[rank])
        for layer in second.linears:
            fill(layer.weight, 5.0)
        with torch.no_grad():
            x = torch.ones(1, WIDTH)
            return [model(x)[0, 0].item() for model in (first, second, first, second)]

    assert on_threads(2, act) == [[6, 125, 6, 125]] * 2


def test_no_grad_and_training_passes_keep_orders_apart() -> None:
    def act(model: Stack) -> list[tuple[int, int]]:
        seen = []
        for _ in range(3):
            with torch.no_grad():
                model(torch.ones(1, WIDTH), (2, 0))
            model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
            model.chain.finish_gradients()
            seen.append(counts(model))
        return seen

    assert on_ranks(act)[0][1:] == [(3, 5), (3, 5)]


def test_watched_model_starts_a_pass_at_each_call() -> None:
    """A model that begins and ends with the same layer: only the model knows where a pass starts."""

    def act(model: Stack) -> tuple[int, int]:
        model.chain.watch(model)
        with torch.no_grad():
            for _ in range(3):
                counts(model)
                model(torch.ones(1, WIDTH), (1, 1, 0, 1))
        return counts(model)

    on_ranks(act)  # no wrong weights, no deadlock, whatever is fetched ahead


def test_frozen_weights_are_gathered_and_get_no_gradient() -> None:
    def act(model: Stack) -> tuple[bool, bool, list[str]]:
        model.linears[1].weight.requires_grad_(False)
        x = torch.ones(1, WIDTH, requires_grad=True)
        model(x).sum().backward()
        model.chain.finish_gradients()
        assert x.grad is not None
        assert x.grad.eq(6).all()
        reductions = [kind for kind in started(model) if kind == "reduce_scatter"]
        return model.linears[0].weight.grad is not None, model.linears[1].weight.grad is None, reductions

    assert on_ranks(act) == [(True, True, ["reduce_scatter"] * 2)] * 2


def test_input_without_gradient_needs_no_gather_in_the_backward_pass() -> None:
    def act(model: Stack) -> int:
        model(torch.ones(1, WIDTH)).sum().backward()
        model.chain.finish_gradients()
        return started(model).count("all_gather")

    assert on_ranks(act, depth=1)[0] == 1


def test_reduction_is_finished_one_step_late_and_the_last_by_finish_gradients() -> None:
    def act(model: Stack) -> list[bool]:
        arrived: list[bool] = []
        model.linears[0].register_full_backward_pre_hook(
            lambda *_: arrived.extend([not layer.weight.state.reductions_pending for layer in model.linears])
        )
        model(torch.ones(1, WIDTH, requires_grad=True)).sum().backward()
        with pytest.raises(UsageError, match=r"0\.weight is still being reduced.*finish_gradients"):
            _ = model.linears[0].weight.grad
        with pytest.raises(UsageError, match="finish_gradients"):
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        model.chain.finish_gradients()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
        return arrived

    # Before layer 0's backward: 2 has arrived, 1 is under way, 0 has not begun.
    assert on_ranks(act)[0] == [True, False, True]


def test_whole_weights_are_lent_to_users_that_do_not_give_them_back() -> None:
    """As TransformerEngine asks for them: a list is answered by the first, with the shard's own requires_grad."""

    def act(model: Stack) -> None:
        weights = [layer.weight for layer in model.linears]
        model.chain.adopt(weights[0], weights[1])
        weights[0].requires_grad_(False)
        pair = weights[0].materialize_group_for_forward()
        assert isinstance(pair, list)
        assert [w.requires_grad for w in pair] == [False, True]
        single = weights[2].materialize_group_for_backward()
        assert isinstance(single, Tensor)
        assert [w.max().item() for w in (*pair, single)] == [1, 2, 3]
        assert type(single) is Tensor
        buffer = weights[2].grad_buffer()
        buffer.fill_(4.0)
        assert weights[2].finalize_group_grads(buffer) is None
        assert weights[0].finalize_group_grads([torch.ones(WIDTH, WIDTH)] * 2) == [None, None]
        model.chain.finish_gradients()
        assert weights[2].grad is not None
        assert weights[2].grad.eq(4).all()
        assert model.chain.pool.lent == 0

    on_ranks(act)


def test_lent_weight_is_valid_while_the_next_one_is_asked_for() -> None:
    def act(model: Stack) -> list[tuple[float, float]]:
        seen = []
        for _ in range(2):
            before = model.linears[0].weight.materialize_group_for_forward()
            for layer in model.linears[1:]:
                now = layer.weight.materialize_group_for_forward()
                assert isinstance(before, Tensor)
                assert isinstance(now, Tensor)
                seen.append((before.max().item(), now.max().item()))
                before = now
            model.chain.begin_pass()
        assert model.chain.pool.lent == 0
        return seen

    assert on_ranks(act, depth=4) == [[(1, 2), (2, 3), (3, 4)] * 2] * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_a_backward_pass_is_fetched_ahead_too(reentrant: bool) -> None:
    """Its gathers are part of the backward order: one on demand in each phase, as without it."""

    def act(model: Stack) -> list[tuple[int, int]]:
        seen = []
        for _ in range(3):
            x = torch.ones(1, WIDTH, requires_grad=True)
            for layer in model.linears:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            torch.autograd.backward(x.sum())
            model.chain.finish_gradients()
            seen.append(counts(model))
        return seen

    assert on_ranks(act)[0] == [(9, 0), (2, 7), (2, 7)]


def test_forward_passes_of_several_micro_batches_may_run_before_their_backward_passes() -> None:
    """As in a pipeline: two forward, then one backward and one forward in turn."""

    def act(model: Stack) -> Tensor:
        model.chain.watch(model)
        waiting: list[Tensor] = []
        for n in range(5):
            waiting.append(model(torch.full((1, WIDTH), n + 1.0, requires_grad=True)).sum())
            if len(waiting) == 3:
                torch.autograd.backward(waiting.pop(0))
        for loss in waiting:
            torch.autograd.backward(loss)
        model.chain.finish_gradients()
        grad = model.linears[0].weight.grad
        assert grad is not None
        return grad

    for grad in on_ranks(act):
        assert (grad == 6 * (1 + 2 + 3 + 4 + 5)).all()


def test_gradient_of_a_wrong_shape_is_refused_before_anything_is_sent() -> None:
    def act(model: Stack) -> int:
        with pytest.raises(UsageError, match="whole weight's"):
            model.linears[0].weight.finalize_group_grads(torch.ones(3, WIDTH))
        return len(started(model))

    assert on_ranks(act) == [0, 0]


def test_unknown_reduction_is_refused() -> None:
    with pytest.raises(UsageError, match="average"):
        GradientReducer(GatherChain().pool, reduction="average")  # type: ignore[arg-type]


def test_weight_outside_any_chain_is_refused_by_name() -> None:
    shard = Stack(ParallelGroups()).linears[0].weight
    shard.state.chain = None
    with pytest.raises(UsageError, match=r"0\.weight is in no gather chain"):
        shard.materialize_group_for_forward()


def test_one_weight_with_several_consumers_gets_the_sum_of_their_gradients() -> None:
    def act(model: Stack) -> tuple[Tensor, int]:
        other = RowParallelLinear("other", WIDTH, WIDTH, model.placement)
        other.weight = model.linears[0].weight
        x = torch.ones(1, WIDTH)
        for _ in range(2):
            (model.linears[0](x) + 2 * other(x) + model.linears[0](3 * x)).sum().backward()
            with pytest.raises(UsageError, match="still being reduced"):  # two uses' have arrived, the third's has not
                _ = model.linears[0].weight.grad
        model.chain.finish_gradients()
        grad = model.linears[0].weight.grad
        assert grad is not None
        return grad, started(model).count("reduce_scatter")

    for grad, reductions in on_ranks(act, depth=1):
        assert (grad == 2 * 6).all()
        assert reductions == 6


def test_order_without_pass_boundaries_starts_again_at_its_first_use() -> None:
    order = UseOrder()
    model = Stack(ParallelGroups())
    uses = {n: _use(model, n) for n in range(3)}

    heard = [order.advance(uses[n]) for n in (0, 1, 2, 0, 1, 2, 0)]

    assert [None if use is None else use.site for use in heard] == [
        None, None, None, model.linears[1], model.linears[2], None, model.linears[1]
    ]  # fmt: skip


def _use(model: Stack, n: int) -> Use:
    return Use(model.linears[n], (model.linears[n].weight,), False)
