from __future__ import annotations

import random
import struct
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from gtp_serve.config import RopeConfig
from gtp_serve.errors import CheckpointError, EnvironmentFault, LayoutMismatch, UnsupportedModel
from gtp_serve.loaders import Checkpoint, open_checkpoint
from gtp_serve.loaders.gguf_header import read_gguf_header

torch.set_num_threads(1)

LAYERS, HIDDEN, HEADS, GROUPS, HEAD, FFN, ROWS, TOKENS = 2, 64, 4, 2, 16, 96, 40, 37
NAMES = {
    "attn_norm": ("input_layernorm", (HIDDEN,)),
    "attn_q": ("self_attn.q_proj", (HEADS * HEAD, HIDDEN)),
    "attn_k": ("self_attn.k_proj", (GROUPS * HEAD, HIDDEN)),
    "attn_v": ("self_attn.v_proj", (GROUPS * HEAD, HIDDEN)),
    "attn_output": ("self_attn.o_proj", (HIDDEN, HEADS * HEAD)),
    "ffn_norm": ("post_attention_layernorm", (HIDDEN,)),
    "ffn_gate": ("mlp.gate_proj", (FFN, HIDDEN)),
    "ffn_up": ("mlp.up_proj", (FFN, HIDDEN)),
    "ffn_down": ("mlp.down_proj", (HIDDEN, FFN)),
}


