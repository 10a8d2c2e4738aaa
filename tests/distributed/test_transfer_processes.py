"""Transfers between real processes over gloo: every layout arrives, each byte leaves once, and deaths are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from transfer_crew import Crew
from transfer_world import MODELS, model_bytes

from gtp_serve.layout.gtp import Grid
from gtp_serve.refit.transports.session import FORM_SECONDS

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    for participant in list(crew.members):
        crew.bury(participant)


@pytest.mark.parametrize(
    ("model", "grid", "tp"),
    [
        ("llama", Grid(), 1),
        ("qwen2", Grid(gtp=2), 1),
        ("qwen2", Grid(tp=2, gtp=2, alignment=32), 2),
        ("llama", Grid(pp=2), 1),
    ],
    ids=["1 to 1", "tied and biased, GTP 2 to TP 1", "TP 2 GTP 2 padded to TP 2", "PP 2 to TP 1"],
)
def test_engine_ranks_hold_what_a_cold_load_would_and_a_second_push_works(
    crew: Crew, model: str, grid: Grid, tp: int
) -> None:
    world = crew.world(model, grid, tp)
    for seed in (1, 2):
        ends = world.push(seed)

        assert sum(end["payload"] for end in ends) == model_bytes(MODELS[model])


def test_data_parallel_replicas_share_the_rows_out_and_send_each_once(crew: Crew) -> None:
    sent = [end["payload"] for end in crew.world("wide", Grid(), 1, replicas=2).push(1)]

    size = model_bytes(MODELS["wide"])
    assert sum(sent) == size
    assert min(sent) > size / 3


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("victim", ["trainer 1", "engine 1", "engine 0"])
def test_a_peer_that_ends_or_stops_in_the_middle_is_named_soon_and_all_is_released(
    crew: Crew, death: signal.Signals, victim: str
) -> None:
    world = crew.world("wide", Grid(gtp=2), 2, bucket_bytes=64 << 10)
    world.begin(2, pause=0.05)
    # Before all are connected it takes longer: see the next test.
    for trainer in world.trainers:
        trainer.event("sending")
    for engine in world.engines:
        engine.event("receiving")
    side, rank = victim.split()
    dying = (world.trainers if side == "trainer" else world.engines)[int(rank)]
    os.kill(dying.process.pid, death)
    killed = time.time()
    ends = [one.event("end") for one in world.everybody if one is not dying]
    crew.bury(dying)

    # Of the store's keeper nobody may have heard yet where it runs.
    name = (
        victim.replace(" ", " rank ") if victim == "engine 0" else f"{side} rank {rank} (pid {dying.process.pid}, host"
    )
    assert [end["error"].startswith(name) for end in ends] == [True] * 3, ends
    assert {end["code"] for end in ends} <= {"peer-silent", "peer-lost"}
    assert max(end["at"] for end in ends) - killed < 6
    assert [end["leaked"] for end in ends] == [{}] * 3
    crew.world("wide", Grid(gtp=2), 2).push(3)


def test_a_peer_that_ends_while_connections_are_made_is_named_and_nothing_of_it_lingers(crew: Crew) -> None:
    world = crew.world("llama", Grid(gtp=2), 2)
    world.begin(2, dying=1)
    dying = world.trainers[1]
    began = time.time()
    ends = [one.event("end") for one in world.everybody if one is not dying]
    crew.bury(dying)

    name = f"trainer rank 1 (pid {dying.process.pid}, host"
    assert [end["error"].startswith(name) for end in ends] == [True] * 3, ends
    assert max(end["at"] for end in ends) - began < FORM_SECONDS + 5
    assert [end["leaked"] for end in ends] == [{}] * 3
    crew.world("llama", Grid(gtp=2), 2).push(3)


AGREE = """
import sys, time
import torch.distributed as dist
from gtp_serve.errors import GtpServeError, UpdateRefused
from gtp_serve.refit.trainers import TrainerRanks

rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
ranks, deadline = TrainerRanks(), time.monotonic() + 30

def refuse():
    raise UpdateRefused("the shards do not fit", [("needed", "others")], code="weights-mismatch")

print(ranks.together(lambda: "x" * 1000 * rank, str, deadline) == ["", "x" * 1000])
print(ranks.from_first(lambda: {"rank": [rank]}, dict, deadline))
for step in (lambda: ranks.together(refuse if rank == 1 else lambda: 1, int, deadline),
             lambda: ranks.from_first(refuse, int, deadline)):
    try:
        step()
    except GtpServeError as error:
        print(type(error).__name__, error.code, error)
dist.destroy_process_group()
"""


def test_trainer_ranks_go_on_together_or_raise_the_same(tmp_path: Path) -> None:
    """Over the default group; whose step failed is told to the others."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", AGREE, str(tmp_path / "meet"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=60)[0].splitlines() for process in processes]

    refusal = "UpdateRefused weights-mismatch the shards do not fit; needed: others"
    good = ["True", "{'rank': [0]}"]
    assert told[0] == [*good, f"{refusal}; on: trainer rank 1", refusal]
    assert told[1] == [*good, refusal, f"{refusal}; on: trainer rank 0"]
