"""The ``gtp-serve`` command: which subcommand, its options, and the exit code.

Only argparse and our own light modules are imported here; a command's module is imported when it is chosen,
so that ``--help`` answers at once (the serve command's imports alone take longer than the help may).
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, cast

from gtp_serve import __version__
from gtp_serve.errors import UsageError
from gtp_serve.server.config_file import find_config, read_config_file
from gtp_serve.server.failures import print_failure
from gtp_serve.server.flags import refuse_unknown, rewrite_aliases
from gtp_serve.server.options import ServeOptions
from gtp_serve.server.serve_options import Given, to_options
from gtp_serve.server.settings import (
    SETTINGS,
    Setting,
    Value,
    add_setting,
    from_command_line,
    from_environment,
    from_file,
    merge,
)

COMMANDS = ("serve", "cluster", "inspect", "convert", "bench", "demo", "doctor", "explain", "push", "weights")
_MODULES = {"weights": "weights_cli"}
"""Where a command's name is not its module's."""

_DESCRIPTION = """\
Serve a Megatron or Hugging Face checkpoint over HTTP, as it lies on disk.

  gtp-serve [serve] --ckpt PATH [options]   serve a checkpoint
  gtp-serve cluster --ckpt PATH [options]   the same from several engines, on Ray
  gtp-serve inspect PATH [--json]           what is in it, will it run here
  gtp-serve convert PATH --to hf OUT        the same weights as another kind of checkpoint
  gtp-serve bench URL                       put a load shaped like rollouts on a server
  gtp-serve demo DIR                        make a small real checkpoint to try
  gtp-serve push URL --ckpt PATH            new weights for a running server
  gtp-serve weights URL                     what it serves and what it has served
  gtp-serve explain CODE | doctor           what an error means | check this machine
"""
_EPILOG = "Every option is also GTP_SERVE_NAME in the environment and name = value in the TOML file."
_EPILOG_ALL = f"""{_EPILOG}
Only in the file: tls_cert, tls_key (https), cors (web origins), max_waiting (requests before queue-full).
"""


class _Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class _Parser(argparse.ArgumentParser):
    """argparse, but a mistake is an error of ours."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, [("see", f"{self.prog} --help")])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    verbose = any(word in ("-v", "-vv", "--verbose") for word in words)
    try:
        return _dispatch(words)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0
    except Exception as error:
        return print_failure(error, sys.stderr, verbose=verbose)


def _dispatch(words: list[str]) -> int:
    command = words[0] if words and words[0] in COMMANDS else "serve"
    rest = words[1:] if words and words[0] in COMMANDS else words
    if command == "serve":
        args, given = read_serve(rest, os.environ, Path())
        if args.print_config:
            return _print_config(given)
        options = to_options(given)
        serve = importlib.import_module("gtp_serve.server.serve")
        return cast(int, serve.run(options))
    if command == "cluster":
        cluster = importlib.import_module("gtp_serve.server.cluster")
        return cast(int, cluster.run(rest, parse_serve))
    module = cast(_Command, importlib.import_module(f"gtp_serve.server.{_MODULES.get(command, command)}"))
    parser = _Parser(prog=f"gtp-serve {command}", allow_abbrev=False)
    module.add_arguments(parser)
    args, unknown = parser.parse_known_args(rest)
    if unknown:
        raise _unknown_word(unknown[0], parser)
    return module.run(args)


def _unknown_word(word: str, parser: argparse.ArgumentParser) -> UsageError:
    """Of a command that is not ``serve``."""
    name = word.partition("=")[0]
    if not name.startswith("-"):
        return UsageError(f"unexpected argument '{word}'", [("see", f"{parser.prog} --help")])
    near = difflib.get_close_matches(name, _own_options(parser), n=1, cutoff=0.7)
    return UsageError(f"unknown option {name}", [("nearest", near[0]) if near else ("see", f"{parser.prog} --help")])


def parse_serve(
    words: Sequence[str], environment: Mapping[str, str] = os.environ, folder: Path = Path()
) -> ServeOptions:
    """The options of ``serve``, checked one by one.

    :param folder: where ``gtp-serve.toml`` is looked for.
    :raises UsageError: naming what was set, where, and what is possible.
    """
    return to_options(read_serve(words, environment, folder)[1])


def read_serve(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> tuple[argparse.Namespace, Given]:
    """The command line, and every value with its source: command line, environment, file in this order."""
    if "--help-all" in words:
        build_serve_parser(everything=True).print_help()
        raise SystemExit(0)
    parser = build_serve_parser()
    args, unknown = parser.parse_known_args(rewrite_aliases(words))
    if unknown:
        raise refuse_unknown(unknown[0], _own_options(parser), COMMANDS)
    layers: list[Mapping[str, Value]] = [from_command_line(args), from_environment(environment)]
    path = find_config(args.config, environment, folder)
    if path is not None:
        layers.append(from_file(read_config_file(path), path))
    return args, Given(merge(layers))


def _print_config(given: Given) -> int:
    module = importlib.import_module("gtp_serve.server.print_config")
    return cast(int, module.run(given, sys.stdout))


def _own_options(parser: argparse.ArgumentParser) -> list[str]:
    return [word for action in parser._actions for word in action.option_strings]


def build_serve_parser(*, everything: bool = False) -> argparse.ArgumentParser:
    """Every option of ``serve``; the help fits one screen unless it is to show everything."""
    parser = _Parser(
        prog="gtp-serve",
        usage="gtp-serve [serve] --ckpt PATH [options]",
        description=_DESCRIPTION,
        epilog=_EPILOG_ALL if everything else _EPILOG,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=100),
        allow_abbrev=False,
        add_help=False,
    )
    for name, settings in _groups().items():
        shown = [s for s in settings if everything or s.shown == "help"]
        group: argparse._ActionsContainer = parser.add_argument_group(name) if shown else parser
        if name == _CONFIGURATION:
            _add_own(group)
        for setting in settings:
            if setting.shown != "file":
                add_setting(group, setting, hidden=setting not in shown)
    return parser


_CONFIGURATION = "configuration and log"


def _add_own(group: argparse._ActionsContainer) -> None:
    """Options that are no settings."""
    group.add_argument("--config", metavar="FILE", help="TOML file of settings (./gtp-serve.toml)")
    group.add_argument("--print-config", action="store_true", help="print every value and where it was set")
    group.add_argument("-h", "--help", action="help", help="this text; --help-all has the rarer options too")
    group.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    group.add_argument("--version", action="version", version=f"gtp-serve {__version__}", help="print it")


def _groups() -> dict[str, list[Setting]]:
    groups: dict[str, list[Setting]] = {}
    for setting in SETTINGS:
        groups.setdefault(setting.group, []).append(setting)
    return groups
