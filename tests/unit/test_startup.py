from __future__ import annotations

import io
import itertools
import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from golden_file import same_as_golden

from gtp_serve.engine.messages import Phase
from gtp_serve.errors import CheckpointNotFound, EngineFault
from gtp_serve.server.failures import as_known_error, format_error, print_failure
from gtp_serve.server.startup import Lines, ReadyNote, Reporter, ReporterHandler, format_fields
from gtp_serve.server.terminal import Terminal

GIB = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC) + timedelta(seconds=self.seconds)


def play(reporter: Reporter, clock: Clock) -> None:
    """A whole start, a request, and the end."""
    reporter.title(["gtp-serve 0.1.0", "torch 2.13.0", "cpu (2 cores, 23.5 GiB)"])
    reporter.phase(Phase(name="port 127.0.0.1:30000", state="ok", seconds=0.01))
    reporter.phase(Phase(name="read checkpoint index", state="running"))
    clock.seconds += 0.1
    reporter.phase(Phase(name="read checkpoint index", state="ok", detail="310 tensors, all shapes match", seconds=0.1))
    reporter.fact(
        "checkpoint",
        ["/ckpts/my-run/iter_0000100   (newest of 4 iterations)", "Megatron torch_dist, step 100"],
    )
    reporter.fact("memory", ["weights 15.3 + KV 107.1 + work 2.7 = 125.1 of 139.8 GiB  (90%)"])
    reporter.phase(Phase(name="start engine", state="running"))
    for _ in range(7):
        clock.seconds += 1
        reporter.tick()
    reporter.phase(Phase(name="start engine", state="ok", detail="torch 2.13.0, cpu, 2 threads", seconds=7.0))
    reporter.phase(Phase(name="load weights", state="running"))
    for step in range(1, 41):
        clock.seconds += 0.25
        reporter.phase(
            Phase(
                name="load weights",
                state="running",
                seconds=0.25 * step,
                done=step * GIB // 4,
                total=10 * GIB,
            )
        )
    reporter.phase(Phase(name="load weights", state="ok", detail="10.0 GiB at 1.0 GiB/s", seconds=10.0))
    reporter.phase(Phase(name="first token", state="ok", detail='"2+2=" -> "4"', seconds=0.2))
    reporter.ready(
        ReadyNote(
            seconds=17.6,
            weight_version="0",
            url="http://127.0.0.1:30000",
            example="curl -s ...",
            drain_seconds=30,
        )
    )
    reporter.line("INFO", "request", {"rid": "a b", "reason": "stop", "seconds": 0.5, "code": None})
    reporter.line("DEBUG", "detail", {})
    reporter.failure(EngineFault("the engine got signal 9", [("likely", "out of memory"), ("try", "less")]))


def written(make: Callable[[io.StringIO, Clock], Reporter]) -> str:
    stream, clock = io.StringIO(), Clock()
    play(make(stream, clock), clock)
    return stream.getvalue()


@pytest.mark.parametrize("form", ["lines", "json", "terminal"])
def test_the_start_reads_as_committed(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")

    def make(stream: io.StringIO, clock: Clock) -> Reporter:
        if form == "terminal":
            return Terminal(stream, clock=clock, now=clock.now)
        return Lines(stream, as_json=form == "json", clock=clock, now=clock.now)

    same_as_golden(f"start-{form}.txt", written(make))


def test_no_phase_is_silent_for_more_than_five_seconds() -> None:
    text = written(lambda stream, clock: Lines(stream, as_json=True, clock=clock, now=clock.now))
    times = [datetime.fromisoformat(json.loads(line)["time"]) for line in text.splitlines()]
    gaps = [(after - before).total_seconds() for before, after in itertools.pairwise(times)]
    assert max(gaps) <= 5


def test_progress_is_at_most_one_line_for_ten_percent() -> None:
    text = written(lambda stream, clock: Lines(stream, as_json=True, clock=clock, now=clock.now))
    progress = [json.loads(line).get("progress") for line in text.splitlines()]
    assert len([share for share in progress if share is not None]) <= 10


def test_quiet_keeps_only_what_went_wrong() -> None:
    for make in (
        lambda stream, clock: Lines(stream, as_json=False, quiet=True, clock=clock, now=clock.now),
        lambda stream, clock: Terminal(stream, quiet=True, clock=clock, now=clock.now),
    ):
        assert written(make).startswith("error[worker-died] the engine got signal 9\n")


def test_a_value_cannot_break_its_line() -> None:
    assert format_fields({"a": "x y", "b": 'q"', "c": "n\nl", "d": "", "e": None, "f": 1.50}) == (
        'a="x y" b="q\\"" c="n\\nl" d="" f=1.5'
    )


def test_log_records_become_lines_and_stacks_only_when_asked() -> None:
    for stacks in (False, True):
        stream = io.StringIO()
        log = logging.Logger("x")
        log.addHandler(ReporterHandler(Lines(stream, as_json=True), stacks=stacks))
        log.info("request", extra={"fields": {"rid": "r"}})
        log.error("bug", exc_info=ValueError("boom"))
        first, second = map(json.loads, stream.getvalue().splitlines())
        assert (first["event"], first["rid"], first["level"]) == ("request", "r", "INFO")
        assert second["kind"] == "ValueError"
        assert ("error" in second, "stack" in second) == (stacks, stacks)
        assert ("boom" in stream.getvalue()) == stacks  # what a client sent may be quoted in it


def test_an_error_is_one_sentence_and_aligned_lines() -> None:
    error = CheckpointNotFound("x is not a checkpoint", [("looked for", "a\nb"), ("try", "y\x1b[2J")])
    assert format_error(error) == (
        "error[ckpt-not-found] x is not a checkpoint\n  looked for  a\n              b\n  try         y [2J"
    )
    assert format_error(error, colour=True).startswith("\x1b[31m\x1b[1merror[ckpt-not-found]\x1b[0m x is")


def test_a_bug_is_named_without_a_stack_unless_verbose() -> None:
    with pytest.raises(ValueError, match="boom") as caught:
        raise ValueError("boom")
    for verbose in (False, True):
        stream = io.StringIO()
        assert print_failure(caught.value, stream, verbose=verbose) == 1
        assert "error[internal] ValueError: boom" in stream.getvalue()
        assert ("Traceback" in stream.getvalue()) is verbose
    assert as_known_error(MemoryError()).code == "out-of-memory"
