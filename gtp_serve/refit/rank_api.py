"""What each rank can do with its weights, as the engine asks it: the same calls on rank 0 and on the others.  No torch.

``refit.rank.RankWeights`` is the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gtp_serve.layout.spans import Shard
from gtp_serve.refit.orders import JoinGroup, Order, Piece, RankExport, StageOrder, TensorPart


class RankControl(Protocol):
    """One rank's live and staged weights.

    ``commit``, ``roll_back``, ``checksum``, ``read_tensor``, ``release`` and ``restore`` are called between two steps
    and may take as long as they need; ``stage``, ``feed``, ``end_feed`` and ``drop`` while steps run, and must not
    wait for bytes.  What comes of them is told through the ``report`` that the rank was made with (from any thread).
    An exception from any of these is this rank's failure and is told in its words.
    """

    def prepare(self, order: Order, deadline: float) -> Order:
        """Rank 0, before the others hear of the update: opens what all are to meet at, and fills in where that is.

        :param deadline: seconds.
        """
        ...

    def stage(self, order: StageOrder) -> None:
        """Begin to fill the staged set (``inplace``: the live one); it ends with exactly one Vote."""
        ...

    def feed(self, update: str, piece: Piece) -> None:
        """Next tensors of a fed update; Fed tells when they are there."""
        ...

    def end_feed(self, update: str) -> None:
        """There are no more pieces: verify and vote."""
        ...

    def drop(self, update: str) -> None:
        """Give an update up, if this rank has it at all.  A Vote may still follow."""
        ...

    def commit(self, update: str, version: str) -> str:
        """The staged set serves from now on; returns this rank's digest of it."""
        ...

    def roll_back(self) -> str:
        """Exchange the live set for the one before; returns this rank's digest of it."""
        ...

    def checksum(self) -> str:
        """This rank's digest of the live set, computed now."""
        ...

    def read_tensor(self, name: str, limit: int) -> Sequence[TensorPart]:
        """This rank's parts of the first ``limit`` rows of a logical tensor; none when it holds none of them."""
        ...

    def shards(self) -> Sequence[Shard]:
        """This rank's parameters."""
        ...

    def join_group(self, group: JoinGroup) -> None:
        """Returns when the group is complete; called in a thread of its own while steps run."""
        ...

    def leave_group(self, name: str) -> None:
        """As ``join_group``; a group that is unknown is no error."""
        ...

    def export(self, update: str, owned: Sequence[Shard]) -> RankExport:
        """Write spans of the live set, or of a verified update's, into sealed memory and let go of what was exported
        before; called in a thread of its own while steps run.
        """
        ...

    def release(self, tags: Sequence[str]) -> None:
        """Give memory back: ``weights``, ``kv_cache``."""
        ...

    def restore(self, tags: Sequence[str]) -> None:
        """Take it again, at the same addresses; what it held is gone."""
        ...
