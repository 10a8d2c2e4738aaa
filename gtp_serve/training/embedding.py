"""The vocabulary's two ends: token embedding and output head, each rank holding rows of them, tied or not.

Legend: T tokens, D hidden, V vocabulary rows of this TP rank.
"""

from __future__ import annotations

from torch import Tensor

from gtp_serve.errors import UsageError
from gtp_serve.layout.spans import Shape
from gtp_serve.training.groups import rank_of, size_of
from gtp_serve.training.layer import ShardedLayer
from gtp_serve.training.linear import call_of, multiply, sum_over_tp
from gtp_serve.training.placement import TrainPlacement
from gtp_serve.training.products import EmbeddingFunction
from gtp_serve.training.shards import Content, GTPShard


class VocabParallelEmbedding(ShardedLayer):
    """One row of D numbers for each token id; TP ranks hold equally many, the last ones' surplus is padding.

    :param name: of the logical tensor.
    :param rows: of the vocabulary.
    """

    weight: GTPShard

    def __init__(self, name: str, rows: int, hidden_size: int, placement: TrainPlacement) -> None:
        super().__init__(placement)
        self.rows, self.hidden_size = rows, hidden_size
        self.first, self.weight = _table(name, rows, hidden_size, placement)

    def forward(self, ids: Tensor) -> Tensor:
        """[.., D], the same on all TP ranks."""
        call = call_of(self, sum_input_grad=False)
        pick = self.placement.ops.embedding
        rows_TD: Tensor = EmbeddingFunction.apply(ids.reshape(-1), self.weight, call, pick, self.first)  # type: ignore[no-untyped-call]
        return sum_over_tp(self.placement, rows_TD).view(*ids.shape, -1)


class VocabParallelHead(ShardedLayer):
    """``[.., D] -> [.., V]``: logits of this TP rank's rows.

    :param tied: the embedding's weight, which is then this layer's too.
    :raises UsageError: for a tied weight of another logical shape than this head's.
    """

    weight: GTPShard

    def __init__(
        self, name: str, rows: int, hidden_size: int, placement: TrainPlacement, *, tied: GTPShard | None = None
    ) -> None:
        super().__init__(placement)
        self.rows, self.hidden_size = rows, hidden_size
        self.local_rows = -(-rows // size_of(placement.tp()))
        if tied is None:
            self.first, self.weight = _table(name, rows, hidden_size, placement)
        else:
            check_head_weight(tied, (self.local_rows, hidden_size))
            self.first = min(rank_of(placement.tp()) * self.local_rows, rows)
            self.weight = tied

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """[.., V].

        :param weight: to multiply with in this call, as Megatron hands a tied head its weight.
        :raises UsageError: for a weight of another logical shape.
        """
        if weight is not None:
            check_head_weight(weight, (self.local_rows, self.hidden_size))
            if not isinstance(weight, GTPShard):
                return self.placement.ops.linear(x, weight, None)
        return multiply(self, x, self.weight if weight is None else weight, None, sum_input_grad=True)


def check_head_weight(weight: Tensor, needed: Shape) -> None:
    """Refuse a weight that is not the head's: a shard's own shape says nothing, its logical one decides.

    :raises UsageError: naming both shapes.
    """
    shape = weight.logical_shape if isinstance(weight, GTPShard) else tuple(weight.shape)
    if shape != needed:
        raise UsageError(f"the head was given a weight of {list(shape)}", [("needed", f"{list(needed)}")])


def _table(name: str, rows: int, hidden_size: int, placement: TrainPlacement) -> tuple[int, GTPShard]:
    """(first row, weight) of this TP rank."""
    tp = placement.tp()
    held = -(-rows // size_of(tp))
    first = min(rank_of(tp) * held, rows)
    content = Content.of(name, min(held, rows - first), first_row=first)
    return first, placement.weight(content, (held, hidden_size), partition_dim=0)
