"""How a torch_dist checkpoint was saved, decided from its chunk grid.

The grid in the files decides; what the saved arguments or the user declare must agree with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch
from gtp_serve.layout.megatron import (
    Rule,
    StoredName,
    full_shape,
)
from gtp_serve.layout.spans import Box, Shape

Kind = Literal["plain", "padded", "logical"]


Space = Literal["dense", "expert"]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of ``.metadata``: its global shape, dtype (torch's name) and the chunks it was saved in."""

    shape: Shape
    dtype: str
    chunks: tuple[Box, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeclaredGrid:
    """Parallel sizes that saved arguments or the user state; None where nobody says."""

    tp: int | None = None
    gtp: int | None = None
    etp: int | None = None
    egtp: int | None = None

    def sizes(self, space: Space) -> tuple[int | None, int | None]:
        """(TP, GTP) of dense or expert weights."""
        return (self.tp, self.gtp) if space == "dense" else (self.etp, self.egtp)


@dataclass(frozen=True, slots=True)
class SpaceLayout:
    """How the dense weights, or the experts, were saved.  ``kind`` is ``plain`` exactly when ``gtp`` is 1."""

    tp: int
    gtp: int
    kind: Kind
    fc1_permuted: bool
    """Gated fc1 rows lie in the order that padded GTP saving leaves them in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedLayout:
    """How a checkpoint was saved; ``expert`` is None for a dense model."""

    dense: SpaceLayout
    expert: SpaceLayout | None

    @property
    def kind(self) -> Kind:
        """Of the checkpoint as a whole."""
        kinds = {self.dense.kind} | ({self.expert.kind} if self.expert else set())
        return "padded" if "padded" in kinds else "logical" if "logical" in kinds else "plain"

    @property
    def fc1_permuted(self) -> bool:
        """Whether gated fc1 rows lie in the order that padded GTP saving leaves them in."""
        return self.dense.fc1_permuted or (self.expert is not None and self.expert.fc1_permuted)

    def space(self, space: Space) -> SpaceLayout:
        """Layout of one space; a dense model has no expert space."""
        if space == "dense" or self.expert is None:
            return self.dense
        return self.expert


def detect_layout(
    tensors: Mapping[str, StoredTensor],
    names: Mapping[str, StoredName],
    config: ModelConfig,
    declared: DeclaredGrid,
) -> SavedLayout:
    """How the checkpoint was saved, from its chunk grid.

    :raises LayoutMismatch: when grid, declared sizes and model contradict one another.
    """
    found = {key: (name.rule, tensors[key]) for key, name in names.items()}
    expert = _detect_space("expert", found, config, declared, "logical")
    # Dense weights of a MoE model may be such that both layouts are the same numbers; experts always tell.
    dense = _detect_space("dense", found, config, declared, expert.kind if expert and expert.gtp > 1 else "logical")
    if dense is None:
        raise LayoutMismatch(
            "the checkpoint has no attention projection (linear_proj)", [("needed", "a decoder's weights")]
        )
    saved = SavedLayout(dense=dense, expert=expert)
    kinds = {saved.dense.kind, saved.expert.kind if saved.expert else "plain"}
    if {"padded", "logical"} <= kinds:
        raise LayoutMismatch(
            f"dense weights are in the {saved.dense.kind} layout and experts in the other one",
            [("needed", "one layout")],
        )
    return saved


def _detect_space(
    space: Space,
    found: Mapping[str, tuple[Rule, StoredTensor]],
    config: ModelConfig,
    declared: DeclaredGrid,
    otherwise: Kind,
) -> SpaceLayout | None:
    """How the dense weights or the experts were saved; None when there are none.

    :param otherwise: the layout to take where the grid is the same in both.
    """
    here = {key: pair for key, pair in found.items() if pair[0].space == space and pair[0].gtp}
    by_rows = {key: tensor for key, (rule, tensor) in here.items() if rule.cut == "row"}
    if not by_rows:
        return None
    tp = _agree(f"{space} tensor-parallel", {key: len(_starts(tensor, -1)) for key, tensor in by_rows.items()})
    cuts = {key: len(_starts(tensor, -2)) for key, tensor in by_rows.items()}
    said_tp, said_gtp = declared.sizes(space)
    prefix = "" if space == "dense" else "expert "
    if said_tp is not None and said_tp != tp:
        key = next(iter(by_rows))
        raise LayoutMismatch(
            f"saved arguments say {prefix}TP {said_tp}, but {key} is cut into {tp} column pieces",
            [("needed", "arguments and files of one run")],
        )
    gtp = max(cuts.values()) if said_gtp is None else said_gtp
    _refuse_more_cuts(cuts, gtp, prefix)
    if gtp == 1:
        _check_plain(here, tp)
        return SpaceLayout(tp, 1, "plain", fc1_permuted=False)
    kind = _padded_or_logical(here, config, tp, gtp) or otherwise
    if kind == "padded":
        short = {key: n for key, n in cuts.items() if n != gtp}
        if short:
            key, n = next(iter(short.items()))
            raise LayoutMismatch(f"{key} is cut into {n} row shards, but the {prefix}GTP size is {gtp}")
    return SpaceLayout(tp, gtp, kind, fc1_permuted=kind == "padded" and bool(_fc1_cuts(here)))


def _refuse_more_cuts(cuts: Mapping[str, int], gtp: int, prefix: str) -> None:
    for key, n in cuts.items():
        if n > gtp:
            raise LayoutMismatch(
                f"saved arguments say {prefix}GTP {gtp}, but {key} is cut into {n} row shards",
                [("needed", "arguments and files of one run")],
            )


def _agree(what: str, values: Mapping[str, int]) -> int:
    first_key, first = next(iter(values.items()))
    for key, value in values.items():
        if value != first:
            raise LayoutMismatch(
                f"{what} size is {first} in {first_key} and {value} in {key}", [("needed", "one grid")]
            )
    return first


def _starts(tensor: StoredTensor, axis: int) -> set[int]:
    """Distinct offsets on an axis, of chunks that hold anything."""
    return {box.start[axis] for box in tensor.chunks if box.volume}


def _fc1_cuts(here: Mapping[str, tuple[Rule, StoredTensor]]) -> dict[str, int]:
    return {key: len(_starts(tensor, -2)) for key, (rule, tensor) in here.items() if rule.parts == "gate_up"}


def _check_plain(here: Mapping[str, tuple[Rule, StoredTensor]], tp: int) -> None:
    for key, (rule, tensor) in here.items():
        if rule.cut != "column":
            continue
        cuts, usual = len(_starts(tensor, -2)), tp * (2 if rule.parts == "gate_up" else 1)
        if cuts not in (usual, 1):
            raise LayoutMismatch(
                f"{key} is cut into {cuts} row pieces; without GTP at TP {tp} there are {usual}",
                [("try", "--saved-gtp N, if the checkpoint was saved with GTP and does not say so")],
            )


def _padded_or_logical(
    here: Mapping[str, tuple[Rule, StoredTensor]], config: ModelConfig, tp: int, gtp: int
) -> Kind | None:
    kinds: dict[str, Kind] = {}
    for key, cuts in _fc1_cuts(here).items():
        if cuts not in (2 * tp * gtp, 2 * tp):
            raise LayoutMismatch(
                f"{key} is cut into {cuts} row pieces",
                [
                    (
                        "needed",
                        f"{2 * tp * gtp} (padded layout) or {2 * tp} (logical layout) at TP {tp} GTP {gtp}",
                    )
                ],
            )
        kinds[key] = "padded" if cuts == 2 * tp * gtp else "logical"
    if not kinds:
        # No gated projection in this space: only rows beyond the real ones can tell.
        grown = any((shape := full_shape(r, config)) and t.shape[-2] > shape[0] for r, t in here.values())
        return "padded" if grown else None
    if len(set(kinds.values())) > 1:
        raise LayoutMismatch(f"gated projections disagree on the layout: {kinds}", [("needed", "one layout")])
    return next(iter(kinds.values()))
