"""Rotary frequencies against transformers' own functions, over many settings."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gtp_serve.config import RopeConfig
from gtp_serve.ops.rope import attention_factor, inverse_frequencies, rotary_tables

SETTINGS = list(itertools.product([32, 64, 128], [10000.0, 1e6], [1.0, 4.0, 32.0], [512, 8192]))


def theirs(head_dim: int, max_positions: int, rope: dict[str, Any], **call: Any) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=rope,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, **call)
    return frequencies, factor


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="transformers")


@pytest.mark.parametrize(("head_dim", "theta", "factor", "original"), SETTINGS)
@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn"])
def test_frequencies_agree(scaling: Any, head_dim: int, theta: float, factor: float, original: int) -> None:
    extra: dict[str, dict[str, Any]] = {
        "linear": {},
        "llama3": {"low_freq_factor": 1.5, "high_freq_factor": 6.0},
        "yarn": {"beta_fast": 24.0, "beta_slow": 1.5},
    }
    ours = RopeConfig(theta=theta, scaling=scaling, factor=factor, original_context=original, **extra[scaling])
    rope = {"rope_type": scaling, "rope_theta": theta, "factor": factor, **extra[scaling]}
    if scaling != "linear":
        rope["original_max_position_embeddings"] = original
    expected, expected_factor = theirs(head_dim, int(original * factor) + 1, rope)
    torch.testing.assert_close(inverse_frequencies(ours, head_dim), expected, rtol=1e-6, atol=0)
    assert attention_factor(ours) == pytest.approx(expected_factor, rel=1e-12)


@pytest.mark.parametrize("context", [100, 512, 513, 2000, 9000])
def test_dynamic_frequencies_agree_at_every_context_length(context: int) -> None:
    rope = RopeConfig(scaling="dynamic", factor=3.0, original_context=512)
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
    expected, _ = theirs(64, 512, parameters, seq_len=context)
    position = context - 1
    cos, sin = rotary_tables(rope, inverse_frequencies(rope, 64), torch.tensor([position]), torch.float32)
    torch.testing.assert_close(cos[0], (position * expected).cos(), rtol=0, atol=2e-3)
    torch.testing.assert_close(sin[0], (position * expected).sin(), rtol=0, atol=2e-3)
