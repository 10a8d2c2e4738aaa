"""``gtp-serve bench`` against a real HTTP server around a scripted engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes_server import FakeClient, serving

from gtp_serve.errors import RequestRejected
from gtp_serve.refit.orders import Begin, DiskOrder, WeightsStatus
from gtp_serve.request import Request
from gtp_serve.server import cli

pytestmark = pytest.mark.e2e

LOAD = ("--groups", "3", "--samples", "4", "--in", "6", "--out", "8", "--concurrency", "5", "--seed", "3")


def as_long_as_asked(request: Request) -> Sequence[int]:
    return [7] * request.sampling.max_new_tokens


class PushedClient(FakeClient):
    """Every update is committed at once."""

    async def control(self, command: Any) -> Any:
        body = await super().control(command)
        if isinstance(command, Begin):
            self.end_update("committed", stall_seconds=0.002)
        return body


def bench(client: FakeClient, *words: str) -> int:
    async def go() -> int:
        async with serving(client) as server:
            return await asyncio.to_thread(cli.main, ["bench", server.url, *words])

    return asyncio.run(asyncio.wait_for(go(), 60))


def test_every_sample_of_every_group_is_asked_for_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient(script=as_long_as_asked)
    out, plot = tmp_path / "run.json", tmp_path / "run.svg"

    assert bench(client, *LOAD, "--json", str(out), "--plot", str(plot)) == 0

    told = json.loads(out.read_text())
    assert (told["requests"], told["failed"], told["load"]["groups"]) == (12, 0, 3)
    assert sorted(Counter(request.input_ids for request in client.requests).values()) == [4, 4, 4]
    assert told["output_tokens"] == sum(request.sampling.max_new_tokens for request in client.requests)
    assert told["input_tokens"] == 12 * 6
    assert len({request.sampling.seed for request in client.requests}) == 12
    assert all(request.sampling.ignore_eos for request in client.requests)
    assert 0 < told["ttft"]["p50"] <= told["e2e"]["p50"]
    assert ET.fromstring(plot.read_text()).tag.endswith("svg")
    table = capsys.readouterr().out
    assert "3 groups x 4 samples, 5 at a time" in table
    assert "first token" in table


def test_no_more_than_the_asked_for_number_run_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    most = 0

    def script(request: Request) -> Sequence[int]:
        nonlocal most
        most = max(most, len(client.running))
        return as_long_as_asked(request)

    client = FakeClient(script=script, delay=0.002)
    assert bench(client, *LOAD, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["requests"] == 12
    assert 1 < most <= 5


def test_pushes_during_the_run_are_counted_with_what_they_cost(capsys: pytest.CaptureFixture[str]) -> None:
    client = PushedClient(script=as_long_as_asked, delay=0.01, weights=WeightsStatus(version="4"))

    assert bench(client, *LOAD, "--push", "run", "--every", "0.05", "--json", "-") == 0

    pushes = json.loads(capsys.readouterr().out)["pushes"]
    assert [push["version"] for push in pushes[:2]] == ["5", "6"]
    assert {push["error"] for push in pushes} == {None}
    assert pushes[0]["stall_seconds"] == 0.002
    assert pushes[0]["began"] >= 0.05
    begun = [command.request for command in client.commands if isinstance(command, Begin)]
    assert len(begun) == len(pushes)
    assert begun[0].order == DiskOrder(path=str(Path("run").absolute()))


def test_a_push_that_is_refused_is_told_and_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    client = PushedClient(script=as_long_as_asked, delay=0.01, weights=WeightsStatus(version="4"))
    client.refuse = RequestRejected("not now", code="update-under-way")

    assert bench(client, *LOAD, "--push", "run", "--every", "0.05") == 1
    assert "not taken after" in capsys.readouterr().out


def test_a_run_that_is_not_as_asked_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prompt as long as the context has room for, and a run that ends before its first push."""
    client = PushedClient(script=as_long_as_asked, weights=WeightsStatus(version="4"))
    out = tmp_path / "run.json"
    words = ("--groups", "1", "--samples", "1", "--in", "999999", "--out", "2", "--push", "run", "--every", "500")

    assert bench(client, *words, "--json", str(out)) == 1

    told, given = capsys.readouterr().out, json.loads(out.read_text(encoding="utf-8"))
    fits = len(client.requests[0].input_ids)
    assert 0 < fits < 999999
    assert given["load"]["input_tokens"] == fits
    assert f"prompts have {fits:,} tokens, not 999,999: more do not fit the context" in told
    assert "nothing was pushed: the run was over before the first push, after 500 s (--every)" in told


def test_some_failures_are_counted_and_all_failures_are_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient(script=as_long_as_asked)
    client.reject = RequestRejected("no room at all")
    assert bench(client, *LOAD) == 6
    assert "error[bench-failed] no request was answered in full\n  first  " in capsys.readouterr().err

    calls = itertools.count()

    def script(request: Request) -> Sequence[int]:
        if next(calls) == 5:
            raise RequestRejected("no room for this one")
        return as_long_as_asked(request)

    assert bench(FakeClient(script=script), *LOAD) == 1
    assert "  failed       1 of 12: " in capsys.readouterr().out


def test_a_server_that_is_not_there_is_an_environment_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "http://127.0.0.1:9", *LOAD]) == 5
    assert capsys.readouterr().err.startswith("error[server-unreachable] the server at 127.0.0.1:9 does not answer")


@pytest.mark.parametrize(
    "words",
    [("--groups", "0"), ("--spread", "9"), ("--timeout", "nan"), ("--json", "/none/such/file"), ("--plot", "run.png")],
)
def test_values_that_cannot_be_are_refused_before_any_load(words: tuple[str, ...]) -> None:
    assert cli.main(["bench", "http://127.0.0.1:9", *words]) == 2
