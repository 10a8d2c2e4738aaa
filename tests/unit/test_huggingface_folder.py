from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import SMALL, SMALL_MOE, edit_json, hf_config, random_tensors, write_hf
from safetensors.torch import save_file
from torch import Tensor

from gtp_serve.config import RopeConfig
from gtp_serve.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    LayoutMismatch,
    UnsupportedModel,
)
from gtp_serve.loaders import Checkpoint, open_checkpoint
from gtp_serve.loaders.hf_config import model_config

torch.set_num_threads(1)

TIED = replace(SMALL, tied=True)


def load(folder: Path) -> tuple[Checkpoint, dict[str, Tensor]]:
    checkpoint = open_checkpoint(folder)
    tensors = dict(checkpoint.tensors())
    checkpoint.close()
    return checkpoint, tensors


def assert_loads(folder: Path, truth: dict[str, Tensor]) -> Checkpoint:
    checkpoint, tensors = load(folder)
    assert tensors.keys() == truth.keys()
    assert all(torch.equal(tensors[name], value) for name, value in truth.items())
    return checkpoint


def refusal(folder: Path, kind: type[CheckpointError] = CheckpointError) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(folder)
    assert "\n" not in caught.value.message
    return str(caught.value)


# good folders


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        TIED,
        replace(SMALL, family="mistral", sliding_window=8),
        replace(SMALL, family="qwen2", qkv_bias=True),
        replace(SMALL, family="qwen3", qk_norm=True),
        SMALL_MOE,
        replace(SMALL_MOE, family="qwen3_moe", qk_norm=True),
        replace(SMALL, qkv_bias=True, proj_bias=True, mlp_bias=True),
        replace(SMALL, dtype="float32"),
        replace(SMALL, dtype="float16"),
    ],
    ids=lambda config: f"{config.family}-{config.dtype}-{'tied' if config.tied else 'untied'}",
)
def test_a_folder_of_each_family_loads_as_it_was_written(config: Any, shards: int, tmp_path: Path) -> None:
    extra = {"sliding_window": config.sliding_window} if config.family == "mistral" else {}
    if config.proj_bias:
        extra = {"attention_bias": True, "mlp_bias": True}
    truth = write_hf(tmp_path, config, shards=shards, **extra)

    checkpoint = assert_loads(tmp_path, truth)

    expected = replace(config, vocab_size=config.vocab_rows, eos_token_ids=(2,))
    assert checkpoint.config == expected
    assert checkpoint.facts.parameters == sum(t.numel() for t in truth.values())
    assert not checkpoint.facts.warnings


def test_mixed_element_types_are_kept(tmp_path: Path) -> None:
    truth = write_hf(tmp_path)
    truth["model.norm.weight"] = truth["model.norm.weight"].float()
    save_file(truth, tmp_path / "model.safetensors")

    assert assert_loads(tmp_path, truth).config.dtype == "bfloat16"


def test_byte_order_marks_and_crlf_do_not_matter(tmp_path: Path) -> None:
    truth = write_hf(tmp_path, shards=2)
    (tmp_path / "generation_config.json").write_text('{\n"eos_token_id": [3, 4],\n"note": "größe"\n}', encoding="utf-8")
    for path in tmp_path.glob("*.json"):
        content = path.read_text(encoding="utf-8").replace("\n", "\r\n")
        path.write_bytes(b"\xef\xbb\xbf" + content.encode())

    assert assert_loads(tmp_path, truth).config.eos_token_ids == (3, 4)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    write_hf(tmp_path, eos_token_id=[5])
    assert load(tmp_path)[0].config.eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8, 9999]}', encoding="utf-8")

    checkpoint, _ = load(tmp_path)

    assert checkpoint.config.eos_token_ids == (7, 8)
    assert any("9999" in warning for warning in checkpoint.facts.warnings)


