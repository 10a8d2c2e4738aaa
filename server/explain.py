"""``gtp-serve explain CODE``: what an error code means and what to do."""

from __future__ import annotations

import argparse
import sys
import textwrap

from gtp_serve.errors import UsageError
from gtp_serve.server.codes import Code, all_codes, as_markdown, find_code, nearest_code

_WIDTH = 88


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = "Say what an error code means and what to do. Without a code: all of them."
    parser.add_argument("code", metavar="CODE", nargs="?", help="for example too-big, or error[too-big]")
    parser.add_argument("--markdown", action="store_true", help="the whole table as docs/troubleshooting.md has it")


def run(args: argparse.Namespace) -> int:
    """Print an entry, the list, or the page.

    :raises UsageError: for a code that does not exist, naming the nearest.
    """
    if args.markdown and args.code is not None:
        raise UsageError("--markdown prints the whole table", [("try", "without a code")])
    if args.markdown:
        sys.stdout.write(as_markdown())
    elif args.code is None:
        sys.stdout.write(_list())
    else:
        sys.stdout.write(_entry(_found(args.code)))
    return 0


def _found(name: str) -> Code:
    code = find_code(name)
    if code is None:
        near = nearest_code(name)
        raise UsageError(
            f"there is no error code '{name}'",
            [("nearest", near)] if near else [("see", "gtp-serve explain, for all of them")],
        )
    return code


def _entry(code: Code) -> str:
    lines = [f"{code.name}   ({code.group.lower()}; {code.seen})"]
    for label, text in (("means", code.meaning), ("do", code.do)):
        lines += textwrap.wrap(
            text, _WIDTH, initial_indent=f"  {label:<7}", subsequent_indent=" " * 9, break_on_hyphens=False
        )
    return "\n".join(lines) + "\n"


def _list() -> str:
    lines: list[str] = []
    group = ""
    for code in all_codes():
        if code.group != group:
            lines += ["", code.group] if group else [code.group]
            group = code.group
        lines.append(f"  {code.name:<21} {code.meaning.partition('. ')[0].rstrip('.')}")
    return "\n".join(lines) + "\n"
