"""Rotary frequencies and tables, with the scaling variants as Hugging Face defines them.

Legend: T tokens, E head size, R = E / 2 rotated pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gtp_serve.config import RopeConfig
from gtp_serve.errors import UsageError


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair, [R] float32 on the CPU.

    ``dynamic`` gives the unscaled ones, which hold up to ``original_context``; see ``rotary_tables``.

    :raises UsageError: when the variant needs ``original_context`` and it is not set.
    """
    plain_R = 1.0 / rope.theta ** _exponents(head_dim)
    if rope.scaling == "none":
        return plain_R
    if rope.scaling == "linear":
        return plain_R / rope.factor
    if rope.original_context <= 0:
        raise UsageError(
            f"rotary scaling {rope.scaling} needs the context length that the model was first trained with",
            [("try", "set rope.original_context")],
        )
    if rope.scaling == "llama3":
        return _llama3(plain_R, rope)
    if rope.scaling == "yarn":
        return _yarn(rope, head_dim)
    return plain_R


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 but for yarn."""
    if rope.scaling != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def rotary_tables(
    rope: RopeConfig, inv_freq_R: Tensor, positions_T: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin of each token's angles, [T, R] each, computed in float32 and cast to ``dtype``.

    ``dynamic``: each position p takes the frequencies of a context of p + 1.  So a token's rotation depends
    on nothing but its position: not on the batch, not on how its prompt was cut.  Hugging Face's decoding
    with a cache rotates a new token in the same way.
    """
    freqs = _dynamic(rope, 2 * inv_freq_R.shape[0], positions_T) if rope.scaling == "dynamic" else inv_freq_R
    angles_TR = positions_T.float()[:, None] * freqs
    factor = attention_factor(rope)
    return (angles_TR.cos() * factor).to(dtype), (angles_TR.sin() * factor).to(dtype)


def _exponents(head_dim: int, device: torch.device | None = None) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim


def _dynamic(rope: RopeConfig, head_dim: int, positions_T: Tensor) -> Tensor:
    """[T, R]: the base grows with the context once that is longer than the original one."""
    context_T = (positions_T + 1).clamp(min=rope.original_context)
    growth_T = rope.factor * context_T / rope.original_context - (rope.factor - 1)
    base_T = rope.theta * growth_T ** (head_dim / (head_dim - 2))
    exponents_R: Tensor = _exponents(head_dim, positions_T.device)
    return 1.0 / base_T[:, None] ** exponents_R


def _llama3(plain_R: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are slowed by ``factor``, short ones kept, those between blended."""
    wavelength_R = 2 * math.pi / plain_R
    longest, shortest = (rope.original_context / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    keep_R = (rope.original_context / wavelength_R - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended_R = (1 - keep_R) * plain_R / rope.factor + keep_R * plain_R
    scaled_R = torch.where(wavelength_R > longest, plain_R / rope.factor, plain_R)
    between_R = (wavelength_R >= shortest) & (wavelength_R <= longest)
    return torch.where(between_R, blended_R, scaled_R)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often are kept, pairs that hardly turn slowed by ``factor``; a ramp lies between."""
    powers_R = rope.theta ** _exponents(head_dim)
    first = max(math.floor(_pair_with_turns(rope.beta_fast, rope, head_dim)), 0)
    last = min(math.ceil(_pair_with_turns(rope.beta_slow, rope, head_dim)), head_dim - 1)
    width = last - first or 0.001
    slowed_R = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept_R = 1 - slowed_R
    # kept_R is subtracted from 1 again because the recorded values come from exactly these roundings.
    return 1.0 / (rope.factor * powers_R) * (1 - kept_R) + 1.0 / powers_R * kept_R


def _pair_with_turns(turns: float, rope: RopeConfig, head_dim: int) -> float:
    """Index (fractional) of the pair that turns this often within the original context."""
    return head_dim * math.log(rope.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
