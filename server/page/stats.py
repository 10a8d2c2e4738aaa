"""The numbers of ``/stats``: gauges as they are, rates and percentiles of the time since an earlier look.

Nothing runs in the background: each look leaves a sample behind, and later looks compare themselves with it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Histogram

from gtp_serve import __version__
from gtp_serve.engine.messages import EngineStats
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.state import ServerState, Serving

RATE_SECONDS = 5.0
LATENCY_SECONDS = 60.0
_APART_SECONDS = 0.5
"""Looks that follow one another faster leave no sample."""
_QUANTILES = (50, 90, 99)

Buckets = tuple[tuple[float, float], ...]
"""(upper bound in seconds, observations up to it), the last bound infinite."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sample:
    at: float
    prompt: float
    generation: float
    cached: float
    latencies: dict[str, Buckets]


class Stats:
    """What ``/stats`` tells, and the samples of the last minute."""

    def __init__(self, state: ServerState, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._histograms = {"ttft": metrics.ttft, "itl": metrics.itl, "e2e": metrics.e2e, "queue": metrics.queue}
        self._clock = clock
        self._started = clock()
        self._samples: deque[_Sample] = deque()

    def read(self) -> dict[str, Any]:
        """The whole answer; before the engine serves only where the server is in its life."""
        now = self._clock()
        body: dict[str, Any] = {
            "version": __version__,
            "time": time.time(),
            "uptime_seconds": round(now - self._started, 3),
            **self._state.status(),
        }
        serving = self._state.serving
        if serving is None:
            return body
        stats = serving.client.stats()
        sample = self._sample(now, stats)
        body |= _gauges(serving, stats) | self._rates(sample) | {"latency": self._latency(sample)}
        body["requests_by_version"] = self._state.by_version.read()
        self._keep(sample)
        return body

    def _sample(self, now: float, stats: EngineStats) -> _Sample:
        return _Sample(
            at=now,
            prompt=stats.prompt_tokens_total,
            generation=stats.generation_tokens_total,
            cached=stats.cached_tokens_total,
            latencies={name: _buckets(one) for name, one in self._histograms.items()},
        )

    def _keep(self, sample: _Sample) -> None:
        if not self._samples or sample.at - self._samples[-1].at >= _APART_SECONDS:
            self._samples.append(sample)
        while self._samples and sample.at - self._samples[0].at > LATENCY_SECONDS + 1:
            self._samples.popleft()

    def _earlier(self, now: float, seconds: float) -> _Sample | None:
        """The oldest sample that is no older than that."""
        return next((one for one in self._samples if now - one.at <= seconds), None)

    def _rates(self, sample: _Sample) -> dict[str, Any]:
        """Tokens per second; null at the first look, which has nothing to compare with."""
        before = self._earlier(sample.at, RATE_SECONDS)
        seconds = 0.0 if before is None else sample.at - before.at
        if before is None or seconds < _APART_SECONDS / 2:
            return {"prompt_tokens_per_second": None, "generation_tokens_per_second": None, "cached_share": None}
        prompt, cached = sample.prompt - before.prompt, sample.cached - before.cached
        return {
            "prompt_tokens_per_second": round(prompt / seconds, 2),
            "generation_tokens_per_second": round((sample.generation - before.generation) / seconds, 2),
            "cached_share": round(cached / (prompt + cached), 4) if prompt + cached > 0 else None,
        }

    def _latency(self, sample: _Sample) -> dict[str, Any]:
        """Percentiles of what ended since the earlier look, or since the start where there was none."""
        before = self._earlier(sample.at, LATENCY_SECONDS)
        window = sample.at - (self._started if before is None else before.at)
        found: dict[str, Any] = {"window_seconds": round(window, 1)}
        for name, buckets in sample.latencies.items():
            old = before.latencies[name] if before is not None else tuple((bound, 0.0) for bound, _ in buckets)
            fresh = tuple((bound, count - was) for (bound, count), (_, was) in zip(buckets, old, strict=True))
            found[name] = {"count": int(fresh[-1][1]), **{f"p{q}": quantile(fresh, q / 100) for q in _QUANTILES}}
        return found


def _gauges(serving: Serving, stats: EngineStats) -> dict[str, Any]:
    weights, engine = serving.client.weights, serving.engine
    newest = weights.history[0].id if weights.history else None
    return {
        "name": serving.name,
        "model_type": engine.model.family,
        "device": engine.device,
        "tp": engine.tp,
        "dtype": engine.dtype,
        "max_context": engine.max_context,
        "has_tokenizer": serving.tokenizer is not None,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_blocks_used": stats.kv_blocks_used,
        "kv_blocks_total": stats.kv_blocks_total,
        "kv_tokens_total": stats.kv_blocks_total * engine.cache.block_size,
        "prompt_tokens_total": stats.prompt_tokens_total,
        "generation_tokens_total": stats.generation_tokens_total,
        "cached_tokens_total": stats.cached_tokens_total,
        "preemptions_total": stats.preemptions_total,
        "requests_total": dict(stats.requests_total),
        "steps_total": stats.steps_total,
        "weight_version": weights.version or engine.weight_version,
        # Enough to see that GET /weights has news, without telling what it tells.
        "weights": {
            "update": weights.update.state if weights.update is not None else None,
            "ended": len(weights.history),
            "newest": newest,
        },
    }


def _buckets(histogram: Histogram) -> Buckets:
    found = [
        (float(sample.labels["le"]), sample.value)
        for one in histogram.collect()
        for sample in one.samples
        if sample.name.endswith("_bucket")
    ]
    return tuple(sorted(found))


def quantile(buckets: Sequence[tuple[float, float]], share: float) -> float | None:
    """A quantile out of cumulative buckets, linear inside a bucket; None of nothing.

    What lies in the last, open bucket counts as its lower bound.
    """
    total = buckets[-1][1]
    if total <= 0:
        return None
    rank, low, below = share * total, 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound):
                return low
            return round(low + (bound - low) * (rank - below) / (count - below), 6)
        low, below = bound, count
    return low
