"""The page without a browser: size, policy, headers, and the numbers and the picture behind it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fakes_server import FakeClient, engine_config
from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.testclient import TestClient

from gtp_serve.engine.messages import EngineStats
from gtp_serve.errors import RequestRejected
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.facts import TensorPadding
from gtp_serve.server.access import AdminGuard
from gtp_serve.server.cli import parse_serve
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.page.picture import describe_checkpoint, pictures
from gtp_serve.server.page.routes import PageRoutes, content_policy, read_page
from gtp_serve.server.page.stats import Stats, quantile
from gtp_serve.server.state import ServerState, Serving
from gtp_serve.server.version_counts import MAX_KEPT, VersionCounts

PAGES = ("index.html", "docs.html")
MOST_BYTES = 60_000
ROOT = Path(__file__).resolve().parents[2]
PADDED = ROOT / "tests" / "data" / "megatron" / "llama-tp1-pp1-gtp4-pad32-padded"


@pytest.mark.parametrize("name", PAGES)
def test_page_is_one_small_file_that_names_no_other_host(name: str) -> None:
    html = read_page(name)

    assert len(html.encode()) <= MOST_BYTES
    namespaces = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", html)) <= namespaces
    assert re.findall(r"<(?:script|link|img|iframe|object|embed)\b[^>]*\b(?:src|data)=", html) == []
    assert re.findall(r"<link[^>]*href=\"([^\"]*)\"", html) == ["icon.svg"]


@pytest.mark.parametrize("name", PAGES)
def test_page_writes_no_markup_out_of_text(name: str) -> None:
    script = read_page(name).partition("<script>")[2]

    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|localStorage|sessionStorage"
    )
    assert re.findall(forbidden, script) == []
    assert "cookie" not in script


@pytest.mark.parametrize("name", PAGES)
def test_policy_allows_the_pages_own_script_and_style_by_hash_and_nothing_else(name: str) -> None:
    html = read_page(name)
    policy = dict(part.split(" ", 1) for part in content_policy(html).split("; "))

    for kind in ("script", "style"):
        (text,) = re.findall(rf"<{kind}>(.*?)</{kind}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == policy["img-src"] == "'self'"
    assert (
        policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
    )
    assert "unsafe" not in content_policy(html)
    # What a hash does not cover would not run, and would not be missed by this test.
    assert re.findall(r"\son\w+=|\sstyle=|javascript:", html.partition("<script>")[0]) == []


def client(*, pages: bool = True) -> TestClient:
    state = ServerState()
    return TestClient(Starlette(routes=PageRoutes(state, Metrics(state), pages=pages).routes()))


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_come_with_strict_headers_before_anything_serves(path: str) -> None:
    reply = client().get(path)

    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert reply.headers["content-security-policy"] == content_policy(reply.text)
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert reply.headers["x-frame-options"] == "DENY"
    assert reply.headers["referrer-policy"] == "no-referrer"
    again = client().get(path, headers={"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_without_pages_only_the_numbers_are_there() -> None:
    bare = client(pages=False)

    statuses = [bare.get(path).status_code for path in ("/", "/docs", "/icon.svg", "/stats")]
    assert statuses == [404, 404, 404, 200]


def test_no_page_option_turns_the_pages_off() -> None:
    assert parse_serve(["--ckpt", "x"], {}).page
    assert not parse_serve(["--ckpt", "x", "--no-page"], {}).page


def test_icon_is_an_image_of_this_server() -> None:
    reply = client().get("/icon.svg")

    assert reply.headers["content-type"].startswith("image/svg+xml")
    assert reply.text.startswith("<svg ")


# -- /stats ----------------------------------------------------------------------------------------------


class Counting(FakeClient):
    """An engine with counters that a test moves."""

    numbers = EngineStats()

    def stats(self) -> EngineStats:
        return self.numbers


def watched() -> tuple[Stats, Counting, Metrics, list[float]]:
    state, engine, now = ServerState(), Counting(), [100.0]
    metrics = Metrics(state)
    stats = Stats(state, metrics, clock=lambda: now[0])
    state.set_serving(Serving(client=engine, engine=engine_config(), tokenizer=None, name="m"))
    return stats, engine, metrics, now


def test_stats_before_serving_tell_the_phase_only() -> None:
    state = ServerState()

    body = Stats(state, Metrics(state)).read()

    assert (body["status"], body["phase"]) == ("starting", "starting")
    assert "running" not in body


def test_stats_tell_rates_since_an_earlier_look() -> None:
    stats, engine, _, now = watched()
    assert stats.read()["generation_tokens_per_second"] is None
    engine.numbers = EngineStats(generation_tokens_total=300, prompt_tokens_total=60, cached_tokens_total=40)
    now[0] += 2.0

    body = stats.read()

    assert body["generation_tokens_per_second"] == 150.0
    assert body["prompt_tokens_per_second"] == 30.0
    assert body["cached_share"] == 0.4
    assert body["uptime_seconds"] == 2.0


def test_rates_forget_what_is_older_than_their_window() -> None:
    stats, engine, _, now = watched()
    stats.read()
    engine.numbers = EngineStats(generation_tokens_total=1000)
    for _ in range(12):
        now[0] += 1.0
        last = stats.read()

    assert last["generation_tokens_per_second"] == 0.0


def test_a_second_reader_at_the_same_moment_does_not_blind_the_first() -> None:
    stats, engine, _, now = watched()
    stats.read()
    now[0] += 1.0
    engine.numbers = EngineStats(generation_tokens_total=10)
    assert stats.read()["generation_tokens_per_second"] == 10.0
    now[0] += 0.01

    assert stats.read()["generation_tokens_per_second"] == pytest.approx(9.9, abs=0.01)


def test_stats_tell_gauges_version_and_that_updates_have_ended() -> None:
    stats, engine, _, _ = watched()
    engine.numbers = EngineStats(running=3, waiting=2, kv_blocks_total=10, kv_blocks_used=4)

    body = stats.read()

    assert (body["running"], body["waiting"], body["kv_blocks_used"], body["kv_blocks_total"]) == (3, 2, 4, 10)
    assert body["kv_tokens_total"] == 10 * engine_config().cache.block_size
    assert body["weight_version"] == "0"
    assert body["weights"] == {"update": None, "ended": 0, "newest": None}
    json.dumps(body, allow_nan=False)


def test_requests_are_counted_by_the_version_that_began_them_for_five_minutes() -> None:
    now = [1000.0]
    counts = VersionCounts(clock=lambda: now[0])
    counts.note([])  # a request that made no token
    counts.note([{"version": "0", "start": 0, "end": 5}])
    now[0] += 200
    counts.note([{"version": "1", "start": 0, "end": 4}])
    counts.note([{"version": "0", "start": 0, "end": 3}, {"version": "1", "start": 3, "end": 10}])
    counts.note([{"version": "1", "start": 0, "end": 1}])

    body = counts.read()

    assert body["window_seconds"] == 300
    assert body["versions"] == [
        {"version": "0", "requests": 2, "tokens": 15, "mixed": 1},
        {"version": "1", "requests": 2, "tokens": 5, "mixed": 0},
    ]
    now[0] += 101  # the first one is too old now
    assert [one["requests"] for one in counts.read()["versions"]] == [1, 2]
    now[0] += 300
    assert counts.read()["versions"] == []
    for _ in range(MAX_KEPT + 5):
        counts.note([{"version": "2", "start": 0, "end": 1}])
    assert counts.read()["versions"][0]["requests"] == MAX_KEPT


def test_latencies_are_those_of_the_last_minute() -> None:
    stats, _, metrics, now = watched()
    metrics.ttft.observe(50.0)
    assert stats.read()["latency"]["ttft"]["count"] == 1
    for _ in range(100):
        metrics.ttft.observe(0.02)
    now[0] += 1.0

    latency = stats.read()["latency"]

    assert latency["window_seconds"] == 1.0
    assert latency["ttft"]["count"] == 100
    assert 0.01 < latency["ttft"]["p50"] <= 0.025
    assert latency["itl"] == {"count": 0, "p50": None, "p90": None, "p99": None}


def test_samples_do_not_pile_up() -> None:
    stats, _, _, now = watched()
    for _ in range(500):
        now[0] += 1.0
        stats.read()

    assert len(stats._samples) <= 63


def test_quantiles_lie_inside_their_bucket() -> None:
    buckets = [(1.0, 0.0), (2.0, 10.0), (4.0, 20.0), (float("inf"), 20.0)]

    assert quantile(buckets, 0.5) == 2.0
    assert quantile(buckets, 0.75) == 3.0
    assert quantile([(1.0, 0.0), (float("inf"), 4.0)], 0.5) == 1.0
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.5) is None


# -- /checkpoint -----------------------------------------------------------------------------------------


def described(path: Path) -> dict[str, Any]:
    checkpoint = open_checkpoint(path)
    try:
        return describe_checkpoint(checkpoint)
    finally:
        checkpoint.close()


def test_checkpoint_facts_name_no_path() -> None:
    text = json.dumps(described(PADDED), allow_nan=False)

    assert str(ROOT) not in text
    assert "/" not in text.replace("file format/", "")


def test_picture_shows_pieces_that_are_nothing_but_padding() -> None:
    found = {one["key"]: one for one in described(PADDED)["pictures"]}
    proj = found["decoder.layers.self_attention.linear_proj.weight"]

    assert [piece["padding"] for piece in proj["pieces"]] == [0, 0, 32, 32]
    assert proj["padding_rows"] == 64
    fc1 = found["decoder.layers.mlp.linear_fc1.weight"]
    assert fc1["pieces"][-1]["padding"] == fc1["padding_rows"] == 32
    both = fc1["pieces"][3]["spans"]
    assert [(span["name"], span["start"], span["rows"], span["of_row"]) for span in both] == [
        ("model.layers.0.mlp.gate_proj.weight", 0, 32, 144),
        ("model.layers.0.mlp.up_proj.weight", 32, 16, 0),
    ]


def test_picture_is_of_the_first_layer_and_expert_only() -> None:
    box = Box((0, 0), (4, 2))
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in (0, 1) for expert in (0, 1)]
    shards = [Shard("fc1", (4, 2), "float32", (Span(name, box, box),)) for name in names]

    (picture,) = pictures(shards)

    assert [span["name"] for piece in picture["pieces"] for span in piece["spans"]] == [names[0]]


def test_picture_of_columns_counts_padding_once_for_each_cut() -> None:
    shards = [
        Shard("proj", (4, 2), "float32", (Span("o.weight", Box((0, 0), (3, 2)), Box((0, column), (3, 2))),))
        for column in (0, 2)
    ]

    (picture,) = pictures(shards, [TensorPadding(key="proj", stored_rows=4, real_rows=3)])

    assert [piece["padding"] for piece in picture["pieces"]] == [1, 1]
    assert picture["padding_rows"] == 1


# -- who may see the history -----------------------------------------------------------------------------


def asked(client: str = "127.0.0.1", **headers: str) -> HTTPConnection:
    given = {"host": "127.0.0.1:30000"} | {name.replace("_", "-"): value for name, value in headers.items()}
    raw = [(name.encode(), value.encode()) for name, value in given.items()]
    return HTTPConnection({"type": "http", "headers": raw, "client": (client, 1), "server": ("127.0.0.1", 30000)})


def status(request: HTTPConnection, *, own_page: bool, key: str | None = None) -> int:
    try:
        AdminGuard(key).check(request, own_page=own_page)
    except RequestRejected as error:
        return error.http_status
    return 200


def test_the_servers_own_page_may_read_but_not_change() -> None:
    page = asked(sec_fetch_site="same-origin")

    assert status(page, own_page=True) == 200
    assert status(page, own_page=False) == 403
    assert status(page, own_page=True, key="a-key-of-some-length") == 401


@pytest.mark.parametrize(
    "request_",
    [
        asked(sec_fetch_site="cross-site"),
        asked(sec_fetch_site="same-site"),
        asked(sec_fetch_site="none"),
        asked(sec_fetch_site="same-origin", origin="https://evil.example"),
        asked(origin="http://127.0.0.1:30000"),
        asked(sec_fetch_site="same-origin", host="evil.example"),
        asked(sec_fetch_site="same-origin", client="10.0.0.7"),
        asked(sec_fetch_site="same-origin", x_forwarded_for="127.0.0.1"),
    ],
)
def test_no_other_page_may_read(request_: HTTPConnection) -> None:
    assert status(request_, own_page=True) == 403
