"""Where the admin key comes from: an option, a file or the environment.  Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gtp_serve.errors import UsageError

KEY_VARIABLE = "GTP_SERVE_ADMIN_KEY"
MAX_KEY_CHARS = 1024


def find_admin_key(key: str | None, file: str | None, environment: Mapping[str, str]) -> str | None:
    """The key that options and environment set; None: none.

    :raises UsageError: when two are given, the file cannot be read, or it is not 1 to 1024 printable ASCII
        characters without spaces.
    """
    if key is not None and file is not None:
        raise UsageError("--admin-key and --admin-key-file exclude each other", [("try", "one of them")])
    if file is not None:
        return _checked("--admin-key-file", _read_key(file))
    if key is not None:
        return _checked("--admin-key", key)
    named = environment.get(KEY_VARIABLE)
    return None if named is None else _checked(KEY_VARIABLE, named)


def _read_key(file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            raw = opened.read(4 * MAX_KEY_CHARS)
    except OSError as error:
        raise UsageError(f"--admin-key-file {file} cannot be read: {error.strerror}") from error
    return raw.decode("ascii", "replace").strip()


def _checked(source: str, key: str) -> str:
    if not 1 <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"{source} is not a key",
            [("possible", f"1 to {MAX_KEY_CHARS} printable ASCII characters without spaces")],
        )
    return key
