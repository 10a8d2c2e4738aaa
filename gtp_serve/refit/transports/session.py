"""What a participant does in a transfer: meets the others, agrees with them, sends and receives buckets.

Runs in a thread of its own, which may block; ``meeting`` watches it and ends what it waits for.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch import Tensor

from gtp_serve.errors import UpdateFailed
from gtp_serve.layout.spans import Shape, Shard
from gtp_serve.refit.transports.buckets import Exchange, KeptExchange, check_digests, plan_exchange
from gtp_serve.refit.transports.liveness import Member
from gtp_serve.refit.transports.pulse import Pulse
from gtp_serve.refit.transports.stores import MeetingStore, Terms, connect, local_address

IN_FLIGHT = 2
"""Buckets of a participant under way at once, which is also how many buffers it has."""
FORM_SECONDS = 10.0
"""For the connections between all pairs, once everybody is there."""
_GLOO_ATTEMPTS = 5
"""Gloo tries so often to connect to a participant, each time for as long as it is told to, and cannot be stopped."""
_CUT_TAG = 1 << 30
_DIST: Any = torch.distributed  # its stubs leave out the groups' options and operations

Buffer = npt.NDArray[np.uint8]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a participant has or wants."""

    shards: tuple[Shard, ...]
    shapes: dict[str, Shape] = {}
    """Every logical tensor of the served model; engine rank 0's is the one that counts."""


class Stopped(Exception):
    """The transfer has been ended from outside."""


class PeerLost(Exception):
    """An operation with the participant at ``place`` failed."""

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place, self.reason = place, reason


class Kept:
    """What one participant's transfers hand on to the next: a trainer pushes the same layout again and again."""

    def __init__(self) -> None:
        self.exchange = KeptExchange()
        self._buffers: list[Buffer] = []

    def take_buffers(self, count: int, size: int) -> list[Buffer]:
        """So many buffers of at least so many bytes; nobody else has them until ``give_back``.

        New memory costs as much as copying into it: the system zeroes each page.
        """
        large = [buffer for buffer in self._buffers if buffer.size >= size][:count]
        self._buffers = []
        return large + [np.empty(size, np.uint8) for _ in range(count - len(large))]

    def give_back(self, buffers: Sequence[Buffer]) -> None:
        """When all is done with them; after a failure a transport may still write, and they are not given back."""
        self._buffers = list(buffers)


@dataclass(slots=True, eq=False)
class Transfer:
    """One bucket under way."""

    session: Session
    work: Any
    place: int
    tensor: Tensor
    back: Buffer | None = None
    """Where bytes received on a device go."""

    def wait(self) -> None:
        """Until the buffer may be used again.

        :raises Stopped: when the transfer was ended.
        :raises PeerLost: when the connection broke.
        """
        try:
            self.work.wait(timedelta(seconds=self.session.remaining() + 1))
        except RuntimeError as error:
            self.session.check()
            raise PeerLost(self.place, str(error).splitlines()[0]) from None
        if self.back is not None:
            torch.from_numpy(self.back).copy_(self.tensor)


