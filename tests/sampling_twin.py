"""Sampling written out in plain Python for one row: what the vectorised code must agree with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from gtp_serve.ops.sampling import uniform
from gtp_serve.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one row must give."""

    token: int
    margin: float
    """Relative distance of the nearest decision from its border: below 1e-6 rounding may decide otherwise."""
    logprobs: Mapping[int, float]
    """Of each id that could be drawn, in the distribution that was drawn from."""


def shaped(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> list[float]:
    """Penalties and bias, in float32, in the documented order."""
    f32 = np.float32
    result: list[float] = []
    for token, raw in enumerate(logits):
        value = f32(raw)
        if token in prompt or token in output:
            repetition = f32(params.repetition_penalty)
            value = value / repetition if value > 0 else value * repetition
        value = value - f32(params.presence_penalty) * f32(token in output)
        value = value - f32(params.frequency_penalty) * f32(output.count(token) if token in output else 0)
        value = value + f32(params.logit_bias.get(token, 0.0))
        result.append(float(value))
    return result


def choose(logits: Sequence[float], banned: Sequence[int], params: SamplingParams, seed: int, index: int) -> Choice:
    """Filters in the documented order, then the random number."""
    named = params.allowed_token_ids or range(len(logits))
    allowed = [token for token in sorted(named) if token not in banned]
    order = sorted(allowed, key=lambda token: (-logits[token], token))
    if params.temperature < 1e-6:
        return Choice(token=order[0], margin=1.0, logprobs={order[0]: 0.0})
    best = logits[order[0]]
    weights = [math.exp((logits[token] - best) / params.temperature) for token in order]
    margin = 1.0
    if params.top_k > 0:
        weights = weights[: params.top_k]
    if params.top_p < 1:
        mass, before, kept = math.fsum(weights), 0.0, 0
        for weight in weights:
            margin = min(margin, abs(before / mass - params.top_p))
            if before >= params.top_p * mass:
                break
            before, kept = before + weight, kept + 1
        weights = weights[:kept]
    if 0 < params.min_p < 1:
        margin = min(margin, *(abs(weight - params.min_p) for weight in weights))
    weights = [weight for weight in weights if weight >= params.min_p]
    sums = list(accumulate(weights))
    target = uniform(seed, index) * sums[-1]
    place = next(at for at, mass in enumerate(sums) if mass > target)
    margin = min(margin, *(abs(mass - target) / sums[-1] for mass in [*sums[:-1], math.inf]))
    logprobs = {
        token: math.log(weight / sums[-1]) if weight > 0 else -math.inf
        for token, weight in zip(order, weights, strict=False)
    }
    return Choice(token=order[place], margin=margin, logprobs=logprobs)
