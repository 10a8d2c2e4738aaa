"""Opens a GGUF file of the llama architecture: dequantised as it is read, rotary rows put back into halves.

llama.cpp stores query and key rows so that rotated pairs are neighbours; here, as in Hugging Face, a pair's
second element lies half a head away.  Quantised types need the ``gguf`` package (and numpy), which is
imported when the first such tensor is read.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from gtp_serve.config import DType, ModelConfig, RopeConfig
from gtp_serve.errors import CheckpointCorrupt, EnvironmentFault, LayoutMismatch, UnsupportedModel
from gtp_serve.layout.huggingface import EMBEDDING, FINAL_NORM, HEAD, layer_prefix, logical_tensors
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.loaders.facts import Facts
from gtp_serve.loaders.files import FileViews, reading, shown
from gtp_serve.loaders.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from gtp_serve.loaders.limits import MAX_SIZE, check_limits
from gtp_serve.loaders.whole_tensors import Found, check_complete
from gtp_serve.refit.plan import ITEM_BYTES

_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KEY = re.compile(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)")
_ROTATED = re.compile(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)")
_FREQUENCIES = "rope_freqs.weight"
#: Element types whose bytes are handed out as they are; all others are dequantised to float32.
_RAW = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Factors of Llama 3's rotary scaling that files are compared with.
_LLAMA3_FACTORS = (8.0, 16.0, 32.0, 4.0)


@dataclass(frozen=True, slots=True)
class OpenedGguf:
    """A file before it becomes a ``Checkpoint``."""

    config: ModelConfig
    facts: Facts
    source: GgufSource


class GgufSource:
    """The tensors of a GGUF file, one shard each."""

    def __init__(self, header: GgufHeader, names: Mapping[str, str], config: ModelConfig, views: FileViews) -> None:
        self._path = header.path
        self._tensors = [header.tensors[key] for key in names]
        self._shards = tuple(_shard(t, name) for t, name in zip(self._tensors, names.values(), strict=True))
        self._config = config
        self._views = views

    def shards(self) -> Sequence[Shard]:
        """All shards; those of quantised tensors are float32."""
        return self._shards

    def read(self, index: int) -> memoryview:
        """The shard's bytes: of the mapped file, or of a new array where they had to be dequantised or
        reordered.

        :raises EnvironmentFault: when the ``gguf`` package is needed and not installed.
        """
        tensor = self._tensors[index]
        data = self._views.view(self._path, tensor.start, tensor.length)
        order = self._row_order(tensor)
        if order is not None:
            data = _reordered(
                data, order, tensor.row_bytes if len(tensor.shape) > 1 else tensor.length // tensor.shape[0]
            )
        return data if tensor.kind_name in _RAW else _dequantised(data, tensor)

    def close(self) -> None:
        """Let go of the file."""
        self._views.close()

    def _row_order(self, tensor: GgufTensor) -> list[int] | None:
        """Stored row of each row, for query and key projections."""
        match = _ROTATED.fullmatch(tensor.name)
        if match is None:
            return None
        heads = self._config.num_heads if match[1] == "q" else self._config.num_kv_heads
        size = self._config.head_dim
        half = size // 2
        return [h * size + 2 * i + part for h in range(heads) for part in (0, 1) for i in range(half)]


def open_gguf(path: Path) -> OpenedGguf:
    """Open a file.

    :raises UnsupportedModel: for another architecture than llama.
    :raises CheckpointError: naming the file and the tensor where something does not fit.
    """
    header = read_gguf_header(path, path.resolve().parent)
    config = _config(header)
    check_limits(config, str(path))
    names = {key: name for key, name in _names(header).items() if key != _FREQUENCIES}
    views = FileViews({header.path: header.size})
    try:
        source = GgufSource(header, names, config, views)
        found = {name: Found(key, header.tensors[key].shape, path) for key, name in names.items()}
        check_complete(found, logical_tensors(config), path)
    except BaseException:
        views.close()
        raise
    return OpenedGguf(config, _facts(header, source.shards()), source)


def _names(header: GgufHeader) -> dict[str, str]:
    """Logical name of each tensor.

    :raises LayoutMismatch: naming those that no rule knows.
    """
    names: dict[str, str] = {}
    unknown = []
    for key in header.tensors:
        match = _KEY.fullmatch(key)
        if key in _TOP or key == _FREQUENCIES:
            names[key] = _TOP.get(key, "")
        elif match is not None and match[2] in _LAYER:
            names[key] = f"{layer_prefix(int(match[1]))}{_LAYER[match[2]]}.{match[3]}"
        else:
            unknown.append(key)
    if unknown:
        raise LayoutMismatch(
            f"{header.path}: {len(unknown)} tensor(s) are not known: {', '.join(map(shown, unknown[:5]))}",
            code="ckpt-unknown-key",
        )
    return names


class _Values:
    """Metadata fields below ``llama.`` with checked types."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.header.fields.get(name, default)
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise CheckpointCorrupt(
                f"{self.header.path}: {name} is {shown(value)}", [("needed", "a whole number above 0")]
            )
        return value

    def number(self, name: str, default: float) -> float:
        value = self.header.fields.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise CheckpointCorrupt(f"{self.header.path}: {name} is {shown(value)}", [("needed", "a number above 0")])
        return _shortest(float(value))


