"""Fill .venv with the locked packages and this project; say what is done and how long it takes.

Standard library only.  A second run with nothing changed does nothing: the stamp in the environment holds a
digest of pyproject.toml, the lock, the interpreter and the folder.  The Makefile has checked the version.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "gtp-serve.stamp"
LOCK = ROOT / "requirements-dev.lock"
#: For the test in which Megatron loads what is saved here.  It runs under Python 3.11 though it asks for 3.12, and none
#: of the packages that it asks for is needed.
MEGATRON = "megatron-core==0.19.2"

#: Settings of a user's shell that would send packages somewhere else than into the environment.
HARMFUL = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONHOME", "PYTHONPATH")


class StepFailed(Exception):
    """A command that failed; its own output has told why."""


def main() -> int:
    """Make the environment or leave a good one alone; the exit status."""
    begin = time.monotonic()
    wanted = fingerprint()
    if is_current(wanted):
        say("ready (.venv, nothing has changed)")
        return 0
    STAMP.unlink(missing_ok=True)
    compiling = threading.Thread(target=compile_native)
    compiling.start()
    try:
        if not is_usable():
            step(f"create .venv with Python {sys.version.split()[0]}", create_environment)
        step("install torch (the largest package: minutes on a slow line)", install_torch)
        step(f"install the packages of {LOCK.name}", lambda: pip_install("-r", str(LOCK)))
        step(f"install {MEGATRON}, which one test reads checkpoints with", install_megatron)
        step("compile the native CPU ops, begun beside the above", compiling.join)
        step(
            "install gtp-serve itself, editable",
            lambda: pip_install("--no-deps", "--no-build-isolation", "-e", str(ROOT)),
        )
    except StepFailed as failure:
        say(f"FAILED: {failure}")
        return 1
    STAMP.write_text(wanted)
    say(f"ready in {time.monotonic() - begin:.1f} s")
    return 0


def fingerprint() -> str:
    """What the environment depends on, as one digest."""
    parts = [
        (ROOT / "pyproject.toml").read_bytes(),
        (ROOT / "setup.py").read_bytes(),
        *(path.read_bytes() for path in native_sources()),
        LOCK.read_bytes(),
        MEGATRON.encode(),
        sys.version.encode(),
        str(ROOT).encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def native_sources() -> list[Path]:
    """What the installation compiles."""
    folder = ROOT / "gtp_serve" / "ops" / "cpu"
    return [folder / "build.py", *sorted(path for path in (folder / "native").rglob("*") if path.is_file())]


def is_current(wanted: str) -> bool:
    """Whether .venv was finished for this very fingerprint."""
    return VENV_PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted


def is_usable() -> bool:
    """Whether .venv can be brought up to date; one of another Python or moved from elsewhere cannot."""
    if not VENV_PYTHON.exists():
        return False
    probe = "import sys, pip; print(sys.version); print(sys.prefix)"
    result = subprocess.run([VENV_PYTHON, "-c", probe], capture_output=True, text=True, env=clean_env())
    scripts_are_ours = (VENV / "bin" / "pip").exists() and str(VENV) in (VENV / "bin" / "pip").read_text()
    return result.stdout == f"{sys.version}\n{VENV}\n" and scripts_are_ours


def compile_native() -> None:
    """Compile what the installation of gtp-serve then finds, while pip waits for the network or uses one core.

    Whatever fails, fails again there, and is told there.
    """
    native = runpy.run_path(str(ROOT / "gtp_serve" / "ops" / "cpu" / "build.py"))
    objects = ROOT / "build" / "native"
    with suppress(native["BuildError"], OSError):
        native["build"](objects / native["LIBRARY"], kept=objects)


def create_environment() -> None:
    """A new .venv with pip inside, also where the distribution keeps ensurepip in a package of its own."""
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        run([sys.executable, "-m", "venv", str(VENV)], quiet=True)
    except StepFailed:
        shutil.rmtree(VENV, ignore_errors=True)
        run([sys.executable, "-m", "venv", "--without-pip", str(VENV)])
        run([sys.executable, "-m", "pip", "--python", str(VENV_PYTHON), "install", "-q", "pip"])


def install_torch() -> None:
    """torch first and alone: the newest release, which a range would take, brings gigabytes for GPUs."""
    (pin,) = [line for line in LOCK.read_text().splitlines() if line.startswith("torch==")]
    index = os.environ.get("TORCH_INDEX")
    pip_install(*(["--index-url", index] if index else []), pin)


def install_megatron() -> None:
    """There are wheels for Linux only; elsewhere its test is skipped."""
    try:
        pip_install("--no-deps", "--ignore-requires-python", "--only-binary", ":all:", MEGATRON)
    except StepFailed:
        say(f"{MEGATRON} cannot be installed here; the test that needs it will be skipped")


def pip_install(*arguments: str) -> None:
    """Install into .venv; a second try goes round pip's cache, which may be damaged."""
    command = [
        str(VENV_PYTHON),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--no-compile",  # a module is compiled when it is first imported, and most never are
    ]
    try:
        run([*command, *arguments])
    except StepFailed:
        say("pip failed; once more without its cache")
        run([*command, "--no-cache-dir", *arguments])


def run(command: Sequence[str], *, quiet: bool = False) -> None:
    """Run a command; its output is shown, unless a failure is expected and answered by another command."""
    silence = subprocess.DEVNULL if quiet else None
    status = subprocess.run(
        command, env=clean_env(), stdin=subprocess.DEVNULL, stdout=silence, stderr=silence
    ).returncode
    if status:
        raise StepFailed(f"exit status {status} from: {' '.join(command)}")


def clean_env() -> dict[str, str]:
    """The user's environment without what would lead pip or Python away from .venv."""
    return {name: value for name, value in os.environ.items() if name not in HARMFUL}


def step(title: str, action: Callable[[], None]) -> None:
    """Announce, do, and tell the seconds."""
    say(f"{title} ...")
    begin = time.monotonic()
    action()
    say(f"  done in {time.monotonic() - begin:.1f} s")


def say(text: str) -> None:
    """One line, at once, even into a pipe."""
    print(f"venv: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
