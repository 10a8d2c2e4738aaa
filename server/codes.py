"""Every error code: what it means and what to do.  ``explain`` and docs/troubleshooting.md are made from this table.

No code may be raised that is not here; a test compares the table with the source.  Standard library only.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import NamedTuple

from gtp_serve.server.codes_cluster import CLUSTER_CODES
from gtp_serve.server.codes_command import COMMAND_CODES
from gtp_serve.server.codes_request import REQUEST_CODES
from gtp_serve.server.codes_weights import WEIGHT_CODES


class Code(NamedTuple):
    """One code as a user sees it."""

    name: str
    group: str
    """Heading that it stands under."""
    seen: str
    """Exit code or HTTP status."""
    meaning: str
    do: str


_INTRO = """\
# Troubleshooting

Every error has a code. A command prints it as `error[CODE]` and ends with an exit code; a route answers it in
`error.code`. `gtp-serve explain CODE` prints the entry below, also on a machine without this page.

Exit codes: 0 stopped as asked, 1 a bug of ours or something that `doctor` found, 2 usage, 3 checkpoint, 4 does not
fit, 5 environment, 6 engine, 7 new weights not taken, 128 + signal when running requests were cut short.

This page is made from the table that `explain` reads: `gtp-serve explain --markdown`.
"""


def all_codes() -> Iterator[Code]:
    """Every code, in the page's order."""
    for groups in (COMMAND_CODES, REQUEST_CODES, WEIGHT_CODES, CLUSTER_CODES):
        for group, entries in groups.items():
            for name, (seen, meaning, do) in entries.items():
                yield Code(name, group, seen, meaning, do)


def find_code(name: str) -> Code | None:
    """The code of this name; ``-`` and ``_`` and case make no difference."""
    return {_plain(code.name): code for code in all_codes()}.get(_plain(name))


def nearest_code(name: str) -> str | None:
    """The code that is spelt most like it."""
    names = {_plain(code.name): code.name for code in all_codes()}
    near = difflib.get_close_matches(_plain(name), names, n=1, cutoff=0.5)
    return names[near[0]] if near else None


def as_markdown() -> str:
    """The whole of docs/troubleshooting.md."""
    lines, group = [_INTRO], ""
    for code in all_codes():
        if code.group != group:
            group = code.group
            lines.append(f"## {group}\n")
        lines.append(f"### {code.name}\n\n{code.seen}. {code.meaning}\n\n{code.do}\n")
    return "\n".join(lines)


def _plain(name: str) -> str:
    return name.strip().removeprefix("error[").removesuffix("]").lower().replace("_", "-")
