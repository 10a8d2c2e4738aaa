"""Rotary frequencies against values recorded from transformers 5.24, and the angles made of them."""

from __future__ import annotations

import pytest
import torch

from gtp_serve.config import RopeConfig
from gtp_serve.errors import UsageError
from gtp_serve.ops.rope import attention_factor, inverse_frequencies, rotary_tables

HEAD = 16
RECORDED = {
    "linear": (
        RopeConfig(scaling="linear", factor=4.0),
        [0.25, 0.07905694, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05],
        1.0,
    ),
    "llama3": (
        RopeConfig(
            theta=500000.0,
            scaling="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context=8192,
        ),
        [1.0, 0.1939228, 0.03760603, 0.007292665, 0.000524846, 3.428102e-05, 6.64787e-06, 1.289173e-06],
        1.0,
    ),
    "yarn": (
        RopeConfig(scaling="yarn", factor=4.0, original_context=4096),
        [1.0, 0.3162278, 0.1, 0.02569351, 0.00625, 0.001383497, 0.00025, 7.905695e-05],
        1.138629436111989,
    ),
    "yarn with its own betas and factor": (
        RopeConfig(
            theta=1e6,
            scaling="yarn",
            factor=8.0,
            original_context=2048,
            beta_fast=16.0,
            beta_slow=2.0,
            attention_factor=1.25,
        ),
        [1.0, 0.1778279, 0.01778781, 0.0007029267, 0.000125, 2.222849e-05, 3.952847e-06, 7.029267e-07],
        1.25,
    ),
}


@pytest.mark.parametrize("case", RECORDED)
def test_frequencies_of_each_scaling_are_the_recorded_ones(case: str) -> None:
    rope, frequencies, factor = RECORDED[case]
    torch.testing.assert_close(inverse_frequencies(rope, HEAD), torch.tensor(frequencies), rtol=2e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)


def test_without_scaling_frequencies_fall_geometrically() -> None:
    frequencies = inverse_frequencies(RopeConfig(theta=16.0), 8)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.5, 0.25, 0.125]))


def test_dynamic_scaling_widens_each_position_by_its_own_context() -> None:
    rope = RopeConfig(scaling="dynamic", factor=2.0, original_context=64)
    of_200 = [1.0, 0.2495285, 0.06226445, 0.01553675, 0.003876863, 0.0009673875, 0.0002413907, 6.023386e-05]
    plain = inverse_frequencies(RopeConfig(), HEAD)
    positions = torch.tensor([199, 63, 3])
    cos, sin = rotary_tables(rope, inverse_frequencies(rope, HEAD), positions, torch.float32)
    expected = torch.stack([199 * torch.tensor(of_200), 63 * plain, 3 * plain])
    torch.testing.assert_close(cos, expected.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(sin, expected.sin(), rtol=0, atol=1e-4)


def test_yarn_multiplies_cos_and_sin() -> None:
    rope = RopeConfig(scaling="yarn", factor=4.0, original_context=4096)
    cos, sin = rotary_tables(rope, inverse_frequencies(rope, HEAD), torch.tensor([0, 5]), torch.float32)
    assert cos[0].tolist() == pytest.approx([1.138629436111989] * 8)
    torch.testing.assert_close(cos**2 + sin**2, torch.full((2, 8), 1.138629436111989**2))


@pytest.mark.parametrize("scaling", ["dynamic", "llama3", "yarn"])
def test_a_scaling_without_its_original_context_is_refused(scaling: str) -> None:
    rope = RopeConfig(scaling=scaling, factor=2.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="context length that the model was first trained with"):
        inverse_frequencies(rope, HEAD)
