"""``gtp-serve cluster``: serve from several replicas on a Ray cluster; every option of ``serve`` holds for each.

Ray is imported by ``gtp_serve.cluster`` only, once the port is open.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.server import serve

_WORDS = """\
Serve a checkpoint from several replicas on a Ray cluster.  All options of gtp-serve serve are taken too
(gtp-serve --help-all) and hold for each replica; weights are changed on all replicas together.
"""


def run(words: Sequence[str], parse_serve: Callable[..., Any]) -> int:
    """Serve until told to stop; returns the exit code.

    :param parse_serve: reads the options that are not the cluster's own.
    """
    args, rest = parser().parse_known_args(list(words))
    options = parse_serve(rest, os.environ, Path())
    if importlib.util.find_spec("ray") is None:
        raise EnvironmentFault("Ray is not installed", [("try", "pip install 'gtp-serve[ray]'")])
    return serve.run(options, lambda: _bringup(args))


def _bringup(args: argparse.Namespace) -> Any:
    bringup = importlib.import_module("gtp_serve.cluster.bringup")
    settings = importlib.import_module("gtp_serve.cluster.settings")
    low = args.min_replicas if args.min_replicas is not None else args.replicas
    high = args.max_replicas if args.max_replicas is not None else max(low, args.replicas)
    scale = settings.Scale(
        low=low, high=high, target=args.target_requests, up_seconds=args.up_after, down_seconds=args.down_after
    )
    scale.check()
    cluster = bringup.ClusterOptions(
        address=None if args.address == "local" else args.address,
        fleet=args.fleet,
        scale=scale,
        strategy=args.placement,
        cpus=args.cpus_per_rank,
        rolling=args.rolling,
        keep=args.keep,
    )
    return bringup.make(cluster)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UsageError(message, [("see", "gtp-serve cluster --help")])


def parser() -> argparse.ArgumentParser:
    """The cluster's own options."""
    made = _Parser(
        prog="gtp-serve cluster",
        usage="gtp-serve cluster --ckpt PATH [--tp N] [--replicas M] [options]",
        description=_WORDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--replicas", type=_count, default=1, metavar="M", help="engines (1)")
    made.add_argument("--min-replicas", type=_count, metavar="N", help="fewest, when their number follows the load")
    made.add_argument("--max-replicas", type=_count, metavar="N", help="most, when their number follows the load")
    made.add_argument(
        "--target-requests", type=_positive, default=32.0, metavar="X", help="requests that a replica is to have (32)"
    )
    made.add_argument(
        "--up-after", type=_positive, default=10.0, metavar="S", help="seconds of demand before one is added (10)"
    )
    made.add_argument(
        "--down-after", type=_positive, default=120.0, metavar="S", help="seconds without before one is drained (120)"
    )
    made.add_argument(
        "--address", default="auto", help="of the Ray cluster: auto, host:port, or local to start one here (auto)"
    )
    made.add_argument("--fleet", default="default", metavar="NAME", help="fronts of one name share replicas (default)")
    made.add_argument(
        "--placement",
        choices=("auto", "pack", "spread"),
        default="auto",
        help="ranks of a replica: on one node if it is large enough, on few, on one each (auto)",
    )
    made.add_argument("--cpus-per-rank", type=_positive, default=1.0, metavar="X", help="of Ray's resource (1)")
    made.add_argument("--rolling", action="store_true", help="new weights replica by replica: two versions for a while")
    made.add_argument("--keep", action="store_true", help="leave the replicas running when this front ends")
    return made


def _count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 10_000:
        raise argparse.ArgumentTypeError(f"{text!r} must be 1 to 10000")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return value
