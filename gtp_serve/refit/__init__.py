"""Moving weights into a live model: sources, plans, the one writer, and the trainer's ``Publisher``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtp_serve.refit.publisher import Publisher as Publisher
    from gtp_serve.refit.publisher import PushReport as PushReport

__all__ = ["Publisher", "PushReport"]

_PUBLIC = {"Publisher": "gtp_serve.refit.publisher", "PushReport": "gtp_serve.refit.publisher"}


def __getattr__(name: str) -> Any:
    """The trainer's side, loaded when it is asked for: it needs torch, and most of this package does not."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
