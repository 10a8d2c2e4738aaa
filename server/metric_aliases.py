"""Our numbers a second time, under the names of another server, for the dashboards and autoscalers that read those.

Only what means the same is there; docs/operations.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gtp_serve.server.options import Flavour


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """One family of another server.

    :param name: without prefix and without ``_total``.
    :param label: the finish reason's name there; "": all reasons together.
    :param reasons: finish reasons that are counted, ours to theirs; None: the family is not about them.
    """

    name: str
    label: str = ""
    reasons: Mapping[str, str] | None = None


_ALL = {"stop": "stop", "length": "length", "abort": "abort", "client_gone": "abort", "error": "error"}
_ABORTED = {"abort": "abort", "client_gone": "abort"}

ALIASES: Mapping[Flavour, Mapping[str, tuple[Alias, ...]]] = {
    "vllm": {
        "requests_running": (Alias(name="num_requests_running"),),
        "requests_waiting": (Alias(name="num_requests_waiting"),),
        "kv_usage_ratio": (Alias(name="kv_cache_usage_perc"),),
        "prompt_tokens": (Alias(name="prompt_tokens"),),
        "cached_prompt_tokens": (Alias(name="prompt_tokens_cached"),),
        "generation_tokens": (Alias(name="generation_tokens"),),
        "preemptions": (Alias(name="num_preemptions"),),
        "prefix_cache_queries": (Alias(name="prefix_cache_queries"),),
        "prefix_cache_hits": (Alias(name="prefix_cache_hits"),),
        "requests": (Alias(name="request_success", label="finished_reason", reasons=_ALL),),
        "ttft_seconds": (Alias(name="time_to_first_token_seconds"),),
        "itl_seconds": (Alias(name="inter_token_latency_seconds"),),
        "e2e_seconds": (Alias(name="e2e_request_latency_seconds"),),
        "queue_seconds": (Alias(name="request_queue_time_seconds"),),
    },
    "sglang": {
        "requests_running": (Alias(name="num_running_reqs"),),
        "requests_waiting": (Alias(name="num_queue_reqs"),),
        "kv_usage_ratio": (Alias(name="token_usage"),),
        "prompt_tokens": (Alias(name="prompt_tokens"),),
        "cached_prompt_tokens": (Alias(name="cached_tokens"),),
        "generation_tokens": (Alias(name="generation_tokens"),),
        "preemptions": (Alias(name="num_retracted_requests"),),
        "requests": (
            Alias(name="num_requests", reasons=_ALL),
            Alias(name="num_aborted_requests", reasons=_ABORTED),
        ),
        "ttft_seconds": (Alias(name="time_to_first_token_seconds"),),
        "itl_seconds": (Alias(name="inter_token_latency_seconds"),),
        "e2e_seconds": (Alias(name="e2e_request_latency_seconds"),),
        "queue_seconds": (Alias(name="queue_time_seconds"),),
        "startup_seconds": (Alias(name="startup_time_seconds"),),
    },
}
"""Our family without ``gtp_serve_``: theirs."""

_EXTRA_LABELS: Mapping[Flavour, Mapping[str, str]] = {"vllm": {"engine": "0"}, "sglang": {}}


class Aliases(Collector):
    """The families of one other server, made of ours whenever they are asked for."""

    def __init__(self, registry: CollectorRegistry, flavour: Flavour, model_name: Callable[[], str]) -> None:
        self._registry = registry
        self._flavour: Flavour = flavour
        self._model_name = model_name

    def describe(self) -> Iterator[Metric]:
        """Nothing: asked for when it is registered, before there is a model."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every family of ours that has another name there."""
        labels = {"model_name": self._model_name(), **_EXTRA_LABELS[self._flavour]}
        table = ALIASES[self._flavour]
        for family in self._registry.collect():
            for alias in table.get(family.name.removeprefix("gtp_serve_"), ()):
                renamed = Metric(f"{self._flavour}:{alias.name}", family.documentation, family.type)
                for sample in _samples(family.samples, alias):
                    name = renamed.name + sample.name.removeprefix(family.name)
                    renamed.samples.append(sample._replace(name=name, labels={**labels, **sample.labels}))
                yield renamed


def _samples(samples: Iterable[Sample], alias: Alias) -> Iterable[Sample]:
    """As they are, or the counts by finish reason added up as the other server adds them."""
    if alias.reasons is None:
        return samples
    counts = dict.fromkeys(alias.reasons.values() if alias.label else [""], 0.0)
    for sample in samples:
        reason = alias.reasons.get(sample.labels["finish_reason"])
        if reason is not None:
            counts[reason if alias.label else ""] += sample.value
    return [
        Sample("gtp_serve_requests_total", {alias.label: reason} if alias.label else {}, count)
        for reason, count in counts.items()
    ]
