"""A checkpoint on disk, opened: what model it is, what is known about it, and its weights as a source of
shards.

Torch-free, but for ``Checkpoint.tensors``, which is for those who want torch tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gtp_serve.config import ModelConfig
from gtp_serve.errors import CheckpointNotFound, UsageError
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.loaders.facts import Facts, SavedOverrides
from gtp_serve.loaders.files import what_is_there
from gtp_serve.loaders.gguf_file import open_gguf
from gtp_serve.loaders.huggingface import CONFIG, open_huggingface, read_config
from gtp_serve.loaders.megatron import open_megatron
from gtp_serve.loaders.megatron_folder import is_iteration, iteration_folders, looks_like_megatron
from gtp_serve.loaders.tokenizer_files import TokenizerFiles, find_tokenizer
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.source import BatchSource, DirectSource, Rows, WeightSource

if TYPE_CHECKING:
    from torch import Tensor

_NOTHING_SAID = SavedOverrides()


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """An open checkpoint.  Every logical tensor of ``config`` is known to be there exactly once, with its
    shape."""

    path: Path
    """The folder (of an iteration) or file that is read."""
    config: ModelConfig
    facts: Facts
    source: WeightSource
    tokenizer: TokenizerFiles | None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each logical tensor with its name (Hugging Face's), whole, on the CPU, in the element type it is
        stored in.

        One tensor at a time is in memory.

        :raises CheckpointCorrupt: when stored bytes are not what the metadata says.
        """
        reader = TensorReader(self)
        for name in logical_tensors(self.config):
            yield name, reader.read(name)

    def dtypes(self) -> dict[str, str]:
        """Element type of each logical tensor as ``tensors`` gives it; reads nothing."""
        reader = TensorReader(self)
        return {name: reader.dtype(name) for name in logical_tensors(self.config)}

    def close(self) -> None:
        """Let go of the files.  Tensors handed out before stay valid."""
        self.source.close()


class TensorReader:
    """Reads logical tensors of an open checkpoint in any order, whole or in part."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = checkpoint.source
        self._shapes = logical_tensors(checkpoint.config)
        self._pieces = _by_name(self._source.shards())
        self._parts: dict[str, _Part] = {}

    def dtype(self, name: str) -> str:
        """The element type in which a tensor is stored."""
        return self._part(name).dtype

    def read(self, name: str, box: Box | None = None, dtype: str | None = None) -> Tensor:
        """A tensor on the CPU, or the part of it in ``box``; read again each time.

        :param dtype: to convert to; None keeps the stored one.
        :raises CheckpointCorrupt: when stored bytes are not what the metadata says.
        """
        # The one late import: everything else of the loaders, and all of inspect, must run without torch.
        import torch

        from gtp_serve.refit.apply import Target, apply_plan

        part = self._part(name)
        box = box or Box.whole(self._shapes[name])
        want = Shard(name, box.shape, dtype or part.dtype, (Span(name, Box.whole(box.shape), box),))
        tensor = torch.empty(box.shape, dtype=getattr(torch, want.dtype))
        plan = build_plan(part.shards(), [want], {name: self._shapes[name]})
        apply_plan(plan, part, [Target(want, tensor)], threads=1)
        return tensor

    def _part(self, name: str) -> _Part:
        if name not in self._parts:
            direct = _BatchPart if isinstance(self._source, BatchSource) else _DirectPart
            kind = direct if isinstance(self._source, DirectSource) else _Part
            self._parts[name] = kind(name, self._source, self._pieces[name])
        return self._parts[name]


class _Part:
    """The part of a source that holds one logical tensor."""

    def __init__(self, name: str, source: WeightSource, indices: Sequence[int]) -> None:
        self._source = source
        self._indices = indices
        everything = source.shards()
        self._shards = tuple(
            replace(everything[i], spans=tuple(s for s in everything[i].spans if s.name == name)) for i in indices
        )
        self.dtype = max((shard.dtype for shard in self._shards), key=lambda d: (d == "float32", d))

    def shards(self) -> Sequence[Shard]:
        """Shards with the spans of this tensor only."""
        return self._shards

    def read(self, index: int) -> memoryview:
        """The whole shard's bytes."""
        return self._source.read(self._indices[index])

    def close(self) -> None:
        """Nothing: the source belongs to the checkpoint."""


class _DirectPart(_Part):
    """The same of a source that reads to where the bytes belong."""

    def read_into(self, index: int, rows: Sequence[Rows]) -> None:
        """Read the shard's bytes."""
        assert isinstance(self._source, DirectSource)  # it was made for one
        self._source.read_into(self._indices[index], rows)


class _BatchPart(_DirectPart):
    """The same of a source that reads several shards in one go."""

    @property
    def batches(self) -> bool:
        """Whether it does so here."""
        assert isinstance(self._source, BatchSource)  # it was made for one
        return self._source.batches

    def read_many(self, parts: Sequence[tuple[int, Sequence[Rows]]]) -> None:
        """Read the shards' bytes."""
        assert isinstance(self._source, BatchSource)
        self._source.read_many([(self._indices[index], rows) for index, rows in parts])


