"""A Hugging Face folder of a Llama-like model as a GGUF file without a tokenizer: ids in, ids out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize

_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OTHERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_TYPES = {"bf16": GGMLQuantizationType.BF16, "q8_0": GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"bf16": 32, "q8_0": 7}


def write_gguf(model: Path, out: Path, dtype: str) -> None:
    """All tensors of a checkpoint whose architecture is Llama's.

    :param dtype: ``bf16`` keeps the values; ``q8_0`` quantises the matrices.  Norms are float32, as llama.cpp has them.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise SystemExit(f"only Llama's architecture is written as GGUF here, not {config['model_type']}")
    writer = GGUFWriter(out, "llama")
    _write_facts(writer, config, dtype)
    for name, values in read_bfloat16(model):
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for part, count in heads.items():
            if f".{part}." in name:
                values = interleave_heads(values, count)
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
        else:
            kind = _TYPES[dtype]
            writer.add_tensor(gguf_name(name), quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_facts(writer: GGUFWriter, config: dict[str, Any], dtype: str) -> None:
    writer.add_name("benchmark")
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_rope_freq_base(float(config.get("rope_theta") or config["rope_parameters"]["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor."""
    stem = name.removesuffix(".weight")
    if stem in _OTHERS:
        return f"{_OTHERS[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_LAYER[part]}.weight"


def interleave_heads(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a head in llama.cpp's order: it rotates neighbours, where the checkpoint rotates halves."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_bfloat16(model: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor of the safetensors files as float32; numpy has no bfloat16."""
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            for name, facts in header.items():
                if name == "__metadata__":
                    continue
                if facts["dtype"] != "BF16":
                    raise SystemExit(f"{name} is {facts['dtype']}; only bfloat16 checkpoints are written as GGUF here")
                begin, end = facts["data_offsets"]
                file.seek(start + begin)
                words = np.frombuffer(file.read(end - begin), dtype=np.uint16)
                yield name, (words.astype(np.uint32) << 16).view(np.float32).reshape(facts["shape"])
