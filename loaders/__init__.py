"""Checkpoints on disk: what they are, which weights they hold and where each byte lies.  Torch-free."""

from __future__ import annotations

from gtp_serve.loaders.checkpoint import Checkpoint, open_checkpoint
from gtp_serve.loaders.facts import Facts, SavedOverrides

__all__ = ["Checkpoint", "Facts", "SavedOverrides", "open_checkpoint"]
