"""The first moment of an engine process: rank 0 starts the other ranks, then torch is imported.

That import takes seconds; started this early, all ranks go through it at the same time.  Ranks of a ``far`` launch
are started by somebody else and find rank 0.  A process that was started early imports torch before it is told what
to build, and takes the memory of its weights and of its cache meanwhile.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol, cast

from gtp_serve.engine.far import Door, Store, knock
from gtp_serve.engine.lifeline import end_with_parent, leave_signals_to_parent
from gtp_serve.engine.peer import Patience
from gtp_serve.engine.ranks import Leader
from gtp_serve.server.early_memory import EarlyMemory, TakenMemory
from gtp_serve.server.launch import Launch, launch_argv, read_launch


class _EngineProcess(Protocol):
    def lead(self, launch: Launch, endpoint: str, leader: Leader | None, memory: TakenMemory = ...) -> int: ...

    def follow(self, launch: Launch, rank: int, link: int, meeting: int, store: Store | None = None) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Be one rank of the engine until told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gtp-serve-engine")
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--launch", help="what to build")
    given.add_argument("--launch-from", type=int, help="descriptor of a pipe that will tell, and where the client is")
    parser.add_argument("--endpoint", help="rank 0: where the client listens")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--link", type=int, help="other ranks: descriptor of the socket to rank 0")
    parser.add_argument("--meeting", type=int, help="other ranks: descriptor of the file where the ranks meet")
    args = parser.parse_args(argv)
    leave_signals_to_parent()
    end_with_parent()
    if args.launch_from is not None:
        return _lead_early(args.launch_from)
    launch = read_launch(args.launch)
    if args.rank:
        code = _follow(launch, args)
        sys.stderr.flush()
        os._exit(code)  # rank 0 waits, and torch's orderly end takes longer than the kernel's
    with ExitStack() as keep:
        leader = start_ranks(launch)
        if leader is not None:
            keep.callback(leader.close)
        return _engine_process().lead(launch, args.endpoint, leader)


def _lead_early(pipe: int) -> int:
    early = EarlyMemory(pipe)
    engine_process = _engine_process()
    order, memory = early.wait()
    if order is None:
        return 0
    launch, endpoint = order
    return engine_process.lead(launch, endpoint, None, memory)


def _follow(launch: Launch, args: argparse.Namespace) -> int:
    if launch.far is None:
        return _engine_process().follow(launch, args.rank, args.link, args.meeting)
    end, store = knock(launch.far, args.rank, Patience().start)
    return _engine_process().follow(launch, args.rank, end.detach(), -1, store)


def start_ranks(launch: Launch) -> Leader | None:
    """The ranks beside this one, on their way; None when there are none."""
    if launch.engine.tp == 1:
        return None
    door = None if launch.far is None else Door(launch.far)
    return Leader(launch_argv(launch, warnings=bool(sys.warnoptions)), launch.engine.tp, door=door)


def _engine_process() -> _EngineProcess:
    """Without collecting garbage meanwhile: the import makes hundreds of thousands of objects that stay, and to look
    through them again and again takes a tenth of its time.  Nor is garbage looked for among them later.  What the
    import needed for itself, 6 MB of torch's, goes back to the system before weights come.
    """
    gc.disable()
    try:
        module = cast(_EngineProcess, importlib.import_module("gtp_serve.server.engine_process"))
        gc.freeze()
    finally:
        gc.enable()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc's
        trim(0)
    return module


if __name__ == "__main__":
    sys.exit(main())
