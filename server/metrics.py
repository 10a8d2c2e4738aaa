"""Prometheus metrics, in a registry of their own.  Names are frozen by a test: renaming one breaks users."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gtp_serve.refit.orders import UpdateRecord, WeightsStatus
from gtp_serve.server.metric_aliases import Aliases
from gtp_serve.server.options import Flavour
from gtp_serve.server.state import ServerState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Otherwise each counter comes with a second series that says when the process began.
disable_created_metrics()  # type: ignore[no-untyped-call]

Outcome = Literal["stop", "length", "abort", "client_gone", "refused", "error"]

_TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_QUEUE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_STALL = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_UPDATE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_E2E = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


class Metrics:
    """Counters that the routes move; the engine's gauges are read when they are asked for.

    :param aliases: other servers under whose names the numbers are told a second time.
    """

    def __init__(self, state: ServerState, *, aliases: Sequence[Flavour] = ()) -> None:
        registry = CollectorRegistry(auto_describe=True)
        self._registry = registry
        self.prompt_tokens = Counter(
            "gtp_serve_prompt_tokens", "Prompt tokens of requests that made a token", registry=registry
        )
        self.cached_prompt_tokens = Counter(
            "gtp_serve_cached_prompt_tokens", "Of these, from the prefix cache", registry=registry
        )
        self.generation_tokens = Counter("gtp_serve_generation_tokens", "Tokens generated", registry=registry)
        self.requests = Counter("gtp_serve_requests", "Ended requests", ["finish_reason"], registry=registry)
        self.ttft = Histogram(
            "gtp_serve_ttft_seconds", "From the request to its first token", buckets=_TTFT, registry=registry
        )
        self.itl = Histogram("gtp_serve_itl_seconds", "Between two tokens", buckets=_ITL, registry=registry)
        self.e2e = Histogram(
            "gtp_serve_e2e_seconds", "From the request to its last token", buckets=_E2E, registry=registry
        )
        self.queue = Histogram(
            "gtp_serve_queue_seconds",
            "From a request's arrival in the engine to its first step",
            buckets=_QUEUE,
            registry=registry,
        )
        self.startup = Gauge("gtp_serve_startup_seconds", "Start-up time", ["phase"], registry=registry)
        self._updates = Counter(
            "gtp_serve_weight_updates", "Weight updates that have ended", ["result", "kind"], registry=registry
        )
        self._update_seconds = Histogram(
            "gtp_serve_weight_update_seconds",
            "Of committed weight updates, by phase",
            ["phase"],
            buckets=_UPDATE,
            registry=registry,
        )
        self._update_stall = Histogram(
            "gtp_serve_weight_update_stall_seconds",
            "In which no step could run because of a committed update",
            buckets=_STALL,
            registry=registry,
        )
        self._update_bytes = Counter(
            "gtp_serve_weight_update_bytes", "Read from sources, and put into parameters", ["side"], registry=registry
        )
        registry.register(_EngineGauges(state))
        self._aliases = CollectorRegistry()
        for flavour in aliases:
            self._aliases.register(Aliases(registry, flavour, lambda: _model_name(state)))

    def add(self, collector: Collector) -> None:
        """Further numbers, asked for when these are."""
        self._registry.register(collector)

    def ended(self, outcome: Outcome, seconds: float | None = None) -> None:
        """One sequence is over; ``seconds`` since its request came, when it was answered."""
        self.requests.labels(outcome).inc()
        if seconds is not None:
            self.e2e.observe(seconds)

    def update_ended(self, record: UpdateRecord) -> None:
        """A weight update is over, whichever way."""
        result = "dry_run" if record.state == "verified" else record.state
        self._updates.labels(result, record.kind).inc()
        self._update_bytes.labels("source").inc(record.source_bytes)
        self._update_bytes.labels("target").inc(record.target_bytes)
        if record.state == "committed" and record.kind != "label":
            for phase, seconds in record.seconds.items():
                self._update_seconds.labels(phase).observe(seconds)
            self._update_stall.observe(record.stall_seconds)

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry) + generate_latest(self._aliases)


class _EngineGauges(Collector):
    """Gauges that live in the engine; absent until it serves."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def describe(self) -> Iterator[Metric]:
        """Nothing: asked for when it is registered, and then nothing serves yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        serving = self._state.serving
        if serving is None:
            return
        stats = serving.client.stats()
        used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
        yield GaugeMetricFamily("gtp_serve_requests_running", "Sequences that hold KV blocks", value=stats.running)
        yield GaugeMetricFamily("gtp_serve_requests_waiting", "Sequences in the queue", value=stats.waiting)
        yield GaugeMetricFamily("gtp_serve_calls_open", "Calls whose answer is not complete", self._state.num_calls)
        yield GaugeMetricFamily("gtp_serve_kv_usage_ratio", "Share of KV blocks in use", value=used)
        free = stats.kv_blocks_total - stats.kv_blocks_used
        yield GaugeMetricFamily("gtp_serve_kv_blocks_free", "KV blocks that no sequence holds", value=free)
        yield GaugeMetricFamily(
            "gtp_serve_last_step_age_seconds",
            "Seconds without a step while there is work",
            value=stats.last_step_age_seconds,
        )
        yield CounterMetricFamily(
            "gtp_serve_prefix_cache_queries", "Tokens looked up in the prefix cache", stats.prefix_queries_total
        )
        yield CounterMetricFamily("gtp_serve_prefix_cache_hits", "Of these, found", stats.prefix_hits_total)
        yield CounterMetricFamily(
            "gtp_serve_preemptions", "Sequences that gave up their KV to older ones", stats.preemptions_total
        )
        yield CounterMetricFamily(
            "gtp_serve_non_finite_logits",
            "Requests that ended because a logit was not a finite number",
            stats.non_finite_total,
        )
        weights = serving.client.weights
        under_way = weights.update is not None
        yield GaugeMetricFamily("gtp_serve_weight_update_under_way", "1: an update has not ended", value=under_way)
        torn = bool(weights.torn)
        yield GaugeMetricFamily("gtp_serve_weights_torn", "1: no whole weights, nothing serves", value=torn)
        yield GaugeMetricFamily("gtp_serve_engine_paused", "1: somebody holds the steps", value=weights.paused)
        version = GaugeMetricFamily("gtp_serve_weight_version_info", "Weights that serve", labels=["version", "source"])
        version.add_metric([weights.version or serving.engine.weight_version, _source(weights)], 1)
        yield version


def _model_name(state: ServerState) -> str:
    return "" if state.serving is None else state.serving.name


def _source(weights: WeightsStatus) -> str:
    """Where the weights that serve have come from: the newest update that was committed, whatever it was named."""
    kinds = (record.kind for record in weights.history if record.state == "committed" and record.kind != "label")
    return next(kinds, "checkpoint")
