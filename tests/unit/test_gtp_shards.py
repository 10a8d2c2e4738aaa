"""The shard as a parameter: one object that survives what torch does to parameters, and the spans it states."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_ranks import thread_groups

from gtp_serve.errors import UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.rows import Rows
from gtp_serve.layout.spans import Box, Shape, check_coverage
from gtp_serve.training.groups import ParallelGroups
from gtp_serve.training.shards import Content, GTPShard, as_parameter, live_parameter, shard_parameter


def groups(gtp: int) -> list[ParallelGroups]:
    return thread_groups(Grid(gtp=gtp), gtp)


def parameter(
    rank: int = 0, gtp: int = 2, *, shape: Shape = (5, 3), alignment: int = 1, content: Content | None = None
) -> GTPShard:
    content = content or Content.of("w", shape[0])
    group = groups(gtp)[rank].gtp_remat
    shard = shard_parameter(content, shape, group, alignment=alignment, dtype=torch.float32)
    shard.local.copy_(torch.arange(shard.local.numel()).view(shard.local.shape))
    return shard


def test_geometry_has_megatrons_names_and_meanings() -> None:
    shard = parameter(1, 4, shape=(10, 3), alignment=4)

    assert tuple(shard.shape) == (4, 3)
    assert (shard.gtp_remat_size, shard.gtp_rank, shard.pad_length) == (4, 1, 6)
    assert (shard.padded_shape, shard.logical_shape, shard.row_range) == ((16, 3), (10, 3), (4, 4))
    assert (shard.partition_dim, shard.partition_stride, shard.tensor_model_parallel) == (0, 1, False)
    assert shard.is_gtp_weight_remat
    assert shard.is_distributed_weight
    assert shard.group is not None
    assert (shard.expert_idx, shard.is_routed_expert) == (None, False)


@pytest.mark.parametrize(("gtp", "alignment"), [(1, 16), (2, 1), (3, 4), (8, 16)])
def test_spans_of_all_ranks_cover_the_logical_tensors_once_and_no_padding(gtp: int, alignment: int) -> None:
    """Ten rows of two tensors, in two columns' offset; with 8 x 16 rows most shards are padding only."""
    content = Content(key="both", rows=(Rows(0, 6, "a", 2), Rows(6, 4, "b", 0)), columns=(4, 3))
    pieces: dict[str, list[tuple[Box, str]]] = {"a": [], "b": []}
    for rank in range(gtp):
        shard = parameter(rank, gtp, shape=(10, 3), alignment=alignment, content=content)
        stated = shard.shard()
        assert stated.shape == tuple(shard.shape)
        assert sum(span.local.volume for span in stated.spans) == 3 * shard.row_range[1]
        for span in stated.spans:
            pieces[span.name].append((span.logical.shifted((-2 if span.name == "a" else 0, -4)), str(rank)))

    check_coverage("a", (6, 3), pieces["a"])
    check_coverage("b", (4, 3), pieces["b"])
    assert parameter(0, 1, alignment=16).pad_length == 0


def test_nn_parameter_gives_the_live_one_and_detaching_keeps_type_and_state() -> None:
    shard = parameter()

    assert isinstance(shard, nn.Parameter)
    assert shard.requires_grad
    assert shard.is_leaf
    alias = shard.detach()
    assert isinstance(alias, GTPShard)
    assert not isinstance(alias, nn.Parameter)
    assert not alias.requires_grad
    assert alias.state is shard.state
    assert alias.data_ptr() == shard.data_ptr()
    assert alias.live is shard
    again = as_parameter(shard)
    assert again.state.live is not None
    assert shard.live is again


def test_other_operations_give_plain_tensors_of_the_shards_shape() -> None:
    shard = parameter()

    for result in (shard * 2, torch.zeros_like(shard), shard.clone(), shard.view(-1), shard.t(), shard.float() + 1):
        assert type(result) is Tensor
    with torch.no_grad():
        assert shard.add_(1) is shard
        assert shard.local[0, 0] == 1
    with torch.inference_mode():
        assert shard.mul_(2) is shard


class Probe(torch.autograd.Function):
    """Saves the weight for the backward pass, as TransformerEngine does."""

    seen: list[object] = []  # noqa: RUF012  # filled by the backward pass

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: GTPShard) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.local.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        _, weight = ctx.saved_tensors
        Probe.seen.append(weight)
        return dy @ weight.local, None


