"""Tokenizer files out of a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gtp_serve.errors import CheckpointCorrupt, UnsupportedModel
from gtp_serve.loaders.gguf_tokenizer import tokenizer_documents
from gtp_serve.loaders.smollm import write_documents
from gtp_serve.loaders.token_bytes import byte_alphabet
from gtp_serve.loaders.tokenizer import load_tokenizer
from gtp_serve.loaders.tokenizer_files import find_tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *byte_alphabet().values(), "Ġt", "<keep>"]


def fields(**changes: Any) -> dict[str, Any]:
    values = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": TOKENS,
        "token_type": [3, 3, 3, *[1] * 257, 4],
        "merges": ["Ġ t"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "padding_token_id": 2,
        "add_bos_token": False,
        "add_space_prefix": False,
    }
    result: dict[str, Any] = {f"tokenizer.ggml.{name}": value for name, value in (values | changes).items()}
    return result | {"tokenizer.chat_template": "{{ messages[0].content }}é", "llama.context_length": 8192}


def test_the_files_make_a_working_tokenizer(tmp_path: Path) -> None:
    write_documents(tokenizer_documents(fields()), tmp_path)
    files = find_tokenizer(tmp_path)
    assert files is not None
    tokenizer = load_tokenizer(files)
    letter = {text: TOKENS.index(text) for text in "t12Ġ"}
    assert tokenizer.encode(" t12<keep><|im_end|>") == [259, letter["1"], letter["2"], 260, 2]
    assert tokenizer.decode(tokenizer.encode("wörld 12 😀")) == "wörld 12 😀"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.bos_token_id == 1
    assert files.special_tokens["unk_token"] == "<|endoftext|>"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hié"


def test_digits_never_join_even_where_a_merge_would_join_them(tmp_path: Path) -> None:
    documents = tokenizer_documents(
        fields(tokens=[*TOKENS, "12"], token_type=[3, 3, 3, *[1] * 257, 4, 1], merges=["Ġ t", "1 2"])
    )
    write_documents(documents, tmp_path)
    files = find_tokenizer(tmp_path)
    assert files is not None
    assert load_tokenizer(files).encode("12") == [TOKENS.index("1"), TOKENS.index("2")]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "llama"},
        {"pre": "llama-bpe"},
        {"add_bos_token": True},
        {"token_type": [3, 3, 3, *[1] * 257, 6]},
    ],
)
def test_other_kinds_of_tokenizer_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="GGUF"):
        tokenizer_documents(fields(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"eos_token_id": 261},
        {"bos_token_id": -1},
        {"padding_token_id": None},
        {"token_type": [1]},
        {"tokens": [*TOKENS[:-1], TOKENS[0]]},
        {"merges": ["abc"]},
    ],
)
def test_lists_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCorrupt, match="GGUF"):
        tokenizer_documents(fields(**change))
