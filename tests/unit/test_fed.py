"""A fed update on one rank: coverage, conversion, slices, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from checkpoint_files import SMALL, SMALL_MOE, random_tensors
from rank_places import Absent
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.errors import UpdateFailed
from gtp_serve.layout.huggingface import EMBEDDING, HEAD, logical_tensors, stored_name
from gtp_serve.models.decoder import build_decoder
from gtp_serve.refit.apply import Target
from gtp_serve.refit.fed import FedStaging, Take
from gtp_serve.refit.orders import Piece


class Sender:
    """Hands tensors over as a group would, and counts what was taken from it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.taken: list[str] = []

    def receive(self, piece: Piece, take: Take) -> int:
        for index, name in enumerate(piece.names):
            self.taken.append(name)
            take(index, self.tensors[name])
        return sum(self.tensors[name].nbytes for name in piece.names)


def piece_of(tensors: Mapping[str, Tensor], names: Sequence[str] | None = None) -> Piece:
    chosen = list(tensors if names is None else names)
    return Piece(
        names=tuple(chosen),
        dtypes=tuple(str(tensors[name].dtype).removeprefix("torch.") for name in chosen),
        shapes=tuple(tuple(tensors[name].shape) for name in chosen),
    )


def rank_of(config: ModelConfig, rank: int = 0, size: int = 1, dtype: str = "bfloat16") -> list[Target]:
    decoder = build_decoder(
        config,
        dtype=getattr(torch, dtype),
        device="cpu",
        tp_rank=rank,
        tp_size=size,
        collective=Absent(rank, size) if size > 1 else None,
    )
    targets = list(decoder.targets())
    for target in targets:
        target.tensor.detach().fill_(7)
    return targets


def staging_of(targets: Sequence[Target], config: ModelConfig = SMALL) -> FedStaging:
    return FedStaging(targets, logical_tensors(config))


def feed_all(staging: FedStaging, tensors: Mapping[str, Tensor], step: int = 5) -> None:
    sender = Sender(tensors)
    names = list(tensors)
    for first in range(0, len(names), step):
        staging.feed(piece_of(tensors, names[first : first + step]), sender.receive)


def check_filled(targets: Sequence[Target], tensors: Mapping[str, Tensor]) -> None:
    for target in targets:
        expected = torch.zeros_like(target.tensor)
        for span in target.shard.spans:
            local = tuple(slice(a, b) for a, b in zip(span.local.start, span.local.stop, strict=True))
            logical = tuple(slice(a, b) for a, b in zip(span.logical.start, span.logical.stop, strict=True))
            expected[local] = tensors[span.name][logical].to(expected.dtype)
        assert torch.equal(target.tensor, expected), target.shard.key


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_each_rank_keeps_its_own_parts_of_whole_tensors(rank: int, size: int) -> None:
    tensors = random_tensors(SMALL)
    targets = rank_of(SMALL, rank, size)
    staging = staging_of(targets)
    feed_all(staging, tensors)
    staging.finish()
    check_filled(targets, tensors)
    assert staging.received_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_types_convert_by_value() -> None:
    tensors = {name: tensor.float() * 1.01 for name, tensor in random_tensors(SMALL).items()}
    targets = rank_of(SMALL)
    staging = staging_of(targets)
    feed_all(staging, tensors)
    staging.finish()
    check_filled(targets, tensors)


def test_experts_come_one_by_one_under_mixtrals_names_or_all_in_one_tensor() -> None:
    tensors = random_tensors(SMALL_MOE)
    for stored in (
        {stored_name(name, "mixtral"): tensor for name, tensor in tensors.items()},
        stacked(tensors, SMALL_MOE),
    ):
        targets = rank_of(SMALL_MOE, 1, 2)
        staging = staging_of(targets, SMALL_MOE)
        feed_all(staging, stored)
        staging.finish()
        check_filled(targets, tensors)


