"""Which folder of a Megatron checkpoint root is read: the newest complete iteration, or the one that was
asked for.

An iteration is complete when its ``.metadata`` is there: it is written last.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from gtp_serve.errors import CheckpointCorrupt, CheckpointNotFound, UnsupportedModel, UsageError
from gtp_serve.loaders.files import read_json, read_whole, shown
from gtp_serve.loaders.torch_dist import METADATA

TRACKER = "latest_checkpointed_iteration.txt"
BACKEND_FILE = "metadata.json"
_ITERATION = re.compile(r"iter_(\d{1,12})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The folder to read.  ``root`` is resolved and holds every file that may be opened."""

    folder: Path
    root: Path
    iteration: int | None
    iterations: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


def iteration_folders(path: Path) -> dict[int, Path]:
    """``iter_*`` folders (and no others) below ``path``, by number."""
    found: dict[int, Path] = {}
    for child in sorted(path.iterdir()) if path.is_dir() else ():
        match = _ITERATION.fullmatch(child.name)
        if match is None or not child.is_dir():
            continue
        number = int(match[1])
        # iter_20 and iter_0000020 are one iteration; what one of them lacks does not hide the other.
        if number not in found or (child / METADATA).exists():
            found[number] = child
    return found


def is_iteration(path: Path) -> bool:
    """Whether the folder itself holds a torch_dist checkpoint, or what is left of one."""
    return (path / METADATA).exists() or (path / BACKEND_FILE).exists() or any(path.glob("__*_*.distcp"))


def looks_like_megatron(path: Path) -> bool:
    """Whether the folder is a Megatron root or iteration, complete or not."""
    return (
        is_iteration(path)
        or (path / TRACKER).exists()
        or bool(iteration_folders(path))
        or is_iteration(path / "release")
    )


def choose(path: Path, iteration: int | None) -> Chosen:
    """Decide which folder to read.

    Without a number: the highest-numbered complete iteration; incomplete newer ones are passed over with a
    warning.

    :param path: a root or an iteration's own folder.
    :raises CheckpointNotFound: when the iteration is not there, or none is.
    :raises CheckpointCorrupt: when the one that was asked for is incomplete.
    """
    if is_iteration(path):
        return _single(path, iteration)
    folders = iteration_folders(path)
    complete = {number: folder for number, folder in folders.items() if (folder / METADATA).exists()}
    if iteration is not None:
        if iteration not in folders:
            raise CheckpointNotFound(
                f"{path} has no iteration {iteration}",
                [("found", _numbers(complete) or "no complete iteration")],
            )
        _check_complete(folders[iteration])
        return _chosen(path, folders[iteration], iteration, complete, ())
    release = path / "release"
    if not complete and (release / METADATA).exists():
        return _chosen(path, release, None, complete, ())
    if not complete:
        raise _nothing_complete(path, folders)
    newest = max(complete)
    return _chosen(path, complete[newest], newest, complete, _warnings(path, folders, complete, newest))


def _single(path: Path, iteration: int | None) -> Chosen:
    match = _ITERATION.fullmatch(path.resolve().name)
    number = int(match[1]) if match is not None else None
    if iteration is not None and iteration != number:
        raise UsageError(
            f"--iteration {iteration} was asked for, but {path} is a single iteration"
            + (f", {number}" if number is not None else ""),
            [("try", f"the folder above it: {path.parent}")],
        )
    _check_complete(path)
    _check_backend(path)
    return Chosen(folder=path, root=path.resolve(), iteration=number, iterations=() if number is None else (number,))


def _chosen(
    root: Path, folder: Path, number: int | None, complete: dict[int, Path], warnings: tuple[str, ...]
) -> Chosen:
    _check_backend(folder)
    return Chosen(
        folder=folder,
        root=root.resolve(),
        iteration=number,
        iterations=tuple(sorted(complete)),
        warnings=warnings,
    )


def _check_complete(folder: Path) -> None:
    if not (folder / METADATA).exists():
        raise CheckpointCorrupt(
            f"{folder} is incomplete: it has no {METADATA}, which is written last",
            [("likely", "the run ended while it was saving"), ("try", "an older iteration")],
        )


def _check_backend(folder: Path) -> None:
    path = folder / BACKEND_FILE
    if not path.exists():
        return
    backend = read_json(path, folder.resolve().parent).get("sharded_backend")
    if backend != "torch_dist":
        raise UnsupportedModel(
            f"{path} says that the checkpoint is of the kind {str(backend)[:40]!r}",
            [("needed", "torch_dist"), ("try", "save with --ckpt-format torch_dist")],
        )


def _warnings(path: Path, folders: dict[int, Path], complete: dict[int, Path], newest: int) -> tuple[str, ...]:
    warnings = [
        f"{folders[number].name} is newer but incomplete (no {METADATA}); {complete[newest].name} is used"
        for number in sorted(folders)
        if number > newest
    ]
    try:
        tracked = tracked_iteration(path)
    except CheckpointCorrupt as error:  # the folders themselves say which iteration is the newest
        tracked = None
        warnings.append(f"{error.message}; {complete[newest].name} is used")
    if tracked is not None and tracked != newest and tracked in complete:
        warnings.append(f"{TRACKER} says {tracked}, but {complete[newest].name} is complete and newer, and is used")
    if tracked is not None and tracked not in folders:
        warnings.append(f"{TRACKER} says {tracked}, which is not there; {complete[newest].name} is used")
    return tuple(warnings)


def tracked_iteration(path: Path) -> int | None:
    """The number in the tracker file; None when there is no file, or it names a release.

    :raises CheckpointCorrupt: when the file is there and cannot be read, or says something else.
    """
    file = path / TRACKER
    if not file.exists():
        return None
    text = read_whole(file, path.resolve(), 4096).decode("utf-8", "replace").strip().lstrip("\ufeff")
    if text == "release":
        return None
    if re.fullmatch(r"[0-9]{1,12}", text) is None:
        raise CheckpointCorrupt(f"{file} says {shown(text)}", [("needed", "the number of an iteration, or release")])
    return int(text)


def _nothing_complete(
    path: Path, folders: dict[int, Path]
) -> CheckpointNotFound | CheckpointCorrupt | UnsupportedModel:
    old = next((p for f in folders.values() for p in f.glob("mp_rank_*")), None)
    if old is not None:
        return UnsupportedModel(
            f"{old.parent} holds one file for each rank, Megatron's old format",
            [
                ("needed", "torch_dist"),
                ("try", "load it in Megatron and save it with --ckpt-format torch_dist"),
            ],
        )
    if folders:
        names = ", ".join(folder.name for folder in list(folders.values())[:5])
        return CheckpointCorrupt(
            f"{path} has no complete iteration: no {METADATA} in {names}",
            [("likely", "the run ended while it was saving")],
        )
    return CheckpointNotFound(f"{path} names an iteration in {TRACKER} but holds none", [("found", "no iter_* folder")])


def _numbers(complete: dict[int, Path]) -> str:
    shown = [str(number) for number in sorted(complete)]
    return "iterations " + ", ".join(shown[-8:]) if shown else ""