def test_d6_code_in_the_folder_is_named_and_not_run(tmp_path: Path) -> None:
    truth = write_hf(tmp_path, auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (tmp_path / "modeling.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')", encoding="utf-8")

    checkpoint = assert_loads(tmp_path, truth)

    assert sum("no code" in note for note in checkpoint.facts.notes) == 2
    assert not (tmp_path / "marker").exists()


def test_a_folder_called_release_does_not_make_it_a_megatron_root(tmp_path: Path) -> None:
    truth = write_hf(tmp_path)
    (tmp_path / "release").mkdir()

    assert_loads(tmp_path, truth)


def test_rotary_frequencies_are_left_out_by_rule(tmp_path: Path) -> None:
    truth = write_hf(tmp_path, extra={"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)})

    assert any("rotary" in note for note in assert_loads(tmp_path, truth).facts.notes)


def test_a_snapshot_of_a_hub_cache_loads_through_its_links(tmp_path: Path) -> None:
    truth = write_hf(tmp_path / "real", shards=2)
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "real").iterdir():
        shutil.move(path, blobs / path.name)
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)

    assert_loads(snapshot, truth)


def test_more_rows_than_tokens_are_padding(tmp_path: Path) -> None:
    truth = write_hf(tmp_path, vocab_size=20)

    checkpoint = assert_loads(tmp_path, truth)

    assert (checkpoint.config.vocab_size, checkpoint.config.vocab_rows) == (20, SMALL.vocab_rows)


# heads


def test_a_tied_model_with_an_equal_head_shares_it(tmp_path: Path) -> None:
    embedding = random_tensors(TIED)["model.embed_tokens.weight"]
    truth = write_hf(tmp_path, TIED, extra={"lm_head.weight": embedding.clone()})

    checkpoint = assert_loads(tmp_path, truth)

    assert checkpoint.config.tied
    assert not checkpoint.facts.warnings


def test_a_tied_model_with_another_head_keeps_the_files_head_and_says_so(tmp_path: Path) -> None:
    head = torch.randn(SMALL.vocab_rows, SMALL.hidden_size).bfloat16()
    truth = write_hf(tmp_path, TIED, extra={"lm_head.weight": head})

    checkpoint = assert_loads(tmp_path, {**truth, "lm_head.weight": head})

    assert not checkpoint.config.tied
    assert "the file's head is used" in checkpoint.facts.warnings[0]


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    write_hf(tmp_path, drop=("lm_head.weight",))

    assert "lm_head.weight is missing" in refusal(tmp_path, LayoutMismatch)


# index and files


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()

    assert "names model-00002-of-00002.safetensors, which is not there" in refusal(tmp_path, CheckpointCorrupt)


def test_a_stale_index_is_called_stale(tmp_path: Path) -> None:
    write_hf(tmp_path, shards=2)
    for number in (1, 2):
        (tmp_path / f"model-0000{number}-of-00002.safetensors").rename(
            tmp_path / f"model-0000{number}-of-00009.safetensors"
        )

    message = refusal(tmp_path, CheckpointCorrupt)

    assert "model-00001-of-00002.safetensors" in message
    assert "stale" in message


def test_index_and_files_must_agree_both_ways(tmp_path: Path) -> None:
    write_hf(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    good = index.read_text(encoding="utf-8")

    edit_json(index, lambda value: value["weight_map"].pop("model.norm.weight"))
    assert "'model.norm.weight', but" in refusal(tmp_path, CheckpointCorrupt)

    index.write_text(good, encoding="utf-8")
    edit_json(index, lambda value: value["weight_map"].update({"model.other": "model-00001-of-00002.safetensors"}))
    assert "does not hold it" in refusal(tmp_path, CheckpointCorrupt)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    write_hf(tmp_path, shards=2)
    path = tmp_path / "model-00001-of-00002.safetensors"
    truth = random_tensors(SMALL)
    held = sorted(truth)[0::2]
    other = sorted(truth)[1]
    save_file({name: truth[name] for name in [*held, other]}, path)

    assert "places it in model-00002-of-00002.safetensors" in refusal(tmp_path, CheckpointCorrupt)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "..", "a/../b", 7, None, ""])
