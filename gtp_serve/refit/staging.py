"""One update on one rank: open, plan, transfer, verify; ends in a Vote whatever happens.  Runs beside decoding.

Everything here may take as long as the update's deadline; all of it looks at its ``Watch`` again and again, so that
an update that is given up ends soon.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event
from typing import assert_never

from gtp_serve.errors import GtpServeError, UpdateFailed, UpdateRefused
from gtp_serve.layout.spans import Shape, Shard
from gtp_serve.refit.apply import Target, apply_plan
from gtp_serve.refit.fed import FedStaging
from gtp_serve.refit.orders import (
    DiskOrder,
    Fed,
    FedOrder,
    GroupOrder,
    MemoryOrder,
    Piece,
    Progress,
    Report,
    StageOrder,
    StreamOrder,
    Vote,
)
from gtp_serve.refit.plan import RefitPlan, build_plan
from gtp_serve.refit.shared import MemorySource, SharedBytes, check_digest
from gtp_serve.refit.source import WeightSource
from gtp_serve.refit.transports.foreign import ForeignGroups, Patience
from gtp_serve.refit.transports.group import GroupReceiver
from gtp_serve.refit.verify import verify

_TELL_SECONDS = 0.1
_LOOK_SECONDS = 0.05
_PLANS_KEPT = 2


class Watch:
    """How long an update may go on: until its deadline, or until it is given up.

    :param seconds: from now to ``deadline``, an instant of the clock.
    :param clock: seconds, steadily rising.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = seconds
        self.deadline = clock() + seconds
        self._given_up = Event()
        self.doing = "starting"

    def give_up(self) -> None:
        """End it; from any thread."""
        self._given_up.set()

    def renew(self) -> None:
        """Its full time again; from any thread."""
        self.deadline = self._clock() + self._seconds

    @property
    def given_up(self) -> bool:
        """Whether it was told to end."""
        return self._given_up.is_set()

    @property
    def over(self) -> bool:
        """Whether it was told to end, or its time is over."""
        return self._given_up.is_set() or self.left <= 0

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - self._clock()

    def keep_on(self) -> None:
        """Nothing, while the update may go on.

        :raises UpdateFailed: when it may not.
        """
        if self._given_up.is_set():
            raise UpdateFailed(f"the update was given up while {self.doing}", code="dropped")
        if self.left <= 0:
            raise UpdateFailed(
                f"the update's deadline of {self._seconds:g} s passed while {self.doing}", code="update-deadline"
            )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sources:
    """Where a rank can take weights from."""

    disk: Callable[[DiskOrder], WeightSource]
    """Opens a checkpoint of the served model; refuses any other."""
    stream: Callable[[SharedBytes], WeightSource]
    """Reads a safetensors file in memory; does not close it."""
    group: GroupReceiver | None = None
    """Takes part in transfers over torch.distributed."""
    foreign: ForeignGroups | None = None
    """Groups of other trainers that this rank has joined."""
    meeting_host: str = "127.0.0.1"
    """Address of the one interface on which rank 0 opens the store where all meet."""


class Plans:
    """The last few plans: a trainer pushes from the same layout again and again."""

    def __init__(self, want: Sequence[Shard], shapes: Mapping[str, Shape]) -> None:
        self._want, self.shapes = tuple(want), shapes
        self._kept: list[RefitPlan] = []

    def plan(self, have: Sequence[Shard]) -> RefitPlan:
        """The plan from these shards to this rank's parameters.

        :raises LayoutMismatch: as ``build_plan``.
        """
        have = tuple(have)
        for kept in self._kept:
            if kept.have == have:
                return kept
        plan = build_plan(have, self._want, self.shapes)
        self._kept = [plan, *self._kept][:_PLANS_KEPT]
        return plan


