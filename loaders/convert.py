"""Turns an open checkpoint into the other kind, tensor by tensor, and reads back what was written.

Imports torch (Megatron's files are torch archives), so only ``gtp-serve convert`` imports this module, when it runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtp_serve.config import DTYPE_BYTES, DType, ModelConfig
from gtp_serve.errors import CheckpointCorrupt, UnsupportedModel, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import EMBEDDING, HEAD, logical_tensors
from gtp_serve.layout.megatron_save import Layout
from gtp_serve.layout.spans import Box, Shape
from gtp_serve.loaders.checkpoint import Checkpoint, TensorReader, open_checkpoint
from gtp_serve.loaders.files import read_json
from gtp_serve.loaders.hf_config_write import huggingface_config
from gtp_serve.loaders.huggingface import CONFIG, hub_root
from gtp_serve.loaders.huggingface_writer import Entry, pieces, write_weights
from gtp_serve.loaders.megatron_writer import write_checkpoint
from gtp_serve.refit.digest import Digest, combine

#: What belongs to a tokenizer; tokenizer.json is what this project reads, the others are for other readers.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_VOCABULARY = (EMBEDDING, HEAD)
#: What may differ between a model and its copy: names that formats have none of.
_FREE = frozenset({"family", "dtype", "eos_token_ids", "bos_token_id"})

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """What was read back and found equal to its source."""

    tensors: int
    num_bytes: int
    digest: str


class Conversion:
    """One checkpoint on its way to another kind.

    :param dtype: of every tensor written; None keeps each as it is stored.
    :param rows: of the vocabulary in what is written: fewer leave padding out, more add zeros.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: DType | None, rows: int) -> None:
        self.checkpoint = checkpoint
        source = checkpoint.config
        self.config = replace(source, vocab_rows=rows, vocab_size=min(source.vocab_size, rows))
        if dtype is not None:
            self.config = replace(self.config, dtype=dtype)
        self.shapes = logical_tensors(self.config)
        self._stored = logical_tensors(source)
        self._dtype = dtype
        self._reader = TensorReader(checkpoint)

    @property
    def num_bytes(self) -> int:
        """Of all tensors as they are written, without Megatron's padding."""
        return sum(prod(shape) * DTYPE_BYTES[self.dtype(name)] for name, shape in self.shapes.items())

    def dtype(self, name: str) -> str:
        """Element type in which a tensor is written."""
        return self._dtype or self._reader.dtype(name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a box of it, as it is to be written.

        :raises UsageError: for a value that the type asked for cannot hold.
        """
        tensor = self._read(name, box)
        if self._dtype == "float16" and not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{name} has values that float16 cannot hold", [("try", "--dtype bfloat16")])
        return tensor

    def _read(self, name: str, box: Box | None) -> Tensor:
        shape, stored = self.shapes[name], self._stored[name]
        box = box or Box.whole(shape)
        if name not in _VOCABULARY or box.stop[0] <= stored[0]:
            return self._reader.read(name, box, self.dtype(name))
        out = torch.zeros(box.shape, dtype=getattr(torch, self.dtype(name)))
        rows = max(0, stored[0] - box.start[0])
        if rows:
            part = Box(box.start, (rows, *box.shape[1:]))
            out[:rows] = self._reader.read(name, part, self.dtype(name))
        return out

    def write_huggingface(self, folder: Path, shard_bytes: int, progress: Progress) -> None:
        """Fill an empty folder: weights, ``config.json``, tokenizer.

        :raises UnsupportedModel: before anything is written, when ``config.json`` cannot describe the model.
        """
        values = self._config_values()
        entries = [Entry(name, shape, self.dtype(name)) for name, shape in self.shapes.items()]
        count = _counter(self.num_bytes, progress)
        write_weights(folder, entries, self.read, family=self.config.family, shard_bytes=shard_bytes, progress=count)
        copy_tokenizer(self.checkpoint, folder)
        # Last: a folder without it is no checkpoint.
        (folder / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    def write_megatron(self, root: Path, grid: Grid, layout: Layout, progress: Progress) -> Path:
        """Write one iteration below an empty root, the tokenizer beside it; returns the iteration's folder."""
        tensors: Mapping[str, _Lazy] = {name: _Lazy(self, name) for name in self.shapes}
        count = _counter(self.num_bytes, progress)
        iteration = self.checkpoint.facts.iteration
        if self.checkpoint.tokenizer is not None:
            (root / "tokenizer").mkdir()
            copy_tokenizer(self.checkpoint, root / "tokenizer")
            self._copy_config(root / "tokenizer")
        return write_checkpoint(
            root,
            self.config,
            tensors,
            grid,
            layout=layout,
            iteration=1 if iteration is None else iteration,
            progress=count,
        )

    def verify(self, written: Path, progress: Progress) -> Verified:
        """Read back what was written and compare the digest of each tensor with its source's.

        :raises CheckpointCorrupt: naming the tensor that differs.
        :raises UnsupportedModel: when what was written describes another model.
        """
        digests = []
        done = 0
        with closing(open_checkpoint(written)) as copy:
            self._check_config(copy.config)
            reader = TensorReader(copy)
            for name in self.shapes:
                digests.append(_digest(name, self.dtype(name), self.read(name)))
                again = _digest(name, reader.dtype(name), reader.read(name))
                if again != digests[-1]:
                    raise CheckpointCorrupt(
                        f"{name} was read back otherwise than it was written",
                        [("its digest", again), ("needed", digests[-1]), ("check", "the disk that was written to")],
                    )
                done += prod(self.shapes[name]) * DTYPE_BYTES[self.dtype(name)]
                progress(done, self.num_bytes)
        return Verified(tensors=len(digests), num_bytes=done, digest=combine(digests))

    def _check_config(self, copy: ModelConfig) -> None:
        names = [field.name for field in fields(ModelConfig) if field.name not in _FREE]
        wrong = [name for name in names if getattr(copy, name) != getattr(self.config, name)]
        if wrong:
            raise UnsupportedModel(
                f"the format that was written to cannot say this model's {', '.join(wrong)}",
                [(name, f"{getattr(self.config, name)}, read back as {getattr(copy, name)}") for name in wrong],
            )

    def _config_values(self) -> dict[str, Any]:
        """``config.json``: the source's own with what has changed, or one made from the model."""
        path = self.checkpoint.path / CONFIG
        if self.checkpoint.facts.format != "huggingface":
            return huggingface_config(self.config)
        values = dict(read_json(path, hub_root(path.parent)))
        if self._dtype is not None:
            values["dtype" if "dtype" in values else "torch_dtype"] = self._dtype
        return values

    def _copy_config(self, folder: Path) -> None:
        path = self.checkpoint.path / CONFIG
        if self.checkpoint.facts.format == "huggingface":
            shutil.copyfile(path, folder / CONFIG)


def output_rows(config: ModelConfig, *, megatron: bool, from_megatron: bool, tp: int = 1) -> int:
    """Vocabulary rows of what is written.

    Megatron wants a multiple of its tensor parallel size; Hugging Face has no use for the padding that Megatron added.
    """
    if megatron:
        return -(-config.vocab_rows // tp) * tp
    return config.vocab_size if from_megatron else config.vocab_rows


def copy_tokenizer(checkpoint: Checkpoint, folder: Path) -> list[str]:
    """Copy whatever tokenizer files lie beside a checkpoint; the names of those that were there."""
    if checkpoint.tokenizer is None:
        return []
    found = [name for name in TOKENIZER_FILES if (checkpoint.tokenizer.folder / name).is_file()]
    for name in found:
        shutil.copyfile(checkpoint.tokenizer.folder / name, folder / name)
    return found


class _Lazy:
    """A tensor of a conversion that is read when it is sliced."""

    def __init__(self, conversion: Conversion, name: str) -> None:
        self._conversion = conversion
        self._name = name

    @property
    def shape(self) -> Shape:
        return self._conversion.shapes[self._name]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self._conversion.dtype(self._name))
        return found

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        start = tuple(part.start for part in index)
        return self._conversion.read(
            self._name, Box(start, tuple(part.stop - first for part, first in zip(index, start, strict=True)))
        )


def _counter(total: int, progress: Progress) -> Callable[[int], None]:
    """Adds up what it is told; Megatron's padding may make more of it than there is in all."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress(min(done, total), total)

    return advance


def _digest(name: str, dtype: str, tensor: Tensor) -> str:
    digest = Digest()
    digest.add("\0".join([name, dtype, *map(str, tensor.shape), "\n"]).encode())
    for piece in pieces(tensor):
        digest.add(piece)
    return digest.text()