def test_index_names_that_leave_the_folder_are_refused(name: Any, tmp_path: Path) -> None:
    write_hf(tmp_path / "other")
    write_hf(tmp_path / "model", shards=2)
    edit_json(
        tmp_path / "model" / "model.safetensors.index.json",
        lambda value: value["weight_map"].update({"model.norm.weight": name}),
    )

    assert "file name" in refusal(tmp_path / "model", CheckpointCorrupt)


def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    write_hf(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (tmp_path / "model" / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")

    assert "leaves the checkpoint folder" in refusal(tmp_path / "model", CheckpointCorrupt)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config()), encoding="utf-8")
    assert "no weight file" in refusal(tmp_path, CheckpointNotFound)

    (tmp_path / "model.safetensors").mkdir()
    assert "model.safetensors, a folder" in refusal(tmp_path, CheckpointNotFound)

    (tmp_path / "model.safetensors").rmdir()
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n.")
    assert "pickles" in refusal(tmp_path, UnsupportedModel)


def test_shard_files_that_are_not_whole_are_named_with_their_sizes(tmp_path: Path) -> None:
    write_hf(tmp_path, shards=3)
    path = tmp_path / "model-00002-of-00003.safetensors"
    good = path.read_bytes()
    for data, words in (
        (good[:-4], f"{len(good) - 4} bytes; expected: {len(good)}"),
        (good + b"x", f"{len(good) + 1} bytes; expected: {len(good)}"),
        (b"", "is empty"),
        (good[:7], "has 7 bytes"),
        (good[:8], "cut short"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "LFS pointer"),
        (b"\xff" * 200, "claims a header"),
    ):
        path.write_bytes(data)
        message = refusal(tmp_path, CheckpointCorrupt)
        assert path.name in message
        assert words in message, message


def header_file(path: Path, header: Any, body: bytes) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + body)


def test_headers_with_holes_overlaps_and_doubled_keys_are_refused(tmp_path: Path) -> None:
    write_hf(tmp_path)
    path = tmp_path / "model.safetensors"

    def entry(start: int, stop: int) -> dict[str, Any]:
        return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}

    for header, words in (
        ({"a": entry(0, 4), "b": entry(6, 8)}, "hole"),
        ({"a": entry(0, 6), "b": entry(4, 8)}, "overlaps"),
        ({"a": entry(2, 8)}, "hole"),
        (b'{"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]}, "a": 1}', "twice"),
        ({"a": {"dtype": "U8", "shape": [7], "data_offsets": [0, 8]}}, "expected: 7"),
        ({"a": {"dtype": "U9", "shape": [8], "data_offsets": [0, 8]}}, "element type"),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 8]}}, "shape"),
        ({"a": {"dtype": "U8", "shape": [8.0], "data_offsets": [0, 8]}}, "shape"),
        ({"a": {"dtype": "U8", "shape": [8], "data_offsets": [8, 0]}}, "not a range"),
        ({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0]}}, "not a range"),
        ({"a": 7}, "element type"),
        (b"[]", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"}", "JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"\xff": 1}', "UTF-8"),
    ):
        header_file(path, header, b"x" * 8)
        message = refusal(tmp_path, CheckpointCorrupt)
        assert "model.safetensors" in message
        assert words in message, message


def test_missing_unknown_and_misshapen_weights_are_named_with_both_shapes(tmp_path: Path) -> None:
    write_hf(tmp_path, drop=("model.layers.1.mlp.up_proj.weight",))
    assert "lacks 1 weight(s): model.layers.1.mlp.up_proj.weight" in refusal(tmp_path, LayoutMismatch)

    write_hf(tmp_path, extra={"model.layers.2.mlp.up_proj.weight": torch.ones(2)})
    assert "model.layers.2.mlp.up_proj.weight' in model.safetensors" in refusal(tmp_path, LayoutMismatch)

    write_hf(tmp_path, intermediate_size=25)
    message = refusal(tmp_path, LayoutMismatch)
    assert "[24, 16], the model has [25, 16]" in message
    assert "model.safetensors" in message

    write_hf(tmp_path, num_hidden_layers=3)
    assert "model.layers.2" in refusal(tmp_path, LayoutMismatch)


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    write_hf(tmp_path, quantization_config={"quant_method": "fp8"})
    assert "quantised ('fp8')" in refusal(tmp_path, UnsupportedModel)

    truth = write_hf(tmp_path)
    for scale in ("weight_scale", "weight_scale_inv", None):
        name = "model.layers.0.mlp.up_proj."
        stored = {**truth, f"{name}weight": truth[f"{name}weight"].to(torch.float8_e4m3fn)}
        if scale is not None:
            stored[name + scale] = torch.ones(1)
        save_file(stored, tmp_path / "model.safetensors")
        assert "F8_E4M3" in refusal(tmp_path, UnsupportedModel)


