"""The arithmetic of ``bench``: lengths, percentiles, rates, the tail, and the picture."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET

import pytest

from gtp_serve.errors import UsageError
from gtp_serve.server.bench_http import parse_url
from gtp_serve.server.bench_load import TAIL, Job, Sample, Shape, draw_length, plan_jobs
from gtp_serve.server.bench_numbers import percentile, rate_between, summarise, timeline
from gtp_serve.server.bench_plot import draw
from gtp_serve.server.bench_push import Push

SHAPE = Shape(groups=3, samples=4, input_tokens=10, output_tokens=50, spread=0.8, concurrency=2, seed=1)
JOB = Job(group=0, input_ids=(1, 2), output_tokens=4, seed=0)


def sample(sent: float, *arrivals: tuple[float, int], ended: float | None = None, **more: object) -> Sample:
    last = arrivals[-1][0] if arrivals else sent
    made = Sample(job=JOB, sent=sent, ended=last if ended is None else ended, arrivals=list(arrivals))
    for name, value in more.items():
        setattr(made, name, value)
    return made


def test_jobs_are_groups_of_one_prompt_with_their_own_lengths_and_seeds() -> None:
    jobs = plan_jobs(SHAPE, vocab_size=30, max_context=128, never=(0, 2))

    assert [job.group for job in jobs] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({job.input_ids for job in jobs}) == 3
    assert len({job.seed for job in jobs}) == 12
    assert {len(job.input_ids) for job in jobs} == {10}
    assert {token for job in jobs for token in job.input_ids} <= set(range(30)) - {0, 2}
    assert all(1 <= job.output_tokens <= 118 for job in jobs)
    assert jobs == plan_jobs(SHAPE, vocab_size=30, max_context=128, never=(0, 2))


def test_prompt_and_reply_fit_a_short_context() -> None:
    jobs = plan_jobs(SHAPE, vocab_size=30, max_context=8)
    assert {(len(job.input_ids), job.output_tokens) for job in jobs} == {(7, 1)}


def test_lengths_have_the_mean_that_was_asked_for_and_a_long_tail() -> None:
    dice = random.Random(7)
    lengths = [draw_length(dice, 200, 0.8) for _ in range(20000)]

    assert 190 < sum(lengths) / len(lengths) < 210
    assert percentile([float(n) for n in lengths], 50) < 160
    assert percentile([float(n) for n in lengths], 99) > 700
    assert 1 <= min(lengths) <= max(lengths) <= TAIL * 200
    assert {draw_length(dice, 200, 0.0) for _ in range(9)} == {200}


@pytest.mark.parametrize(("share", "value"), [(1, 1), (50, 5), (90, 9), (91, 10), (99, 10), (100, 10)])
def test_percentiles_are_values_that_occurred(share: float, value: float) -> None:
    assert percentile([float(n) for n in range(10, 0, -1)], share) == value


def test_a_run_is_summed_up() -> None:
    samples = [
        sample(0.0, (1.0, 1), (1.5, 1), (2.5, 2), prompt_tokens=10, cached_tokens=8, versions=2),
        sample(0.5, (1.0, 2), (8.0, 2), prompt_tokens=10),
        sample(1.0, error="lost"),
    ]
    pushes = [Push(version="1", began=2.0, ended=3.0, stall_seconds=0.25)]

    numbers = summarise(samples, pushes, 8.0)

    assert (numbers["requests"], numbers["failed"], numbers["first_failure"]) == (3, 1, "lost")
    assert (numbers["output_tokens"], numbers["output_tokens_per_second"]) == (8, 1.0)
    assert (numbers["input_tokens"], numbers["cached_share"]) == (20, 0.4)
    assert numbers["ttft"] == {"mean": 0.75, "p50": 0.5, "p90": 1.0, "p99": 1.0, "max": 1.0}
    assert numbers["itl"]["p50"] == 0.5
    assert numbers["itl"]["max"] == 3.5
    assert numbers["itl"]["mean"] == pytest.approx((0.5 + 0.5 + 0.5 + 3.5 + 3.5) / 5)
    assert numbers["e2e"]["max"] == 7.5
    assert numbers["tail_share"] == 0.0
    assert numbers["mixed_samples"] == 1
    (push,) = numbers["pushes"]
    assert (push["stall_seconds"], push["tokens_per_second_before"], push["tokens_per_second_during"]) == (0.25, 4, 2)


def test_the_tail_is_the_time_after_nine_tenths_of_the_replies() -> None:
    samples = [sample(0.0, (1.0, 1)) for _ in range(9)] + [sample(0.0, (10.0, 1))]
    assert summarise(samples, [], 10.0)["tail_share"] == pytest.approx(0.9)


def test_a_push_is_compared_with_the_time_since_the_one_before_it() -> None:
    samples = [sample(0.0, *((float(n), 1) for n in range(10)))]
    pushes = [Push(version="1", began=2.0, ended=5.0), Push(version="2", began=6.0, ended=9.0)]

    first, second = summarise(samples, pushes, 10.0)["pushes"]
    assert (first["tokens_per_second_before"], second["tokens_per_second_before"]) == (1.0, 1.0)
    assert rate_between(samples, 5.0, 5.0) == 0.0


def test_the_timeline_counts_every_token_once() -> None:
    samples = [sample(0.0, (0.05, 1), (0.95, 3)), sample(0.5, (1.0, 2))]
    points = timeline(samples, 1.0)

    assert len(points) == 10
    assert sum(rate for _, rate, _ in points) * 0.1 == pytest.approx(6)
    assert [running for _, _, running in points] == [1] * 5 + [2] * 4 + [1]


def test_the_picture_is_well_formed_and_shows_pushes_and_names_as_text() -> None:
    picture = draw([(0.5, 120.0, 3), (1.5, 80.0, 1)], [(0.2, 9.0, "push <1>", True)], 2.0, "a & b")

    root = ET.fromstring(picture)
    texts = [element.text for element in root.iter() if element.text and element.text.strip()]
    assert "a & b" in texts
    assert "push <1>" in texts
    lines = [e.attrib["points"] for e in root.iter() if e.tag.endswith("polyline")]
    assert [len(line.split()) for line in lines] == [2, 2]
    assert "200" in texts  # the axis ends at a round number above 120
    assert draw([], [], 1.0, "empty").startswith("<svg ")


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        parse_url(url)


def test_a_bare_host_means_http() -> None:
    assert parse_url("localhost:30000").geturl() == "http://localhost:30000"