def interleaved(weight: Any, heads: int) -> Any:
    """llama.cpp's order: the two elements of a rotated pair beside one another."""
    return weight.reshape(heads, 2, HEAD // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def model_tensors(*, tied: bool, biases: bool = False) -> dict[str, tuple[str, Any]]:
    """GGUF name -> (logical name, float32 values in Hugging Face's order)."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (ROWS, HIDDEN)),
        "output_norm.weight": ("model.norm.weight", (HIDDEN,)),
    }
    if not tied:
        shapes["output.weight"] = ("lm_head.weight", (ROWS, HIDDEN))
    for layer in range(LAYERS):
        for short, (name, shape) in NAMES.items():
            shapes[f"blk.{layer}.{short}.weight"] = (f"model.layers.{layer}.{name}.weight", shape)
            if biases and short in ("attn_q", "attn_k", "attn_v"):
                shapes[f"blk.{layer}.{short}.bias"] = (f"model.layers.{layer}.{name}.bias", shape[:1])
    return {k: (name, rng.standard_normal(shape).astype(np.float32)) for k, (name, shape) in shapes.items()}


def write_gguf(
    path: Path,
    *,
    kind: Any = gguf.GGMLQuantizationType.F32,
    tied: bool = False,
    biases: bool = False,
    architecture: str = "llama",
    extra: dict[str, Any] | None = None,
    drop: str = "",
    **fields: Any,
) -> dict[str, Tensor]:
    """A small model of the given element type (norms and biases float32); returns what must come out."""
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {
        "block_count": LAYERS,
        "context_length": 64,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": GROUPS,
        "rope.dimension_count": HEAD,
        **fields,
    }
    for name, value in numbers.items():
        if value is not None:
            writer.add_uint32(f"llama.{name}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 50000.0)
    writer.add_token_list([f"t{i}" for i in range(TOKENS)])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    expected: dict[str, Tensor] = {}
    for key, (name, values) in model_tensors(tied=tied, biases=biases).items():
        if key == drop:
            continue
        stored = values
        if ".attn_q." in key or ".attn_k." in key:
            stored = interleaved(values, HEADS if ".attn_q." in key else GROUPS)
        this = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        raw = gguf.quants.quantize(stored, this)
        writer.add_tensor(key, raw, raw_dtype=this)
        # Rows are quantised one by one, so the values that come out do not depend on their order.
        expected[name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, this), this))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def load(path: Path) -> tuple[Checkpoint, dict[str, Tensor]]:
    checkpoint = open_checkpoint(path)
    tensors = dict(checkpoint.tensors())
    checkpoint.close()
    return checkpoint, tensors


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_element_type_comes_out_dequantised_and_in_rotary_halves(kind: str, tied: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    expected = write_gguf(path, kind=gguf.GGMLQuantizationType[kind], tied=tied)

    checkpoint, tensors = load(path)

    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(tensors[name].float(), value), name
    raw = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert tensors["model.layers.0.self_attn.q_proj.weight"].dtype == raw
    assert checkpoint.config.dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    assert checkpoint.config.tied is tied


def test_the_model_is_described_by_the_metadata(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", biases=True)

    checkpoint, tensors = load(tmp_path / "model.gguf")
    config = checkpoint.config

    assert (config.num_layers, config.hidden_size, config.ffn_size) == (LAYERS, HIDDEN, FFN)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, GROUPS, HEAD)
    assert (config.vocab_size, config.vocab_rows) == (TOKENS, ROWS)
    assert (config.norm_eps, config.rope) == (1e-5, RopeConfig(theta=50000.0))
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    assert config.qkv_bias
    assert torch.equal(
        tensors["model.layers.1.self_attn.k_proj.bias"],
        torch.from_numpy(model_tensors(tied=False, biases=True)["blk.1.attn_k.bias"][1]),
    )


def test_a_folder_with_one_gguf_file_opens_it(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")

    assert open_checkpoint(tmp_path).facts.format == "gguf"


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    theta, divisors = 50000.0, []
    for i in range(0, HEAD, 2):
        wavelength = 2 * np.pi * theta ** (i / HEAD)
        keep = np.clip((8192 / wavelength - 1) / 3, 0, 1)
        divisors.append(1 / ((1 - keep) / 32 + keep))
    write_gguf(tmp_path / "a.gguf", extra={"rope_freqs.weight": np.array(divisors, dtype=np.float32)})

    rope = open_checkpoint(tmp_path / "a.gguf").config.rope

    assert rope == RopeConfig(theta=theta, scaling="llama3", factor=32.0, original_context=8192)
    write_gguf(tmp_path / "b.gguf", extra={"rope_freqs.weight": np.full(HEAD // 2, 3.0, dtype=np.float32)})
    with pytest.raises(UnsupportedModel, match="rope_freqs"):
        open_checkpoint(tmp_path / "b.gguf")


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, architecture="gemma")
    with pytest.raises(UnsupportedModel, match="'gemma'"):
        open_checkpoint(path)
    write_gguf(path, expert_count=4)
    with pytest.raises(UnsupportedModel, match="experts"):
        open_checkpoint(path)
    partly: dict[str, Any] = {"rope.dimension_count": 8}
    write_gguf(path, **partly)
    with pytest.raises(UnsupportedModel, match="8 of 16"):
        open_checkpoint(path)
    write_gguf(path, drop="blk.1.ffn_up.weight")
    with pytest.raises(LayoutMismatch, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        open_checkpoint(path)
    write_gguf(path, extra={"blk.0.attn_rot_embd.weight": np.ones(4, dtype=np.float32)})
    with pytest.raises(LayoutMismatch, match="attn_rot_embd"):
        open_checkpoint(path)
    write_gguf(path, feed_forward_length=64)
    with pytest.raises(LayoutMismatch, match=r"\[96, 64\], the model has \[64, 64\]"):
        open_checkpoint(path)


def test_quantised_weights_without_the_package_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType.Q8_0)
    monkeypatch.setitem(sys.modules, "gguf.quants", None)

    with pytest.raises(EnvironmentFault, match="pip install gguf"):
        load(tmp_path / "model.gguf")


def test_the_header_agrees_with_the_packages_reader(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, kind=gguf.GGMLQuantizationType.Q4_1)

    header, reader = read_gguf_header(path, tmp_path.resolve()), gguf.GGUFReader(path)

    assert {t.name: (t.data_offset, t.n_bytes, t.tensor_type.name) for t in reader.tensors} == {
        t.name: (t.start, t.length, t.kind_name) for t in header.tensors.values()
    }
    assert header.fields["llama.block_count"] == LAYERS


def test_damaged_files_are_refused_with_their_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    good = path.read_bytes()
    for data in (
        good[:-1000],
        good[:50],
        b"GGUF",
        b"GGUF" + b"\xff" * 40,
        good[:4] + struct.pack("<I", 9) + good[8:],
    ):
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"model\.gguf"):
            open_checkpoint(path)


def test_random_damage_of_the_header_ends_in_one_sentence_or_opens(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path)
    good = path.read_bytes()
    size = min(t.start for t in read_gguf_header(path, tmp_path.resolve()).tensors.values())
    rng = random.Random(0)
    for _ in range(250):
        damaged = bytearray(good)
        at = rng.randrange(size - 8)
        damaged[at : at + 8] = rng.choice([b"\xff" * 8, b"\0" * 8, struct.pack("<Q", 2**31), rng.randbytes(8)])
        path.write_bytes(bytes(damaged))
        try:
            open_checkpoint(path).close()
        except CheckpointError as error:
            message = error.message
            assert "\n" not in message
