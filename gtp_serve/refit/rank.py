"""One rank's weights as the engine tells it what to do with them; the ``RankControl`` of every rank.

Staging runs in a thread beside decoding; what exchanges or reads the live set is called between two steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gtp_serve.errors import UpdateRefused
from gtp_serve.layout.spans import Box, Shape, Shard, intersect
from gtp_serve.refit.apply import Target
from gtp_serve.refit.mapping import give_back
from gtp_serve.refit.offer import Offer, TensorOffer
from gtp_serve.refit.orders import GroupOrder, JoinGroup, Order, Piece, RankExport, Report, StageOrder, TensorPart, Vote
from gtp_serve.refit.outgoing import fill_segment
from gtp_serve.refit.shared import SealedMemory
from gtp_serve.refit.staging import Plans, Sources, Staging, Watch
from gtp_serve.refit.store import WeightStore
from gtp_serve.refit.transports.foreign import ForeignGroups
from gtp_serve.refit.verify import rank_digest

_LOOK_SECONDS = 0.05
_STAGING_NICE = 7
"""Added to the niceness of threads that stage beside decoding: on a core that both want, decoding has five sixths of
the time.
"""


@dataclass(slots=True, eq=False)
class _Job:
    """The update that this rank has heard of last."""

    staging: Staging
    thread: threading.Thread | None = None
    vote: Vote | None = None

    @property
    def running(self) -> bool:
        """Its thread may still touch weights."""
        return self.thread is not None and self.thread.is_alive()


class RankWeights:
    """Live, staged and previous weights of one rank.

    :param store: holds the decoder's parameters.
    :param shapes: each logical tensor of the model.
    :param sources: where new weights can come from.
    :param report: takes votes and progress, from any thread; it must not block.
    :param threads: that stage beside decoding.
    :param stall_threads: that work while no step runs.
    :param caches: memory that ``kv_cache`` stands for in ``release``.
    """

    def __init__(
        self,
        *,
        rank: int,
        store: WeightStore,
        shapes: Mapping[str, Shape],
        sources: Sources,
        report: Callable[[Report], None],
        threads: int = 1,
        stall_threads: int = 1,
        caches: Sequence[Tensor] = (),
    ) -> None:
        self._rank, self._store, self._sources, self._report = rank, store, sources, report
        self._shapes = dict(shapes)
        self._threads, self._stall_threads, self._caches = threads, stall_threads, tuple(caches)
        self._plans = Plans(store.shards, self._shapes)
        self._job: _Job | None = None
        self._digest = ""
        """Of the live set; empty: not known."""
        self._previous: str | None = None
        """Digest of the set that a rollback restores (empty: not known); None: there is no such set."""
        self._export: SealedMemory | None = None
        self._reading = threading.Lock()
        """Held while a tensor is copied out, and while the sets are exchanged."""
        self._changes = 0
        """Of what either set holds."""

    # -- while steps run ---------------------------------------------------------------------------

    def prepare(self, order: Order, deadline: float) -> Order:
        """Rank 0: open what all are to meet at.

        :param deadline: seconds.
        """
        if not isinstance(order, GroupOrder):
            return order
        group, host = self._sources.group, self._sources.meeting_host
        if group is None:
            raise UpdateRefused("this engine takes no weights over torch.distributed", code="not-supported")
        return group.open(order, host, time.monotonic() + deadline)

    def stage(self, order: StageOrder) -> None:
        """Begin to fill the staged set (``inplace``: the live one), which is the set that a rollback would restore.

        :raises UpdateRefused: while another update is under way here.
        """
        before = self._job
        if before is not None and before.running and not before.staging.watch.given_up:
            raise UpdateRefused(
                f"rank {self._rank} is still staging update {before.staging.order.update}", code="update-under-way"
            )
        previous = None if before is None else before.thread  # not its job, which would hold the one before it
        inplace, watch = order.memory == "inplace", Watch(order.deadline_seconds)
        staging = Staging(
            order=order,
            rank=self._rank,
            targets=lambda: self._store.live if inplace else self._store.staged,
            plans=self._plans,
            sources=self._sources,
            report=self._tell,
            threads=self._stall_threads if inplace else self._threads,
            watch=watch,
            before=lambda: self._before(watch, previous, inplace),
            derive=lambda keep_on: self._store.derive(staged=not inplace, keep_on=keep_on),
            on_touch=lambda: self._note_touched(inplace),
        )
        job = self._job = _Job(staging)
        job.thread = threading.Thread(target=self._run, args=(job,), name="stage-weights", daemon=True)
        job.thread.start()

    def feed(self, update: str, piece: Piece) -> None:
        """The next tensors of a fed update.

        :raises UpdateRefused: when this rank is not staging it.
        """
        staging = self._running(update).staging
        staging.watch.renew()  # as the engine's own deadline
        staging.pieces.put(piece)

    def end_feed(self, update: str) -> None:
        """No more pieces.

        :raises UpdateRefused: when this rank is not staging it.
        """
        staging = self._running(update).staging
        staging.watch.renew()
        staging.pieces.put(None)

    def drop(self, update: str) -> None:
        """Give an update up; its thread ends soon after, and nothing else is staged before it has."""
        job = self._job
        if job is not None and job.staging.order.update == update:
            job.staging.watch.give_up()
            job.vote = None
        elif self._sources.group is not None:  # prepared, and then not staged
            self._sources.group.close()

    def join_group(self, group: JoinGroup) -> None:
        """Join a group that somebody else's trainer holds open."""
        self._foreign().join(group)

    def leave_group(self, name: str) -> None:
        """Leave it."""
        self._foreign().leave(name)

    def export(self, update: str, owned: Sequence[Shard]) -> RankExport:
        """Write spans of the live set, or of a verified update's, into sealed memory, in a thread beside the steps.

        :param owned: this rank's shards with only the spans that are wanted; none lets the memory of before go.
        :raises UpdateRefused: when this rank holds no such update.
        """
        before, self._export = self._export, None
        if before is not None:
            before.close()
        if not owned:
            return RankExport()
        pairs = [(target.shard, target.tensor) for target in self._held(update)]
        self._export, stored = fill_segment(_Unchanged(TensorOffer(pairs), self._copy_out(bool(update))), owned)
        if self._export is None:
            return RankExport()
        return RankExport(segment=self._export.seal(), shards=tuple(stored))

    def _copy_out(self, staged: bool) -> Callable[[], AbstractContextManager[None]]:
        """Makes what is entered for each copy.

        :raises UpdateRefused: from it, once the set holds something else.
        """
        before = self._marks(staged)

        @contextmanager
        def copying() -> Iterator[None]:
            with self._reading:
                if self._marks(staged) != before:
                    raise UpdateRefused("the weights changed while they were written out", code="weights-changed")
                yield

        return copying

    def _marks(self, staged: bool) -> object:
        return (self._changes, self._job if staged else None)

    def _held(self, update: str) -> Sequence[Target]:
        if not update:
            return self._store.live
        job = self._job
        if job is None or job.staging.order.update != update or job.vote is None or job.vote.error is not None:
            raise UpdateRefused(f"rank {self._rank} has nothing verified of update {update}", code="not-verified")
        return self._store.live if job.staging.order.memory == "inplace" else self._store.staged

    # -- between two steps -------------------------------------------------------------------------

    def commit(self, update: str, version: str) -> str:
        """The staged set serves from now on; its digest.

        :raises UpdateRefused: when this rank has not voted for the update.
        """
        job = self._job
        if job is None or job.staging.order.update != update or job.vote is None or job.vote.error is not None:
            raise UpdateRefused(f"rank {self._rank} has nothing verified of update {update}", code="not-verified")
        self._wait_for(job)
        if job.staging.order.memory == "staged":
            self._swap()
            self._previous = self._digest
        self._digest = job.vote.digest
        self._job = None
        return self._digest

    def roll_back(self) -> str:
        """Exchange the live set for the one before; a second time, back again.

        :raises UpdateRefused: when there is none: nothing was committed yet, or another update has begun since.
        """
        if self._previous is None:
            raise UpdateRefused(
                "there is no set of weights to go back to",
                [("kept", "the set before the last commit, until another update begins")],
                code="nothing-to-roll-back",
            )
        self._swap()
        self._digest, self._previous = self._previous, self._digest
        return self._digest or self.checksum()

    def _swap(self) -> None:
        with self._reading:
            self._changes += 1
            self._store.swap()

    def checksum(self) -> str:
        """Digest of the live set, computed now."""
        self._digest = rank_digest(self._store.live, threads=self._stall_threads)
        return self._digest

    def read_tensor(self, name: str, limit: int) -> Sequence[TensorPart]:
        """This rank's parts of the first ``limit`` rows of a logical tensor.

        :raises UpdateRefused: for a tensor that the model does not have.
        """
        shape = self._shapes.get(name)
        if shape is None:
            raise UpdateRefused(f"the model has no tensor {name[:200]}", code="unknown-tensor")
        wanted = Box.whole((min(max(0, limit), shape[0]), *shape[1:]) if shape else shape)
        return [part for target in self._store.live for part in _parts(target.tensor, target.shard, name, wanted)]

    def shards(self) -> Sequence[Shard]:
        """This rank's parameters."""
        return self._store.shards

    def release(self, tags: Sequence[str]) -> None:
        """Give memory back; what it held is gone.  On a GPU only the second set goes: the rest has fixed addresses.

        :raises UpdateRefused: while an update is under way here.
        """
        self._refuse_running()
        if "weights" in tags:
            with self._reading:
                self._changes += 1
                self._store.release_live()
                self._store.release_staged()
            self._job, self._previous, self._digest = None, None, ""
        if "kv_cache" in tags:
            for cache in self._caches:
                if cache.device.type == "cpu":
                    give_back(cache.data_ptr(), cache.nbytes)

    def restore(self, tags: Sequence[str]) -> None:
        """Nothing to do: memory that was given back comes again when it is written to."""

    def close(self) -> None:
        """End whatever is under way."""
        job = self._job
        if job is not None:
            job.staging.watch.give_up()
            if job.thread is not None:
                job.thread.join()
        if self._sources.foreign is not None:
            self._sources.foreign.close()

    # ----------------------------------------------------------------------------------------------

    def _run(self, job: _Job) -> None:
        if job.staging.order.memory == "staged":
            _step_back()
        job.vote = vote = job.staging.run()
        if job.staging.watch.given_up:  # ``drop`` may have been too early to take the vote away
            job.vote = None
        self._tell(vote)

    def _before(self, watch: Watch, previous: threading.Thread | None, inplace: bool) -> None:
        """In the staging thread, before anything is written."""
        watch.doing = f"rank {self._rank} was waiting for the update before it to end"
        while previous is not None and previous.is_alive():
            previous.join(_LOOK_SECONDS)
            watch.keep_on()
        if not inplace and not self._digest:
            watch.doing = f"rank {self._rank} was making the digest of what serves"
            self._digest = rank_digest(self._store.live, threads=self._threads, keep_on=watch.keep_on)

    def _note_touched(self, inplace: bool) -> None:
        if inplace:
            with self._reading:
                self._changes += 1
            self._digest = ""
        else:
            self._previous = None

    def _tell(self, report: Report) -> None:
        with suppress(OSError):  # nobody listens any more, and this process is about to end
            self._report(report)

    def _running(self, update: str) -> _Job:
        job = self._job
        if job is None or job.staging.order.update != update or not job.running:
            raise UpdateRefused(f"rank {self._rank} is not staging update {update}", code="not-staging")
        return job

    def _refuse_running(self) -> None:
        job = self._job
        if job is not None and job.running:
            raise UpdateRefused(
                f"rank {self._rank} is still staging update {job.staging.order.update}", code="update-under-way"
            )

    def _wait_for(self, job: _Job) -> None:
        """The thread has voted and has nothing left to do but end."""
        if job.thread is not None:
            job.thread.join()

    def _foreign(self) -> ForeignGroups:
        if self._sources.foreign is None:
            raise UpdateRefused("this engine joins no other trainers' groups", code="not-supported")
        return self._sources.foreign