@pytest.mark.parametrize("how", ["plain", "reentrant", "non-reentrant", "on the host"])
def test_it_comes_back_as_a_shard_from_what_autograd_saved(how: str) -> None:
    shard, x = parameter(), torch.ones(2, 3, requires_grad=True)
    Probe.seen.clear()

    def multiply(x: Tensor) -> Tensor:
        y: Tensor = Probe.apply(x, shard)  # type: ignore[no-untyped-call]
        return y

    if how == "on the host":
        with torch.autograd.graph.save_on_cpu():
            torch.autograd.backward(multiply(x).sum())
    elif how == "plain":
        torch.autograd.backward(multiply(x).sum())
    else:
        checkpoint(multiply, x, use_reentrant=how == "reentrant").sum().backward()

    (seen,) = Probe.seen
    assert isinstance(seen, GTPShard)
    assert seen.state is shard.state
    assert shard.requires_grad


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_torchs_optimizers_step_it_as_they_step_a_plain_parameter(kind: Any, options: dict[str, bool]) -> None:
    shard = parameter()
    plain = nn.Parameter(shard.local.clone())
    for one in (shard, plain):
        one.grad = torch.full(one.shape, 0.25)
        kind([one], lr=0.1, **options).step()

    assert torch.equal(shard.local, plain.data)


def test_moving_and_saving_a_module_keep_the_object() -> None:
    module = nn.Module()
    module.weight = shard = parameter()
    module.to(torch.bfloat16)

    assert module.weight is shard
    assert shard.dtype == shard.local.dtype == torch.bfloat16
    stored = io.BytesIO()
    torch.save(module.state_dict(), stored)
    stored.seek(0)
    loaded = torch.load(stored, weights_only=True)
    assert type(loaded["weight"]) is Tensor
    with torch.no_grad():
        shard.zero_()
    module.load_state_dict(loaded)
    assert module.weight is shard
    assert shard.local[1, 0] == 3


def test_data_can_be_moved_to_other_memory_of_the_same_shape_only() -> None:
    shard, buffer = parameter(), torch.zeros(100)
    alias = shard.detach()
    where = buffer[:9].view(3, 3)
    shard.data = where

    assert isinstance(alias, GTPShard)
    assert alias.local.data_ptr() == where.data_ptr()  # what autograd saved, or a group's list, is not left behind
    assert shard.data_ptr() == shard.local.data_ptr() == where.data_ptr()
    assert shard.requires_grad
    with pytest.raises(UsageError, match="shape"):
        shard.data = torch.zeros(5, 3)


def test_a_deep_copy_is_another_parameter_in_the_same_place() -> None:
    shard = parameter(1)
    shard.main_grad = torch.zeros(3, 3)
    twin = copy.deepcopy({"a": shard, "b": shard})

    assert twin["a"] is twin["b"]
    assert isinstance(twin["a"], GTPShard)
    assert isinstance(twin["a"], nn.Parameter)
    assert twin["a"].state is not shard.state
    assert (twin["a"].group, twin["a"].main_grad) == (shard.group, None)
    assert twin["a"].shard() == shard.shard()
    assert torch.equal(twin["a"].local, shard.local)
    assert twin["a"].data_ptr() != shard.data_ptr()


def test_trimmed_rows_lead_back_to_the_live_parameter() -> None:
    shard = parameter(1)
    moment = torch.full((3, 3), 7.0)

    for view, of in ((shard.trimmed(), shard.local), (shard.trimmed(moment), moment)):
        assert tuple(view.shape) == (2, 3)
        assert view.data_ptr() == of.data_ptr()
        assert live_parameter(view) is shard
    assert live_parameter(moment) is None
    assert tuple(parameter(3, 4, shape=(3, 2), alignment=1).trimmed().shape) == (0, 2)
    with pytest.raises(UsageError, match="rows"):
        shard.trimmed(torch.zeros(5, 3))


def test_main_grad_must_have_the_shards_shape() -> None:
    shard = parameter()
    with pytest.raises(UsageError, match="main_grad"):
        shard.main_grad = torch.zeros(5, 3)


def test_gradients_cannot_be_read_while_they_are_being_reduced() -> None:
    shard = parameter()
    shard.state.reductions_pending = 1

    with pytest.raises(UsageError, match="finish_gradients"):
        _ = shard.grad
    with pytest.raises(UsageError, match="finish_gradients"):
        _ = shard.main_grad
    with pytest.raises(UsageError, match="finish_gradients"):
        torch.optim.SGD([shard], lr=0.1).step()


def test_a_target_is_filled_in_place() -> None:
    shard = parameter(1)
    target = shard.target()

    target.tensor.fill_(4)
    assert target.shard.key == "w"
    assert (shard.data == 4).all()
