"""The compiled library: found, checked against the structures here, and its threads.

Calls leave the interpreter lock, so that other threads of Python run beside a step.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int64, c_void_p
from functools import cache
from pathlib import Path

from gtp_serve.errors import EnvironmentFault
from gtp_serve.ops.cpu.build import LIBRARY
from gtp_serve.ops.cpu.structs import KINDS, Op, sizes

PATH = Path(__file__).with_name(LIBRARY)


class Library:
    """An open library.

    :raises OSError: it is not there, or cannot be loaded here.
    :raises ValueError: it was compiled from other sources than these modules fit.
    """

    def __init__(self, path: Path) -> None:
        self.dll = dll = ctypes.CDLL(str(path))
        if not hasattr(dll, "gtp_op_sizes"):
            raise ValueError(f"{path.name} is another library")
        dll.gtp_isa.restype, dll.gtp_isa.argtypes = c_char_p, [c_int64]
        dll.gtp_pool_new.restype, dll.gtp_pool_new.argtypes = c_void_p, [c_int64, c_char_p]
        dll.gtp_pool_delete.restype, dll.gtp_pool_delete.argtypes = None, [c_void_p]
        dll.gtp_run.restype = c_int64
        dll.gtp_run.argtypes = [c_void_p, POINTER(c_void_p), c_int64, POINTER(c_int64)]
        found = (c_int64 * len(KINDS))()
        dll.gtp_op_sizes(found)
        if list(found) != sizes():
            raise ValueError(f"{path.name} was compiled from other sources")

    def instruction_sets(self) -> list[str]:
        """Those that this machine runs, best first."""
        names: list[str] = []
        while (name := self.dll.gtp_isa(len(names))) is not None:
            names.append(name.decode())
        return names


@cache
def find_library(path: Path = PATH) -> Library | str:
    """The library, or why it cannot be used, in a few words."""
    if not path.exists():
        return "the native CPU ops were not built"
    try:
        return Library(path)
    except ValueError as error:
        return str(error)
    except OSError as error:
        return f"the native CPU ops cannot be loaded ({error})"


class Threads:
    """Threads that run operations; they wait without using a core between two steps.

    :param instruction_set: the machine's best by default.
    :raises EnvironmentFault: they cannot be had.
    """

    def __init__(self, library: Library, count: int, instruction_set: str | None = None) -> None:
        self.count = count
        self.instruction_set = instruction_set or library.instruction_sets()[0]
        self._dll = library.dll
        self._pool = library.dll.gtp_pool_new(count, self.instruction_set.encode())
        if not self._pool:
            raise EnvironmentFault(f"{count} threads for {self.instruction_set} could not be started")
        weakref.finalize(self, library.dll.gtp_pool_delete, self._pool)

    def run(self, ops: Sequence[Op]) -> None:
        """Carry out operations in order; what they point to must be alive."""
        self.run_array(addresses_of(ops), len(ops), None)

    def run_array(self, ops: ctypes.Array[c_void_p], count: int, rows: ctypes.Array[c_int64] | None) -> None:
        """The same from an array of their addresses.

        :param rows: how many rows this run has, for each counter.
        :raises MemoryError: there is none for what they need meanwhile; nothing was done.
        """
        if self._dll.gtp_run(self._pool, ops, count, rows):
            raise MemoryError("none for the step's intermediate results")


@cache
def shared_threads(library: Library, count: int) -> Threads:
    """This process's threads of that number: two engines take turns on them instead of sharing cores."""
    return Threads(library, count)


def addresses_of(ops: Sequence[Op]) -> ctypes.Array[c_void_p]:
    """For ``run_array``."""
    return (c_void_p * len(ops))(*(ctypes.addressof(op) for op in ops))