class _Unchanged:
    """An offer whose copies are made under a guard."""

    def __init__(self, offered: Offer, copying: Callable[[], AbstractContextManager[None]]) -> None:
        self._offered, self._copying = offered, copying

    def shards(self) -> Sequence[Shard]:
        """All of them, in a fixed order."""
        return self._offered.shards()

    def copy(self, index: int, box: Box, out: npt.NDArray[np.uint8]) -> None:
        """Copy the elements ``box`` of a shard, row-major, into so many bytes."""
        with self._copying():
            self._offered.copy(index, box, out)


def _step_back() -> None:
    """Let this thread, and those that it starts, have less of a core that others want too."""
    thread = threading.get_native_id()
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + _STAGING_NICE))


def _parts(tensor: Tensor, shard: Shard, name: str, wanted: Box) -> list[TensorPart]:
    found: list[TensorPart] = []
    for span in shard.spans:
        common = intersect(span.logical, wanted) if span.name == name else None
        if common is None:
            continue
        start = tuple(a - b + c for a, b, c in zip(common.start, span.logical.start, span.local.start, strict=True))
        cut = tuple(slice(a, a + n) for a, n in zip(start, common.shape, strict=True))
        values = tensor.detach()[cut].float().reshape(-1).tolist()
        found.append(TensorPart(start=common.start, shape=common.shape, values=tuple(values)))
    return found
