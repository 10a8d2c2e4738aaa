"""``gtp-serve convert PATH --to hf|megatron OUT``: the same weights as another kind of checkpoint.

What is written lies under a hidden name until it has been read back and found equal.  Torch is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders import Checkpoint, open_checkpoint
from gtp_serve.server.demo_steps import Steps
from gtp_serve.server.saved_arguments import a_size, add_saved_arguments, saved_of
from gtp_serve.sizes import format_gib, parse_size

_DTYPES = {
    "auto": None,
    **dict.fromkeys(("float32", "fp32"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
    **dict.fromkeys(("float16", "fp16"), "float16"),
}
_GRID = ("tp", "gtp", "pp", "ep", "etp", "egtp", "alignment")
_SHARD_SIZE = "4GiB"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = "Write a checkpoint as another kind, one tensor in memory at a time, and read it back."
    parser.add_argument("path", metavar="PATH", type=Path, help="Megatron torch_dist, Hugging Face or GGUF checkpoint")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make; if it is there it must be empty")
    parser.add_argument("--to", metavar="KIND", required=True, help="hf or megatron")
    parser.add_argument("--dtype", metavar="TYPE", default="auto", help="auto, float32, bfloat16, float16 (as stored)")
    parser.add_argument("--shard-size", metavar="SIZE", help=f"hf: most bytes of weights in one file ({_SHARD_SIZE})")
    parser.add_argument("--layout", metavar="HOW", help="megatron: padded or logical (padded)")
    for name, words in (
        ("tp", "tensor parallel size"),
        ("gtp", "GTP size"),
        ("pp", "pipeline parallel size"),
        ("ep", "expert parallel size"),
        ("etp", "expert tensor parallel size"),
        ("egtp", "expert GTP size"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=a_size, help=f"megatron: {words} (1)")
    parser.add_argument("--alignment", metavar="N", type=a_size, help="megatron: rows of a GTP shard divide by it (16)")
    add_saved_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Convert, verify, and give the result its name.

    :raises UsageError: for options that do not fit one another, or an OUT that holds something.
    """
    grid = _grid(args)
    dtype = _dtype(args.dtype)
    layout = _choice("--layout", args.layout or "padded", ("padded", "logical"))
    shard_bytes = parse_size(args.shard_size or _SHARD_SIZE)
    begun = time.monotonic()
    out = args.out.absolute()
    _check_free(out, args.out)
    steps = Steps()
    with closing(open_checkpoint(args.path, iteration=args.iteration, saved=saved_of(args))) as checkpoint:
        writers: Any = steps.run("start torch", lambda _progress: importlib.import_module("gtp_serve.loaders.convert"))
        conversion = _conversion(writers, checkpoint, args.to, dtype, grid)
        with _partial(out, conversion.num_bytes) as partial:
            size = conversion.num_bytes
            if args.to == "hf":
                steps.run("write", lambda said: conversion.write_huggingface(partial, shard_bytes, said), size=size)
            else:
                steps.run("write", lambda said: conversion.write_megatron(partial, grid, layout, said), size=size)
            verified = steps.run("read back", lambda said: conversion.verify(partial, said), size=size)
            _keep(partial, out, args.out)
    _report(checkpoint, verified, args.out, time.monotonic() - begun)
    return 0


def _conversion(writers: Any, checkpoint: Checkpoint, to: str, dtype: str | None, grid: Grid) -> Any:
    rows = writers.output_rows(
        checkpoint.config,
        megatron=to == "megatron",
        from_megatron=checkpoint.facts.format == "megatron",
        tp=grid.tp,
    )
    return writers.Conversion(checkpoint, dtype=dtype, rows=rows)


def _grid(args: argparse.Namespace) -> Grid:
    _choice("--to", args.to, ("hf", "megatron"))
    given = {name: getattr(args, name) for name in _GRID if getattr(args, name) is not None}
    if args.to == "hf":
        for option in (*given, *(["layout"] if args.layout else [])):
            raise UsageError(f"--{option} is for --to megatron: a Hugging Face folder is cut over no ranks")
        return Grid()
    if args.shard_size is not None:
        raise UsageError("--shard-size is for --to hf: Megatron writes one file for each rank")
    return Grid(**{"alignment": 16, **given})


def _dtype(text: str) -> str | None:
    _choice("--dtype", text, tuple(_DTYPES))
    return _DTYPES[text]


def _choice(option: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(f"{option} '{value}' is not possible", [("possible", ", ".join(choices))])
    return value


def _check_free(out: Path, shown: Path) -> None:
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"{shown} exists and is not an empty folder", [("try", "another folder")], code="output-exists"
        )


@contextmanager
def _partial(out: Path, size: int) -> Iterator[Path]:
    """An empty hidden folder beside ``out``, gone afterwards unless it was renamed.

    :raises EnvironmentFault: when the disk is too full or cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < size:
            raise EnvironmentFault(
                f"{out.parent} has {format_gib(free)} free", [("needed", f"{format_gib(size)} of weights")]
            )
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
        try:
            # The library makes it for its owner only; a checkpoint is shared like any other folder.
            inner = folder / "checkpoint"
            inner.mkdir()
            yield inner
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except BrokenPipeError:
        raise  # nobody reads what is printed; that is no fault of the disk
    except OSError as error:
        reason = error.strerror or str(error)
        raise EnvironmentFault(f"{error.filename or out} cannot be written", [("reason", reason)]) from error


def _keep(partial: Path, out: Path, shown: Path) -> None:
    """Give the folder its name in one step; somebody may have written there meanwhile."""
    _check_free(out, shown)
    os.replace(partial, out)


def _report(checkpoint: Checkpoint, verified: Any, out: Path, seconds: float) -> None:
    count = checkpoint.facts.num_tensors
    lines = [
        f"\nverified {verified.tensors}/{count} tensors, {format_gib(verified.num_bytes)}, in {seconds:.1f} s",
        f"  digest   {verified.digest}   (of what was read back; the same as of what was read)",
        f"  serve    gtp-serve --ckpt {shlex.quote(str(out))}",
    ]
    if checkpoint.tokenizer is None:
        lines.insert(2, "  note     the source has no tokenizer, so neither has this: --tokenizer PATH, to serve text")
    sys.stdout.write("\n".join(lines) + "\n")
