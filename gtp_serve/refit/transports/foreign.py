"""Groups that somebody else's trainer holds open, joined as SGLang's and vLLM's engines join them.

The trainer is rank 0 and owns the store; this engine's ranks come behind it and only ever receive.  Nothing is
registered with torch: a group is an object, and its end is the end of its connections.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from math import prod
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from gtp_serve.errors import GtpServeError, UpdateFailed, UpdateRefused
from gtp_serve.refit.fed import Take
from gtp_serve.refit.orders import JoinGroup, Piece
from gtp_serve.refit.plan import ITEM_BYTES
from gtp_serve.refit.transports.landing import ExactLanding, Landing, is_float, passes_on
from gtp_serve.refit.transports.nccl import NcclCommunicator, join_nccl

_DIST: Any = torch.distributed  # its stubs leave out the groups' options and operations
_CUDA: Any = torch.cuda  # typed in part only
_TICK_SECONDS = 0.05
"""How often a wait looks whether it was called off."""
_GRACE_SECONDS = 2.0
_WINDOW_BYTES = 64 << 20
"""Broadcasts are posted ahead up to so many bytes, and at least two of them."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a wait may last.

    :param left: seconds, asked every 50 ms.
    :param cancelled: likewise.
    """

    left: Callable[[], float]
    cancelled: Callable[[], bool]

    def check(self, doing: str) -> None:
        """Go on or not.

        :raises UpdateFailed: when the time is over or it was called off.
        """
        if self.left() <= 0:
            raise UpdateFailed(f"the update's deadline passed while {doing}", code="update-deadline")
        if self.cancelled():
            raise UpdateFailed(f"the update was given up while {doing}", code="dropped")


class Pending(Protocol):
    """A broadcast under way."""

    def done(self, seconds: float) -> bool:
        """Whether it is complete, after waiting for at most so long; raises RuntimeError when it failed."""
        ...


class Channel(Protocol):
    """What a group receives with."""

    device: str
    """Where its buffers lie."""

    def land(self, count: int, *, floats: bool) -> Landing | ExactLanding:
        """Memory for a broadcast of so many bytes; ``floats``: a floating-point number is the last of them."""
        ...

    def broadcast(self, buffer: Tensor, seconds: float) -> Pending:
        """Begin to receive what rank 0 sends next; it fails by itself after so long."""
        ...

    def close(self) -> None:
        """Let go of all connections; nothing is under way."""
        ...

    def abandon(self, pending: list[Pending]) -> None:
        """Let go of all connections though something is under way; does not wait for it."""
        ...


class ForeignGroup:
    """A group that was joined; used by one thread at a time."""

    def __init__(self, name: str, channel: Channel) -> None:
        self.name = name
        self.broken = ""
        """Why nothing more can come through it: its members no longer agree on what comes next."""
        self._channel = channel

    def receive(self, piece: Piece, take: Take, patience: Patience) -> int:
        """Bring a piece's tensors; returns their bytes.

        :raises UpdateFailed: when the trainer is gone or late, or it was called off; the group is broken then.  Also
            when it sends another number of bytes than it told; the group is as before then.
        """
        if self.broken:
            raise UpdateRefused(
                f"group '{self.name}' is of no use any more: {self.broken}",
                [("try", "join it again")],
                code="group-broken",
            )
        if self._channel.device != "cpu":
            _CUDA.set_device(self._channel.device)  # of this thread
        sizes = [prod(shape) * ITEM_BYTES[dtype] for shape, dtype in zip(piece.shapes, piece.dtypes, strict=True)]
        under_way: deque[tuple[range, Landing | ExactLanding, Pending]] = deque()
        problems: list[str] = []
        try:
            for members in _broadcasts(piece, sizes):
                count = sum(sizes[index] for index in members)
                while len(under_way) > 1 and count + sum(len(one.told) for _, one, _ in under_way) > _WINDOW_BYTES:
                    problems += self._finish(under_way, piece, sizes, take, patience)
                landing = self._channel.land(count, floats=is_float(piece.dtypes[members[-1]]))
                # It is called off here first; its own end comes a little later, for what nobody waits for any more.
                work = self._channel.broadcast(landing.room, max(0.0, patience.left()) + _GRACE_SECONDS)
                under_way.append((members, landing, work))
            while under_way:
                problems += self._finish(under_way, piece, sizes, take, patience)
        except BaseException as error:
            self._break(str(error).splitlines()[0] if str(error) else repr(error), [work for _, _, work in under_way])
            if isinstance(error, RuntimeError):  # torch's
                raise UpdateFailed(
                    f"the trainer's broadcast in group '{self.name}' failed",
                    [("error", str(error).splitlines()[0])],
                    code="peer-lost",
                ) from error
            raise
        if problems:  # told when all have come: the trainer is in its broadcasts
            raise UpdateFailed(problems[0], [("in", f"group '{self.name}'")], code="tensors-refused")
        return sum(sizes)

    def _finish(
        self,
        under_way: deque[tuple[range, Landing | ExactLanding, Pending]],
        piece: Piece,
        sizes: list[int],
        take: Take,
        patience: Patience,
    ) -> list[str]:
        """Take the first of those under way; returns what is wrong with it, and it is not taken then."""
        members, landing, pending = under_way[0]
        while not pending.done(_TICK_SECONDS):
            patience.check(f"waiting for {piece.names[members.start]} in group '{self.name}'")
        under_way.popleft()
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        if problem := landing.check(piece.names[members.start] + more):
            return [problem]
        buffer = landing.told
        starts = accumulate((sizes[index] for index in members), initial=0)
        for index, start in zip(members, starts, strict=False):
            part = buffer[start : start + sizes[index]]
            dtype: torch.dtype = getattr(torch, piece.dtypes[index])
            if start % dtype.itemsize:
                part = part.clone()  # a view of another type must begin at a multiple of its size
            take(index, part.view(dtype).reshape(piece.shapes[index]))
        return []

    def _break(self, why: str, pending: list[Pending]) -> None:
        self.broken = why
        self._channel.abandon(pending)

    def close(self) -> None:
        """Leave the group."""
        if not self.broken:
            self.broken = "it was left"
            self._channel.close()


def _broadcasts(piece: Piece, sizes: list[int]) -> Iterator[range]:
    """Which tensors come in one broadcast, one after another."""
    if piece.packed == "":
        yield from (range(index, index + 1) for index in range(len(sizes)))
        return
    first = filled = 0
    for index, size in enumerate(sizes):
        filled += size
        if piece.packed == "vllm_packed" and filled > piece.bucket_bytes:
            yield range(first, index + 1)
            first, filled = index + 1, 0
    if first < len(sizes):
        yield range(first, len(sizes))


class ForeignGroups:
    """The groups that this rank has joined.

    :param rank: this engine rank.
    :param device: ``cpu`` or ``cuda``, where the parameters are.
    """

    def __init__(self, rank: int, device: str) -> None:
        self._rank, self._device = rank, device
        self._index: int | None = _CUDA.current_device() if device == "cuda" and _CUDA.is_available() else None
        """Of the GPU of the thread that makes this; every other thread begins with the first one."""
        self._groups: dict[str, ForeignGroup] = {}
        self._lock = threading.Lock()

    def join(self, order: JoinGroup) -> None:
        """Returns when all members are there; a group of the same name is left first.

        :raises UpdateRefused: for a place in the group, or a backend, that cannot be.
        :raises UpdateFailed: when the others do not come in time.
        """
        rank = order.rank_offset + self._rank
        if not 0 < rank < order.world_size:
            raise UpdateRefused(
                f"rank {rank} has no place in group '{order.name}' of {order.world_size}",
                [("needed", "rank_offset from 1, world_size of at least rank_offset plus this server's ranks")],
                code="group-place",
            )
        if order.backend == "nccl" and self._device != "cuda":
            raise UpdateRefused(
                f"group '{order.name}' asks for nccl, but this server's weights are on a CPU",
                [("send", "backend: gloo")],
                code="group-backend",
            )
        self.leave(order.name)
        if self._index is not None:
            _CUDA.set_device(self._index)  # of this thread
        try:
            joined = ForeignGroup(order.name, _connect(order, rank))
        except GtpServeError:
            raise
        except (RuntimeError, OSError) as error:
            raise UpdateFailed(
                f"rank {rank} could not join group '{order.name}' within {order.seconds:g} s",
                [("at", f"{order.host}:{order.port}"), ("error", str(error).splitlines()[0])],
                code="group-join",
            ) from error
        with self._lock:
            previous, self._groups[order.name] = self._groups.get(order.name), joined
        if previous is not None:
            previous.close()

    def leave(self, name: str) -> None:
        """A name that is unknown is no error."""
        with self._lock:
            group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def get(self, name: str) -> ForeignGroup:
        """A group that was joined.

        :raises UpdateRefused: when there is none of this name.
        """
        with self._lock:
            if name not in self._groups:
                known = ", ".join(sorted(self._groups)) or "none"
                raise UpdateRefused(
                    f"there is no group '{name}'", [("joined", known), ("try", "join it first")], code="group-unknown"
                )
            return self._groups[name]

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.leave(name)


# -- connecting --------------------------------------------------------------------------------------------------------


def _connect(order: JoinGroup, rank: int) -> Channel:
    form = timedelta(seconds=order.seconds)
    if order.kind == "stateless" and order.backend == "nccl":
        return _Stateless(join_nccl(order, rank, form))
    store = _DIST.TCPStore(order.host, order.port, order.world_size, False, form)
    prefixed = _prefixed(store, order)
    if order.backend == "gloo":
        return _Gloo(prefixed, rank, order, form)
    return _Nccl(prefixed, rank, order.world_size, form)


def _prefixed(store: Any, order: JoinGroup) -> Any:
    """The store as the trainer's side sees it: its functions put the group's name in front of every key."""
    if order.kind == "stateless":
        host = f"[{order.host}]" if ":" in order.host else order.host
        return _DIST.PrefixStore(f"tcp://{host}:{order.port}", store)
    first_device = "cpu" if order.backend == "gloo" else "cuda"
    named = _DIST.PrefixStore(order.name, store)
    return _DIST.PrefixStore(f"{first_device}/", _DIST.PrefixStore(f"{order.name}/", named))


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to the trainer: no other interface is bound."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: nothing is sent
        return str(probe.getsockname()[0])


def _from_first(seconds: float) -> Any:
    options = _DIST.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = timedelta(seconds=seconds)
    return options


class _Gloo:
    device = "cpu"

    def __init__(self, store: Any, rank: int, order: JoinGroup, form: timedelta) -> None:
        options = _DIST.ProcessGroupGloo._Options()
        options._timeout = form
        own = _own_address(order.host, order.port)
        options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=own)]
        self._group = _DIST.ProcessGroupGloo(store, rank, order.world_size, options)
        self._passes_on = passes_on(rank, order.world_size)

    def land(self, count: int, *, floats: bool) -> Landing:
        return Landing(count, floats=floats, passes_on=self._passes_on)

    def broadcast(self, buffer: Tensor, seconds: float) -> Pending:
        return _GlooWork(self._group.broadcast([buffer], _from_first(seconds)), buffer)

    def close(self) -> None:
        self._group = None

    def abandon(self, pending: list[Pending]) -> None:
        # gloo cannot call an operation off: it ends by its own timeout, or when the trainer goes, and the group's
        # end waits for that.  Nobody else does.
        group, self._group = self._group, None
        threading.Thread(target=_outlast, args=(pending, group), name="group-end", daemon=True).start()


def _outlast(pending: list[Pending], group: object) -> None:
    for work in pending:
        with suppress(RuntimeError):
            while not work.done(1.0):
                pass
    pending.clear()
    del group


class _GlooWork:
    def __init__(self, work: Any, buffer: Tensor) -> None:
        self._work = work
        self._buffer = buffer  # must outlive the operation

    def done(self, seconds: float) -> bool:
        try:
            self._work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # it ended in the meantime: raises only if it failed
        return True


class _Nccl:
    def __init__(self, store: Any, rank: int, size: int, form: timedelta) -> None:
        self.device = f"cuda:{_CUDA.current_device()}"
        options = _DIST.ProcessGroupNCCL.Options()
        options._timeout = form
        self._group = _DIST.ProcessGroupNCCL(store, rank, size, options)

    def land(self, count: int, *, floats: bool) -> ExactLanding:
        return ExactLanding(count, self.device)

    def broadcast(self, buffer: Tensor, seconds: float) -> Pending:
        return _NcclWork(self._group.broadcast([buffer], _from_first(seconds)), buffer)

    def close(self) -> None:
        group, self._group = self._group, None
        group.shutdown()

    def abandon(self, pending: list[Pending]) -> None:
        group, self._group = self._group, None
        group.abort()


class _NcclWork:
    def __init__(self, work: Any, buffer: Tensor) -> None:
        self._work, self._buffer = work, buffer

    def done(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._work.is_completed():
            if time.monotonic() >= end:
                return False
            time.sleep(0.0005)
        self._work.wait()
        return True


class _Stateless:
    def __init__(self, communicator: NcclCommunicator) -> None:
        self.device = communicator.device
        self._communicator = communicator

    def land(self, count: int, *, floats: bool) -> ExactLanding:
        return ExactLanding(count, self.device)

    def broadcast(self, buffer: Tensor, seconds: float) -> Pending:
        return self._communicator.broadcast(buffer)

    def close(self) -> None:
        self._communicator.destroy()

    def abandon(self, pending: list[Pending]) -> None:
        self._communicator.abort()
