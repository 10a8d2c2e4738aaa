"""Names of metrics: ours, those of other servers, and the dashboard that uses ours."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes_server import FakeClient, engine_config
from prometheus_client.parser import text_string_to_metric_families

from gtp_serve.errors import UsageError
from gtp_serve.server.cli import parse_serve
from gtp_serve.server.metric_aliases import ALIASES
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.options import Flavour
from gtp_serve.server.state import ServerState, Serving

ROOT = Path(__file__).parents[2]

VLLM = """
vllm:e2e_request_latency_seconds histogram
vllm:generation_tokens_total counter
vllm:inter_token_latency_seconds histogram
vllm:kv_cache_usage_perc gauge
vllm:num_preemptions_total counter
vllm:num_requests_running gauge
vllm:num_requests_waiting gauge
vllm:prefix_cache_hits_total counter
vllm:prefix_cache_queries_total counter
vllm:prompt_tokens_cached_total counter
vllm:prompt_tokens_total counter
vllm:request_queue_time_seconds histogram
vllm:request_success_total counter
vllm:time_to_first_token_seconds histogram
"""
SGLANG = """
sglang:cached_tokens_total counter
sglang:e2e_request_latency_seconds histogram
sglang:generation_tokens_total counter
sglang:inter_token_latency_seconds histogram
sglang:num_aborted_requests_total counter
sglang:num_queue_reqs gauge
sglang:num_requests_total counter
sglang:num_retracted_requests_total counter
sglang:num_running_reqs gauge
sglang:prompt_tokens_total counter
sglang:queue_time_seconds histogram
sglang:startup_time_seconds gauge
sglang:time_to_first_token_seconds histogram
sglang:token_usage gauge
"""


def scraped(*aliases: Flavour) -> str:
    """The text of a server that has answered something."""
    state = ServerState()
    metrics = Metrics(state, aliases=aliases)
    state.set_serving(Serving(client=FakeClient(), engine=engine_config(), tokenizer=None, name="tiny"))
    for outcome in ("stop", "stop", "length", "abort", "client_gone", "refused", "error"):
        metrics.ended(outcome, 0.2 if outcome == "stop" else None)
    metrics.generation_tokens.inc(7)
    metrics.ttft.observe(0.3)
    metrics.startup.labels("total").set(4)
    return metrics.render().decode()


def types(text: str, prefix: str) -> list[str]:
    lines = (line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    return sorted(" ".join(words) for words in lines if words[0].startswith(prefix))


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """What a scraper reads; raises where the exposition is not well formed."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_no_foreign_name_appears_unless_it_is_asked_for() -> None:
    assert {line.split()[2][:10] for line in scraped().splitlines() if line.startswith("# TYPE")} == {"gtp_serve_"}


@pytest.mark.parametrize(("flavour", "names"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_names_and_types_are_the_other_servers(flavour: Flavour, names: str) -> None:
    assert types(scraped(flavour), f"{flavour}:") == names.split("\n")[1:-1]


def test_every_alias_is_of_a_family_that_exists() -> None:
    ours = {name.removeprefix("gtp_serve_").split()[0].removesuffix("_total") for name in types(scraped(), "gtp_")}

    assert {name for table in ALIASES.values() for name in table} - ours == set()


def test_an_alias_has_the_value_of_ours_and_the_labels_of_theirs() -> None:
    found = values(scraped("vllm", "sglang"))
    vllm, sglang = (("engine", "0"), ("model_name", "tiny")), (("model_name", "tiny"),)

    assert found["vllm:generation_tokens_total", vllm] == found["sglang:generation_tokens_total", sglang] == 7
    assert found["vllm:kv_cache_usage_perc", vllm] == found["gtp_serve_kv_usage_ratio", ()] == 0.1
    assert found["vllm:time_to_first_token_seconds_sum", vllm] == 0.3
    assert found["vllm:time_to_first_token_seconds_bucket", (vllm[0], ("le", "0.5"), vllm[1])] == 1
    assert found["sglang:startup_time_seconds", (*sglang, ("phase", "total"))] == 4


def test_ended_requests_are_counted_as_the_other_server_counts_them() -> None:
    found = values(scraped("vllm", "sglang"))

    by_reason = {
        dict(labels)["finished_reason"]: count
        for (name, labels), count in found.items()
        if name == "vllm:request_success_total"
    }
    assert by_reason == {"stop": 2, "length": 1, "abort": 2, "error": 1}  # a refused one never was a request there
    assert found["sglang:num_requests_total", (("model_name", "tiny"),)] == 6
    assert found["sglang:num_aborted_requests_total", (("model_name", "tiny"),)] == 2


def test_the_option_takes_one_name_or_both() -> None:
    assert parse_serve(["--ckpt", "x"]).metrics_aliases == ()
    assert parse_serve(["--ckpt", "x", "--metrics-aliases", "sglang,vllm"]).metrics_aliases == ("sglang", "vllm")
    with pytest.raises(UsageError, match="tgi"):
        parse_serve(["--ckpt", "x", "--metrics-aliases", "tgi"])


def test_the_dashboard_uses_only_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana.json").read_text())
    text = " ".join(expressions(dashboard))
    used = set(re.findall(r"gtp_serve_\w+", text))

    endings = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
    families = (line.split() for line in types(scraped(), "gtp_serve_"))
    series = {name + ending for name, kind in families for ending in endings[kind]}
    assert len(used) >= 15
    assert used - series == set()
    assert set(re.findall(r"by \(([^)]*)\)", text)) <= {
        "finish_reason", "instance", "le", "phase", "side", "result, kind",
    }  # fmt: skip


def test_dashboard_panels_do_not_overlap_and_have_names() -> None:
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel["title"] for panel in panels)


def expressions(node: Any) -> list[str]:
    """Every query text of a dashboard."""
    if isinstance(node, dict):
        own = [value for key, value in node.items() if key in ("expr", "definition") and isinstance(value, str)]
        return own + [text for value in node.values() for text in expressions(value)]
    return [text for value in node for text in expressions(value)] if isinstance(node, list) else []
