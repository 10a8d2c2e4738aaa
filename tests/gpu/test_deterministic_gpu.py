"""``--deterministic`` on a GPU: the same plain operations, whose tile sizes are found out there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from deterministic_mixes import check_mixes, open_subject

from gtp_serve.config import DType

MEGATRON = Path(__file__).parents[1] / "data" / "megatron"
FIXTURES = {
    "llama": "llama-tp1-pp1-gtp4-pad16-logical",
    "moe": "moe-tp2-pp1-gtp2-egtp2-pad32-logical",
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", FIXTURES)
def test_random_mixes_on_a_gpu_give_each_request_the_bits_it_has_alone(model: str, dtype: DType) -> None:
    subject = open_subject(MEGATRON / FIXTURES[model], dtype, longest=150, device="cuda")

    check_mixes(subject, range(12))

    assert subject.preemptions > 0
