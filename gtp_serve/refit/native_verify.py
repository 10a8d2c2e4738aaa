"""Digest and finiteness of a run of bytes by the compiled library, in one pass and one call.  No torch.

The digest is the very one of ``refit.digest``, which computes it where there is no library.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

from gtp_serve.native_library import open_library

#: Element types that are looked at, by torch's names: numbers that the library knows.
ELEMENTS = {"float16": 1, "float32": 2, "bfloat16": 3}
_TOO_SHORT = -1


class NativeVerifier:
    """The library's verifier.  Safe to use from threads; calls leave the interpreter's lock.

    :param plain: without the machine's wide instructions.
    """

    def __init__(self, library: ctypes.CDLL, *, plain: bool = False) -> None:
        self._verify, self._plain = library.gtp_verify, plain
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._verify.argtypes = (ctypes.c_char_p, count, pointer, count, count, count, pointer)
        self._verify.restype = count

    def look(self, head: bytes, address: int, size: int, dtype: str | None) -> tuple[str, bool] | None:
        """(digest of ``head`` and the memory behind it, whether all elements there are finite).

        :param dtype: of the elements; another than those of ``ELEMENTS``, or None, is not looked at.
        :return: None for what is too short.
        """
        digest = (ctypes.c_uint64 * 2)()
        elements = ELEMENTS.get(dtype or "", 0)
        found = self._verify(head, len(head), address, size, elements, self._plain, digest)
        return None if found == _TOO_SHORT else (f"{digest[0]:016x}{digest[1]:016x}", not found)


@cache
def native_verifier() -> NativeVerifier | None:
    """The verifier; None where the library is missing or older, or the machine's bytes lie the other way round."""
    library = open_library()
    if library is None or sys.byteorder != "little" or not hasattr(library, "gtp_verify"):
        return None
    return NativeVerifier(library)
