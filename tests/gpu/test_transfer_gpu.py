"""Transfers from tensors on a GPU into parameters on a GPU: over gloo by way of host memory, and over NCCL."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from transfer_crew import Crew
from transfer_world import MODELS, model_bytes

from gtp_serve.layout.gtp import Grid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.distributed,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    for participant in list(crew.members):
        crew.bury(participant)


def test_gloo_takes_tensors_from_a_gpu_and_fills_parameters_on_one(crew: Crew) -> None:
    world = crew.world("wide", Grid(gtp=2, alignment=32), 1, bucket_bytes=64 << 10, devices=True)

    assert sum(end["payload"] for end in world.push(1, leaks=False)) == model_bytes(MODELS["wide"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_nccl_fills_the_parameters_twice_and_releases_everything(crew: Crew) -> None:
    world = crew.world("wide", Grid(), 1, bucket_bytes=64 << 10, backend="nccl", devices=True)
    for seed in (1, 2):
        assert sum(end["payload"] for end in world.push(seed, leaks=False)) == model_bytes(MODELS["wide"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_a_trainer_that_is_killed_during_nccl_is_named(crew: Crew) -> None:
    world = crew.world("wide", Grid(), 1, bucket_bytes=64 << 10, backend="nccl", devices=True)
    world.begin(1, pause=0.05)
    world.trainers[0].event("sending")
    os.kill(world.trainers[0].process.pid, signal.SIGKILL)
    end = world.engines[0].event("end")
    crew.bury(world.trainers[0])

    assert end["error"].startswith("trainer rank 0 (pid ")
