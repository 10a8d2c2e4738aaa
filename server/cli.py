"""The ``gtp-serve`` command: which subcommand, its options, and the exit code.

Only argparse and our own light modules are imported here; a command's module is imported when it is chosen,
so that ``--help`` answers at once (the serve command's imports alone take longer than the help may).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, Protocol, cast, get_args

from gtp_serve import __version__
from gtp_serve.config import AttentionBackend
from gtp_serve.errors import UsageError
from gtp_serve.server.admin_key import find_admin_key
from gtp_serve.server.failures import print_failure
from gtp_serve.server.flags import refuse_unknown, rewrite_aliases
from gtp_serve.server.options import SavedGrid, ServeOptions
from gtp_serve.sizes import parse_size

COMMANDS = ("serve", "inspect", "demo", "push", "weights")
_MODULES = {"weights": "weights_cli"}
"""Where a command's name is not its module's."""

_ATTENTION_HELP = "on a GPU: auto, torch, triton, flashinfer, flash-attn (auto)"
_DESCRIPTION = """\
Serve a Megatron or Hugging Face checkpoint over HTTP, as it lies on disk.

  gtp-serve [serve] --ckpt PATH [options]   serve a checkpoint
  gtp-serve inspect PATH [--json]           what is in it, will it run here
  gtp-serve demo DIR                        make a small real checkpoint to try
  gtp-serve push URL --ckpt PATH            new weights for a running server
  gtp-serve weights URL                     what it serves and what it has served
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
        options = parse_serve(rest)
        serve = importlib.import_module("gtp_serve.server.serve")
        return cast(int, serve.run(options))
    module = cast(_Command, importlib.import_module(f"gtp_serve.server.{_MODULES.get(command, command)}"))
    parser = _Parser(prog=f"gtp-serve {command}", allow_abbrev=False)
    module.add_arguments(parser)
    return module.run(parser.parse_args(rest))


def parse_serve(words: Sequence[str]) -> ServeOptions:
    """The options of ``serve``, checked one by one.

    :raises UsageError: naming the option, what was given and what is possible.
    """
    parser = build_serve_parser()
    args, unknown = parser.parse_known_args(rewrite_aliases(words))
    if unknown:
        raise refuse_unknown(unknown[0], _own_options(parser))
    if args.ckpt is None:
        raise UsageError("which checkpoint?", [("need", "--ckpt PATH"), ("try", "gtp-serve --ckpt /path/to/run")])
    return _to_options(args)


def _own_options(parser: argparse.ArgumentParser) -> list[str]:
    return [word for action in parser._actions for word in action.option_strings]


def build_serve_parser() -> argparse.ArgumentParser:
    """Every option of ``serve`` in four groups; the help fits one screen."""
    parser = _Parser(
        prog="gtp-serve",
        usage="gtp-serve [serve] --ckpt PATH [options]",
        description=_DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=28, width=100),
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"gtp-serve {__version__}")
    _add_model_options(parser.add_argument_group("model"))
    _add_memory_options(parser.add_argument_group("device and memory"))
    _add_http_options(parser.add_argument_group("http"))
    _add_weight_options(parser.add_argument_group("new weights while serving"))
    _add_saved_options(parser.add_argument_group("only if the checkpoint does not say how it was saved"))
    return parser


def _add_model_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--ckpt", metavar="PATH", help="Megatron torch_dist, Hugging Face or GGUF checkpoint")
    group.add_argument("--iteration", metavar="N", help="which Megatron iteration (newest)")
    group.add_argument("--tokenizer", metavar="PATH", help="folder with tokenizer.json (the checkpoint's)")
    group.add_argument("--no-tokenizer", action="store_true", help="token ids only")
    group.add_argument("--chat-template", metavar="FILE", help="Jinja chat template (the tokenizer's)")
    group.add_argument("--name", metavar="NAME", help="model name in replies (folder name)")
    group.add_argument("--dtype", metavar="TYPE", default="auto", help="auto, float32, bfloat16, float16 (as saved)")
    group.add_argument("--context", metavar="N", help="most tokens of prompt plus reply (the model's)")


def _add_memory_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tp", metavar="N", default="1", help="tensor parallel size: processes, GPUs (1)")
    group.add_argument("--device", metavar="DEVICE", default="auto", help="auto, cpu, cuda (auto)")
    group.add_argument("--mem-fraction", metavar="F", help="share of memory to use (0.9 of a GPU, 0.5 of free RAM)")
    group.add_argument("--kv-memory", metavar="SIZE", help="KV cache, for example 4GiB (what fits)")
    group.add_argument("--max-running", metavar="N", help="sequences in one step (64)")
    group.add_argument("--no-prefix-cache", action="store_true", help="compute shared prompt beginnings anew")
    group.add_argument("--no-graphs", action="store_true", help="run each decode step eagerly")
    group.add_argument("--attention-backend", metavar="NAME", default="auto", help=_ATTENTION_HELP)
    group.add_argument("--deterministic", action="store_true", help="same bits whatever runs beside it; slower")


