"""vLLM's communicator on a real GPU: a group of one, since two ranks cannot share a device."""

from __future__ import annotations

import ctypes
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from gtp_serve.errors import UpdateFailed
from gtp_serve.refit.transports.nccl import NcclCommunicator, _library

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

FORM = timedelta(seconds=60)


@pytest.fixture
def library() -> Any:
    return _library()


def unique_id(library: Any) -> bytes:
    raw = (ctypes.c_byte * 128)()
    assert library.ncclGetUniqueId(ctypes.byref(raw)) == 0
    return bytes(raw)


def test_a_broadcast_arrives_and_the_communicator_ends(library: Any) -> None:
    communicator = NcclCommunicator(library, unique_id(library), 0, 1, FORM)
    buffer = torch.arange(1 << 16, dtype=torch.int32, device="cuda").view(torch.uint8)
    before = buffer.clone()
    pending = communicator.broadcast(buffer)
    assert pending.done(10.0)
    assert torch.equal(buffer, before)
    communicator.destroy()
    communicator.destroy()


def test_a_group_that_is_not_complete_is_given_up_in_time(library: Any) -> None:
    began = time.monotonic()
    with pytest.raises(UpdateFailed, match="not complete within 1 s"):
        NcclCommunicator(library, unique_id(library), 1, 2, timedelta(seconds=1))
    assert time.monotonic() - began < 5
