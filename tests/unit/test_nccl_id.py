"""NCCL's id out of what trainers leave for their engines, without unpickling it."""

from __future__ import annotations

import base64
import ctypes
import pickle

import pytest

from gtp_serve.errors import UpdateRefused
from gtp_serve.refit.transports.nccl import ID_BYTES, id_from_text, id_in


class UniqueId(ctypes.Structure):
    """As vLLM's wrapper declares it."""

    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


IDS = (bytes(range(ID_BYTES)), bytes(ID_BYTES), bytes([ord("C"), ID_BYTES]) * (ID_BYTES // 2))


@pytest.mark.parametrize("raw", IDS)
@pytest.mark.parametrize("protocol", [4, 5])
def test_the_id_is_found_in_the_object_that_vllm_stores(raw: bytes, protocol: int) -> None:
    stored = pickle.dumps(UniqueId.from_buffer_copy(raw), protocol=protocol)
    assert id_in(stored) == raw
    assert id_in(raw) == raw


@pytest.mark.parametrize(
    "stored", [b"", b"\x80\x04N.", pickle.dumps(bytes(127)), pickle.dumps(IDS[0], protocol=4)[:-60]]
)
def test_what_holds_no_id_is_refused_and_not_unpickled(stored: bytes) -> None:
    with pytest.raises(UpdateRefused, match="holds no NCCL id"):
        id_in(stored)


@pytest.mark.parametrize("raw", IDS)
def test_the_id_may_come_as_base64(raw: bytes) -> None:
    assert id_from_text(base64.b64encode(raw).decode()) == raw


@pytest.mark.parametrize("text", ["", "AAAA", "%" * 172, base64.b64encode(bytes(129)).decode()])
def test_what_is_no_id_in_base64_is_refused(text: str) -> None:
    with pytest.raises(UpdateRefused, match="is not an NCCL id"):
        id_from_text(text)
