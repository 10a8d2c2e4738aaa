"""Makes the two small tokenizers beside this file; run it with a Python that has gtp_serve.

``tokenizer`` has all 256 bytes and a few merges.  ``tokenizer251`` has exactly 251 ids, for the fixture
models with a vocabulary of 251: three special tokens, the 243 bytes that occur in UTF-8, five merges.  So
each spells any text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gtp_serve.loaders.token_bytes import byte_alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (
    "Ġ t",
    "h e",
    "Ġt he",
    "i n",
    "a n",
    "Ġ a",
    "o u",
    "r e",
    "e r",
    "Ġ w",
    "o r",
    "l l",
    "he ll",
    "hell o",
)
UTF8_BYTES = (*range(0xC0), *range(0xC2, 0xF5))

TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\\n' }}
{%- endif -%}
"""


def documents(byte_values: tuple[int, ...], merges: tuple[str, ...]) -> dict[str, str]:
    """File contents by name."""
    alphabet = byte_alphabet()
    tokens = [
        *SPECIAL,
        *(alphabet[byte] for byte in byte_values),
        *(merge.replace(" ", "") for merge in merges),
    ]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
    }
    return {
        "tokenizer.json": _text(_tokenizer(tokens, merges)),
        "tokenizer_config.json": _text(config),
        "chat_template.jinja": TEMPLATE,
    }


def all_documents() -> dict[str, dict[str, str]]:
    """Contents by folder and file name."""
    return {
        "tokenizer": documents(tuple(range(256)), MERGES),
        "tokenizer251": documents(UTF8_BYTES, MERGES[:5]),
    }


def _tokenizer(tokens: list[str], merges: tuple[str, ...]) -> dict[str, Any]:
    level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True, "add_prefix_space": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    return {
        "version": "1.0",
        "added_tokens": [{"id": index, "content": text, **flags} for index, text in enumerate(SPECIAL)],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in merges],
        },
    }


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n"


def main() -> None:
    """Write every file."""
    for folder, files in all_documents().items():
        target = Path(__file__).parent / folder
        target.mkdir(exist_ok=True)
        for name, text in files.items():
            (target / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
