"""Prometheus metrics of each replica, with its name and node as labels, on every front's ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gtp_serve.cluster.client import FleetClient

_LABELS = ("replica", "node")
_GAUGES = {
    "running": ("gtp_serve_replica_requests_running", "Sequences that hold KV blocks"),
    "waiting": ("gtp_serve_replica_requests_waiting", "Sequences in the queue"),
}
_COUNTERS = {
    "generation_tokens_total": ("gtp_serve_replica_generation_tokens", "Tokens generated"),
    "prompt_tokens_total": ("gtp_serve_replica_prompt_tokens", "Prompt tokens computed"),
    "prefix_queries_total": ("gtp_serve_replica_prefix_cache_queries", "Tokens looked up in the prefix cache"),
    "prefix_hits_total": ("gtp_serve_replica_prefix_cache_hits", "Of these, found"),
    "preemptions_total": ("gtp_serve_replica_preemptions", "Sequences that gave up their KV"),
    "steps_total": ("gtp_serve_replica_steps", "Model steps"),
}


class ReplicaMetrics(Collector):
    """Numbers of all replicas, as this front last heard them."""

    def __init__(self, client: FleetClient) -> None:
        self._client = client

    def describe(self) -> Iterator[Metric]:
        """Nothing: they are known when they are asked for."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """One family for each number."""
        each = self._client.each()
        state = GaugeMetricFamily(
            "gtp_serve_replica_info", "1 for each replica", labels=[*_LABELS, "state", "weight_version"]
        )
        usage = GaugeMetricFamily("gtp_serve_replica_kv_usage_ratio", "Share of KV blocks in use", labels=_LABELS)
        for view, stats, _ in each:
            state.add_metric([view.name, view.node, view.state, view.version], 1)
            used = stats.kv_blocks_used / stats.kv_blocks_total if stats.kv_blocks_total else 0.0
            usage.add_metric([view.name, view.node], used)
        yield state
        yield usage
        for field, (name, words) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, words, labels=_LABELS)
            for view, stats, _ in each:
                gauge.add_metric([view.name, view.node], getattr(stats, field))
            yield gauge
        for field, (name, words) in _COUNTERS.items():
            counter = CounterMetricFamily(name, words, labels=_LABELS)
            for view, stats, _ in each:
                counter.add_metric([view.name, view.node], getattr(stats, field))
            yield counter
        yield GaugeMetricFamily(
            "gtp_serve_replicas_wanted", "Replicas that there should be", value=self._client.view.status.wanted
        )
        yield CounterMetricFamily(
            "gtp_serve_requests_moved", "Requests that another replica took over", self._client.retries_total
        )
