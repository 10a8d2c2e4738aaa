from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from ranks_harness import plan_of, running

from gtp_serve.engine.collective import join_group
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
