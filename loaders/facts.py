"""What is known about a checkpoint beside its weights: the report that ``inspect`` and the server print."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Format = Literal["megatron", "huggingface", "gguf"]
Layout = Literal["plain", "padded", "logical"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedOverrides:
    """What the user says about how a Megatron checkpoint was saved, for what the checkpoint itself may not
    say.

    A value that the checkpoint says differently is refused, never replaced.
    """

    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    etp: int | None = None
    gtp: int | None = None
    egtp: int | None = None
    config: Path | None = None
    """A Hugging Face ``config.json`` that describes the model, for a checkpoint without saved arguments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedGrid:
    """Parallel sizes of the run that saved a checkpoint; 1 where nothing says otherwise."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    gtp: int = 1
    egtp: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPadding:
    """A stored tensor with padding rows: rows of one matrix as stored, and those that the model has."""

    key: str
    stored_rows: int
    real_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A checkpoint in words and numbers."""

    format: Format
    format_text: str
    """For people, for example ``Megatron torch_dist (common.pt)``."""
    layout: Layout = "plain"
    saved: SavedGrid = SavedGrid()
    fc1_permuted: bool = False
    padding: tuple[TensorPadding, ...] = ()
    iteration: int | None = None
    iterations: tuple[int, ...] = ()
    """All complete iterations of the root."""
    weight_bytes: int = 0
    """Of the model's own elements, as stored, without padding."""
    optimizer_bytes: int = 0
    parameters: int = 0
    dtypes: tuple[tuple[str, int], ...] = ()
    """Bytes of weights by element type, largest first."""
    num_tensors: int = 0
    """Logical tensors, each found exactly once."""
    warnings: tuple[str, ...] = ()
    """What a user should know: something was ignored, or is not as it should be."""
    notes: tuple[str, ...] = ()
    """What was left out by rule, with counts."""
    saved_tokenizer: str | None = None
    """Where the trainer had its tokenizer, as the saved arguments say."""
