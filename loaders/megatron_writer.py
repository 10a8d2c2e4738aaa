"""Writes a Megatron ``torch_dist`` checkpoint of any grid and layout, as a trainer on that grid leaves it.

Real files: torch reads them back, and so do this project's loaders.  Needs torch (the tensor items are torch.save
archives), so nothing that must stay torch-free imports this module.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gtp_serve.config import ModelConfig
from gtp_serve.errors import LayoutMismatch, UsageError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.megatron_save import Layout, SavedTensor, plan_save
from gtp_serve.layout.spans import Box, Shard

#: Names of the pickled top-level entries of a common state.
_COMMON_KEY = "common_state/shard_0_1"


class WholeTensor(Protocol):
    """A logical tensor, in memory or read piece by piece when it is sliced."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the whole tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""

    def __getitem__(self, index: tuple[slice, ...], /) -> Tensor:
        """A part of it."""


def write_checkpoint(
    root: Path,
    config: ModelConfig,
    tensors: Mapping[str, WholeTensor],
    grid: Grid,
    *,
    layout: Layout = "padded",
    iteration: int = 1,
    per_layer_keys: bool = False,
    pad_value: float | None = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Write ``root/iter_NNNNNNN`` and the tracker file; an unfinished folder is never left under its final name.

    :param tensors: whole logical tensors by name (``logical_tensors(config)``); each element is read once.
    :param pad_value: of padding rows; None fills them with numbers that look like weights.
    :param progress: called with the bytes of each chunk as it is written.
    :returns: the iteration's folder.
    :raises LayoutMismatch: when a tensor is missing or has another shape.
    :raises UsageError: for a grid that Megatron could not have, or an iteration that exists already.
    """
    _check_tensors(config, tensors)
    plan = plan_save(config, grid, layout, per_layer_keys=per_layer_keys)
    folder = root / f"iter_{iteration:07d}"
    if folder.exists():
        raise UsageError(f"{folder} exists already", [("try", "another iteration, or remove the folder")])
    partial = root / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write_files(partial, config, tensors, grid, plan, iteration, pad_value, progress or (lambda _: None))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    os.replace(partial, folder)
    (root / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n", encoding="utf-8")
    return folder


def _check_tensors(config: ModelConfig, tensors: Mapping[str, WholeTensor]) -> None:
    for name, shape in logical_tensors(config).items():
        if name not in tensors:
            raise LayoutMismatch(f"{name} is missing", [("needed", str(list(shape)))])
        if tuple(tensors[name].shape) != shape:
            raise LayoutMismatch(f"{name} has shape {list(tensors[name].shape)}", [("needed", str(list(shape)))])


def _write_files(
    folder: Path,
    config: ModelConfig,
    tensors: Mapping[str, WholeTensor],
    grid: Grid,
    plan: list[SavedTensor],
    iteration: int,
    pad_value: float | None,
    progress: Callable[[int], None],
) -> None:
    metadata = Metadata(state_dict_metadata={}, planner_data=None, storage_data={})
    files = _Files(folder)
    try:
        common = [_common_state(config, grid, iteration)]
        metadata.state_dict_metadata[_COMMON_KEY] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(_COMMON_KEY)] = files.append(0, common)
        for saved in plan:
            dtype = _write_tensor(metadata, files, saved, tensors, pad_value, progress)
            metadata.state_dict_metadata[saved.key] = TensorStorageMetadata(
                TensorProperties(dtype=dtype),
                torch.Size(saved.shape),
                [ChunkStorageMetadata(torch.Size(c.box.start), torch.Size(c.box.shape)) for c in saved.chunks],
            )
    finally:
        files.close()
    described = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(described), encoding="utf-8")
    # Written last, as torch does: a folder without it is incomplete.
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def _write_tensor(
    metadata: Metadata,
    files: _Files,
    saved: SavedTensor,
    tensors: Mapping[str, WholeTensor],
    pad_value: float | None,
    progress: Callable[[int], None],
) -> torch.dtype:
    dtype = next(tensors[span.name].dtype for chunk in saved.chunks for span in chunk.shard.spans)
    for index, chunk in enumerate(saved.chunks):
        value = _fill(chunk.shard, tensors, dtype, pad_value).reshape(chunk.box.shape)
        where = MetadataIndex(saved.key, torch.Size(chunk.box.start), index)
        metadata.storage_data[where] = files.append(chunk.rank, value)
        progress(value.nbytes)
    return dtype


def _fill(shard: Shard, tensors: Mapping[str, WholeTensor], dtype: torch.dtype, pad_value: float | None) -> Tensor:
    """The shard's elements: padding first, then what its spans cover."""
    if pad_value is None:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{shard.key}{shard.shape}".encode()))
        out = torch.empty(shard.shape, dtype=torch.float32).normal_(generator=generator).to(dtype)
    else:
        out = torch.full(shard.shape, pad_value, dtype=dtype)
    for span in shard.spans:
        out[_slices(span.local)] = tensors[span.name][_slices(span.logical)]
    return out


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


class _Files:
    """The ``.distcp`` files, one a rank, each a run of torch.save archives."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, io.BufferedWriter] = {}

    def append(self, rank: int, value: object) -> _StorageInfo:
        """Write one item at the end of a rank's file."""
        name = f"__{rank}_0.distcp"
        if rank not in self._open:
            self._open[rank] = (self._folder / name).open("wb")
        file = self._open[rank]
        offset = file.tell()
        torch.save(value, file)
        return _StorageInfo(relative_path=name, offset=offset, length=file.tell() - offset)

    def close(self) -> None:
        """Flush and close every file."""
        for file in self._open.values():
            file.close()


def _common_state(config: ModelConfig, grid: Grid, iteration: int) -> dict[str, object]:
    return {
        "args": argparse.Namespace(**saved_arguments(config, grid), iteration=iteration),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False},
    }


