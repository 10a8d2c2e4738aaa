"""What a run of ``bench`` amounts to: rates, percentiles, the tail, and what pushes cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gtp_serve.server.bench_load import Sample
from gtp_serve.server.bench_push import Push

PERCENTILES = (50, 90, 99)
_TAIL_SHARE = 0.9
_BUCKETS = 200
_LEAST_BUCKET = 0.1


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so many per cent of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def summarise(samples: Sequence[Sample], pushes: Sequence[Push], seconds: float) -> dict[str, Any]:
    """Everything as JSON values; times in seconds, rates in tokens a second.

    :param seconds: the whole run.
    """
    good = [sample for sample in samples if not sample.error and sample.arrivals]
    prompt = sum(sample.prompt_tokens for sample in good)
    cached = sum(sample.cached_tokens for sample in good)
    output = sum(sample.tokens for sample in samples)
    return {
        "seconds": seconds,
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "first_failure": next((sample.error for sample in samples if sample.error), None),
        "input_tokens": prompt,
        "output_tokens": output,
        "input_tokens_per_second": prompt / seconds,
        "output_tokens_per_second": output / seconds,
        "cached_share": cached / prompt if prompt else 0.0,
        "ttft": _spread([sample.arrivals[0][0] - sample.sent for sample in good]),
        "itl": _spread(_gaps(good)),
        "e2e": _spread([sample.ended - sample.sent for sample in good]),
        "output_length": _spread([float(sample.tokens) for sample in good]),
        "tail_share": _tail(good, seconds),
        "pushes": [_cost(push, samples, pushes, seconds) for push in pushes],
        "mixed_samples": sum(sample.versions > 1 for sample in good),
    }


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = {f"p{share}": percentile(values, share) for share in PERCENTILES}
    return {"mean": sum(values) / len(values), **found, "max": max(values)}


def _gaps(samples: Sequence[Sample]) -> list[float]:
    """Seconds from one token to the next; tokens that came together share the wait for them."""
    gaps: list[float] = []
    for sample in samples:
        for (before, _), (now, count) in zip(sample.arrivals, sample.arrivals[1:], strict=False):
            gaps += [(now - before) / count] * count
    return gaps


def _tail(samples: Sequence[Sample], seconds: float) -> float:
    """Share of the run after nine tenths of the replies had ended."""
    if not samples:
        return 0.0
    return max(0.0, 1 - percentile([sample.ended for sample in samples], 100 * _TAIL_SHARE) / seconds)


def rate_between(samples: Sequence[Sample], start: float, end: float) -> float:
    """Tokens a second that came in a span of time."""
    if end <= start:
        return 0.0
    return sum(count for s in samples for at, count in s.arrivals if start <= at < end) / (end - start)


def _cost(push: Push, samples: Sequence[Sample], pushes: Sequence[Push], seconds: float) -> dict[str, Any]:
    """A push beside as long a time just before it, cut where the push before it ended."""
    width = push.ended - push.began
    earlier = max([0.0, *(other.ended for other in pushes if other.ended <= push.began)])
    return {
        "version": push.version,
        "began": push.began,
        "seconds": width,
        "stall_seconds": push.stall_seconds,
        "error": push.error or None,
        "tokens_per_second_before": rate_between(samples, max(earlier, push.began - width), push.began),
        "tokens_per_second_during": rate_between(samples, push.began, min(push.ended, seconds)),
    }


def timeline(samples: Sequence[Sample], seconds: float) -> list[tuple[float, float, int]]:
    """(middle of a span, tokens a second, requests under way) over the run."""
    width = max(_LEAST_BUCKET, seconds / _BUCKETS)
    count = max(1, math.ceil(seconds / width))
    tokens = [0] * count
    for sample in samples:
        for at, number in sample.arrivals:
            tokens[min(count - 1, int(at / width))] += number
    points = []
    for index in range(count):
        middle = (index + 0.5) * width
        running = sum(sample.sent <= middle < sample.ended for sample in samples)
        points.append((middle, tokens[index] / width, running))
    return points
