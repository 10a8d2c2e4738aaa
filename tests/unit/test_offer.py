"""What a trainer can offer: state dicts, modules, one rank's pieces; and what is refused by name before it is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transfer_world import MODELS, WholeTensors, state_dict, trainer_ranks

from gtp_serve.errors import UpdateRefused, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import EMBEDDING, HEAD, logical_tensors
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.offer import Offer, check_offers, offer

LLAMA, TIED = MODELS["llama"], MODELS["qwen2"]
BF16 = {name: frozenset({"bfloat16"}) for name in logical_tensors(LLAMA)}


def copied(offered: Offer, index: int, box: Box) -> Tensor:
    shard = offered.shards()[index]
    dtype: torch.dtype = getattr(torch, shard.dtype)
    out = np.empty(box.volume * dtype.itemsize, np.uint8)
    offered.copy(index, box, out)
    return torch.from_numpy(out).view(dtype).reshape(box.shape)


def names(offered: Offer) -> list[str]:
    return [span.name for shard in offered.shards() for span in shard.spans]


def test_a_state_dict_is_its_tensors_also_those_that_are_views_of_others() -> None:
    base = torch.arange(48, dtype=torch.bfloat16).reshape(6, 8)
    given = {"a": base.t(), "b": base[1:4, ::2], "c": torch.tensor(5.0), "d": base[:0]}
    offered = offer(given)

    assert names(offered) == ["a", "b", "c", "d"]
    assert torch.equal(copied(offered, 0, Box((2, 1), (3, 4))), base.t()[2:5, 1:5])
    assert torch.equal(copied(offered, 1, Box.whole((3, 4))), base[1:4, ::2])
    assert torch.equal(copied(offered, 2, Box((), ())), torch.tensor(5.0))


def test_mixtral_names_become_logical_ones_and_rotary_tables_are_left_out() -> None:
    offered = offer(
        {
            "model.layers.0.block_sparse_moe.experts.1.w2.weight": torch.zeros(2, 2),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2),
        }
    )

    assert names(offered) == ["model.layers.0.mlp.experts.1.down_proj.weight"]


class Tied(nn.Module):
    """As Hugging Face's models are: two modules with one parameter."""

    def __init__(self, *, share: bool, says: bool) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(10, 4)
        self.lm_head = nn.Linear(4, 10, bias=False)
        if share:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.config = SimpleNamespace(tie_word_embeddings=says)


@pytest.mark.parametrize(
    ("share", "says", "expected"),
    [(True, False, [EMBEDDING]), (False, True, [EMBEDDING]), (False, False, [EMBEDDING, HEAD])],
    ids=["one storage", "the configuration says so", "a head of its own"],
)
def test_a_tied_head_is_left_out_of_a_module(share: bool, says: bool, expected: list[str]) -> None:
    module = Tied(share=share, says=says)

    assert names(offer(module)) == expected
    if share:
        assert names(offer(module.state_dict())) == expected


def test_one_ranks_pieces_keep_their_padding_to_themselves() -> None:
    values = state_dict(LLAMA, 1)
    pairs = trainer_ranks(LLAMA, Grid(gtp=2, alignment=32), values)[1]
    offered = offer(pairs)

    assert tuple(offered.shards()) == tuple(shard for shard, _ in pairs)
    for index, (shard, _) in enumerate(pairs):
        for span in shard.spans:
            logical = tuple(slice(a, b) for a, b in zip(span.logical.start, span.logical.stop, strict=True))
            assert torch.equal(copied(offered, index, span.local), values[span.name][logical])


