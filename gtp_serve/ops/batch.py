"""One step's input to the model: tokens of many sequences, one after another, without padding."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """T tokens of S sequences; each sequence brings one token (decode) or several (a chunk of its prompt).

    Sequence ``s`` owns rows ``query_starts[s]`` to ``query_starts[s + 1]``; they are the last of its
    ``context_lens[s]`` positions, and its keys and values lie in the blocks ``block_tables_SB[s]``.
    """

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64."""
    slots_T: Tensor
    """int64, ``block * block_size + offset``: where each token's key and value are written."""
    query_starts: tuple[int, ...]
    """S + 1 numbers, on the host."""
    context_lens: tuple[int, ...]
    """S numbers, on the host: keys of each sequence after this step's writes."""
    block_tables_SB: Tensor
    """int64, B blocks per table, padded with 0."""
    logit_rows_S: Tensor
    """int64: rows of T whose logits are wanted."""
