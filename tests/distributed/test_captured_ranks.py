"""Captured steps on several ranks: all capture the same sizes, and rank 0's word is where each step runs."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from captured_rank import SIZE, Failing, config_of, small_decoder, small_pool
from fakes import request
from ranks_harness import plan_of

from gtp_serve.assembly import with_graphs
from gtp_serve.engine.collective import join_group
from gtp_serve.engine.engine import Engine
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.engine.ranks import Leader
from gtp_serve.engine.runner import ModelRunner
from gtp_serve.errors import EngineFault
from gtp_serve.ops.batch import Taps

pytestmark = pytest.mark.distributed

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Rank0:
    leader: Leader
    graphs: DecodeGraphs
    runner: ModelRunner
    log: Path

    def lines(self, kind: str) -> list[str]:
        """What the other rank noted of one kind."""
        words = [line.split() for line in self.log.read_text().splitlines()]
        return [word for name, word in words if name == kind]


@contextmanager
def two_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch, *, here: str = "", there: str = "") -> Iterator[Rank0]:
    """
    :param here: what fails on rank 0, see ``Failing``.
    :param there: and on rank 1.
    """
    log = folder / "log"
    log.touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, TESTS))))
    argv = [sys.executable, str(TESTS / "captured_rank.py"), "--log", str(log), "--fail", there]
    leader = Leader(argv, SIZE)
    try:
        decoder = small_decoder(leader.join(lambda meeting: join_group(meeting, "cpu")))
        pool, config = small_pool(decoder), config_of(SIZE)
        model, _ = with_graphs(config, decoder, pool, Failing(here), together=leader.capture)
        assert isinstance(model, DecodeGraphs)
        leader.wait_built()
        yield Rank0(leader, model, ModelRunner(model, pool, config, together=leader.step), log)
    finally:
        leader.close()


def answers(runner: ModelRunner, tp: int, graphs: DecodeGraphs | None) -> dict[str, list[int]]:
    """Greedy text of nine requests, four at a time, while sizes are captured between the steps."""
    engine = Engine(config_of(tp), runner, check=(lambda: None) if graphs is None else lambda: advance(graphs))
    rng = random.Random(0)
    tokens: dict[str, list[int]] = {}
    for n in range(9):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 12))]
        tokens[f"r{n}"] = []
        engine.add(request(f"r{n}", prompt, max_new_tokens=4 + n, temperature=0.0, ignore_eos=True))
    while engine.has_work():
        engine.wait()
        engine.check()
        for event in engine.step():
            tokens[event.rid] += event.token_ids
    return tokens


def advance(graphs: DecodeGraphs) -> None:
    graphs.capture_next()


def alone() -> dict[str, list[int]]:
    decoder = small_decoder()
    return answers(ModelRunner(decoder, small_pool(decoder), config_of(1)), 1, None)


def test_ranks_capture_the_same_sizes_and_replay_the_same_ones_and_answer_as_one_rank_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(tmp_path, monkeypatch) as rank0:
        assert answers(rank0.runner, SIZE, rank0.graphs) == alone()
        assert rank0.graphs.captured == [1, 2, 4]
        assert rank0.lines("capture") == ["4", "2", "1"]
        steps = rank0.lines("step")
    assert len([step for step in steps if step != "None"]) == rank0.graphs.replayed > 8
    assert steps.count("None") == rank0.graphs.ran_eagerly > 2
    assert {"2", "4"} <= {*steps}


def test_a_size_that_one_rank_cannot_record_is_used_by_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(tmp_path, monkeypatch, there="record 4") as rank0:
        assert answers(rank0.runner, SIZE, rank0.graphs) == alone()
        assert rank0.graphs.captured == [1, 2]
        assert rank0.graphs.failures == {4: "rank tp1: OutOfMemoryError: no memory to record in"}
        steps = rank0.lines("step")
    assert {"2", "None"} <= {*steps}
    assert "4" not in steps


def test_a_size_that_rank_0_cannot_record_is_used_by_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(tmp_path, monkeypatch, here="record 2") as rank0:
        assert answers(rank0.runner, SIZE, rank0.graphs) == alone()
        assert rank0.graphs.captured == [1, 4]
        assert rank0.graphs.failures == {2: "OutOfMemoryError: no memory to record in"}
        assert rank0.lines("capture") == ["4", "2", "1"]
        steps = rank0.lines("step")
    assert "4" in steps
    assert "2" not in steps


def test_what_only_rank_0_wants_makes_all_ranks_run_eagerly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with two_ranks(tmp_path, monkeypatch) as rank0:
        while rank0.graphs.capture_next():
            pass
        rank0.runner.forward(plan_of(0, (0, [3, 7]), (0, [9])))
        decode = plan_of(1, (2, [4]), (1, [5]))
        routes: list[torch.Tensor] = []
        routed = replace(decode, items=tuple(replace(item, routes=True) for item in decode.items))
        eager = rank0.runner.forward(routed, Taps(routes=routes)).clone()
        replayed = rank0.runner.forward(decode).clone()
        steps = rank0.lines("step")
    assert steps == ["None", "None", "2"]
    assert [tuple(route.shape) for route in routes] == [(2, 2), (2, 2)]
    torch.testing.assert_close(replayed, eager, rtol=0, atol=1e-5)


def test_a_rank_that_fails_before_it_records_ends_the_group_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unlike a failure to record: rank 0 may be waiting for it in a collective."""
    with two_ranks(tmp_path, monkeypatch, there="warm-up 4") as rank0, pytest.raises(EngineFault) as caught:
        rank0.graphs.capture_next()
    assert "tensor-parallel rank tp1" in caught.value.message
    assert "no memory to warm up in" in str(caught.value)
    assert "Traceback" in capfd.readouterr().err


def test_rank_0_failing_before_it_records_ends_the_group_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two_ranks(tmp_path, monkeypatch, here="warm-up 4") as rank0, pytest.raises(EngineFault) as caught:
        rank0.graphs.capture_next()
    assert "rank tp0" in caught.value.message
    assert "no memory to warm up in" in str(caught.value)


def test_a_step_in_a_bucket_that_a_rank_has_not_captured_is_an_error_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        two_ranks(tmp_path, monkeypatch) as rank0,
        pytest.raises(EngineFault) as caught,
        rank0.leader.step(plan_of(0, (0, [3])), 4),
    ):
        rank0.leader._wait_until(lambda: False)
    assert "fits none of the buckets []" in str(caught.value)
