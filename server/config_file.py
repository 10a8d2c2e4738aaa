"""Finds and reads the configuration file of ``serve``: ``--config``, ``GTP_SERVE_CONFIG`` or ``./gtp-serve.toml``.

Never from a home folder and never from inside a checkpoint, whose author is not the operator.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gtp_serve.errors import UsageError
from gtp_serve.server.settings import CONFIG_VARIABLE

CONFIG_NAME = "gtp-serve.toml"
_MAX_BYTES = 1 << 20


def find_config(option: str | None, environment: Mapping[str, str], folder: Path) -> Path | None:
    """The file to read, or None.

    :param folder: where ``gtp-serve.toml`` is looked for; its absence is no mistake.
    """
    if option is not None:
        return Path(option)
    if environment.get(CONFIG_VARIABLE):
        return Path(environment[CONFIG_VARIABLE])
    beside = folder / CONFIG_NAME
    return beside if beside.is_file() else None


def read_config_file(path: Path) -> dict[str, Any]:
    """The file's keys and values.

    :raises UsageError: when it cannot be read or is not TOML, with the line.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"the configuration file {path} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_BYTES:
        raise UsageError(f"the configuration file {path} is larger than {_MAX_BYTES >> 20} MiB")
    import tomllib  # late, because most starts and every --help go without a file

    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8, or of a number of thousands of digits
        reason = str(error) or type(error).__name__
        raise UsageError(f"the configuration file {path} is not TOML: {reason}") from error
