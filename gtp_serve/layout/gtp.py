"""The GTP grid: how one weight's rows are cut over tensor parallelism and then over a ``gtp_remat`` group.

Each tensor-parallel rank holds ``local_rows`` rows; a GTP group of ``gtp`` ranks shares them in shards of
``shard_rows`` each, rounded up so that every shard is a multiple of ``alignment``.  Padding lies only at the
tail of a TP rank's block, so late shards may be partly or wholly padding:

    TP rank 0: | shard 0 | shard 1 | shard 2 ..pad| pad pad |   TP rank 1: | shard 0 | ...

Source of the rule: Megatron-LM ``core/tensor_parallel/generalized_tensor_parallelism.py`` (``pad_for_alignment``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

from gtp_serve.errors import UsageError

#: Rows that a recipe's kernels want each shard to be a multiple of.  bf16 itself needs 1; 16 is Megatron's default,
#: chosen so that a run can later switch to fp8.
RECIPE_ALIGNMENT = {"bf16": 16, "fp8": 16, "mxfp8": 32, "nvfp4": 16}


def alignment_for(recipe: str, explicit: int | None = None) -> int:
    """The alignment of a recipe; an explicit value wins.

    :raises UsageError: for a recipe that is not known or an explicit value below 1.
    """
    if explicit is not None:
        if explicit < 1:
            raise UsageError(f"alignment {explicit} is below 1", [("needed", "a positive number of rows")])
        return explicit
    if recipe not in RECIPE_ALIGNMENT:
        raise UsageError(f"unknown recipe {recipe!r}", [("known", ", ".join(RECIPE_ALIGNMENT))])
    return RECIPE_ALIGNMENT[recipe]


def shard_rows(local_rows: int, gtp: int, alignment: int) -> int:
    """Rows of each shard of a TP rank's ``local_rows`` rows, padding included."""
    return -(-local_rows // (alignment * gtp)) * alignment


def pad_rows(local_rows: int, gtp: int, alignment: int) -> int:
    """Padding rows of one TP rank's block."""
    return gtp * shard_rows(local_rows, gtp, alignment) - local_rows


def real_rows(local_rows: int, rows_per_shard: int, rank: int) -> tuple[int, int]:
    """What GTP rank ``rank`` holds of its TP rank's block: (first row, number of real rows)."""
    start = min(rank * rows_per_shard, local_rows)
    return start, min(rows_per_shard, local_rows - start)


def alignments(local_rows: int, gtp: int, rows_per_shard: int) -> frozenset[int]:
    """Every alignment under which a block of ``local_rows`` is cut into shards of ``rows_per_shard`` rows.

    Empty when no alignment explains the cut: the shards are too short, or longer than padding could make them.
    """
    return frozenset(a for a in _divisors(rows_per_shard) if shard_rows(local_rows, gtp, a) == rows_per_shard)


def _divisors(n: int) -> frozenset[int]:
    small = [a for a in range(1, isqrt(max(n, 0)) + 1) if n % a == 0]
    return frozenset(small) | frozenset(n // a for a in small)


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Parallel sizes of a trainer.  Experts have their own tensor (``etp``) and GTP (``egtp``) sizes."""

    tp: int = 1
    gtp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    egtp: int = 1
    alignment: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "gtp", "pp", "ep", "etp", "egtp", "alignment"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} is below 1")

    def sizes(self, *, expert: bool) -> tuple[int, int]:
        """(tensor parallel, GTP) sizes that cut dense weights, or expert weights."""
        return (self.etp, self.egtp) if expert else (self.tp, self.gtp)
