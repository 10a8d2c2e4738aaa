"""A child process's tie to its parent: by the kernel where it can (Linux), and by a pipe anywhere.  No torch.

The parent holds the writing end of the child's stdin and never writes; it closes when the parent is gone.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import stat
import sys
import threading

from gtp_serve.errors import EngineFault

_CHECK_SECONDS = 0.5
_WATCHER = "watch-parent"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """From now on this process never outlives the thread of the parent that started it.  May be called again."""
    if any(thread.name == _WATCHER for thread in threading.enumerate()):
        return
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_watch_parent, args=(parent,), name=_WATCHER, daemon=True).start()


def leave_signals_to_parent() -> None:
    """Signals from the terminal are for the parent, which decides when and how to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _watch_parent(parent: int) -> None:
    # The pipe's end is seen even with a parent that was gone before this process could ask who it is.
    mode = os.fstat(0).st_mode
    lifeline = [0] if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else []
    while os.getppid() == parent:
        readable, _, _ = select.select(lifeline, [], [], _CHECK_SECONDS)
        if readable and not os.read(0, 1):
            break
    os._exit(EngineFault.exit_code)