# config.json


def described(**changes: Any) -> Any:
    return model_config(hf_config(**changes), {}, "config.json")


def test_rotary_scaling_is_read_in_old_and_new_spelling() -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    expected = RopeConfig(
        theta=5e5,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_context=32,
    )

    old = described(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    older = described(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3})
    new = described(rope_theta=..., rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})

    assert old.rope == older.rope == new.rope == expected
    assert described(rope_scaling=None).rope == RopeConfig(theta=10000.0)
    assert described(rope_scaling={"type": "linear", "factor": 2}).rope.factor == 2.0
    assert described(rope_scaling={"type": "dynamic", "factor": 2}).rope.original_context == SMALL.max_context
    yarn = described(rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}).rope
    assert (yarn.scaling, yarn.factor, yarn.original_context, yarn.attention_factor) == (
        "yarn",
        4.0,
        16,
        None,
    )


def test_defaults_are_those_of_each_family() -> None:
    bare = {"rope_theta": ..., "rms_norm_eps": ..., "num_key_value_heads": ..., "head_dim": ...}
    assert described(**bare).num_kv_heads == SMALL.num_heads
    assert described(**bare).head_dim == SMALL.hidden_size // SMALL.num_heads
    qwen3 = described(model_type="qwen3", head_dim=...)
    assert (qwen3.head_dim, qwen3.qk_norm) == (128, True)
    mixtral = described(model_type="mixtral", **bare | {"num_key_value_heads": 2})
    assert (mixtral.rope.theta, mixtral.norm_eps, mixtral.sliding_window) == (1e6, 1e-5, None)
    assert described(model_type="mistral").sliding_window == 4096
    assert described(model_type="mistral", sliding_window=None).sliding_window is None
    assert described(model_type="qwen2").sliding_window is None
    assert described(model_type="qwen2").qkv_bias
    assert not described(tie_word_embeddings=...).tied


def test_sliding_windows_are_read_where_all_layers_agree() -> None:
    qwen2: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}
    assert described(**qwen2, max_window_layers=0).sliding_window == 8
    assert described(**qwen2, max_window_layers=2).sliding_window is None
    assert described(**qwen2, layer_types=["sliding_attention"] * 2).sliding_window == 8
    for mixed in ({"max_window_layers": 1}, {"layer_types": ["sliding_attention", "full_attention"]}):
        with pytest.raises(UnsupportedModel, match="sliding window"):
            described(**qwen2, **mixed)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": ...}, "kind"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one for all layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}}, "truncate"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UnsupportedModel, match=word):
        described(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": ...},
        {"hidden_size": "16"},
        {"hidden_size": 0},
        {"hidden_size": -1},
        {"hidden_size": 2**63},
        {"hidden_size": 16.5},
        {"hidden_size": True},
        {"num_hidden_layers": 2**27},
        {"num_attention_heads": 3},
        {"head_dim": 3},
        {"rope_theta": -1.0},
        {"rope_theta": float("inf")},
        {"rope_scaling": []},
        {"tie_word_embeddings": "yes"},
        {"model_type": "mixtral", "num_local_experts": 2**20},
        {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3},
    ],
)
def test_values_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        described(**changes)

    assert "config.json" in caught.value.message


def test_a_model_type_may_come_from_the_architecture() -> None:
    assert described(model_type=..., architectures=["Qwen3ForCausalLM"]).family == "qwen3"
