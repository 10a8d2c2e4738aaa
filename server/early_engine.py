"""An engine process that is started before anybody knows what it is to serve: importing torch takes it seconds, in
which this process imports its own packages and reads the checkpoint's index.

What to build comes through a pipe once that is known; if the pipe is closed instead, the process ends.  Nothing but the
standard library is imported here, so that the process starts at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress

ENGINE_MODULE = "gtp_serve.server.engine_start"


def engine_command(*, warnings: bool = False) -> list[str]:
    """The interpreter with this one's flags, and the engine's module; what to build is not in it yet.

    :param warnings: let other packages' warnings through.
    """
    flags = ["-P"] if sys.flags.safe_path else []
    flags += ["-O"] * sys.flags.optimize
    flags += ["-W", "default"] if warnings else []
    return [sys.executable, *flags, "-m", ENGINE_MODULE]


def can_start_early(tp: int) -> bool:
    """Whether one engine process is all there is to start, in an interpreter that can start another like itself."""
    return tp == 1 and bool(sys.executable)


class EarlyEngine:
    """One such process.  ``close`` ends it unless somebody has taken it over.

    Its stdin and stderr are pipes, as those of every engine process.

    :param warnings: let other packages' warnings through.
    :raises OSError: no process can be started.
    """

    def __init__(self, *, warnings: bool = False) -> None:
        reading, self._writing = os.pipe()
        try:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                [*engine_command(warnings=warnings), "--launch-from", str(reading)],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(reading,),
            )
        except BaseException:
            os.close(self._writing)
            raise
        finally:
            os.close(reading)
        self._taken = False

    def hand_over(self, order: bytes) -> subprocess.Popen[bytes]:
        """Tell it what to build, and who listens; from now on it is the caller's.

        A process that has died in the meantime is handed over too: its exit code and last words tell why.

        :param order: as ``server.launch.write_order`` makes it.
        """
        self._taken = True
        with suppress(BrokenPipeError), os.fdopen(self._writing, "wb") as pipe:
            pipe.write(order)
        return self.process

    def close(self) -> None:
        """End a process that nobody needed."""
        if self._taken:
            return
        self._taken = True
        os.close(self._writing)
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.process.wait()
