"""The native CPU ops that tests run on."""

from __future__ import annotations

import pytest

from gtp_serve.ops.cpu.library import Library, Threads, find_library


def the_library() -> Library:
    """Skips the test where the package was built without a compiler."""
    found = find_library()
    if isinstance(found, str):
        pytest.skip(found, allow_module_level=True)
    return found


THREADS = Threads(the_library(), 2)