def saved_arguments(config: ModelConfig, grid: Grid) -> dict[str, object]:
    """Megatron's arguments that describe the model and the grid, under its names (0.19)."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    arguments: dict[str, object] = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_size or (config.moe.ffn_size if config.moe else 0),
        "num_attention_heads": config.num_heads,
        "group_query_attention": config.num_kv_heads != config.num_heads,
        "num_query_groups": config.num_kv_heads,
        "kv_channels": config.head_dim,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": config.vocab_rows,
        "max_position_embeddings": config.max_context,
        "seq_length": config.max_context,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.norm_eps,
        "layernorm_zero_centered_gamma": False,
        "swiglu": True,
        "squared_relu": False,
        "add_bias_linear": config.proj_bias or config.mlp_bias,
        "add_qkv_bias": config.qkv_bias,
        "qk_layernorm": config.qk_norm,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "untie_embeddings_and_output_weights": not config.tied,
        "window_size": None if config.sliding_window is None else (config.sliding_window - 1, 0),
        "multi_latent_attention": False,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "params_dtype": dtype,
        "tokenizer_type": "NullTokenizer",
        "tokenizer_model": None,
    }
    return arguments | _rope_arguments(config) | _moe_arguments(config) | _grid_arguments(grid)


def _rope_arguments(config: ModelConfig) -> dict[str, object]:
    rope = config.rope
    if rope.scaling not in ("none", "linear", "llama3"):
        known = [("known", "linear, llama3")]
        raise UsageError(f"Megatron's arguments cannot say {rope.scaling} rotary scaling", known)
    return {
        "rotary_base": rope.theta,
        "rotary_seq_len_interpolation_factor": rope.factor if rope.scaling == "linear" else None,
        "use_rope_scaling": rope.scaling == "llama3",
        "rope_scaling_factor": rope.factor if rope.scaling == "llama3" else 8.0,
    }


def _moe_arguments(config: ModelConfig) -> dict[str, object]:
    moe = config.moe
    if moe is None:
        return {"num_experts": None}
    return {
        "num_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_size,
        "moe_layer_freq": 1,
        "moe_router_score_function": "softmax",
        # Softmax over the chosen logits equals normalised probabilities; softmax first keeps them as they are.
        "moe_router_pre_softmax": not moe.normalise_top_k,
        "moe_router_topk_scaling_factor": None,
        "moe_router_enable_expert_bias": False,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_size or None,
        "moe_shared_expert_gate": moe.shared_gate,
    }


def _grid_arguments(grid: Grid) -> dict[str, object]:
    return {
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.etp,
        "gtp_weight_remat_size": grid.gtp,
        "expert_gtp_weight_remat_size": grid.egtp,
        "context_parallel_size": 1,
    }