class Session:
    """One participant's part.

    :param place: in the group: trainer ranks first, then engine ranks.
    :param kept: of the transfer before.
    :param device: of this participant, where buckets go through a GPU (``nccl``).
    """

    def __init__(self, terms: Terms, place: int, pulse: Pulse, kept: Kept, device: str) -> None:
        self.terms, self.place, self.pulse, self.kept = terms, place, pulse, kept
        self.stop = threading.Event()
        self.sent_bytes = 0
        """Handed to the transport, digests included."""
        self.done = self.total = 0
        """Payload of this participant."""
        self.open_seconds = 0.0
        self._store: Any = None
        self._group: Any = None
        self._device = device if terms.backend == "nccl" else "cpu"

    # -- who is who

    def engine_place(self, rank: int) -> int:
        """The place of an engine rank."""
        return self.terms.trainers + rank

    def who(self, place: int) -> str:
        """A participant, as errors name it."""
        return str(self.pulse.member(place))

    def trainers(self) -> list[Member]:
        """All trainer ranks."""
        return [self.pulse.member(place) for place in range(self.terms.trainers)]

    # -- one step after the other

    def check(self) -> None:
        """:raises Stopped: when the transfer was ended."""
        if self.stop.is_set():
            raise Stopped

    def remaining(self) -> float:
        """Seconds to the deadline."""
        return max(0.0, self.terms.deadline - time.monotonic())

    def agree(self, shards: Sequence[Shard], shapes: Mapping[str, Shape]) -> Exchange:
        """Tell what this participant has or wants, hear it of all others, and decide what goes where.

        :param shapes: needed of engine rank 0; the others' are not used.
        :raises LayoutMismatch: when it does not fit together; all participants come to the same result.
        """
        began = time.monotonic()
        self._store = connect(self.terms)
        mine = Manifest(shards=tuple(shards), shapes=dict(shapes) if self.place == self.terms.trainers else {})
        told = self._exchange("manifest", msgspec.json.encode(mine))
        self.open_seconds = time.monotonic() - began
        exchange = self.kept.exchange.get(told, self.terms.bucket_bytes, lambda: self._decide(told))
        digests = self._exchange("plan", exchange.digest().encode())
        check_digests(exchange.digest(), {self.who(place): one.decode() for place, one in enumerate(digests)})
        return exchange

    def _decide(self, told: Sequence[bytes]) -> Exchange:
        manifests = [msgspec.json.decode(one, type=Manifest) for one in told]
        return plan_exchange(
            [one.shards for one in manifests[: self.terms.trainers]],
            [one.shards for one in manifests[self.terms.trainers :]],
            manifests[self.terms.trainers].shapes,
            self.terms.bucket_bytes,
        )

    def _exchange(self, key: str, value: bytes) -> list[bytes]:
        """Everybody's value, in the order of their places."""
        self._store.set(f"{key}/{self.place}", value)
        keys = [f"{key}/{place}" for place in range(self.terms.size)]
        self._store.wait(keys, timedelta(seconds=self.remaining() + 1))
        self.check()
        values: list[bytes] = self._store.multi_get(keys)
        return values

    def form_group(self) -> None:
        """Connect to all others."""
        store = _DIST.PrefixStore("group", self._store)
        if self.terms.backend == "nccl":
            timeout = timedelta(seconds=FORM_SECONDS)
            self._group = _nccl(store, self.place, self.terms, timeout, self._device)
        else:
            timeout = timedelta(seconds=FORM_SECONDS / _GLOO_ATTEMPTS)
            self._group = _gloo(MeetingStore(store, self.check, FORM_SECONDS), self.place, self.terms, timeout)
        self.check()

    def send(self, buffer: Buffer, place: int, number: int) -> Transfer:
        """Begin to send a bucket; its buffer must stay as it is until ``wait``."""
        tensor = torch.from_numpy(buffer)
        if self._device != "cpu":
            tensor = tensor.to(self._device)
        transfer = self._begin(self._group.send, tensor, place, number)
        self.sent_bytes += buffer.size
        return transfer

    def receive(self, buffer: Buffer, place: int, number: int) -> Transfer:
        """Begin to receive a bucket; the buffer holds it after ``wait``."""
        if self._device == "cpu":
            return self._begin(self._group.recv, torch.from_numpy(buffer), place, number)
        tensor = torch.empty(buffer.size, dtype=torch.uint8, device=self._device)
        transfer = self._begin(self._group.recv, tensor, place, number)
        transfer.back = buffer
        return transfer

    def _begin(self, operation: Any, tensor: Tensor, place: int, number: int) -> Transfer:
        self.check()
        try:
            return Transfer(self, operation([tensor], place, number + 1), place, tensor)
        except RuntimeError as error:
            self.check()
            raise PeerLost(place, str(error).splitlines()[0]) from None

    def advance(self, count: int) -> None:
        """Payload bytes that are done with."""
        self.done += count

    def wait_for_all(self) -> None:
        """This participant has done its part; returns when all have."""
        self.pulse.say("done")
        self._exchange("done", b"1")

    # -- the end

    def leave(self, linger_seconds: float) -> None:
        """Tell that this participant needs the store no more; with a time to linger, wait for the others' word."""
        if self._store is None:
            return
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.place}", b"1")
            if linger_seconds:
                keys = [f"left/{place}" for place in range(self.terms.size)]
                self._store.wait(keys, timedelta(seconds=linger_seconds))

    def cut(self) -> None:
        """From another thread: end what this participant waits for."""
        self.stop.set()
        group = self._group
        if group is None:
            return
        if self._device != "cpu":
            group.abort()
            return
        # Gloo has no abort; an operation that runs out of time closes all connections of its group.
        for place in range(self.terms.size):
            if place != self.place:
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1, dtype=torch.uint8)], place, _CUT_TAG).wait(timedelta(milliseconds=1))

    def release(self) -> None:
        """Let go of connections."""
        if self._group is not None and self._device != "cpu":
            with contextlib.suppress(RuntimeError):
                self._group.shutdown()  # its watchdog thread does not end by itself
        self._group = self._store = None


def _gloo(store: Any, place: int, terms: Terms, timeout: timedelta) -> Any:
    options = _DIST.ProcessGroupGloo._Options()
    options._timeout = timeout
    address = local_address(terms.host, terms.port)
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=address)]
    return _DIST.ProcessGroupGloo(store, place, terms.size, options)


def _nccl(store: Any, place: int, terms: Terms, timeout: timedelta, device: str) -> Any:
    if not torch.cuda.is_available() or device == "cpu":
        raise UpdateFailed("the nccl backend needs a GPU in every process", [("try", "backend gloo")], code="no-device")
    options = _DIST.ProcessGroupNCCL.Options()
    options._timeout = timeout
    torch.cuda.set_device(device)  # of this thread
    return _DIST.ProcessGroupNCCL(store, place, terms.size, options)
