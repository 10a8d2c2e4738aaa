"""The list of a demo folder's files with sizes and digests; written last, so its presence means complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from gtp_serve.server.demo_package import WHEEL_SHA256

_NAME = "demo.json"
#: Raised whenever what the demo writes changes, so that folders of an older version are made anew.
_VERSION = 1
_DIGEST_AGAIN_BYTES = 8 << 20


def write_manifest(folder: Path, parts: Iterable[str]) -> None:
    """List every file under the given sub-folders."""
    paths = sorted(path for part in parts for path in (folder / part).rglob("*") if path.is_file())
    files = {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in paths}
    value = {"version": _VERSION, "wheel_sha256": WHEEL_SHA256, "files": files}
    partial = folder / f".{_NAME}.partial"
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / _NAME)


def forget_manifest(folder: Path) -> None:
    """The folder is incomplete from here on."""
    (folder / _NAME).unlink(missing_ok=True)


def is_complete(folder: Path) -> bool:
    """Every listed file is there with its size; small files are digested again, weights are not."""
    try:
        value = json.loads((folder / _NAME).read_text(encoding="utf-8"))
        known = value["version"] == _VERSION and value["wheel_sha256"] == WHEEL_SHA256
        return known and all(_matches(folder / name, entry) for name, entry in value["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _matches(path: Path, entry: dict[str, object]) -> bool:
    size = path.stat().st_size
    if size != entry["bytes"]:
        return False
    return size > _DIGEST_AGAIN_BYTES or _digest(path) == entry["sha256"]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
