"""Files of a checkpoint folder: which may be opened, how much of them is read, and views of their bytes.

Rule for names found in files: one plain path component, a regular file, and (links followed) inside the
folder's root.  Rule for sizes: whatever is read whole has a limit, and a file keeps the size it was checked with.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

from gtp_serve.errors import CheckpointCorrupt, CheckpointError
from gtp_serve.loaders.scatter import scatter
from gtp_serve.refit.native_copy import Checks, Job, native_reader
from gtp_serve.refit.source import Rows

#: Largest JSON file that is read: configuration, tokenizer configuration, shard index.
MAX_JSON_BYTES = 64 * 1024**2
#: Files that are mapped, and files that are open, at one time (a map has a descriptor too).  Those beyond are opened
#: for each read, so that a process does not run out of descriptors.
MAX_MAPPED_FILES = 256
MAX_OPEN_FILES = 256

_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Where a text may hold a surrogate; two of them in a row are a character."""
_LFS_PREFIX = b"version https://git-lfs.github.com/spec/"
_LFS_MAX_BYTES = 1024


def file_size(path: Path, root: Path) -> int:
    """Size in bytes of a regular file that may be read.

    :param root: resolved folder that the file, links followed, must lie in.
    :raises CheckpointCorrupt: when it is missing, not a regular file, empty, outside ``root``, or a git-LFS
        pointer.
    """
    try:
        real = path.resolve(strict=True)
        info = real.stat()
    except (OSError, RuntimeError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {_reason(error)}") from error
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointCorrupt(f"{path} is {_kind(info.st_mode)}, not a file")
    if not real.is_relative_to(root):
        raise CheckpointCorrupt(
            f"{path} is a link that leaves the checkpoint folder",
            [("allowed", f"links to files inside {root}")],
        )
    if info.st_size == 0:
        raise CheckpointCorrupt(f"{path} is empty (0 bytes)", [("likely", "an interrupted copy or download")])
    if info.st_size <= _LFS_MAX_BYTES and _head(path, len(_LFS_PREFIX)) == _LFS_PREFIX:
        raise CheckpointCorrupt(
            f"{path} is a git-LFS pointer of {info.st_size} bytes, not the file itself",
            [("try", "git lfs pull")],
        )
    return info.st_size


def child(folder: Path, name: object, named_by: str) -> Path:
    """The path of a file that another file names.

    :raises CheckpointCorrupt: unless ``name`` is one plain component.
    """
    plain = isinstance(name, str) and 0 < len(name) <= 255 and name not in (".", "..")
    if not plain or any(c in str(name) for c in "/\\\0"):
        raise CheckpointCorrupt(
            f"{named_by} names the file {shown(name)}", [("needed", "a plain file name in the same folder")]
        )
    return folder / str(name)


def read_whole(path: Path, root: Path, limit: int) -> bytes:
    """All bytes of a file.

    :raises CheckpointCorrupt: for what ``file_size`` refuses, and for a file above ``limit`` bytes.
    """
    size = file_size(path, root)
    if size > limit:
        raise CheckpointCorrupt(f"{path} has {size} bytes", [("limit", f"{limit} bytes for a file of this kind")])
    with reading(path) as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise CheckpointCorrupt(f"{path} changed while it was read", [("expected", f"{size} bytes")])
    return data


def parse_json(data: bytes, file: str) -> Any:
    """JSON in UTF-8 (a byte-order mark and CRLF are fine); a key that comes twice in one object is refused.

    :raises CheckpointCorrupt: with the place of the fault.
    """
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_integer,
        )
        if _HALF.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # a UnicodeEncodeError, which is a ValueError
        return value
    except RecursionError:
        raise CheckpointCorrupt(f"{file} is nested too deeply to be JSON of a checkpoint") from None
    except UnicodeDecodeError as error:
        raise CheckpointCorrupt(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except UnicodeEncodeError as error:
        raise CheckpointCorrupt(
            f"{file} holds half a character, which is no text", [("found", error.reason)]
        ) from error
    except ValueError as error:
        raise CheckpointCorrupt(f"{file} is not valid JSON: {error}") from error


def read_json(path: Path, root: Path) -> dict[str, Any]:
    """The object in a JSON file.

    :raises CheckpointCorrupt: as ``read_whole`` and ``parse_json``, and when it is not an object.
    """
    value = parse_json(read_whole(path, root, MAX_JSON_BYTES), str(path))
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def shown(value: object) -> str:
    """A value from a file, cut to what fits in a message."""
    text = repr(value) if isinstance(value, str | int | float | bool | None) else f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {shown(twice)} comes twice in one object")
    return result


def _no_constant(text: str) -> float:
    # transformers writes Infinity for some limits (time_step_limit); it is not JSON, and no value we read may
    # be it
    return float(text)


def _integer(text: str) -> int:
    if len(text) > 40:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _reason(error: BaseException) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[BinaryIO]:
    """The open file; whatever the system says against it, then or later, becomes an error that names it.

    :raises CheckpointCorrupt: for that.
    """
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {_reason(error)}") from error


def what_is_there(path: Path) -> str:
    """What a path is that is no file: a folder, a pipe, a link that leads nowhere."""
    try:
        return _kind(path.stat().st_mode)
    except OSError:
        return "a link to nothing" if path.is_symlink() else "not there"


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for test, name in kinds if test(mode)), "a device")


def _head(path: Path, count: int) -> bytes:
    with reading(path) as file:
        return file.read(count)


class Part(NamedTuple):
    """Rows of a byte range of a file.

    :param label: the tensor, for messages.
    :param checks: bytes of the item around the range, which begins ``before`` bytes earlier and has ``whole`` bytes.
    """

    path: Path
    start: int
    length: int
    rows: Sequence[Rows]
    label: str
    checks: Checks | None = None
    before: int = 0
    whole: int = 0


