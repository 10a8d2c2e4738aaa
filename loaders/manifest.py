"""A list of a checkpoint's files with their SHA-256, as ``sha256sum`` writes it, compared before anything is loaded.

No format that trainers write has a digest of tensor bytes, so a changed bit loads as it is.  Whoever wants to know
makes such a list where the checkpoint is known to be good, and keeps it elsewhere:
``cd FOLDER && sha256sum -- * .metadata > LIST``.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from gtp_serve.errors import CheckpointCorrupt
from gtp_serve.loaders.files import child, file_size, read_whole, reading, shown

MAX_LIST_BYTES = 16 << 20
_PIECE = 8 << 20
_LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?:\./)?(?P<name>.+)")
_READ = (".json", ".safetensors", ".distcp", ".pt", ".gguf", ".jinja", ".model", ".metadata")
"""Ends of the names of files that loading may read.  Others (a README, code, pictures) need not be listed."""


def read_manifest(path: Path) -> dict[str, str]:
    """SHA-256 in hexadecimal of each file by its name.

    :raises CheckpointCorrupt: naming the line that is none of ``sha256sum``'s, or that names a file twice.
    """
    text = read_whole(path, path.resolve().parent, MAX_LIST_BYTES).decode("utf-8", "replace")
    found: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointCorrupt(
                f"{path}, line {number}: {shown(line)} is no line of a list of digests",
                [("needed", "64 hexadecimal digits, two spaces and a file's name, as sha256sum writes them")],
            )
        if match["name"] in found:
            raise CheckpointCorrupt(f"{path}, line {number}: {shown(match['name'])} comes twice")
        found[match["name"]] = match["digest"].lower()
    if not found:
        raise CheckpointCorrupt(
            f"{path} lists no file", [("try", "sha256sum -- * .metadata, in the checkpoint's folder")]
        )
    return found


def check_manifest(manifest: Path, checkpoint: Path) -> int:
    """Compare a checkpoint's files with a list; returns how many bytes were read.

    :param checkpoint: folder (of the iteration) or file that is loaded.
    :raises CheckpointCorrupt: for a file that is another than the list says, is missing, or is not listed though it
        would be read.
    """
    listed = read_manifest(manifest)
    folder = checkpoint if checkpoint.is_dir() else checkpoint.parent
    wanted = _files(folder, listed, manifest, only=None if checkpoint.is_dir() else checkpoint.name)
    sizes = {name: file_size(child(folder, name, str(manifest)), folder.resolve()) for name in wanted}
    for name in wanted:
        digest = hashlib.sha256()
        with reading(folder / name) as file:
            while piece := file.read(_PIECE):
                digest.update(piece)
        if digest.hexdigest() != listed[name]:
            raise CheckpointCorrupt(
                f"{folder / name} is not the file that {manifest} lists",
                [("SHA-256", digest.hexdigest()), ("listed", listed[name]), ("size", f"{sizes[name]} bytes")],
            )
    return sum(sizes.values())


def _files(folder: Path, listed: Mapping[str, str], manifest: Path, only: str | None) -> list[str]:
    """The files to compare: all that are listed, of which those that would be read are none too few."""
    if only is not None:
        needed = {only}
    else:
        inside = (one for one in folder.iterdir() if one.name.endswith(_READ) and not one.is_dir())
        needed = {one.name for one in inside if not _same(one, manifest)}
    missing = sorted(needed - listed.keys())
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointCorrupt(
            f"{manifest} does not list {shown(missing[0])}{more}, which would be read",
            [("in", str(folder)), ("needed", f"a digest of each file that ends in {', '.join(_READ)}")],
        )
    return sorted(listed if only is None else needed)


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:
        return False
