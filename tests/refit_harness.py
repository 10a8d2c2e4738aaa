"""One rank's weights with a decoder around them, and sources that can be slow, wrong or broken."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from checkpoint_files import SMALL, random_tensors
from parity.model_harness import PagedRun, TensorSource, fill
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Shard
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.refit.digest import digest_bytes
from gtp_serve.refit.orders import (
    DiskOrder,
    Fed,
    MemoryOrder,
    Order,
    Progress,
    Report,
    StageOrder,
    StoredShard,
    Vote,
)
from gtp_serve.refit.rank import RankWeights
from gtp_serve.refit.shared import SealedMemory
from gtp_serve.refit.source import WeightSource
from gtp_serve.refit.staging import Sources
from gtp_serve.refit.store import WeightStore
from gtp_serve.refit.verify import rank_digest

WAIT = 20.0


class Rank:
    """A decoder whose weights can be changed, and what it reports."""

    def __init__(
        self,
        config: ModelConfig = SMALL,
        *,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: torch.dtype = torch.float32,
        decoder: Decoder | None = None,
        store: WeightStore | None = None,
        **options: Any,
    ) -> None:
        self.config = config
        self.decoder = decoder or new_decoder(config, tp_rank, tp_size, dtype)
        self.store = store or WeightStore(self.decoder.targets())
        self.disk: dict[str, Callable[[], WeightSource]] = {}
        self.reports: list[Report] = []
        self._heard = threading.Condition()
        sources = options.pop("sources", None) or Sources(disk=self.open, stream=_no_stream)
        self.weights = RankWeights(
            rank=tp_rank,
            store=self.store,
            shapes=logical_tensors(config),
            sources=sources,
            report=self._hear,
            **options,
        )

    def open(self, order: DiskOrder) -> WeightSource:
        """What ``disk`` has under this path."""
        return self.disk[order.path]()

    def load(self, seed: int) -> None:
        """Fill the live weights as a cold start does."""
        fill(self.decoder, random_tensors(self.config, seed))

    def stage(self, update: str, order: Order, *, memory: str = "staged", seconds: float = WAIT) -> None:
        self.weights.stage(
            StageOrder(update=update, version="v", order=order, memory=memory, deadline_seconds=seconds)  # type: ignore[arg-type]
        )

    def vote(self, update: str) -> Vote:
        """The one vote on an update, waiting for it."""
        with self._heard:
            assert self._heard.wait_for(lambda: bool(self.votes(update)), WAIT), f"no vote on {update}"
        return self.votes(update)[0]

    def votes(self, update: str) -> list[Vote]:
        return [r for r in list(self.reports) if isinstance(r, Vote) and r.update == update]

    def stage_seed(self, update: str, seed: int, *, memory: str = "staged") -> Vote:
        """Stage random weights to the end."""
        self.disk[update] = lambda: TensorSource(random_tensors(self.config, seed))
        self.stage(update, DiskOrder(path=update), memory=memory)
        return self.vote(update)

    def push(self, update: str, seed: int, *, memory: str = "staged") -> str:
        """Stage and commit; the digest."""
        vote = self.stage_seed(update, seed, memory=memory)
        assert vote.error is None, vote.error
        return self.weights.commit(update, update)

    def logits(self) -> Tensor:
        return logits_of(self.decoder)

    def fed(self, update: str, pieces: int) -> None:
        """Wait until so many pieces have been taken."""
        with self._heard:
            assert self._heard.wait_for(lambda: self._count(update) >= pieces, WAIT), f"{pieces} pieces never came"

    def _count(self, update: str) -> int:
        return max((r.pieces for r in list(self.reports) if isinstance(r, Fed) and r.update == update), default=0)

    def progress(self, update: str) -> list[Progress]:
        return [r for r in list(self.reports) if isinstance(r, Progress) and r.update == update]

    def _hear(self, report: Report) -> None:
        with self._heard:
            self.reports.append(report)
            self._heard.notify_all()


def _no_stream(memory: object) -> WeightSource:
    raise AssertionError("no stream was expected")


@dataclass(frozen=True)
class Alone:
    """One of several ranks, without the others: its parameters are cut, and nothing is ever computed."""

    rank: int
    size: int
    capturable: bool = False

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("there are no other ranks")

    def all_gather(self, x: Tensor) -> Tensor:
        raise AssertionError("there are no other ranks")


def new_decoder(
    config: ModelConfig = SMALL, tp_rank: int = 0, tp_size: int = 1, dtype: torch.dtype = torch.float32
) -> Decoder:
    collective = Alone(tp_rank, tp_size) if tp_size > 1 else None
    return build_decoder(config, dtype=dtype, device="cpu", tp_rank=tp_rank, tp_size=tp_size, collective=collective)


def cold_digest(
    config: ModelConfig, seed: int, tp_rank: int = 0, tp_size: int = 1, dtype: torch.dtype = torch.float32
) -> str:
    """Of a decoder that was loaded with these weights and never knew others."""
    decoder = new_decoder(config, tp_rank, tp_size, dtype)
    fill(decoder, random_tensors(config, seed))
    return rank_digest(decoder.targets())


def cold_logits(config: ModelConfig, seed: int) -> Tensor:
    decoder = new_decoder(config)
    fill(decoder, random_tensors(config, seed))
    return logits_of(decoder)


def logits_of(decoder: Decoder) -> Tensor:
    run = PagedRun(decoder)
    return run.step([(run.add(), [1, 2, 3, 4, 5])])[0]


class SourceWith(TensorSource):
    """Whole tensors; ``before_read`` is called with the number of each read."""

    def __init__(self, tensors: Mapping[str, Tensor], before_read: Callable[[int], None]) -> None:
        super().__init__(tensors)
        self._before_read = before_read
        self.reads = 0
        self.closed = False

    def read(self, index: int) -> memoryview:
        self.reads += 1
        self._before_read(self.reads)
        return super().read(index)

    def close(self) -> None:
        self.closed = True
        super().close()


class Gate:
    """Lets a source read until it is closed at a certain read, and goes on when it is opened."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, number: int) -> None:
        if number == self.at:
            self.reached.set()
            assert self._open.wait(WAIT)

    def open(self) -> None:
        self._open.set()


def slowly(seconds: float) -> Callable[[int], None]:
    return lambda number: time.sleep(seconds)


def memory_order(tensors: Mapping[str, Tensor]) -> tuple[MemoryOrder, SealedMemory]:
    """Whole tensors in sealed memory of this process."""
    source = TensorSource(tensors)
    shards: Sequence[Shard] = source.shards()
    memory = SealedMemory(sum(tensor.nbytes for tensor in source.tensors.values()))
    stored = []
    for index, shard in enumerate(shards):
        data = source.read(index)
        stored.append(StoredShard(shard=shard, segment=0, offset=memory.append(data), digest=digest_bytes(data)))
    return MemoryOrder(segments=(memory.seal(),), shards=tuple(stored)), memory


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def weight_memory() -> list[str]:
    """Descriptors of this process for shared memory with weights, those of maps too."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            if "gtp-serve-weights" in os.readlink(f"/proc/self/fd/{name}"):
                found.append(name)
    return sorted(found)
