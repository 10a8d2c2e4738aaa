"""The tokenizer inside a GGUF file, written as Hugging Face's tokenizer files.

Knows byte-level BPE as SmolLM has it: digits split one by one, then GPT-2's byte level.  Other pre-tokenisers
are refused, since GGUF stores only their name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gtp_serve.errors import CheckpointCorrupt, UnsupportedModel

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerDocuments:
    """Contents of the tokenizer files, as JSON values and text."""

    tokenizer: Mapping[str, Any]
    tokenizer_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    chat_template: str | None


def tokenizer_documents(fields: Mapping[str, Any]) -> TokenizerDocuments:
    """The tokenizer files for a GGUF file's metadata.

    :param fields: metadata by key, with all that a GPT-2 style tokenizer has under ``tokenizer.``.
    :raises UnsupportedModel: for another kind of tokenizer or pre-tokeniser.
    :raises CheckpointCorrupt: when the lists do not fit one another.
    """
    _check_kind(fields)
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    special = {name: tokens[_token_id(fields, name, tokens)] for name in ("bos", "eos", "unknown", "padding")}
    return TokenizerDocuments(
        tokenizer=_tokenizer(fields, tokens),
        tokenizer_config={
            # The plain class: transformers' GPT-2 class puts its own pre-tokeniser in place of the file's.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(fields["llama.context_length"]),
            "bos_token": special["bos"],
            "eos_token": special["eos"],
            "unk_token": special["unknown"],
            "pad_token": special["padding"],
        },
        generation_config={
            "bos_token_id": _token_id(fields, "bos", tokens),
            "eos_token_id": _token_id(fields, "eos", tokens),
            "pad_token_id": _token_id(fields, "padding", tokens),
        },
        chat_template=fields.get("tokenizer.chat_template"),
    )


def _check_kind(fields: Mapping[str, Any]) -> None:
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (kind, pre) != ("gpt2", "smollm"):
        raise UnsupportedModel(
            f"the GGUF's tokenizer is {kind!r} with pre-tokeniser {pre!r}",
            [("known", "'gpt2' with 'smollm'")],
        )
    if fields.get("tokenizer.ggml.add_bos_token") or fields.get("tokenizer.ggml.add_space_prefix"):
        raise UnsupportedModel("the GGUF's tokenizer adds a token or a space before each text")


def _token_id(fields: Mapping[str, Any], name: str, tokens: Sequence[str]) -> int:
    value = fields.get(f"tokenizer.ggml.{name}_token_id")
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise CheckpointCorrupt(f"the GGUF's {name} token is {value!r}, not one of {len(tokens)} tokens")
    return value


def _tokenizer(fields: Mapping[str, Any], tokens: Sequence[str]) -> dict[str, Any]:
    kinds: Sequence[int] = fields["tokenizer.ggml.token_type"]
    if len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointCorrupt("the GGUF's tokens are not distinct, or their kinds are not as many")
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], kind) for i, kind in enumerate(kinds) if kind != _NORMAL],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                _byte_level(add_prefix_space=False),
            ],
        },
        "post_processor": None,
        "decoder": _byte_level(add_prefix_space=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [_merge(text) for text in fields["tokenizer.ggml.merges"]],
        },
    }


def _added(index: int, text: str, kind: int) -> dict[str, Any]:
    if kind not in (_CONTROL, _USER_DEFINED):
        raise UnsupportedModel(
            f"the GGUF's token {index} has kind {kind}", [("known", "normal, control, user-defined")]
        )
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": text, **flags, "special": kind == _CONTROL}


def _byte_level(*, add_prefix_space: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": True,
    }


def _merge(text: str) -> list[str]:
    parts = text.split(" ")
    if len(parts) != 2:
        raise CheckpointCorrupt(f"the GGUF's merge {text!r} does not have two parts")
    return parts
