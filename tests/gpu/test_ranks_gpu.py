from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ranks_harness import greedy, plan_of, running

from gtp_serve.engine.capture import CudaCapture
from gtp_serve.engine.collective import join_group
from gtp_serve.engine.graphs import DecodeGraphs
from gtp_serve.engine.ranks import Meeting

pytestmark = [pytest.mark.gpu, pytest.mark.distributed]

LLAMA = Path(__file__).parents[1] / "data" / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_nccl_joins_over_a_file_in_memory_and_lets_go() -> None:
    descriptor = os.memfd_create("ranks")
    meeting = Meeting(descriptor=descriptor, rank=0, size=1, form_seconds=60, step_seconds=60)
    group = join_group(meeting, "cuda")
    x = torch.arange(6.0, device="cuda").view(2, 3)
    assert torch.equal(group.all_reduce(x.clone()), x)
    assert torch.equal(group.all_gather(x), x)
    group.abort()
    os.close(descriptor)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
def test_two_gpus_give_the_logits_of_one() -> None:
    plan = plan_of(0, (0, [3, 7, 250, 17, 9]), (0, [26]))
    with running(LLAMA, 1, device="cuda") as alone:
        expected = alone.runner.forward(plan)
    with running(LLAMA, 2, device="cuda") as ranks:
        torch.testing.assert_close(ranks.runner.forward(plan), expected, rtol=0, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_operations_of_nccl_are_recorded_and_replayed() -> None:
    descriptor = os.memfd_create("ranks")
    meeting = Meeting(descriptor=descriptor, rank=0, size=1, form_seconds=60, step_seconds=60)
    group = join_group(meeting, "cuda")
    assert group.capturable
    x = torch.ones(4, 3, device="cuda")

    def step() -> torch.Tensor:
        return group.all_gather(group.all_reduce(x * 2) + 1)

    capture = CudaCapture("cuda")
    capture.warm_up(step)
    recorded = capture.record(step, ())
    for value in (3.0, 5.0):
        x.fill_(value)
        assert torch.equal(recorded.replay(1), torch.full_like(x, 2 * value + 1))
    group.abort()
    os.close(descriptor)


PROMPTS = [[3, 7, 250, 17, 9], [26], [5, 6, 7, 8, 9, 10, 11, 12, 13], [100, 50]]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("name", ["llama-tp1-pp1-gtp2-pad16-padded", "moe-tp2-pp1-gtp2-egtp2-pad32-logical"])
def test_two_gpus_replay_captured_steps_and_answer_as_one_does(name: str) -> None:
    ckpt = LLAMA.parent / name
    with running(ckpt, 1, device="cuda") as alone:
        expected = greedy(alone.engine(), PROMPTS, 16)
    with running(ckpt, 2, device="cuda") as ranks:
        graphs = ranks.model
        assert isinstance(graphs, DecodeGraphs)
        while graphs.capture_next():
            pass
        assert graphs.failures == {}
        assert greedy(ranks.engine(), PROMPTS, 16) == expected
        assert graphs.replayed >= 15
