"""Where a key comes from: an option, a file or the environment.  Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gtp_serve.errors import UsageError

KEY_VARIABLE = "GTP_SERVE_ADMIN_KEY"
API_KEY_VARIABLE = "GTP_SERVE_API_KEY"
MAX_KEY_CHARS = 1024


def find_admin_key(key: str | None, file: str | None, environment: Mapping[str, str]) -> str | None:
    """The key that options and environment set; None: none.

    :raises UsageError: when two are given, the file cannot be read, or it is not 1 to 1024 printable ASCII
        characters without spaces.
    """
    if key is not None and file is not None:
        raise UsageError("--admin-key and --admin-key-file exclude each other", [("try", "one of them")])
    if file is not None:
        return check_key("--admin-key-file", read_key("--admin-key-file", file))
    if key is not None:
        return check_key("--admin-key", key)
    named = environment.get(KEY_VARIABLE)
    return None if named is None else check_key(KEY_VARIABLE, named)


def read_key(place: str, file: str) -> str:
    """The key that a file holds, white space around it apart.

    :param place: what named the file, for the error.
    :raises UsageError: when it cannot be read.
    """
    try:
        with Path(file).open("rb") as opened:
            raw = opened.read(4 * MAX_KEY_CHARS)
    except OSError as error:
        raise UsageError(f"{place} {file} cannot be read: {error.strerror}") from error
    return raw.decode("ascii", "replace").strip()


def check_key(place: str, key: str) -> str:
    """A key that can be sent in a header.

    :raises UsageError: when it is not 1 to 1024 printable ASCII characters without spaces.
    """
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"{place} is not a key",
            [("possible", f"1 to {MAX_KEY_CHARS} printable ASCII characters without spaces")],
        )
    return key