def _shortest(value: float) -> float:
    """The shortest decimal with the same float32: files hold 1e-5 as 9.99999974e-06, and the model was made
    with 1e-5."""
    for digits in range(1, 10):
        candidate = float(f"{value:.{digits}g}")
        if struct.pack("<f", candidate) == struct.pack("<f", value):
            return candidate
    return value


def _config(header: GgufHeader) -> ModelConfig:
    architecture = header.fields.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"{header.path}: the architecture is {shown(architecture)}", [("supported", "llama")])
    values = _Values(header)
    if header.fields.get("llama.expert_count"):
        raise UnsupportedModel(f"{header.path}: the model has experts, which are not read from GGUF files")
    hidden, heads = values.integer("llama.embedding_length"), values.integer("llama.attention.head_count")
    kv_heads = values.integer("llama.attention.head_count_kv", heads)
    head_dim = values.integer("llama.attention.key_length", hidden // heads or 1)
    rotated = values.integer("llama.rope.dimension_count", head_dim)
    if rotated != head_dim or values.integer("llama.attention.value_length", head_dim) != head_dim or head_dim % 2:
        raise UnsupportedModel(
            f"{header.path}: {rotated} of {head_dim} elements of a head are rotated", [("needed", "all")]
        )
    if heads % kv_heads:
        raise LayoutMismatch(f"{header.path}: {heads} heads are not a multiple of {kv_heads} key and value heads")
    rows, vocab = _vocabulary(header)
    return ModelConfig(
        family="llama",
        num_layers=values.integer("llama.block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=values.integer("llama.feed_forward_length"),
        vocab_size=vocab,
        vocab_rows=rows,
        norm_eps=values.number("llama.attention.layer_norm_rms_epsilon", 1e-5),
        rope=_rope(header, values, head_dim),
        tied="output.weight" not in header.tensors,
        qkv_bias="blk.0.attn_q.bias" in header.tensors,
        proj_bias="blk.0.attn_output.bias" in header.tensors,
        mlp_bias="blk.0.ffn_down.bias" in header.tensors,
        max_context=values.integer("llama.context_length", 2048),
        dtype=_dtype(header),
        eos_token_ids=_token_ids(header, rows, "eos", "eot"),
        bos_token_id=next(iter(_token_ids(header, rows, "bos")), None),
    )


def _vocabulary(header: GgufHeader) -> tuple[int, int]:
    """(rows of the embedding, tokens that exist)."""
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise LayoutMismatch(f"{header.path}: token_embd.weight is missing")
    tokens = header.fields.get("tokenizer.ggml.tokens")
    count = len(tokens) if isinstance(tokens, list) and tokens else embedding.shape[0]
    if count > embedding.shape[0]:
        raise LayoutMismatch(f"{header.path}: {count} tokens, but token_embd.weight has {embedding.shape[0]} rows")
    return embedding.shape[0], count


def _token_ids(header: GgufHeader, rows: int, *names: str) -> tuple[int, ...]:
    values = (header.fields.get(f"tokenizer.ggml.{name}_token_id") for name in names)
    return tuple(dict.fromkeys(v for v in values if type(v) is int and 0 <= v < rows))


def _dtype(header: GgufHeader) -> DType:
    """Of the largest kind; quantised weights are served in bfloat16 unless asked otherwise."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        sizes[tensor.kind_name] += tensor.length
    kind = sizes.most_common(1)[0][0]
    named: dict[str, DType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return named.get(kind, "bfloat16")


def _rope(header: GgufHeader, values: _Values, head_dim: int) -> RopeConfig:
    theta = values.number("llama.rope.freq_base", 10000.0)
    kind = header.fields.get("llama.rope.scaling.type", "none")
    if _FREQUENCIES in header.tensors:
        return _llama3(header, theta, head_dim)
    if kind == "none":
        return RopeConfig(theta=theta)
    scalings: dict[object, Literal["linear", "yarn"]] = {"linear": "linear", "yarn": "yarn"}
    if kind not in scalings:
        raise UnsupportedModel(f"{header.path}: rotary scaling {shown(kind)}", [("supported", "none, linear, yarn")])
    original = values.integer(
        "llama.rope.scaling.original_context_length", values.integer("llama.context_length", 2048)
    )
    return RopeConfig(
        theta=theta,
        scaling=scalings[kind],
        factor=values.number("llama.rope.scaling.factor", 1.0),
        original_context=original,
    )


def _llama3(header: GgufHeader, theta: float, head_dim: int) -> RopeConfig:
    """Llama 3's scaling, which files store as one divisor for each pair: find the factor that gives them."""
    tensor = header.tensors[_FREQUENCIES]
    if tensor.kind_name != "F32" or prod(tensor.shape) != head_dim // 2:
        raise CheckpointCorrupt(f"{header.path}: {_FREQUENCIES} is not {head_dim // 2} numbers")
    with reading(header.path) as file:
        file.seek(tensor.start)
        stored = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.length))
    for factor in _LLAMA3_FACTORS:
        rope = RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_context=8192,
        )
        expected = _divisors(rope, head_dim)
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, expected, strict=True)):
            return rope
    raise UnsupportedModel(
        f"{header.path}: {_FREQUENCIES} is not Llama 3's rotary scaling", [("supported", "factors 4 to 32")]
    )


