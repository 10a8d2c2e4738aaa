"""Python's garbage collector, kept from running while very many objects are made that all stay.  No torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Without cyclic garbage collection inside, in all threads: it would walk over every object made so far again and
    again, for a fifth of the time that opening a large checkpoint takes, and find nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