def stacked(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """As Transformers holds experts: one tensor for all of a layer."""
    assert config.moe is not None
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        parts = {
            part: [tensors[f"{prefix}{expert}.{part}.weight"] for expert in range(config.moe.num_experts)]
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        both = [torch.cat(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
        found[f"{prefix}gate_up_proj"] = torch.stack(both)
        found[f"{prefix}down_proj"] = torch.stack(parts["down_proj"])
    return found


def test_what_never_came_is_named_at_the_end() -> None:
    tensors = random_tensors(SMALL)
    last = tensors.pop("model.norm.weight")
    staging = staging_of(rank_of(SMALL))
    feed_all(staging, tensors)
    with pytest.raises(UpdateFailed, match=r"1 of 21 tensors never came: model\.norm\.weight") as caught:
        staging.finish()
    assert caught.value.code == "tensors-missing"
    feed_all(staging, {"model.norm.weight": last})
    staging.finish()


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("model.norm.weigth", torch.zeros(16), r"this model has no model\.norm\.weigth \(but model\.norm\.weight\)"),
        ("model.norm.weight", torch.zeros(15), r"model\.norm\.weight comes as \[15\], but is \[16\]"),
        ("model.norm.weight", torch.zeros(16, dtype=torch.int64), r"int64, which does not convert to bfloat16"),
        ("lm_head.weight", torch.zeros(22, 16), r"lm_head\.weight comes twice"),
    ],
)
def test_a_tensor_that_cannot_be_used_is_refused_by_name_after_it_was_received(
    name: str, tensor: Tensor, words: str
) -> None:
    targets = rank_of(SMALL)
    staging = staging_of(targets)
    head = random_tensors(SMALL)[HEAD]
    staging.feed(piece_of({HEAD: head}), Sender({HEAD: head}).receive)
    before = [target.tensor.clone() for target in targets]
    sender = Sender({name: tensor})
    with pytest.raises(UpdateFailed, match=words) as caught:
        staging.feed(piece_of({name: tensor}), sender.receive)
    assert caught.value.code == "tensors-refused"
    assert sender.taken == [name]
    assert all(torch.equal(target.tensor, saved) for target, saved in zip(targets, before, strict=True))


@pytest.mark.parametrize(
    "piece",
    [
        Piece(names=("model.norm.weight",), dtypes=("float128",), shapes=((16,),)),
        Piece(names=("model.norm.weight",), dtypes=("float32",), shapes=((-16,),)),
        Piece(names=("model.norm.weight", "lm_head.weight"), dtypes=("float32",), shapes=((16,),)),
        Piece(names=("huge",), dtypes=("float32",), shapes=((1 << 40,),)),
        Piece(names=(), dtypes=(), shapes=()),
    ],
)
def test_what_cannot_be_measured_is_refused_without_a_wait_for_it(piece: Piece) -> None:
    sender = Sender({})
    with pytest.raises(UpdateFailed):
        staging_of(rank_of(SMALL)).feed(piece, sender.receive)
    assert sender.taken == []


def test_a_name_that_comes_twice_in_one_piece_is_refused() -> None:
    tensors = random_tensors(SMALL)
    piece = piece_of(tensors, ["model.norm.weight", "model.norm.weight"])
    with pytest.raises(UpdateFailed, match=r"model\.norm\.weight comes twice"):
        staging_of(rank_of(SMALL)).feed(piece, Sender(tensors).receive)


def test_many_problems_are_counted() -> None:
    wrong = {f"layer{index}": torch.zeros(1) for index in range(8)}
    with pytest.raises(UpdateFailed, match=r"layer0.*layer4; and 3 more"):
        staging_of(rank_of(SMALL)).feed(piece_of(wrong), Sender(wrong).receive)


def tied() -> ModelConfig:
    return replace(SMALL, tied=True)


@pytest.mark.parametrize("first", [EMBEDDING, HEAD])
@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_may_come_beside_the_embedding_if_it_is_the_same(first: str, same: bool) -> None:
    tensors = random_tensors(tied())
    head = tensors[EMBEDDING].clone()
    if not same:
        head[3, 4] += 1
    both = {first: tensors[EMBEDDING] if first == EMBEDDING else head}
    both |= {EMBEDDING: tensors[EMBEDDING], HEAD: head}
    targets = rank_of(tied())
    staging = staging_of(targets, tied())
    sender = Sender(both)
    if not same:
        with pytest.raises(UpdateFailed, match="they are one tensor"):
            staging.feed(piece_of(both), sender.receive)
        assert len(sender.taken) == 2
        return
    staging.feed(piece_of(both), sender.receive)
    feed_all(staging, {name: tensor for name, tensor in tensors.items() if name != EMBEDDING})
    staging.finish()
    check_filled(targets, tensors)


def test_the_first_write_is_told_before_it_happens() -> None:
    tensors = random_tensors(SMALL)
    targets = rank_of(SMALL)
    untouched: list[bool] = []
    staging = FedStaging(
        targets, logical_tensors(SMALL), lambda: untouched.append(all(bool((t.tensor == 7).all()) for t in targets))
    )
    feed_all(staging, tensors)
    assert untouched == [True]


def test_what_is_to_be_thrown_away_is_received_and_written_nowhere() -> None:
    tensors = random_tensors(SMALL)
    targets = rank_of(SMALL)
    touched: list[None] = []
    staging = FedStaging(targets, logical_tensors(SMALL), lambda: touched.append(None), discard=True)
    sender = Sender({**tensors, "model.extra": torch.zeros(3)})
    staging.feed(piece_of(sender.tensors), sender.receive)
    assert len(sender.taken) == len(sender.tensors)
    assert touched == []
    assert all(bool((target.tensor == 7).all()) for target in targets)
    with pytest.raises(UpdateFailed, match="thrown away"):
        staging.finish()
