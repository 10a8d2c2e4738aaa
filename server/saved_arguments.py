"""Options that say how a Megatron checkpoint was saved, for the commands that read one."""

from __future__ import annotations

import argparse
from pathlib import Path

from gtp_serve.errors import UsageError
from gtp_serve.loaders import SavedOverrides

SIZES = ("tp", "pp", "ep", "etp", "gtp", "egtp")


def add_saved_arguments(parser: argparse.ArgumentParser) -> None:
    """``--iteration`` and ``--saved-*``."""
    parser.add_argument("--iteration", metavar="N", type=int, help="of a Megatron root (newest complete one)")
    group = parser.add_argument_group("only if the checkpoint does not say how it was saved")
    for name in SIZES:
        group.add_argument(f"--saved-{name}", metavar="N", type=a_size, help=f"{name.upper()} size of the trainer")
    group.add_argument("--saved-config", metavar="FILE", type=Path, help="a config.json that describes the model")


def a_size(text: str) -> int:
    """A parallel size or an alignment, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if not 1 <= value <= 1 << 16:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 1 to {1 << 16}")
    return value


def saved_of(args: argparse.Namespace) -> SavedOverrides:
    """What those options say.

    :raises UsageError: for an iteration that cannot be.
    """
    if args.iteration is not None and args.iteration < 0:
        raise UsageError(f"--iteration {args.iteration} is below 0")
    return SavedOverrides(**{name: getattr(args, f"saved_{name}") for name in SIZES}, config=args.saved_config)
