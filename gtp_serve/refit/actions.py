"""What all ranks are to do about an update, beside ``StageOrder``.  No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Drop:
    """Give an update up."""

    update: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """Commit an update, or roll back, between two steps: all ranks between the same ones."""

    update: str
    version: str
    roll_back: bool