def test_a_weight_source_is_offered_as_it_is() -> None:
    values = state_dict(LLAMA, 1)
    offered = offer(WholeTensors(values))

    assert names(offered) == list(values)
    assert torch.equal(copied(offered, 0, Box((3, 2), (5, 6))), values[EMBEDDING][3:8, 2:8])


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (object(), "object is no source of weights"),
        ("a path", "str is no source of weights"),
        ([torch.zeros(2)], "pairs of"),
        ({"a": np.zeros(2)}, "a is a ndarray, not a tensor"),
        ([(Shard("a", (3,), "float32", ()), torch.zeros(2))], "a: the tensor is float32"),
        ({"a": torch.zeros(2, device="meta")}, "without plain values"),
    ],
)
def test_anything_else_is_refused(source: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        offer(source)


def shards_of(values: dict[str, Tensor]) -> list[Shard]:
    return list(offer(values).shards())


def refusal(values: dict[str, Tensor]) -> UpdateRefused:
    with pytest.raises(UpdateRefused) as refused:
        check_offers([shards_of(values)], logical_tensors(LLAMA), BF16)
    return refused.value


Q = "model.layers.0.self_attn.q_proj.weight"


def test_weights_that_fit_are_let_through_also_in_another_float_type_and_from_several_ranks() -> None:
    values = state_dict(LLAMA, 1)
    check_offers([shards_of({n: t.float() for n, t in values.items()})], logical_tensors(LLAMA), BF16)
    ranks = trainer_ranks(LLAMA, Grid(tp=2, gtp=2, alignment=32, pp=2), values)

    check_offers([[shard for shard, _ in rank] for rank in ranks], logical_tensors(LLAMA), BF16)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    values = state_dict(LLAMA, 1)

    assert refusal(values | {Q.replace("q_proj", "q_prj"): values[Q]}).message == (
        f"model.layers.0.self_attn.q_prj.weight is not known; did you mean {Q}?"
    )


def test_a_missing_misshapen_or_mistyped_tensor_is_refused_by_name() -> None:
    values = state_dict(LLAMA, 1)

    assert refusal({n: t for n, t in values.items() if n != Q}).message == f"{Q} is missing"
    assert refusal(values | {Q: values[Q][:5]}).message == f"{Q} has the shape [5, 24] where [32, 24] is needed"
    assert refusal(values | {Q: values[Q].to(torch.int8)}).message == f"{Q} is int8, which cannot become bfloat16"


def test_many_problems_are_counted_and_the_first_named() -> None:
    error = refusal({})

    assert error.message == f"the weights do not fit the served model in {len(BF16)} places"
    assert error.details[0] == ("1", f"{EMBEDDING} is missing")
    assert error.details[-1] == ("6", f"and {len(BF16) - 5} more")


def test_a_head_for_a_tied_model_is_refused_with_the_reason() -> None:
    values = state_dict(TIED, 1)

    with pytest.raises(UpdateRefused, match="the served model's head is its embedding"):
        check_offers([shards_of(values | {HEAD: values[EMBEDDING].clone()})], logical_tensors(TIED), {})


def test_a_span_beyond_its_tensor_is_refused_by_name() -> None:
    box = Box((0, 0), (60, 24))
    shard = Shard("embedding", (60, 24), "bfloat16", (Span(EMBEDDING, box, box),))
    others = [one for one in shards_of(state_dict(LLAMA, 1)) if one.key != EMBEDDING]

    with pytest.raises(UpdateRefused, match=r"embed_tokens.weight has the shape \[60, 24\] where \[50, 24\]"):
        check_offers([[shard, *others]], logical_tensors(LLAMA), BF16)


def test_first_ranks_piece_that_bears_the_tensors_name_is_a_piece_and_not_a_misshapen_tensor() -> None:
    name, (rows, columns) = EMBEDDING, logical_tensors(LLAMA)[EMBEDDING]
    whole = [shard for shard in offer(state_dict(LLAMA, 1)).shards() if shard.key != name]
    halves = [
        Shard(
            name,
            (rows // 2, columns),
            "bfloat16",
            (Span(name, Box.whole((rows // 2, columns)), Box((first, 0), (rows // 2, columns))),),
        )
        for first in (0, rows // 2)
    ]
    check_offers([[*whole, halves[0]], [halves[1]]], logical_tensors(LLAMA), BF16)
    with pytest.raises(UpdateRefused, match=rf"{name} has the shape \[{rows // 2}, {columns}\] where"):
        check_offers([[*whole, halves[0]], [halves[0]]], logical_tensors(LLAMA), BF16)