def _add_http_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", metavar="HOST", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", metavar="PORT", default="30000", help="0 picks a free one (30000)")
    group.add_argument("--drain-timeout", metavar="S", default="30", help="seconds for running requests at exit (30)")
    group.add_argument("--log", metavar="FORM", default="text", help="text or json (text)")
    group.add_argument("-v", "--verbose", action="store_true", help="debug lines, warnings and stacks")
    group.add_argument("-q", "--quiet", action="store_true", help="warnings and errors only")


def _add_weight_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--admin-key-file", metavar="FILE", help="key of the weight routes (none: this machine only)")
    group.add_argument("--admin-key", metavar="KEY", help="the same, for all to see in the process list")
    group.add_argument("--refit-memory", metavar="HOW", default="auto", help="staged or inplace (staged if it fits)")
    group.add_argument("--refit-timeout", metavar="S", default="120", help="seconds for an update (120)")
    group.add_argument("--refit-host", metavar="HOST", help="address where trainers meet the engine (--host's)")


def _add_saved_options(group: argparse._ArgumentGroup) -> None:
    for name, words in (
        ("tp", "tensor parallel size"),
        ("gtp", "GTP size"),
        ("etp", "expert tensor parallel size"),
        ("egtp", "expert GTP size"),
    ):
        group.add_argument(f"--saved-{name}", metavar="N", help=f"{words} of the trainer")
    group.add_argument("--saved-config", metavar="FILE", help="a config.json that describes the model")


def _to_options(args: argparse.Namespace) -> ServeOptions:
    if args.no_tokenizer and args.tokenizer is not None:
        raise UsageError("--tokenizer and --no-tokenizer exclude each other", [("try", "one of them")])
    if args.verbose and args.quiet:
        raise UsageError("-v and -q exclude each other", [("try", "one of them")])
    return ServeOptions(
        ckpt=Path(args.ckpt),
        iteration=_optional_integer("--iteration", args.iteration, 0, (1 << 63) - 1),
        tokenizer=None if args.tokenizer is None else Path(args.tokenizer),
        no_tokenizer=args.no_tokenizer,
        chat_template=None if args.chat_template is None else Path(args.chat_template),
        name=args.name,
        dtype=_choice("--dtype", _DTYPES.get(args.dtype, args.dtype), ("auto", "float32", "bfloat16", "float16")),  # type: ignore[arg-type]
        context=_optional_integer("--context", args.context, 1, 1 << 30),
        tp=_integer("--tp", args.tp, 1, 1024),
        device=_choice("--device", args.device, ("auto", "cpu", "cuda")),  # type: ignore[arg-type]
        mem_fraction=None if args.mem_fraction is None else _fraction("--mem-fraction", args.mem_fraction),
        kv_memory=None if args.kv_memory is None else parse_size(args.kv_memory),
        max_running=_optional_integer("--max-running", args.max_running, 1, 4096),
        prefix_cache=not args.no_prefix_cache,
        graphs=not args.no_graphs,
        attention=_choice(
            "--attention-backend",
            _ATTENTION.get(args.attention_backend.lower().replace("_", "-"), args.attention_backend),
            get_args(AttentionBackend),
        ),  # type: ignore[arg-type]
        deterministic=args.deterministic,
        host=args.host,
        port=_integer("--port", args.port, 0, 65535),
        drain_timeout=_seconds("--drain-timeout", args.drain_timeout),
        log=_choice("--log", args.log, ("text", "json")),  # type: ignore[arg-type]
        verbosity=int(args.verbose) - int(args.quiet),
        admin_key=find_admin_key(args.admin_key, args.admin_key_file, os.environ),
        refit_memory=_choice("--refit-memory", args.refit_memory, ("auto", "staged", "inplace")),  # type: ignore[arg-type]
        refit_timeout=_real("--refit-timeout", args.refit_timeout, 1.0, 86400.0, "seconds from 1 to 86400"),
        refit_host=args.refit_host,
        saved=SavedGrid(
            config=args.saved_config,
            **{
                name: _optional_integer(f"--saved-{name}", getattr(args, f"saved_{name}"), 1, 1 << 16)
                for name in ("tp", "gtp", "etp", "egtp")
            },
        ),
    )


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}

_ATTENTION = {
    "fa2": "flash-attn", "flash-attn": "flash-attn", "flashinfer": "flashinfer",
    "torch-native": "torch", "torch-sdpa": "torch", "triton": "triton", "triton-attn": "triton",
}  # fmt: skip
"""As other servers call them too."""


def _choice(option: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise UsageError(f"{option} '{value}' is not possible", [("possible", ", ".join(choices))])
    return value


def _integer(option: str, text: str, low: int, high: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 20 or not low <= int(text) <= high:
        raise UsageError(f"{option} '{text}' is not possible", [("possible", f"a whole number from {low} to {high}")])
    return int(text)


def _optional_integer(option: str, text: str | None, low: int, high: int) -> int | None:
    return None if text is None else _integer(option, text, low, high)


def _real(option: str, text: str, low: float, high: float, possible: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise UsageError(f"{option} '{text}' is not possible", [("possible", possible)])
    return value


def _fraction(option: str, text: str) -> float:
    return _real(option, text, 0.01, 1.0, "a share from 0.01 to 1, for example 0.9")


def _seconds(option: str, text: str) -> float:
    return _real(option, text, 0.0, 86400.0, "seconds from 0 to 86400")
