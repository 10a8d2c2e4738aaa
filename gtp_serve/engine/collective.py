"""The collectives of a group of processes: torch.distributed's gloo on a CPU, NCCL on GPUs.

Groups are objects of their own: torch's default group, which may be the caller's, is not touched.  The ranks of
one machine meet in a file in memory that only they have open, and gloo's connections are bound to the loopback
address; ranks on several machines meet in a store that rank 0 opens, bound to the address that reached it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from gtp_serve.engine.ranks import Meeting
from gtp_serve.errors import EnvironmentFault

LOOPBACK = "127.0.0.1"
_DIST: Any = torch.distributed  # its stubs leave out the groups' options and operations


@dataclass(frozen=True, slots=True, eq=False)
class GroupCollective:
    """Collectives over a process group; one that a peer's death or a deadline ends raises RuntimeError.

    :param abort: ends operations under way, also those that a device waits in.
    """

    rank: int
    size: int
    group: Any
    """torch's ProcessGroupGloo or ProcessGroupNCCL."""
    abort: Callable[[], None]
    capturable: bool
    """NCCL's operations are; gloo's are the host's."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, the same bits on all of them; overwrites ``x`` when it is contiguous."""
        x = x.contiguous()
        self.group.allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' tensors (of one shape), joined along the last axis in rank order."""
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self.group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, dim=-1)


def join_group(meeting: Meeting, device: str) -> GroupCollective:
    """Meet the other ranks and connect to each.

    :raises EnvironmentFault: when they do not come in time, or no connection can be made.
    """
    rank, size = meeting.rank, meeting.size
    form = timedelta(seconds=meeting.form_seconds)
    address = LOOPBACK if meeting.store is None else meeting.store.own_address
    try:
        store = _store(meeting, form)
        store.set_timeout(form)
        group, abort = (_nccl if device == "cuda" else _gloo)(store, rank, size, form, address)
        group._set_default_timeout(timedelta(seconds=meeting.step_seconds))
    except RuntimeError as error:
        raise EnvironmentFault(
            f"rank tp{rank} could not connect to the other {size - 1} within {meeting.form_seconds:g} s",
            [("error", str(error).splitlines()[0])],
        ) from error
    return GroupCollective(rank, size, group, abort, capturable=device == "cuda")


def _store(meeting: Meeting, timeout: timedelta) -> Any:
    if meeting.store is not None:
        place = meeting.store
        return _DIST.TCPStore(place.host, place.port, meeting.size, meeting.rank == 0, timeout, wait_for_workers=False)
    # torch opens the path once more, locks the file and writes to it when the group is destroyed, whenever that is.
    # So the descriptor in the path must never come to mean another file: this one is not closed while we live.
    return _DIST.FileStore(f"/proc/self/fd/{os.dup(meeting.descriptor)}", meeting.size)


def _gloo(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> tuple[Any, Callable[[], None]]:
    options = _DIST.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=address)]
    return _DIST.ProcessGroupGloo(store, rank, size, options), lambda: None  # a peer's death ends an operation


def _nccl(store: Any, rank: int, size: int, timeout: timedelta, address: str) -> tuple[Any, Callable[[], None]]:
    if address == LOOPBACK:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # all ranks are on this host
    options = _DIST.ProcessGroupNCCL.Options()
    options._timeout = timeout
    group = _DIST.ProcessGroupNCCL(store, rank, size, options)
    first = torch.zeros(1, device="cuda")
    group.allreduce([first]).wait()  # NCCL connects at the first operation: here, not in the first step
    torch.cuda.synchronize()
    return group, group.abort
