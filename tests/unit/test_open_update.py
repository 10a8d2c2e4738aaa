"""What an update may be read from: a checkpoint of the model that is served, or a stream of its tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    COMMON_KEY,
    SMALL,
    SMALL_MOE,
    drop_key,
    edit_metadata,
    hf_config,
    random_tensors,
    write_hf,
    write_megatron,
)
from refit_harness import Rank, cold_digest, open_fds
from safetensors.torch import save
from torch import Tensor

from gtp_serve.assembly import _open_stream, open_update
from gtp_serve.config import ModelConfig
from gtp_serve.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, LayoutMismatch, UnsupportedModel
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import stored_name
from gtp_serve.loaders import SavedOverrides
from gtp_serve.refit.digest import digest_bytes
from gtp_serve.refit.orders import DiskOrder, Order, StreamOrder
from gtp_serve.refit.shared import SealedMemory, SharedBytes
from gtp_serve.refit.staging import Sources


def rank_for(config: ModelConfig) -> Rank:
    sources = Sources(disk=lambda order: open_update(order, config), stream=_open_stream)
    rank = Rank(config, sources=sources)
    rank.load(7)
    return rank


def outcome(rank: Rank, order: Order, update: str = "u") -> str:
    """The digest that serves after the update, or why it was refused."""
    rank.stage(update, order)
    vote = rank.vote(update)
    return ": ".join(vote.error[:2]) if vote.error else rank.weights.commit(update, "1")


# -- disk ------------------------------------------------------------------------------------------


def test_hugging_face_folder_of_the_served_model_is_taken(tmp_path: Path) -> None:
    write_hf(tmp_path, SMALL)

    assert outcome(rank_for(SMALL), DiskOrder(path=str(tmp_path))) == cold_digest(SMALL, 0)


@pytest.mark.parametrize("layout", ["padded", "logical"])
def test_megatron_checkpoint_is_taken_at_the_iteration_that_was_asked_for(tmp_path: Path, layout: str) -> None:
    write_megatron(tmp_path, SMALL, Grid(tp=2, gtp=2, alignment=4), layout=layout)
    rank = rank_for(SMALL)

    assert outcome(rank, DiskOrder(path=str(tmp_path), iteration=1)) == cold_digest(SMALL, 0)
    assert outcome(rank, DiskOrder(path=str(tmp_path), iteration=2), "v").startswith("ckpt-not-found: ")


def test_fields_that_change_no_weights_may_differ(tmp_path: Path) -> None:
    served = replace(
        SMALL, family="mistral", max_context=128, vocab_size=20, dtype="float32", eos_token_ids=(5,), bos_token_id=1
    )
    write_hf(tmp_path, SMALL)

    assert outcome(rank_for(served), DiskOrder(path=str(tmp_path))) == cold_digest(SMALL, 0)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": 500.0}, ["rope: RopeConfig(theta=10000.0", "theta=500.0"]),
        ({"rms_norm_eps": 1e-6}, ["norm_eps: 1e-05 is served, 1e-06 was found"]),
        ({"num_attention_heads": 2, "head_dim": 8, "num_key_value_heads": 1}, ["num_heads: 4 is served, 2 was found"]),
        ({"tie_word_embeddings": True}, ["tied: False is served, True was found"]),
    ],
)
def test_other_model_is_refused_naming_each_difference(
    tmp_path: Path, changes: dict[str, Any], named: list[str]
) -> None:
    drop = ("lm_head.weight",) if changes.get("tie_word_embeddings") else ()
    write_hf(tmp_path, SMALL, drop=drop, **changes)

    with pytest.raises(LayoutMismatch, match="holds another model than the one that is served") as caught:
        open_update(DiskOrder(path=str(tmp_path)), SMALL)

    assert caught.value.code == "other-model"
    assert all(part in str(caught.value) for part in named)


def test_several_differences_are_all_named_and_nothing_is_left_open(tmp_path: Path) -> None:
    write_hf(tmp_path, SMALL_MOE)
    before = open_fds()

    with pytest.raises(LayoutMismatch) as caught:
        open_update(DiskOrder(path=str(tmp_path)), replace(SMALL, norm_eps=0.5))

    assert {label for label, _ in caught.value.details} >= {"moe", "ffn_size", "norm_eps"}
    assert open_fds() == before


def test_what_is_no_checkpoint_is_refused_as_at_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        open_update(DiskOrder(path=str(tmp_path / "none")), SMALL)
    with pytest.raises(CheckpointError):
        open_update(DiskOrder(path="\0"), SMALL)


def test_what_was_said_of_saved_grids_helps_where_a_checkpoint_does_not_say(tmp_path: Path) -> None:
    """It is left out for a checkpoint that says otherwise, and for one that Megatron did not save."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(hf_config(SMALL)))
    said = SavedOverrides(tp=2, gtp=2, config=config)
    silent, _ = write_megatron(tmp_path / "silent", SMALL, Grid(tp=2, gtp=2, alignment=4))
    edit_metadata(silent, lambda metadata: drop_key(metadata, COMMON_KEY))
    write_megatron(tmp_path / "other", SMALL, Grid(tp=1, gtp=4, alignment=4))
    write_hf(tmp_path / "folder", SMALL)

    with pytest.raises(CheckpointError, match="nothing says what the model is"):
        open_update(DiskOrder(path=str(silent)), SMALL)
    for path in (silent, tmp_path / "other", tmp_path / "folder"):
        open_update(DiskOrder(path=str(path)), SMALL, said).close()