def _by_name(shards: Sequence[Shard]) -> dict[str, list[int]]:
    pieces: dict[str, list[int]] = {}
    for index, shard in enumerate(shards):
        for name in dict.fromkeys(span.name for span in shard.spans):
            pieces.setdefault(name, []).append(index)
    return pieces


def open_checkpoint(
    path: Path | str, *, iteration: int | None = None, saved: SavedOverrides = _NOTHING_SAID
) -> Checkpoint:
    """Open whatever lies at ``path``: a Megatron root or ``iter_*`` folder, a Hugging Face folder, a GGUF
    file.

    :param iteration: of a Megatron root; None takes the newest complete one.
    :param saved: how a Megatron checkpoint was saved, for what it does not say itself.
    :raises CheckpointNotFound: telling what was looked for and what is there instead.
    :raises CheckpointError: when what is there is damaged, contradicts itself or is a model that is not
        served.
    """
    path = Path(path)
    try:
        return _open(path, iteration, saved)
    except OSError as error:
        raise CheckpointNotFound(f"{path} cannot be read: {error.strerror or type(error).__name__}") from error


def _open(path: Path, iteration: int | None, saved: SavedOverrides) -> Checkpoint:
    if "\0" in str(path):
        raise CheckpointNotFound("a path cannot hold a zero byte")
    if _is_gguf(path):
        _refuse_megatron_options(path, "a GGUF file", iteration, saved)
        gguf = open_gguf(path)
        return _checkpoint(path, gguf.config, gguf.facts, gguf.source, path.parent)
    if not path.is_dir():
        raise _not_found(path)
    if looks_like_megatron(path):
        given = read_config(saved.config) if saved.config is not None else None
        megatron = open_megatron(path, iteration=iteration, overrides=saved, given=given)
        return _checkpoint(megatron.path, megatron.config, megatron.facts, megatron.source, megatron.path)
    if (path / CONFIG).exists():
        _refuse_megatron_options(path, "a Hugging Face folder", iteration, saved)
        folder = open_huggingface(path)
        return _checkpoint(path, folder.config, folder.facts, folder.source, path)
    single = sorted(path.glob("*.gguf"))
    if len(single) == 1:
        return _open(single[0], iteration, saved)
    raise _not_found(path)


def _checkpoint(path: Path, config: ModelConfig, facts: Facts, source: WeightSource, folder: Path) -> Checkpoint:
    try:
        tokenizer = find_tokenizer(folder)
    except BaseException:
        source.close()
        raise
    if tokenizer is not None and not config.eos_token_ids:
        fitting = tuple(token for token in tokenizer.eos_token_ids if token < config.vocab_rows)
        bos = tokenizer.bos_token_id if config.bos_token_id is None else config.bos_token_id
        config = replace(config, eos_token_ids=fitting, bos_token_id=bos)
    return Checkpoint(path=path, config=config, facts=facts, source=source, tokenizer=tokenizer)


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _refuse_megatron_options(path: Path, what: str, iteration: int | None, saved: SavedOverrides) -> None:
    if iteration is not None:
        raise UsageError(f"--iteration {iteration} was given, but {path} is {what}, which has no iterations")
    if saved != _NOTHING_SAID:
        raise UsageError(f"--saved-* options were given, but {path} is {what}, which was not saved by Megatron")


def _not_found(path: Path) -> CheckpointNotFound:
    details = [("looked for", "metadata.json + .metadata (Megatron torch_dist), config.json (Hugging Face), *.gguf")]
    if path.is_file():
        return CheckpointNotFound(f"{path} is a file, and not a GGUF file", [*details, ("try", str(path.parent))])
    what = "is not a checkpoint folder" if path.is_dir() else f"is {what_is_there(path)}"
    what = "does not exist" if what == "is not there" else what
    details += _found(path)
    return CheckpointNotFound(f"{path} {what}", details)


def _found(path: Path) -> list[tuple[str, str]]:
    """What lies there, and a checkpoint one level down or up, if there is one."""
    lines: list[tuple[str, str]] = []
    for folder in (path, path.parent):
        if not folder.is_dir():
            continue
        iterations = sorted(child.name + "/" for child in iteration_folders(folder).values())
        below = sorted(p.name + "/" for p in folder.iterdir() if p.is_dir() and _is_checkpoint(p))[:3]
        names = iterations[:4] or below
        if names:
            where = "" if folder == path else f" one level up, in {folder}"
            lines.append(("found", "  ".join(names) + where))
            lines.append(("try", f"--ckpt {folder if iterations else folder / names[0].rstrip('/')}"))
            return lines
        if folder == path:
            inside = sorted(p.name + ("/" if p.is_dir() else "") for p in folder.iterdir())[:6]
            lines.append(("found", "  ".join(inside) or "nothing: the folder is empty"))
    return lines


def _is_checkpoint(folder: Path) -> bool:
    return is_iteration(folder) or (folder / CONFIG).exists() or bool(iteration_folders(folder))
