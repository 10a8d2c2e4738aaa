"""The first moment of an engine process: rank 0 starts the other ranks, then torch is imported.

That import takes seconds; started this early, all ranks go through it at the same time.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Protocol, cast

from gtp_serve.engine.lifeline import end_with_parent, leave_signals_to_parent
from gtp_serve.engine.ranks import Leader
from gtp_serve.server.launch import Launch, launch_argv, read_launch


class _EngineProcess(Protocol):
    def lead(self, launch: Launch, endpoint: str, leader: Leader | None) -> int: ...

    def follow(self, launch: Launch, rank: int, link: int, meeting: int) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Be one rank of the engine until told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(prog="gtp-serve-engine")
    parser.add_argument("--launch", required=True)
    parser.add_argument("--endpoint", help="rank 0: where the client listens")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--link", type=int, help="other ranks: descriptor of the socket to rank 0")
    parser.add_argument("--meeting", type=int, help="other ranks: descriptor of the file where the ranks meet")
    args = parser.parse_args(argv)
    launch = read_launch(args.launch)
    leave_signals_to_parent()
    end_with_parent()
    if args.rank:
        code = _engine_process().follow(launch, args.rank, args.link, args.meeting)
        sys.stderr.flush()
        os._exit(code)  # rank 0 waits, and torch's orderly end takes longer than the kernel's
    with ExitStack() as keep:
        leader = start_ranks(launch)
        if leader is not None:
            keep.callback(leader.close)
        return _engine_process().lead(launch, args.endpoint, leader)


def start_ranks(launch: Launch) -> Leader | None:
    """The ranks beside this one, on their way; None when there are none."""
    if launch.engine.tp == 1:
        return None
    return Leader(launch_argv(launch, warnings=bool(sys.warnoptions)), launch.engine.tp)


def _engine_process() -> _EngineProcess:
    return cast(_EngineProcess, importlib.import_module("gtp_serve.server.engine_process"))


if __name__ == "__main__":
    sys.exit(main())