def test_config_of_the_folder_is_read_anew(tmp_path: Path) -> None:
    write_hf(tmp_path, SMALL)
    open_update(DiskOrder(path=str(tmp_path)), SMALL).close()

    (tmp_path / "config.json").write_text(json.dumps(hf_config(SMALL, rope_theta=7.0)))

    with pytest.raises(LayoutMismatch, match="another model"):
        open_update(DiskOrder(path=str(tmp_path)), SMALL)


# -- stream ----------------------------------------------------------------------------------------


def stream(data: bytes) -> tuple[StreamOrder, SealedMemory]:
    memory = SealedMemory(len(data))
    memory.append(data)
    return StreamOrder(segment=memory.seal(), digest=digest_bytes(data)), memory


def file_of(config: ModelConfig = SMALL, extra: Mapping[str, Tensor] | None = None) -> bytes:
    tensors = {stored_name(name, config.family): value for name, value in random_tensors(config).items()}
    return save({**tensors, **(extra or {})})


@pytest.mark.parametrize("config", [SMALL, SMALL_MOE], ids=["dense", "moe"])
def test_stream_of_safetensors_is_taken(config: ModelConfig) -> None:
    order, memory = stream(file_of(config))
    rank, before = rank_for(config), open_fds()

    assert outcome(rank, order) == cold_digest(config, 0)
    assert open_fds() == before
    memory.close()


def test_rotary_frequencies_in_a_stream_are_left_alone() -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    order, memory = stream(file_of(extra=extra))

    assert outcome(rank_for(SMALL), order) == cold_digest(SMALL, 0)
    memory.close()


def test_stream_whose_digest_is_not_the_senders_is_refused() -> None:
    order, memory = stream(file_of())
    wrong = StreamOrder(segment=order.segment, digest="0" * 32)

    assert outcome(rank_for(SMALL), wrong).startswith("digest-mismatch: the stream: ")
    memory.close()


def test_stream_with_another_tensor_is_refused_by_name() -> None:
    order, memory = stream(file_of(extra={"other": torch.ones(2)}))

    assert "other" in outcome(rank_for(SMALL), order)
    memory.close()


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"abc", CheckpointCorrupt, "has 3 bytes, which is no safetensors file"),
        (b"\xff" * 64, CheckpointCorrupt, "claims a header of"),
        ((2).to_bytes(8, "little") + b"{}" + b"x", CheckpointCorrupt, "its header tells of 10"),
        ((2).to_bytes(8, "little") + b"[]", CheckpointCorrupt, "not a JSON object"),
        (save({"a": torch.ones(2)})[:-1], CheckpointCorrupt, "its header tells of"),
        (save({"a": torch.ones(2, dtype=torch.int8)}), UnsupportedModel, "element type I8"),
    ],
)
def test_stream_that_is_no_safetensors_file_is_refused(data: bytes, error: type[Exception], message: str) -> None:
    order, memory = stream(data)
    shared, before = SharedBytes(order.segment), open_fds()

    with pytest.raises(error, match=message):
        _open_stream(shared)

    assert len(os.listdir("/proc/self/fd")) == before
    shared.close()
    memory.close()