def _divisors(rope: RopeConfig, head_dim: int) -> list[float]:
    """What Llama 3's scaling divides each pair's frequency by."""
    result = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * math.pi * rope.theta ** (i / head_dim)
        if wavelength < rope.original_context / rope.high_freq_factor:
            result.append(1.0)
        elif wavelength > rope.original_context / rope.low_freq_factor:
            result.append(rope.factor)
        else:
            keep = (rope.original_context / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            result.append(1 / ((1 - keep) / rope.factor + keep))
    return result


def _shard(tensor: GgufTensor, name: str) -> Shard:
    box = Box.whole(tensor.shape)
    return Shard(tensor.name, tensor.shape, _RAW.get(tensor.kind_name, "float32"), (Span(name, box, box),))


def _reordered(data: memoryview, order: Sequence[int], row_bytes: int) -> memoryview:
    """Row ``order[i]`` as row ``i``."""
    if len(order) * row_bytes != len(data):
        raise LayoutMismatch(
            f"a query or key projection has {len(data) // row_bytes} rows where {len(order)} are needed"
        )
    result = memoryview(bytearray(len(data)))
    for row, stored in enumerate(order):
        result[row * row_bytes : (row + 1) * row_bytes] = data[stored * row_bytes : (stored + 1) * row_bytes]
    return result


def _dequantised(data: memoryview, tensor: GgufTensor) -> memoryview:
    # Imported here: numpy takes a tenth of a second and inspect needs none; the package is an extra.
    try:
        import numpy as np
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize
    except ImportError as error:
        raise EnvironmentFault(
            f"{tensor.name} is {tensor.kind_name}, and the gguf package that dequantises it is not installed",
            [("try", "pip install gguf")],
        ) from error
    raw = np.frombuffer(data, dtype=np.uint8).reshape(*tensor.shape[:-1], tensor.row_bytes)
    with np.errstate(all="ignore"):  # a scale that is no number makes no number: whoever verifies weights says so
        values = np.ascontiguousarray(dequantize(raw, GGMLQuantizationType(tensor.kind)), dtype=np.float32)
    if values.shape != tensor.shape:
        raise CheckpointCorrupt(
            f"{tensor.name} dequantises to {list(values.shape)}", [("expected", str(list(tensor.shape)))]
        )
    return memoryview(values.data).cast("B")


def _facts(header: GgufHeader, shards: Sequence[Shard]) -> Facts:
    by_kind: Counter[str] = Counter()
    for tensor in header.tensors.values():
        by_kind[_RAW.get(tensor.kind_name, tensor.kind_name)] += tensor.length
    quantised = [kind for kind in by_kind if kind not in ITEM_BYTES]
    return Facts(
        format="gguf",
        format_text="GGUF",
        weight_bytes=sum(by_kind.values()),
        parameters=sum(prod(shard.shape) for shard in shards),
        dtypes=tuple(by_kind.most_common()),
        num_tensors=len(shards),
        notes=(f"{', '.join(quantised)} weights are dequantised",) if quantised else (),
    )