class FileViews:
    """Byte ranges of a set of files: copied to where they belong, or as views.  Safe to use from threads.

    Copies are made by reading, so a file that is cut short meanwhile ends in an error.  Views are of maps where the
    system can; maps are private copies-on-write, which is what a tensor library wants of a buffer, and nothing that
    is written reaches the file.

    :param sizes: each file with the size that its ranges were checked against.
    """

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        self._sizes = MappingProxyType(dict(sizes))
        self._maps: dict[Path, memoryview | None] = {}
        self._files: dict[Path, _File] = {}
        self._lock = threading.Lock()
        self._closed = False

    def view(self, path: Path, start: int, length: int) -> memoryview:
        """Bytes ``start .. start + length`` of a file.

        :raises CheckpointCorrupt: when the file has not that many bytes any more.
        """
        self._check(path, start, length)
        whole = self._whole(path)
        return whole[start : start + length] if whole is not None else memoryview(self.read(path, start, length))

    def read(self, path: Path, start: int, length: int) -> bytes:
        """The same bytes, copied.

        :raises CheckpointCorrupt: when the file has not that many bytes any more.
        """
        self._check(path, start, length)
        file = self._file(path)
        try:
            data = os.pread(file.descriptor, length, start)
            while len(data) < length:
                more = os.pread(file.descriptor, length - len(data), start + len(data))
                if not more:
                    raise CheckpointCorrupt(f"{path} ends {length - len(data)} bytes early")
                data += more
        except OSError as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {_reason(error)}") from error
        return data

    def read_into(self, path: Path, start: int, length: int, rows: Sequence[Rows], label: str = "") -> None:
        """Fill the rows' memory; ``Rows.start`` counts from byte ``start`` of the file.

        :param label: the tensor, for messages.
        :raises CheckpointCorrupt: when rows leave the range, or the file has not that many bytes any more.
        """
        self._check(path, start, length)
        _check_rows(path, start, length, rows)
        file = self._file(path)  # kept by name: it is closed when nobody holds it
        scatter(file.descriptor, str(path), start, rows, label)

    @property
    def batches(self) -> bool:
        """Whether ``read_many`` can be used."""
        return native_reader() is not None

    def read_many(self, parts: Sequence[Part]) -> int:
        """As ``read_into`` for each part, in one call of the native reader; rows may ask for conversions.

        :return: how many parts were read: all, or up to one whose checks failed.
        :raises CheckpointCorrupt: as ``read_into``, naming the tensor.
        """
        reader = native_reader()
        assert reader is not None  # the caller has asked
        files: dict[Path, _File] = {}  # held: a file is closed when nobody holds it
        jobs: list[Job] = []
        for path, start, length, rows, label, checks, before, whole in parts:
            self._check(path, start, length)
            _check_rows(path, start, length, rows)
            file = files.get(path)
            if file is None:
                file = files[path] = self._file(path)
            end = whole - before if whole else 0
            jobs.append(Job(file.descriptor, path, start, rows, label, checks, -before, end))
        return reader.read(jobs)

    def close(self) -> None:
        """Forget files and maps; each is let go of once nobody uses it."""
        with self._lock:
            self._closed = True
            self._maps.clear()
            self._files.clear()

    def _check(self, path: Path, start: int, length: int) -> None:
        size = self._sizes[path]
        if start < 0 or length < 0 or start + length > size:
            raise CheckpointCorrupt(f"{path} has {size} bytes, {start + length} are needed")

    def _whole(self, path: Path) -> memoryview | None:
        with self._lock:
            self._refuse_closed()
            if path not in self._maps:
                crowded = sum(m is not None for m in self._maps.values()) >= MAX_MAPPED_FILES
                self._maps[path] = None if crowded else self._map(path)
            return self._maps[path]

    def _map(self, path: Path) -> memoryview | None:
        file = _File(path, self._sizes[path])
        for access in (mmap.ACCESS_COPY, mmap.ACCESS_READ):
            try:
                return memoryview(mmap.mmap(file.descriptor, self._sizes[path], access=access))
            except (OSError, ValueError):
                continue  # a file system without maps, or no address space left for a private one
        return None

    def _file(self, path: Path) -> _File:
        file = self._files.get(path)
        if file is not None:
            return file
        with self._lock:
            self._refuse_closed()
            file = self._files.get(path)
            if file is None:
                file = _File(path, self._sizes[path])
                if len(self._files) < MAX_OPEN_FILES:
                    self._files[path] = file
            return file

    def _refuse_closed(self) -> None:
        if self._closed:
            raise CheckpointError("the checkpoint has been closed")


def _check_rows(path: Path, start: int, length: int, rows: Sequence[Rows]) -> None:
    for first, stride, size, count, _, _, _ in rows:
        end = first + (count - 1) * stride + size
        if first < 0 or stride < 0 or end > length:
            raise CheckpointCorrupt(
                f"{path} has {length} bytes of a tensor at byte {start}", [("needed", f"{end} bytes")]
            )


class _File:
    """An open file.  It is closed when the last reader lets go of it: its number must not become another file's
    while one reads.

    :raises CheckpointCorrupt: when it has another size than ``size``.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.descriptor = -1
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            now = os.fstat(self.descriptor).st_size
        except OSError as error:
            raise CheckpointCorrupt(f"{path} cannot be read: {_reason(error)}") from error
        if now != size:
            raise CheckpointCorrupt(
                f"{path} has {now} bytes now", [("expected", f"{size} bytes, as when it was opened")]
            )

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
