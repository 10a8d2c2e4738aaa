from __future__ import annotations

import argparse
import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import (
    COMMON_KEY,
    SMALL,
    SMALL_MOE,
    append_item,
    common_args,
    drop_key,
    edit_metadata,
    hf_config,
    rename_key,
    saved,
    set_args,
    write_megatron,
)
from torch import Tensor

from gtp_serve.config import ModelConfig, RopeConfig
from gtp_serve.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    LayoutMismatch,
    UnsupportedModel,
    UsageError,
)
from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders import Checkpoint, SavedOverrides, open_checkpoint

torch.set_num_threads(1)

FC1 = "decoder.layers.mlp.linear_fc1.weight"


def load(path: Path, **options: Any) -> tuple[Checkpoint, dict[str, Tensor]]:
    checkpoint = open_checkpoint(path, **options)
    tensors = dict(checkpoint.tensors())
    checkpoint.close()
    return checkpoint, tensors


def assert_loads(path: Path, truth: dict[str, Tensor], **options: Any) -> Checkpoint:
    checkpoint, tensors = load(path, **options)
    assert tensors.keys() == truth.keys()
    assert all(torch.equal(tensors[name], value) for name, value in truth.items())
    return checkpoint


def refusal(path: Path, kind: type[Exception] = CheckpointError, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(path, **options)
    return str(caught.value)


# grids


@pytest.mark.parametrize("layout", ["padded", "logical"])
@pytest.mark.parametrize(
    ("config", "grid"),
    [
        (SMALL, Grid(tp=2, gtp=3, alignment=4)),
        (replace(SMALL, tied=True, qkv_bias=True, family="qwen2"), Grid(tp=1, gtp=4, alignment=8)),
        (replace(SMALL, qk_norm=True, family="qwen3"), Grid(tp=2, gtp=2, alignment=16, pp=2)),
        (SMALL_MOE, Grid(tp=2, gtp=2, etp=2, egtp=2, alignment=2, ep=3)),
        (replace(SMALL, sliding_window=9, family="mistral"), Grid(tp=2)),
        (replace(SMALL, num_kv_heads=1, num_heads=4), Grid(tp=1, gtp=2)),
        (replace(SMALL, qkv_bias=True, proj_bias=True, mlp_bias=True, family="qwen2"), Grid(tp=2, gtp=2)),
    ],
    ids=lambda value: value.family if isinstance(value, ModelConfig) else f"tp{value.tp}gtp{value.gtp}",
)
def test_every_grid_loads_as_it_was_written(config: ModelConfig, grid: Grid, layout: Any, tmp_path: Path) -> None:
    _, truth = write_megatron(tmp_path / "run", config, grid, layout=layout, pad_value=None)

    checkpoint = assert_loads(tmp_path / "run", truth)

    assert checkpoint.config == config
    assert checkpoint.facts.layout == (layout if max(grid.gtp, grid.egtp) > 1 else "plain")
    assert checkpoint.facts.fc1_permuted == (checkpoint.facts.layout == "padded")
    assert (checkpoint.facts.saved.tp, checkpoint.facts.saved.gtp) == (grid.tp, grid.gtp)
    assert not checkpoint.facts.warnings


def test_gate_and_up_come_apart_at_any_tensor_parallel_size(tmp_path: Path) -> None:
    for tp in (1, 2, 4):
        folder, truth = write_megatron(tmp_path / f"tp{tp}", replace(SMALL, vocab_rows=24), Grid(tp=tp))
        assert_loads(folder, truth)


# which folder


def test_the_newest_complete_iteration_is_taken(tmp_path: Path) -> None:
    write_megatron(tmp_path, iteration=10)
    write_megatron(tmp_path, iteration=200)

    checkpoint = open_checkpoint(tmp_path)

    assert (checkpoint.facts.iteration, checkpoint.facts.iterations) == (200, (10, 200))
    assert checkpoint.path.name == "iter_0000200"
    assert open_checkpoint(tmp_path, iteration=10).facts.iteration == 10
    assert open_checkpoint(tmp_path / "iter_0000010").facts.iteration == 10


def test_an_incomplete_newest_iteration_is_passed_over_with_a_warning_and_refused_by_number(
    tmp_path: Path,
) -> None:
    write_megatron(tmp_path, iteration=10)
    write_megatron(tmp_path, iteration=20)
    (tmp_path / "iter_0000020" / ".metadata").unlink()

    checkpoint = open_checkpoint(tmp_path)

    assert checkpoint.facts.iteration == 10
    assert any("iter_0000020 is newer but incomplete" in warning for warning in checkpoint.facts.warnings)
    assert "iter_0000020 is incomplete" in refusal(tmp_path, CheckpointCorrupt, iteration=20)
    assert "iter_0000020 is incomplete" in refusal(tmp_path / "iter_0000020", CheckpointCorrupt)
    assert "no iteration 30" in refusal(tmp_path, CheckpointNotFound, iteration=30)
    with pytest.raises(UsageError, match="single iteration"):
        open_checkpoint(tmp_path / "iter_0000010", iteration=20)
    shutil.rmtree(tmp_path / "iter_0000010")
    assert "no complete iteration" in refusal(tmp_path, CheckpointCorrupt)
    shutil.rmtree(tmp_path / "iter_0000020")
    assert "holds none" in refusal(tmp_path, CheckpointNotFound)


def test_other_formats_are_refused_by_name(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}', encoding="utf-8")
    assert "'zarr'" in refusal(tmp_path / "run", UnsupportedModel)

    (tmp_path / "old" / "iter_0000001" / "mp_rank_00").mkdir(parents=True)
    assert "old format" in refusal(tmp_path / "old", UnsupportedModel)


def test_a_wrong_folder_says_what_is_there_instead(tmp_path: Path) -> None:
    write_megatron(tmp_path / "run", iteration=10)
    (tmp_path / "run" / "latest").mkdir()

    message = refusal(tmp_path / "run" / "latest", CheckpointNotFound)

    assert "looked for" in message
    assert "iter_0000010/ one level up" in message
    assert f"--ckpt {tmp_path / 'run'}" in message
    assert "run/" in refusal(tmp_path, CheckpointNotFound)
    assert "does not exist" in refusal(tmp_path / "nowhere", CheckpointNotFound)


# common state


def test_common_pt_and_the_state_inside_say_the_same(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    inside = assert_loads(folder, truth)
    args = common_args(folder)
    edit_metadata(folder, lambda m: drop_key(m, COMMON_KEY))
    (folder / "common.pt").write_bytes(saved({"args": argparse.Namespace(**args), "iteration": 1}))

    beside = assert_loads(folder, truth)

    assert beside.config == inside.config
    assert "common.pt" in beside.facts.format_text


def test_without_any_arguments_a_config_may_stand_in(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run", SMALL, Grid(tp=2, gtp=2, alignment=4))
    edit_metadata(folder, lambda m: drop_key(m, COMMON_KEY))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(hf_config(SMALL)), encoding="utf-8")

    message = refusal(folder, CheckpointCorrupt)
    assert "common.pt" in message
    assert "--saved-config" in message

    checkpoint = assert_loads(folder, truth, saved=SavedOverrides(config=config))
    assert (checkpoint.facts.saved.tp, checkpoint.facts.saved.gtp) == (2, 2)


def test_a_config_that_contradicts_the_arguments_is_refused(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(hf_config(SMALL, rms_norm_eps=1e-6)), encoding="utf-8")
    assert "norm_eps" in refusal(folder, LayoutMismatch, saved=SavedOverrides(config=config))

    config.write_text(json.dumps(hf_config(SMALL)), encoding="utf-8")
    assert_loads(folder, truth, saved=SavedOverrides(config=config))


def test_saved_sizes_fill_gaps_and_never_contradict(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run", SMALL, Grid(tp=2, gtp=2, alignment=4))
    assert "--saved-tp 4 contradicts" in refusal(folder, LayoutMismatch, saved=SavedOverrides(tp=4))

    set_args(folder, tensor_model_parallel_size=..., gtp_weight_remat_size=..., expert_tensor_parallel_size=...)
    assert_loads(folder, truth)
    assert_loads(folder, truth, saved=SavedOverrides(tp=2, gtp=2))
    for wrong in (SavedOverrides(tp=4), SavedOverrides(gtp=4), SavedOverrides(gtp=1)):
        refusal(folder, LayoutMismatch, saved=wrong)


def test_arguments_that_contradict_the_grid_are_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run", SMALL, Grid(tp=2, gtp=2, alignment=4))
    set_args(folder, tensor_model_parallel_size=4)
    assert "TP 4" in refusal(folder, LayoutMismatch)
    set_args(folder, tensor_model_parallel_size=2, gtp_weight_remat_size=8)
    refusal(folder, LayoutMismatch)


# arguments


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("normalization", "LayerNorm"),
        ("swiglu", False),
        ("position_embedding_type", "learned_absolute"),
        ("position_embedding_type", "none"),
        ("rotary_percent", 0.5),
        ("rotary_interleaved", True),
        ("layernorm_zero_centered_gamma", True),
        ("apply_layernorm_1p", True),
        ("apply_residual_connection_post_layernorm", True),
        ("multi_latent_attention", True),
        ("qk_l2_norm", True),
        ("attention_output_gate", True),
        ("squared_relu", True),
        ("quick_geglu", True),
        ("glu_linear_offset", 1.0),
        ("activation_func_clamp_value", 7.0),
        ("softmax_type", "learnable"),
        ("softmax_scale", 0.5),
        ("no_rope_freq", 4),
        ("no_rope_freq", [0, 1]),
        ("window_attn_skip_freq", 2),
        ("window_size", (4, 4)),
        ("window_size", "wide"),
        ("use_mup", True),
        ("experimental_attention_variant", "dsa"),
        ("heterogeneous_layers_config_path", "x.json"),
        ("hybrid_layer_pattern", "M*-M*-"),
    ],
)
def test_arguments_that_change_the_computation_are_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    set_args(folder, **{name: value})

    assert name in refusal(folder, UnsupportedModel)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_topk_scaling_factor", 2.5),
        ("moe_router_enable_expert_bias", True),
        ("moe_router_num_groups", 2),
        ("moe_router_group_topk", 1),
        ("moe_layer_freq", 2),
        ("moe_layer_freq", [0, 1]),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_latent_size", 8),
        ("moe_apply_probs_on_input", True),
        ("add_bias_linear", True),
    ],
)
def test_router_arguments_that_change_the_computation_are_refused_by_name(
    name: str, value: Any, tmp_path: Path
) -> None:
    folder, _ = write_megatron(tmp_path / "run", SMALL_MOE)
    set_args(folder, **{name: value})

    assert name in refusal(folder, UnsupportedModel)


