"""Opens a Hugging Face folder: ``config.json`` and one safetensors file or several with an index.

Nothing in the folder is executed: ``auto_map`` and ``.py`` files are left alone.  Links may lead to files
inside the folder, or inside the cache entry when the folder is a snapshot of a hub cache
(``models--*/snapshots/*``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from gtp_serve.config import DType, ModelConfig
from gtp_serve.errors import CheckpointCorrupt, CheckpointNotFound, LayoutMismatch, UnsupportedModel
from gtp_serve.layout.huggingface import EMBEDDING, HEAD, logical_name, logical_tensors
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.loaders.facts import Facts
from gtp_serve.loaders.file_source import FileRange, FileSource
from gtp_serve.loaders.files import FileViews, child, read_json, shown, what_is_there
from gtp_serve.loaders.hf_config import model_config
from gtp_serve.loaders.safetensors_file import (
    LENGTH_BYTES,
    MAX_HEADER_BYTES,
    Header,
    StoredTensor,
    parse_header,
    read_header,
)
from gtp_serve.loaders.whole_tensors import Found, check_complete

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_IGNORED_ENDING = ".rotary_emb.inv_freq"
_COMPARED_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class OpenedFolder:
    """A folder before it becomes a ``Checkpoint``."""

    config: ModelConfig
    facts: Facts
    source: FileSource


def hub_root(folder: Path) -> Path:
    """Resolved folder that links may lead into: the folder, or its cache entry in a hub cache."""
    real = folder.resolve()
    return real.parent.parent if real.parent.name == "snapshots" else real


def read_config(path: Path) -> ModelConfig:
    """The model that a ``config.json`` (and ``generation_config.json`` beside it) describes."""
    root = hub_root(path.parent)
    beside = path.parent / GENERATION_CONFIG
    return model_config(read_json(path, root), read_json(beside, root) if beside.exists() else {}, str(path))


def open_huggingface(folder: Path) -> OpenedFolder:
    """Open a folder.

    :raises CheckpointError: naming the file and the tensor where something does not fit.
    """
    root = hub_root(folder)
    config = read_config(folder / CONFIG)
    notes, warnings = _notes(folder, read_json(folder / CONFIG, root)), list[str]()
    headers = _headers(folder, root)
    warnings += _unread(folder, headers)
    stored = _by_name(headers)
    tensors = {name: t for name, t in stored.items() if not name.endswith(_IGNORED_ENDING)}
    if len(tensors) < len(stored):
        notes.append(f"{len(stored) - len(tensors)} tensors of rotary frequencies are not read")
    _check_types(tensors)
    views = FileViews({header.path: header.size for header in headers})
    try:
        config, tensors = _settle_head(config, tensors, views, folder, warnings)
        config = _settle_vocabulary(config, tensors, warnings)
        source = FileSource([_range(name, tensor) for name, tensor in tensors.items()], views)
        found = {name: Found(t.name, t.shape, t.path) for name, t in tensors.items()}
        check_complete(found, logical_tensors(config), folder)
    except BaseException:
        views.close()
        raise
    return OpenedFolder(
        replace(config, dtype=_dtype(tensors)), _facts(config, source.shards(), notes, warnings), source
    )


def open_stream(path: Path, size: int) -> FileSource:
    """Open one safetensors file that lies in memory; whether it is of a certain model is the plan's to say.

    :param path: a descriptor of this process, as a path.
    :param size: bytes of the file.
    :raises CheckpointError: naming the tensor where something does not fit.
    """
    views = FileViews({path: size})
    try:
        header = _header_in_memory(path, size, views)
        tensors = {name: t for name, t in _by_name([header]).items() if not name.endswith(_IGNORED_ENDING)}
        _check_types(tensors)
        return FileSource([_range(name, tensor) for name, tensor in tensors.items()], views)
    except BaseException:
        views.close()
        raise


def _header_in_memory(path: Path, size: int, views: FileViews) -> Header:
    if size < LENGTH_BYTES:
        raise CheckpointCorrupt(f"the stream has {size} bytes, which is no safetensors file")
    length = int.from_bytes(views.view(path, 0, LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
        raise CheckpointCorrupt(
            f"the stream is no safetensors file: it claims a header of {length} bytes",
            [("limit", f"{min(MAX_HEADER_BYTES, size - LENGTH_BYTES)} bytes")],
        )
    header = parse_header(path, bytes(views.view(path, LENGTH_BYTES, length)))
    if header.size != size:
        raise CheckpointCorrupt(f"the stream has {size} bytes, its header tells of {header.size}")
    return header


def _notes(folder: Path, values: Mapping[str, Any]) -> list[str]:
    notes = []
    if values.get("auto_map"):
        notes.append("auto_map in config.json is ignored: no code of a model folder is run")
    scripts = sorted(p.name for p in folder.glob("*.py"))
    if scripts:
        notes.append(f"{len(scripts)} .py file(s) are ignored: no code of a model folder is run")
    return notes


def _headers(folder: Path, root: Path) -> list[Header]:
    """Headers of the weight files, in a fixed order.  One file wins over an index, as in transformers."""
    if (folder / SINGLE).is_file():
        return [read_header(folder / SINGLE, root)]
    if (folder / INDEX).exists():
        return _indexed(folder, root)
    paths = sorted(p for p in folder.glob("*.safetensors") if p.is_file() and _is_part(p.name))
    if not paths:
        raise _no_weights(folder)
    return [read_header(path, root) for path in paths]


def _unread(folder: Path, headers: Sequence[Header]) -> list[str]:
    """What looks like weights of this model and is not read."""
    used = {header.path.name for header in headers}
    warnings = []
    if used == {SINGLE} and (folder / INDEX).exists():
        warnings.append(f"{INDEX} is not read: {SINGLE} is there, and is used")
    others = sorted(p.name for p in folder.glob("*.safetensors") if p.name not in used and _is_part(p.name))
    if others:
        more = f" and {len(others) - 3} more" if len(others) > 3 else ""
        warnings.append(f"{', '.join(others[:3])}{more} belong to no weight that is used, and are not read")
    return warnings


def _is_part(name: str) -> bool:
    return name.startswith("model") or not name.startswith(("consolidated", "adapter"))


def _no_weights(folder: Path) -> CheckpointNotFound | UnsupportedModel:
    pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt*"))
    if pickled:
        return UnsupportedModel(
            f"{folder} has its weights as pickles ({', '.join(pickled[:2])}), which are not read",
            [("needed", "safetensors")],
        )
    adapter = (folder / "adapter_config.json").exists()
    found = [f"{p.name}, {what_is_there(p)}" for p in sorted(folder.glob("*.safetensors")) if not p.is_file()][:5]
    details = [("looked for", f"{SINGLE}, {INDEX}")]
    if found or adapter:
        details.append(("found", "; ".join(found) or "an adapter: merge it into its base model first"))
    return CheckpointNotFound(f"{folder} has a {CONFIG} but no weight file", details)


def _indexed(folder: Path, root: Path) -> list[Header]:
    path = folder / INDEX
    named = read_json(path, root).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointCorrupt(f"{path} has no weight_map")
    files = {name: child(folder, name, str(path)) for name in dict.fromkeys(_texts(named, path))}
    missing = [name for name, file in files.items() if not file.exists()]
    if missing:
        present = len(list(folder.glob("*.safetensors")))
        raise CheckpointCorrupt(
            f"{path} names {missing[0]}, which is not there"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else ""),
            [
                ("found", f"{present} safetensors file(s)"),
                (
                    "likely",
                    "a stale index" if present and len(missing) == len(files) else "an incomplete copy or download",
                ),
            ],
        )
    headers = {name: read_header(file, root) for name, file in files.items()}
    for tensor, name in named.items():
        if tensor not in headers[name].tensors:
            raise CheckpointCorrupt(f"{path} says that {shown(tensor)} is in {name}, which does not hold it")
    for name, header in headers.items():
        extra = next((t for t in header.tensors if named.get(t) != name), None)
        if extra is not None:
            where = f"places it in {named[extra]}" if extra in named else "does not list it"
            raise CheckpointCorrupt(f"{header.path} holds {shown(extra)}, but {INDEX} {where}")
    return list(headers.values())


def _texts(named: Mapping[str, object], path: Path) -> list[str]:
    for tensor, name in named.items():
        if not isinstance(name, str):
            raise CheckpointCorrupt(f"{path} says that {shown(tensor)} is in {shown(name)}, which is not a file name")
    return [str(name) for name in named.values()]


def _by_name(headers: Sequence[Header]) -> dict[str, StoredTensor]:
    """All tensors by logical name."""
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for stored, tensor in header.tensors.items():
            name = logical_name(stored)
            if name in tensors:
                raise CheckpointCorrupt(
                    f"{shown(stored)} comes twice",
                    [("from", f"{tensors[name].path.name} and {header.path.name}")],
                )
            tensors[name] = tensor
    return tensors


def _check_types(tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.kind not in _DTYPES:
            raise UnsupportedModel(
                f"{tensor.path}: {name} has the element type {tensor.kind}, which is not supported",
                [("supported", ", ".join(_DTYPES))],
            )


def _settle_head(
    config: ModelConfig, tensors: dict[str, StoredTensor], views: FileViews, folder: Path, warnings: list[str]
) -> tuple[ModelConfig, dict[str, StoredTensor]]:
    """Whether the head is the embedding.  A head in the file that differs from it is what was trained, so it
    is kept."""
    if not config.tied:
        if HEAD not in tensors:
            raise LayoutMismatch(
                f"{folder / CONFIG} says that the output head is not the embedding, but {HEAD} is missing",
                [("needed", f"{HEAD}, or tie_word_embeddings true")],
            )
        return config, tensors
    if HEAD not in tensors:
        return config, tensors
    if EMBEDDING in tensors and _same(tensors[EMBEDDING], tensors[HEAD], views):
        return config, {name: t for name, t in tensors.items() if name != HEAD}
    warnings.append(f"{HEAD} differs from the embedding although tie_word_embeddings is true; the file's head is used")
    return replace(config, tied=False), tensors


def _same(a: StoredTensor, b: StoredTensor, views: FileViews) -> bool:
    if (a.kind, a.shape) != (b.kind, b.shape):
        return False
    return all(
        views.view(a.path, a.start + at, min(_COMPARED_BYTES, a.length - at))
        == views.view(b.path, b.start + at, min(_COMPARED_BYTES, a.length - at))
        for at in range(0, a.length, _COMPARED_BYTES)
    )


def _settle_vocabulary(config: ModelConfig, tensors: Mapping[str, StoredTensor], warnings: list[str]) -> ModelConfig:
    """More rows than ``vocab_size`` are padding; end tokens beyond the rows cannot be."""
    rows = tensors[EMBEDDING].shape[0] if EMBEDDING in tensors and tensors[EMBEDDING].shape else config.vocab_rows
    if rows > config.vocab_size:
        warnings.append(f"{EMBEDDING} has {rows} rows for a vocabulary of {config.vocab_size}; the rest is padding")
        config = replace(config, vocab_rows=rows)
    wrong = [token for token in config.eos_token_ids if token >= config.vocab_rows]
    if wrong:
        warnings.append(f"end tokens {wrong} are ignored: the model has {config.vocab_rows} vocabulary rows")
    return replace(config, eos_token_ids=tuple(t for t in config.eos_token_ids if t < config.vocab_rows))


def _range(name: str, tensor: StoredTensor) -> FileRange:
    box = Box.whole(tensor.shape)
    shard = Shard(tensor.name, tensor.shape, _DTYPES[tensor.kind], (Span(name, box, box),))
    return FileRange(shard, tensor.path, tensor.start, tensor.length)


def _dtype(tensors: Mapping[str, StoredTensor]) -> DType:
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[_DTYPES[tensor.kind]] += tensor.length
    return cast(DType, sizes.most_common(1)[0][0])


def _facts(config: ModelConfig, shards: Sequence[Shard], notes: list[str], warnings: list[str]) -> Facts:
    by_dtype: Counter[str] = Counter()
    parameters = 0
    for shard in shards:
        volume = Box.whole(shard.shape).volume
        parameters += volume
        by_dtype[shard.dtype] += volume * (4 if shard.dtype == "float32" else 2)
    return Facts(
        format="huggingface",
        format_text="Hugging Face safetensors",
        weight_bytes=sum(by_dtype.values()),
        parameters=parameters,
        dtypes=tuple(by_dtype.most_common()),
        num_tensors=len(shards),
        warnings=tuple(warnings),
        notes=tuple(notes),
    )
