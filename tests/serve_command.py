"""A ``gtp-serve`` command in a process of its own, watched through its JSON log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

START_SECONDS = 120


class Command:
    """A running ``gtp-serve`` whose JSON log is collected line by line.

    :param script: runs in place of the command, with its words.
    """

    def __init__(self, *words: str, script: str = "") -> None:
        self.started = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *(["-c", script] if script else ["-m", "gtp_serve.server"]), *words, "--log", "json"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.lines: list[dict[str, Any]] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(json.loads(line) if line.startswith("{") else {"event": "other", "text": line})

    def wait_for(self, event: str, seconds: float = START_SECONDS, **fields: Any) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for line in list(self.lines):
                if line["event"] == event and all(line.get(key) == value for key, value in fields.items()):
                    return line
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"no {event} in {self.lines}")

    def url(self, seconds: float = START_SECONDS) -> str:
        return str(self.wait_for("ready", seconds)["url"])

    def end(self) -> tuple[int, float]:
        """(exit code, seconds until then)."""
        started = time.monotonic()
        code = self.process.wait(60)
        self._reader.join(10)
        return code, time.monotonic() - started

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stderr is not None
        self.process.stderr.close()
