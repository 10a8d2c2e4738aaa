"""vLLM's way to a group: NCCL's own communicator, whose id the trainer leaves in a store or hands over by HTTP.

The library is the one that torch has loaded, called through ctypes.  Needs a GPU; nothing is loaded at import.
"""

from __future__ import annotations

import base64
import binascii
import ctypes
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from gtp_serve.errors import EnvironmentFault, UpdateFailed, UpdateRefused
from gtp_serve.refit.orders import JoinGroup

ID_BYTES = 128
_ID_KEY = "broadcast_from/0/0"
"""Where vLLM's StatelessProcessGroup leaves the first object that its rank 0 sends to all."""
_INT8, _FLOAT32, _SUM = 0, 7, 0
"""Of NCCL's enumerations."""
_OPCODE = b"C" + bytes([ID_BYTES])
_MEMOIZE = b"\x94"
_DIST: Any = torch.distributed
_CUDA: Any = torch.cuda  # typed in part only


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


def id_in(stored: bytes) -> bytes:
    """The id in what a vLLM trainer has stored: the object's pickle, of which only the 128 bytes are looked at.

    :raises UpdateRefused: when they are not there.
    """
    if len(stored) == ID_BYTES:
        return stored
    at = stored.find(_OPCODE)
    found = stored[at + len(_OPCODE) :][:ID_BYTES] if at >= 0 else b""
    if len(found) != ID_BYTES or stored[at + len(_OPCODE) + ID_BYTES :][:1] != _MEMOIZE:
        raise UpdateRefused("the trainer's store holds no NCCL id", code="group-id")
    return found


def id_from_text(text: str) -> bytes:
    """The id as a torch-free trainer sends it: base64 of 128 bytes.

    :raises UpdateRefused: when it is something else.
    """
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        found = b""
    if len(found) != ID_BYTES:
        raise UpdateRefused(
            "nccl_unique_id_b64 is not an NCCL id",
            [("needed", f"standard base64 of {ID_BYTES} bytes")],
            code="group-id",
        )
    return found


def join_nccl(order: JoinGroup, rank: int, form: timedelta) -> NcclCommunicator:
    """Join a communicator as vLLM's workers do.

    :raises UpdateFailed: when the others do not come in time.
    """
    library = _library()
    if order.unique_id:
        return NcclCommunicator(library, id_from_text(order.unique_id), rank, order.world_size, form)
    store = _DIST.TCPStore(order.host, order.port, order.world_size, False, form)
    unique_id = id_in(bytes(store.get(_ID_KEY)))
    # The store must live until all have the id; the trainer's end of it does.
    return NcclCommunicator(library, unique_id, rank, order.world_size, form)


class NcclCommunicator:
    """Receives broadcasts from rank 0 on a stream of its own."""

    def __init__(self, library: Any, unique_id: bytes, rank: int, size: int, form: timedelta) -> None:
        self._library = library
        self._device = _CUDA.current_device()
        self.device = f"cuda:{self._device}"
        self._communicator = ctypes.c_void_p()
        identity = _UniqueId.from_buffer_copy(unique_id)
        self._until(
            form.total_seconds(),
            lambda: self._check(library.ncclCommInitRank(ctypes.byref(self._communicator), size, identity, rank)),
        )
        self._stream = _CUDA.Stream()
        self._warm_up(form.total_seconds())

    def _until(self, seconds: float, call: Callable[[], None]) -> None:
        """Make a call that cannot be called off, in a thread that is given up when time is over."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                _CUDA.set_device(self._device)
                call()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="nccl-join", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive():
            raise UpdateFailed(f"the group was not complete within {seconds:g} s", code="group-join")
        if failures:
            raise failures[0]

    def _warm_up(self, seconds: float) -> None:
        """All members add up one element first, as vLLM's communicators do."""
        one = torch.zeros(1, device="cuda")
        self._stream.wait_stream(_CUDA.current_stream())
        pointer = ctypes.c_void_p(one.data_ptr())
        self._check(
            self._library.ncclAllReduce(pointer, pointer, 1, _FLOAT32, _SUM, self._communicator, self._raw_stream)
        )
        work = NcclPending(self._stream, one)
        if not work.done(seconds):
            self.abort()
            raise UpdateFailed(f"the group was not complete within {seconds:g} s", code="group-join")

    @property
    def _raw_stream(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self._stream.cuda_stream)

    def broadcast(self, buffer: Tensor) -> NcclPending:
        """Begin to receive into a tensor of bytes what rank 0 sends next."""
        self._stream.wait_stream(_CUDA.current_stream())
        pointer = ctypes.c_void_p(buffer.data_ptr())
        self._check(
            self._library.ncclBroadcast(
                pointer, pointer, buffer.numel(), _INT8, 0, self._communicator, self._raw_stream
            )
        )
        return NcclPending(self._stream, buffer)

    def destroy(self) -> None:
        """The end, with nothing under way."""
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            self._check(self._library.ncclCommDestroy(communicator))

    def abort(self) -> None:
        """The end of whatever is under way, too."""
        communicator, self._communicator = self._communicator, ctypes.c_void_p()
        if communicator:
            self._check(self._library.ncclCommAbort(communicator))

    def _check(self, result: int) -> None:
        if result != 0:
            raise RuntimeError(f"NCCL: {self._library.ncclGetErrorString(result).decode()}")


class NcclPending:
    """An operation on the stream, up to here."""

    def __init__(self, stream: Any, buffer: Tensor) -> None:
        self._event = _CUDA.Event()
        self._event.record(stream)
        self._buffer = buffer  # must outlive the operation

    def done(self, seconds: float) -> bool:
        """Whether it is complete, after waiting for at most so long."""
        end = time.monotonic() + seconds
        while not self._event.query():
            if time.monotonic() >= end:
                return False
            time.sleep(0.0005)
        return True


def _library() -> Any:
    """NCCL as torch has loaded it."""
    if not _CUDA.is_available():
        raise UpdateRefused(
            "NCCL needs a GPU, and this server has none", [("send", "backend: gloo")], code="group-backend"
        )
    _CUDA.init()
    try:
        library: Any = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise EnvironmentFault(f"NCCL's library cannot be loaded: {error}") from error
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetErrorString.argtypes = [ctypes.c_int]
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), integer, _UniqueId, integer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, integer, integer, pointer, pointer]
    library.ncclAllReduce.argtypes = [pointer, pointer, size, integer, integer, pointer, pointer]
    library.ncclCommDestroy.argtypes = library.ncclCommAbort.argtypes = [pointer]
    return library
