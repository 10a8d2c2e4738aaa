"""A real checkpoint whose next token is a table's: each token's logits depend on the last token alone.

Embeddings are the unit vectors, attention and MLP add nothing, and the head is the table.  So a test can place stops,
end tokens, probabilities and overflows exactly, with every part of the product in between.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

_TOKENIZER = Path(__file__).parent / "data" / "tokenizer"
VOCAB, EOS = 273, 2
_HIDDEN, _HEADS, _FFN = 288, 2, 32
_LIKELY = 10.0
_GAIN = 4.0
_TOO_LARGE = 1e38


class MarkovModel:
    """The tokenizer is the tests' own of bytes; a token is told by its one byte."""

    def __init__(self) -> None:
        self._logits_TV = torch.zeros(VOCAB, VOCAB)
        self._logits_TV[:, EOS] = _LIKELY
        self._overflows: list[int] = []

    def follow(self, *tokens: str) -> None:
        """Each token is followed by the next one, and the last by the end."""
        for before, after in itertools.pairwise(tokens):
            self._logits_TV[token_id(before)] = 0.0
            self._logits_TV[token_id(before), token_id(after)] = _LIKELY

    def overflow_after(self, token: str) -> None:
        """The logits after it are not finite."""
        self._overflows.append(token_id(token))

    def write(self, folder: Path) -> Path:
        """A Hugging Face folder in float32."""
        width = math.sqrt(_HIDDEN)  # so that the norm leaves a unit vector's length as it is
        embedding = torch.zeros(VOCAB, _HIDDEN)
        embedding[range(VOCAB), range(VOCAB)] = width
        head = torch.zeros(VOCAB, _HIDDEN)
        head[:, :VOCAB] = self._logits_TV.T / width / _GAIN
        head[0, self._overflows] = _TOO_LARGE
        heads = _HIDDEN // _HEADS // 9
        layer = {
            "input_layernorm": torch.ones(_HIDDEN),
            "post_attention_layernorm": torch.ones(_HIDDEN),
            **{f"self_attn.{name}_proj": torch.zeros(_HEADS * heads, _HIDDEN) for name in "qkv"},
            "self_attn.o_proj": torch.zeros(_HIDDEN, _HEADS * heads),
            **{f"mlp.{name}_proj": torch.zeros(_FFN, _HIDDEN) for name in ("gate", "up")},
            "mlp.down_proj": torch.zeros(_HIDDEN, _FFN),
        }
        tensors = {f"model.layers.0.{name}.weight": value for name, value in layer.items()}
        tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
        tensors["model.norm.weight"] = torch.full((_HIDDEN,), _GAIN)
        save_file(tensors, folder / "model.safetensors")
        config = {
            "model_type": "llama",
            "hidden_size": _HIDDEN,
            "num_hidden_layers": 1,
            "num_attention_heads": _HEADS,
            "num_key_value_heads": _HEADS,
            "head_dim": heads,
            "intermediate_size": _FFN,
            "vocab_size": VOCAB,
            "rms_norm_eps": 1e-9,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "max_position_embeddings": 512,
            "eos_token_id": EOS,
            "torch_dtype": "float32",
        }
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for file in _TOKENIZER.iterdir():
            shutil.copy(file, folder / file.name)
        return folder


def token_id(char: str) -> int:
    """Of one byte."""
    return 3 + ord(char)
