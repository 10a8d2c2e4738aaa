"""A trainer rank's shards as objects of Ray's object store, for ``RolloutWorker.push``.

Each rank gives only those of its rows that no other rank gives, straight from its shard: no gather and no padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from gtp_serve.cluster.bundles import BUNDLE_BYTES, Bundle, pack_stored
from gtp_serve.cluster.memory_host import put_object
from gtp_serve.errors import LayoutMismatch, UpdateRefused
from gtp_serve.layout.spans import Shape, Shard
from gtp_serve.refit.offer import Offered, offer
from gtp_serve.refit.outgoing import fill_segment
from gtp_serve.refit.shared import SharedBytes
from gtp_serve.refit.transports.shares import sole_owners


def offered_shards(source: Offered) -> tuple[Shard, ...]:
    """What a rank has, to be told to the other ranks: metadata only."""
    return tuple(offer(source).shards())


def bundle_shards(
    source: Offered,
    rank: int,
    ranks: Sequence[Sequence[Shard]],
    tensors: dict[str, Shape],
    *,
    size: int = BUNDLE_BYTES,
) -> list[Bundle]:
    """This rank's part of the model, as objects that live as long as this process and somebody holds them.

    :param source: see ``refit.offer.offer``.
    :param ranks: ``offered_shards`` of each trainer rank.
    :param tensors: the served model's logical tensors (``RolloutWorker.layout()["tensors"]``).
    :raises UpdateRefused: when the ranks do not fit together or the model.
    """
    try:
        mine = sole_owners(ranks, {name: tuple(shape) for name, shape in tensors.items()})[rank]
    except LayoutMismatch as error:
        raise UpdateRefused(error.message, error.details, code="weights-mismatch") from None
    memory, stored = fill_segment(offer(source), mine)
    if memory is None:
        return []
    with memory:
        shared = SharedBytes(memory.seal())
        try:
            return pack_stored(shared.view, stored, put_object, size=size)
        finally:
            shared.close()
