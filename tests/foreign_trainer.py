"""What other projects' trainers do as rank 0 of a group that an engine joins: run as a process of its own."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

dist: Any = torch.distributed  # its stubs leave out half of it
SECONDS = timedelta(seconds=60)


def free_port() -> int:
    """A port that was free a moment ago, as trainers choose theirs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NamedGroup:
    """A group beside torch's default one, with a name, over a TCP store: how slime, OpenRLHF and others open it."""

    def __init__(self, name: str, port: int, world_size: int) -> None:
        rendezvous = dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=SECONDS)
        store, rank, size = next(rendezvous)
        store.set_timeout(SECONDS)
        named = dist.PrefixStore(name, store)
        backend = dist.Backend("gloo")
        helper: Any = c10d._new_process_group_helper
        self.group, _ = helper(size, rank, [], backend, named, group_name=name, timeout=SECONDS)
        world: Any = c10d._world
        world.pg_group_ranks[self.group] = {member: member for member in range(size)}

    def broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        """One broadcast each, all begun before the first is waited for."""
        works = [dist.broadcast(tensor, 0, group=self.group, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    def close(self) -> None:
        dist.destroy_process_group(self.group)


class StatelessGroup:
    """vLLM's group that torch knows nothing of, with gloo in NCCL's place."""

    def __init__(self, port: int, world_size: int) -> None:
        address = f"tcp://127.0.0.1:{port}"
        store, rank, size = next(dist.rendezvous(address, 0, world_size, timeout=SECONDS))
        store.set_timeout(SECONDS)
        gloo: Any = c10d.ProcessGroupGloo
        self.group = gloo(dist.PrefixStore(address, store), rank, size, timeout=SECONDS)

    def broadcast_all(self, tensors: Sequence[Tensor]) -> None:
        """One broadcast each."""
        for tensor in tensors:
            options: Any = dist.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            self.group.broadcast([tensor], options).wait()

    def close(self) -> None:
        self.group = None


def flattened(tensors: Sequence[Tensor]) -> Tensor:
    """SGLang's bucket: the bytes of all tensors in one."""
    return torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors])


def packed(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[Tensor]:
    """vLLM's buckets: bytes are gathered until there are more than so many."""
    waiting: list[Tensor] = []
    for tensor in tensors:
        waiting.append(tensor)
        if sum(one.nbytes for one in waiting) > bucket_bytes:
            yield flattened(waiting)
            waiting = []
    if waiting:
        yield flattened(waiting)


def obey(
    kind: str, port: int, world_size: int, orders: Connection, values: Mapping[str, Any], types: Mapping[str, str]
) -> None:
    """Be rank 0: open the group, then broadcast the tensors in whatever form is told."""
    torch.set_num_threads(1)
    tensors = [torch.tensor(value, dtype=getattr(torch, types[name])) for name, value in values.items()]
    group = NamedGroup("weights", port, world_size) if kind == "torch" else StatelessGroup(port, world_size)
    orders.send("open")
    while (order := orders.recv()) != "end":
        match order:
            case "each":
                group.broadcast_all(tensors)
            case "bucket":
                group.broadcast_all([flattened(tensors)])
            case int():
                group.broadcast_all(list(packed(tensors, order)))
        orders.send("sent")
    group.close()


def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Names, types and shapes as they are sent."""
    return {
        "names": list(tensors),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }
