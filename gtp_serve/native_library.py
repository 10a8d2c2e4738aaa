"""The compiled library (its sources: ``ops/cpu/native``) for those who need neither torch nor ops: loaders and refit.

It is optional; whoever uses it does the same without it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

PATH = Path(__file__).parent / "ops" / "cpu" / "_native.so"


@cache
def open_library(path: Path = PATH) -> ctypes.CDLL | None:
    """The library; None where it was not built or cannot be loaded here."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        return None