def test_arguments_are_mapped_to_the_models_fields(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run", SMALL_MOE)

    def described(**changes: Any) -> ModelConfig:
        set_args(folder, **changes)
        return open_checkpoint(folder).config

    assert described(moe_router_pre_softmax=True).moe != SMALL_MOE.moe
    assert described(moe_router_pre_softmax=False).moe == SMALL_MOE.moe
    assert described(moe_layer_freq=[1, 1]).moe == SMALL_MOE.moe
    assert described(window_size=(7, 0)).sliding_window == 8
    assert described(window_size=(-1, 0)).sliding_window is None
    assert described(window_size=None, use_rope_scaling=True, rope_scaling_factor=32.0).rope == RopeConfig(
        scaling="llama3", factor=32.0, original_context=8192
    )
    assert described(use_rope_scaling=False, rotary_seq_len_interpolation_factor=4).rope == RopeConfig(
        scaling="linear", factor=4.0
    )
    assert described(rotary_seq_len_interpolation_factor=None, rotary_base=5000).rope == RopeConfig(theta=5000.0)
    yarn = described(
        position_embedding_type="yarn",
        rotary_scaling_factor=4.0,
        yarn_original_max_position_embeddings=16,
        mscale=1.0,
    ).rope
    assert (yarn.scaling, yarn.factor, yarn.original_context) == ("yarn", 4.0, 16)
    assert yarn.attention_factor == pytest.approx(0.1 * 1.3862943611198906 + 1)
    assert described(position_embedding_type="rope", moe_expert_capacity_factor=1.0).moe == SMALL_MOE.moe
    assert any("drops tokens" in warning for warning in open_checkpoint(folder).facts.warnings)


@pytest.mark.parametrize(
    "name", ["num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "normalization", "swiglu"]
)
def test_a_missing_argument_is_named_with_what_can_replace_it(name: str, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    set_args(folder, **{name: ...})

    message = refusal(folder, CheckpointCorrupt)

    assert name in message
    assert "--saved-config" in message


@pytest.mark.parametrize("value", [0, -1, 2.5, "2", 2**63, float("nan"), True, [2]])
def test_an_argument_of_the_wrong_kind_is_refused_by_name(value: Any, tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    set_args(folder, num_layers=value)

    assert "num_layers" in refusal(folder, CheckpointError)


# vocabulary and head


def test_tensors_win_over_a_wrong_padded_vocabulary_with_a_warning(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run", replace(SMALL, vocab_size=20))
    set_args(folder, padded_vocab_size=128)

    checkpoint = assert_loads(folder, truth)

    assert (checkpoint.config.vocab_size, checkpoint.config.vocab_rows) == (20, 22)
    warning = next(w for w in checkpoint.facts.warnings if "vocabulary" in w)
    assert "128" in warning
    assert "22" in warning


def test_a_padded_vocabulary_that_the_saved_divisor_does_not_give_is_told_where_nothing_else_tells(
    tmp_path: Path,
) -> None:
    folder, truth = write_megatron(tmp_path / "run", replace(SMALL, vocab_size=20), Grid(tp=2, gtp=2, alignment=4))
    set_args(folder, make_vocab_size_divisible_by=11)
    assert assert_loads(folder, truth).facts.warnings == ()

    set_args(folder, padded_vocab_size=24)
    warnings = open_checkpoint(folder).facts.warnings

    assert len(warnings) == 1
    assert "padded_vocab_size is 24, and by make_vocab_size_divisible_by it is 22" in warnings[0]
    plain, truth = write_megatron(tmp_path / "plain", replace(SMALL, vocab_size=20), Grid(tp=2))
    set_args(plain, make_vocab_size_divisible_by=5)
    assert assert_loads(plain, truth).facts.warnings == ()  # the stored tensor itself says how many rows it has


def test_without_a_vocabulary_size_all_rows_are_tokens(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    set_args(folder, vocab_size=None)

    assert assert_loads(folder, truth).config.vocab_size == SMALL.vocab_rows


def test_a_vocabulary_larger_than_the_tensors_is_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    set_args(folder, vocab_size=100, padded_vocab_size=128)

    assert "fewer than the 100 tokens" in refusal(folder, LayoutMismatch)


def test_embedding_and_head_of_different_size_are_named_with_both_shapes(tmp_path: Path) -> None:
    small, _ = write_megatron(tmp_path / "run")

    def shrink(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["output_layer.weight"]
        tensor.size = torch.Size([20, 16])
        tensor.chunks[0].sizes = torch.Size([20, 16])

    edit_metadata(small, shrink)

    message = refusal(small, LayoutMismatch)

    assert "[22, 16]" in message
    assert "[20, 16]" in message


def test_a_dead_head_of_a_tied_model_is_ignored_with_a_warning(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    set_args(folder, untie_embeddings_and_output_weights=False)
    del truth["lm_head.weight"]

    checkpoint = assert_loads(folder, truth)

    assert checkpoint.config.tied
    assert "output_layer.weight is ignored" in checkpoint.facts.warnings[0]


def test_an_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    edit_metadata(folder, lambda m: drop_key(m, "output_layer.weight"))

    assert "output_layer.weight is missing" in refusal(folder, LayoutMismatch)


# keys


def test_f5_unknown_missing_and_surplus_weights_are_named(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    good = (folder / ".metadata").read_bytes()

    edit_metadata(folder, lambda m: rename_key(m, FC1, "decoder.layers.mlp.fc1.weight"))
    assert "decoder.layers.mlp.fc1.weight" in refusal(folder, LayoutMismatch)

    (folder / ".metadata").write_bytes(good)
    edit_metadata(folder, lambda m: drop_key(m, FC1))
    assert "mlp.gate_proj.weight" in refusal(folder, LayoutMismatch)

    (folder / ".metadata").write_bytes(good)
    set_args(folder, num_layers=3)
    assert "[2, " in refusal(folder, LayoutMismatch)

    set_args(folder, num_layers=2, qk_layernorm=True)
    assert "q_norm" in refusal(folder, LayoutMismatch)

    set_args(folder, qk_layernorm=False, hidden_size=32)
    refusal(folder, LayoutMismatch)


def test_layers_are_exactly_those_of_the_model(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run", per_layer_keys=True)
    assert_loads(folder, truth)

    set_args(folder, num_layers=1)
    assert "layer 1" in refusal(folder, LayoutMismatch)
    set_args(folder, num_layers=4)
    assert "model.layers.2" in refusal(folder, LayoutMismatch)


def test_experts_that_no_rule_knows_are_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run", SMALL_MOE)
    old = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    edit_metadata(folder, lambda m: rename_key(m, old, old.replace("experts.experts", "experts.local")))

    assert "experts.local" in refusal(folder, LayoutMismatch)


def test_a_weight_without_chunks_is_refused(tmp_path: Path) -> None:
    folder, _ = write_megatron(tmp_path / "run")

    def edit(metadata: Any) -> None:
        metadata.state_dict_metadata[FC1].chunks = []
        metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != FC1}

    edit_metadata(folder, edit)

    refusal(folder, CheckpointError)


@pytest.mark.parametrize("wrapper", ["model.", "module.", "model.module."])
def test_weights_nested_in_a_saver_dictionary_load_the_same(wrapper: str, tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")

    def nest(metadata: Any) -> None:
        for key in [k for k in metadata.state_dict_metadata if k != COMMON_KEY]:
            rename_key(metadata, key, wrapper + key)

    edit_metadata(folder, nest)

    assert_loads(folder, truth)


def test_separate_layer_norms_load_the_same_as_fused_ones(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")

    def separate(metadata: Any) -> None:
        layers = "decoder.layers."
        rename_key(
            metadata,
            f"{layers}self_attention.linear_qkv.layer_norm_weight",
            f"{layers}input_layernorm.weight",
        )
        rename_key(metadata, f"{layers}mlp.linear_fc1.layer_norm_weight", f"{layers}pre_mlp_layernorm.weight")

    edit_metadata(folder, separate)

    assert_loads(folder, truth)


def test_extra_state_optimizer_and_prediction_layers_are_left_out_by_rule(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    append_item(folder, "decoder.layers.0.self_attention.core_attention._extra_state/shard_0_1", b"never opened")

    def add(metadata: Any) -> None:
        norm = "decoder.final_layernorm.weight"
        for prefix in ("optimizer.state.exp_avg.", "mtp.layers.0."):
            copy_key(folder, metadata, norm, prefix + norm)

    edit_metadata(folder, add)

    checkpoint = assert_loads(folder, truth)

    assert checkpoint.facts.optimizer_bytes > 0
    notes = " ".join(checkpoint.facts.notes)
    for words in ("_extra_state", "optimizer state", "multi-token prediction"):
        assert words in notes


def copy_key(folder: Path, metadata: Any, old: str, new: str) -> None:
    """Store a tensor again under another key."""
    index, info = next((i, x) for i, x in metadata.storage_data.items() if i.fqn == old)
    path = folder / info.relative_path
    data = path.read_bytes()[info.offset : info.offset + info.length]
    offset = path.stat().st_size
    with path.open("ab") as out:
        out.write(data)
    metadata.state_dict_metadata[new] = pickle.loads(pickle.dumps(metadata.state_dict_metadata[old]))
    metadata.storage_data[replace(index, fqn=new)] = replace(info, offset=offset)


def test_parts_of_a_chunk_that_spans_layers_are_read_apart(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    key = "decoder.layers.mlp.linear_fc2.weight"
    both = torch.stack([truth[f"model.layers.{n}.mlp.down_proj.weight"] for n in (0, 1)])
    data = saved(both)
    path = folder / "__0_0.distcp"
    offset = path.stat().st_size
    with path.open("ab") as out:
        out.write(data)

    def merge(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata[key]
        tensor.chunks = tensor.chunks[:1]
        tensor.chunks[0].sizes = torch.Size(both.shape)
        index, info = next((i, x) for i, x in metadata.storage_data.items() if i.fqn == key)
        metadata.storage_data = {i: x for i, x in metadata.storage_data.items() if i.fqn != key}
        metadata.storage_data[index] = replace(info, offset=offset, length=len(data))

    edit_metadata(folder, merge)

    assert_loads(folder, truth)


def test_f7_what_was_loaded_does_not_depend_on_the_files(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    _, tensors = load(folder)
    for path in folder.glob("*.distcp"):
        path.write_bytes(b"x" * path.stat().st_size)

    assert all(torch.equal(tensors[name], value) for name, value in truth.items())


def test_options_of_megatron_are_refused_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config()), encoding="utf-8")

    with pytest.raises(UsageError, match="--iteration 3"):
        open_checkpoint(tmp_path, iteration=3)
    with pytest.raises(UsageError, match="--saved-"):
        open_checkpoint(tmp_path, saved=SavedOverrides(tp=2))
