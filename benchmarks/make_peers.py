"""Install each peer into an environment of its own under build/peers, and write the model in each one's format.

One that cannot be installed is reported and the others go on.  What is done already is not done again.  Exit code 0
when all are there, 1 when some are not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from peers.catalogue import PEERS, Peer, find

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "build" / "peers"
#: Settings of a user's shell that would send packages somewhere else.
HARMFUL = ("PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PYTHONHOME", "PYTHONPATH")


class StepFailed(Exception):
    """A command that failed; its log tells why."""


def main(argv: Sequence[str] | None = None) -> int:
    """Install what is missing; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PEER", help="only these (default: all)")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder of the model to measure")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the environments go (default: build/peers)")
    args = parser.parse_args(argv)
    chosen = [find(name) for name in args.names] or [peer for peer in PEERS if not peer.ours]
    failed: dict[str, str] = {}
    for peer in chosen:
        started = time.monotonic()
        try:
            done = install(peer, args.folder) + prepare(peer, args.folder, args.model)
        except (StepFailed, OSError, subprocess.TimeoutExpired) as failure:
            failed[peer.name] = str(failure)
            print(f"{peer.name}: FAILED: {failure}", flush=True)
        else:
            print(f"{peer.name}: {', '.join(done) or 'nothing has changed'} ({time.monotonic() - started:.0f} s)")
    if failed:
        print(f"{len(failed)} of {len(chosen)} peers are not there: {', '.join(failed)}; `make bench` leaves them out")
    return 1 if failed else 0


def python_of(peer: Peer, folder: Path = FOLDER) -> Path:
    """The interpreter that runs a peer's adapter."""
    return Path(sys.executable) if peer.ours else folder / peer.name / "bin" / "python"


def is_ready(peer: Peer, folder: Path = FOLDER) -> bool:
    """Whether its packages were installed to the end."""
    return peer.ours or _stamp(peer, folder).exists()


def install(peer: Peer, folder: Path) -> list[str]:
    """Make its environment; what was done, in words.

    :raises StepFailed: a command failed.
    """
    stamp, digest = _stamp(peer, folder), _fingerprint(peer)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return []
    stamp.unlink(missing_ok=True)
    place, python = folder / peer.name, python_of(peer, folder)
    place.mkdir(parents=True, exist_ok=True)
    print(f"{peer.name}: installing {' '.join(peer.requirements)}", flush=True)
    if not python.exists():
        _run(peer, folder, [sys.executable, "-m", "venv", str(place)])
    _run(peer, folder, [str(python), "-m", "pip", "install", "--progress-bar", "off", *peer.requirements], peer.build)
    if peer.unwanted:
        _run(peer, folder, [str(python), "-m", "pip", "uninstall", "-y", *peer.unwanted])
    frozen = subprocess.run([python, "-m", "pip", "freeze"], capture_output=True, text=True, check=True).stdout
    (place / "installed.txt").write_text(frozen, encoding="utf-8")
    stamp.write_text(digest, encoding="utf-8")
    return ["installed"]


def prepare(peer: Peer, folder: Path, model: Path) -> list[str]:
    """Write the model in the peer's own formats.

    :raises StepFailed: its converter failed.
    """
    done = []
    for dtype in peer.dtypes:
        place = model_folder(peer, dtype, folder)
        stamp, digest = place / "from.json", _model_digest(model)
        if stamp.exists() and json.loads(stamp.read_text(encoding="utf-8")) == digest:
            continue
        place.mkdir(parents=True, exist_ok=True)
        command = [str(python_of(peer, folder)), "-m", peer.module, "--prepare"]
        _run(peer, folder, [*command, "--dtype", dtype, "--model", str(model.absolute()), "--converted", str(place)])
        stamp.write_text(json.dumps(digest), encoding="utf-8")
        done.append(f"{dtype} model written")
    return done


def model_folder(peer: Peer, dtype: str, folder: Path = FOLDER) -> Path:
    """Where the model lies in a peer's own format, if it has one."""
    return folder / "models" / f"{peer.name}-{dtype}"


def peer_environment(threads: int | None = None) -> dict[str, str]:
    """For a peer's processes: nothing from our own environment, nothing from the network."""
    kept = {name: value for name, value in os.environ.items() if name not in HARMFUL}
    kept |= {"PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if threads is not None:
        kept["OMP_NUM_THREADS"] = str(threads)
    return kept


def _stamp(peer: Peer, folder: Path) -> Path:
    return folder / peer.name / "ready"


def _fingerprint(peer: Peer) -> str:
    parts = [*peer.requirements, *peer.unwanted, json.dumps(dict(peer.build)), sys.version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _model_digest(model: Path) -> dict[str, int]:
    """Names and sizes tell one checkpoint from another well enough here, and cost nothing."""
    return {path.name: path.stat().st_size for path in sorted(model.iterdir()) if path.is_file()}


def _run(peer: Peer, folder: Path, command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
    """With its output in the peer's log; the log's last lines when it fails."""
    log = folder / f"{peer.name}.log"
    environment = peer_environment() | dict(more or {})
    with log.open("a", encoding="utf-8") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        code = subprocess.run(command, stdout=output, stderr=output, env=environment, cwd=HERE).returncode
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-6:]
        raise StepFailed(
            f"`{' '.join(command[:4])} ...` exited with {code}; the end of {log}:\n    " + "\n    ".join(last)
        )


if __name__ == "__main__":
    sys.exit(main())
