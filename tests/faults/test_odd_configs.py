"""A ``config.json`` that contradicts itself, leaves out what it needs, or has a number that no angle can be made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import hf_config, write_hf

from gtp_serve.errors import CheckpointCorrupt, CheckpointError, LayoutMismatch
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.loaders.hf_config import model_config
from gtp_serve.ops.rope import attention_factor, inverse_frequencies

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def described(**changes: Any) -> Any:
    return model_config(hf_config(**changes), {}, "config.json")


@pytest.mark.parametrize(
    ("scaling", "missing"),
    [
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": None}, "factor"),
        ({"type": "dynamic"}, "factor"),
        *[({k: v for k, v in LLAMA3.items() if k != name}, name) for name in LLAMA3 if name != "rope_type"],
    ],
)
def test_a_rotary_scaling_without_its_numbers_is_refused_and_not_made_up(scaling: dict[str, Any], missing: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=f"rope_scaling does not say {missing}"):
        described(rope_scaling=scaling)


def test_a_rotary_type_of_null_does_not_hide_the_old_name() -> None:
    rope = described(rope_scaling={"rope_type": None, "type": "linear", "factor": 2.0}).rope
    assert (rope.scaling, rope.factor) == ("linear", 2.0)


def test_two_spellings_of_the_rotary_scaling_must_agree() -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    assert described(rope_parameters=linear, rope_scaling=linear).rope.factor == 2.0
    for other in ({**linear, "factor": 8.0}, {"rope_type": "default"}):
        with pytest.raises(LayoutMismatch, match="both rope_parameters and rope_scaling, and they differ"):
            described(rope_parameters=other, rope_scaling=linear)


def test_the_original_context_may_stand_beside_the_context() -> None:
    for scaling in (LLAMA3, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "dynamic", "factor": 4.0}):
        assert described(rope_scaling=scaling, original_max_position_embeddings=16).rope.original_context == 16
        inside = {**scaling, "original_max_position_embeddings": 32}
        assert described(rope_scaling=inside, original_max_position_embeddings=16).rope.original_context == 32


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_sliding_window_of_null_is_none_though_it_is_switched_on(family: str) -> None:
    on: dict[str, Any] = {"model_type": family, "use_sliding_window": True, "max_window_layers": 0}
    if family == "qwen3_moe":
        on |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    assert described(**on, sliding_window=None).sliding_window is None
    assert described(**on).sliding_window == 4096


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_theta": 1.0}, "theta of the rotary embedding is 1; possible: 1.001 to 1e+15"),
        ({"rope_theta": 1e-300}, "theta of the rotary embedding is 1e-300"),
        ({"rope_theta": 1e300}, "theta of the rotary embedding is 1e+300"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-300}}, "factor of the rotary embedding is 1e-300"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 1e308}}, "factor of the rotary embedding is 1e+308"),
        ({"rope_scaling": {**YARN, "beta_fast": 1e308}}, "beta_fast of the rotary embedding is 1e+308"),
        ({"rope_scaling": {**YARN, "beta_slow": 1e-300}}, "beta_slow of the rotary embedding is 1e-300"),
        ({"rope_scaling": {**YARN, "beta_slow": 32, "beta_fast": 1}}, "beta_slow 32 of the rotary .* not below"),
        ({"rope_scaling": {**YARN, "attention_factor": 1e300}}, "attention_factor of the rotary embedding is 1e+300"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor 4 of the rotary .* not below"),
        ({"head_dim": 2, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "heads of 2 elements"),
    ],
)
def test_numbers_of_which_no_angle_can_be_made_are_refused_before_anything_is_loaded(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    write_hf(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=words.replace("+", r"\+")) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path / "config.json") in caught.value.message


@pytest.mark.parametrize("head_dim", [2, 4, 256])
@pytest.mark.parametrize("extreme", [0, 1])
def test_at_the_ends_of_their_ranges_all_angles_are_numbers(extreme: int, head_dim: int) -> None:
    theta, number, gain = (1.001, 1e15)[extreme], (1e-3, 1e6)[extreme], (1e-3, 1e3)[extreme]
    betas = {"beta_fast": (2e-3, 1e6)[extreme], "beta_slow": (1e-3, 9e5)[extreme]}
    scalings: list[dict[str, Any]] = [
        {"rope_type": "linear", "factor": number},
        {**YARN, "factor": number, **betas, "attention_factor": gain},
        {**LLAMA3, "factor": number, "low_freq_factor": 1e-3, "high_freq_factor": 1e6},
    ]
    for scaling in scalings:
        rope = described(rope_theta=theta, head_dim=head_dim, rope_scaling=scaling).rope
        assert inverse_frequencies(rope, head_dim).isfinite().all(), scaling
        assert 0 < attention_factor(rope) < 1e4