@dataclass(kw_only=True, eq=False)
class Staging:
    """An update under way on this rank.

    :param targets: gives the set to fill.
    :param before: what else is to be done before the first byte is written, while steps run.
    :param threads: that copy and verify.
    """

    order: StageOrder
    rank: int
    targets: Callable[[], Sequence[Target]]
    plans: Plans
    sources: Sources
    report: Callable[[Report], None]
    threads: int
    watch: Watch
    before: Callable[[], None] = lambda: None
    derive: Callable[[Callable[[], None]], None] = lambda keep_on: None
    """Computes what serves in the place of verified weights; is given the watch's ``keep_on``."""
    on_touch: Callable[[], None] = lambda: None
    """Told once, before the first byte of the set may be overwritten."""
    pieces: SimpleQueue[Piece | None] = field(default_factory=SimpleQueue)
    """What is fed; None ends it."""
    touched: bool = False
    """Bytes of the set may have been overwritten."""
    _seconds: dict[str, float] = field(default_factory=dict)
    _told: float = 0.0

    def run(self) -> Vote:
        """Do it all; never raises."""
        try:
            self.watch.keep_on()
            self.before()
            targets = self.targets()
            received = self._transfer(targets)
            with self._phase("verify", "verifying"):
                digest = verify(targets, threads=self.threads, keep_on=self.watch.keep_on)
            with self._phase("derive", "deriving what serves"):
                self.derive(self.watch.keep_on)
        except GtpServeError as error:
            return self._vote(error=(error.code, error.message, _texts(error)))
        except Exception as error:
            traceback.print_exception(error)
            return self._vote(error=("internal", f"rank {self.rank}: {type(error).__name__}: {error}", ()))
        size = sum(target.tensor.nbytes for target in targets)
        return self._vote(digest=digest, source_bytes=received, target_bytes=size)

    def _vote(
        self,
        *,
        error: tuple[str, str, tuple[tuple[str, str], ...]] | None = None,
        digest: str = "",
        source_bytes: int = 0,
        target_bytes: int = 0,
    ) -> Vote:
        return Vote(
            update=self.order.update,
            rank=self.rank,
            error=error,
            digest=digest,
            source_bytes=source_bytes,
            target_bytes=target_bytes,
            seconds=dict(self._seconds),
            touched=self.touched,
        )

    # -- transfer ----------------------------------------------------------------------------------

    def _transfer(self, targets: Sequence[Target]) -> int:
        match self.order.order:
            case DiskOrder() as disk:
                with self._phase("open", "opening the checkpoint"):
                    source = self.sources.disk(disk)
                return self._copy(source, targets, disk.max_bytes_per_second)
            case MemoryOrder() as memory:
                with self._phase("open", "opening shared memory"):
                    source = MemorySource(memory, self.rank)
                return self._copy(source, targets)
            case StreamOrder() as stream:
                return self._read_stream(stream, targets)
            case GroupOrder() as group:
                return self._receive_group(group, targets)
            case FedOrder() as fed:
                return self._receive_fed(fed, targets)
            case _:
                assert_never(self.order.order)

    def _read_stream(self, stream: StreamOrder, targets: Sequence[Target]) -> int:
        with self._phase("open", "opening the stream"):
            memory = SharedBytes(stream.segment)
        try:
            with self._phase("open", "reading the stream's header"):
                if stream.digest:
                    check_digest(memory.view, stream.digest, "the stream")
                source = self.sources.stream(memory)
            return self._copy(source, targets)
        finally:
            memory.close()

    def _copy(self, source: WeightSource, targets: Sequence[Target], rate: int | None = None) -> int:
        try:
            with self._phase("plan", "planning"):
                plan = self.plans.plan(source.shards())
            self.watch.keep_on()
            done, total = 0, plan.source_bytes

            def advance(count: int) -> None:
                nonlocal done
                done += count
                self.watch.keep_on()
                self._tell("transfer", done, total)

            with self._phase("transfer", "copying"):
                self._touch()
                return apply_plan(
                    plan,
                    source,
                    targets,
                    threads=self.threads,
                    progress=advance,
                    max_bytes_per_second=rate,
                    background=self.order.memory != "inplace",
                )
        finally:
            source.close()

    def _receive_group(self, order: GroupOrder, targets: Sequence[Target]) -> int:
        group = self.sources.group
        if group is None:
            raise UpdateRefused("this engine takes no weights over torch.distributed", code="not-supported")
        self.watch.doing = f"rank {self.rank} was receiving from the trainer"
        received = group.receive(
            order,
            update=self.order.update,
            targets=targets,
            shapes=self.plans.shapes,
            deadline=self.watch.deadline,
            cancelled=lambda: self.watch.over,
            writing=self._touch,
            progress=lambda done, total: self._tell("transfer", done, total),
        )
        self._seconds |= received.seconds
        return received.source_bytes

    def _receive_fed(self, order: FedOrder, targets: Sequence[Target]) -> int:
        foreign = self.sources.foreign
        if foreign is None:
            raise UpdateRefused("this engine takes no weights from other trainers' groups", code="not-supported")
        patience = Patience(left=lambda: self.watch.left, cancelled=lambda: self.watch.given_up)
        fed = FedStaging(targets, self.plans.shapes, writing=self._touch, discard=order.discard)
        with self._phase("transfer", "waiting for tensors"):
            for count, piece in enumerate(self._announced(), 1):
                group = foreign.get(piece.group or order.group)
                fed.feed(piece, partial(group.receive, patience=patience))
                self.report(Fed(update=self.order.update, rank=self.rank, pieces=count))
            fed.finish()
        return fed.received_bytes

    def _announced(self) -> Iterator[Piece]:
        """Pieces as they are fed."""
        while True:
            try:
                piece = self.pieces.get(timeout=_LOOK_SECONDS)
            except Empty:
                self.watch.keep_on()
                continue
            if piece is None:
                return
            yield piece

    def _touch(self) -> None:
        """The set's contents are gone from now on."""
        if not self.touched:
            self.touched = True
            self.on_touch()

    # -- what is told ------------------------------------------------------------------------------

    @contextmanager
    def _phase(self, name: str, doing: str) -> Iterator[None]:
        self.watch.doing = f"rank {self.rank} was {doing}"
        began = time.monotonic()
        try:
            self.watch.keep_on()
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - began

    def _tell(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._told >= _TELL_SECONDS or done == total:
            self._told = now
            self.report(Progress(update=self.order.update, rank=self.rank, phase=phase, done=done, total=total))


def _texts(error: GtpServeError) -> tuple[tuple[str, str], ...]:
    return tuple((str(label), str(text)) for label, text in error.details)
