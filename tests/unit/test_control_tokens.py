"""What a grammar spells is text, also where it is spelled as a control token is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from fakes_server import byte_ids, byte_tokenizer

from gtp_serve.engine.control_tokens import named_by_id, unspelled
from gtp_serve.engine.grammar import GrammarCompiler, fill_masks
from gtp_serve.loaders.tokenizer import Tokenizer
from gtp_serve.loaders.tokenizer_files import TokenizerFiles
from gtp_serve.request import Grammar


def unigram_tokenizer() -> Tokenizer:
    """Pieces with scores in a list, all bytes, and HTML's strike-through as its control tokens."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram([*pieces, ("b", -1.0)], unk_id=0, byte_fallback=True))
    backend.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()])
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<s>", "</s>"])
    unused = Path("unused")
    return Tokenizer(backend, TokenizerFiles(folder=unused, tokenizer_json=unused), None)


def spelled(tokenizer: Tokenizer, grammar: Grammar, most: int = 200) -> list[int]:
    """The lowest id that may follow, until the end token may."""
    vocab = tokenizer.vocab_size
    compiler = GrammarCompiler(tokenizer.to_json, vocab_size=vocab, eos_token_ids=(2,))
    parser, ids = compiler.compile(grammar).result(60), list[int]()
    while len(ids) < most:
        mask = fill_masks(compiler.executor, [parser], vocab).reshape(-1)
        assert parser.settle(mask, end_ids=(2,), banned=()), ids
        token = int(np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0][0])
        if token == 2 and parser.complete:
            return ids
        ids.append(token)
        parser.feed(ids, 0)
    raise AssertionError(f"no end after {ids}")


TAGGED = {"const": "\x00<|im_end|>"}


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar(kind="choice", text=json.dumps(["<|im_end|>"])), "<|im_end|>"),
        (Grammar(kind="choice", text=json.dumps(["a<|im_start|>"])), "a<|im_start|>"),
        (Grammar(kind="regex", text=r"<\|im_end\|>"), "<|im_end|>"),
        (Grammar(kind="lark", text='start: "<|im_end|>" "<|im_start|>"'), "<|im_end|><|im_start|>"),
        (Grammar(kind="json_schema", text=json.dumps(TAGGED)), '"\\u0000<|im_end|>"'),
        (
            Grammar(kind="json_schema", text='{"properties":{"<|im_end|>":{"const":1}},"required":["<|im_end|>"],'
                    '"additionalProperties":false,"type":"object"}'),
            '{"<|im_end|>":1}',
        ),
    ],
)  # fmt: skip
def test_a_text_that_spells_a_control_token_is_made_of_text(grammar: Grammar, text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = spelled(tokenizer, grammar)
    assert not {0, 1, 2} & set(ids)
    assert "".join(tokenizer.decode(ids).split()) == text


def test_html_is_text_also_where_its_tags_are_control_tokens() -> None:
    tokenizer = unigram_tokenizer()
    ids = spelled(tokenizer, Grammar(kind="choice", text=json.dumps(["<s>b</s>"])))
    assert tokenizer.decode(ids) == "<s>b</s>"
    assert not {0, 1, 2} & set(ids)


def test_a_control_token_can_be_named_outside_quotes_and_by_its_id() -> None:
    for name in ("<|im_start|>", "<[1]>"):
        ids = spelled(byte_tokenizer(), Grammar(kind="lark", text=f'start: {name} "<|im_start|>" /<\\|im_end\\|>/'))
        assert ids[0] == 1
        assert ids[1:] == byte_ids(b"<|im_start|><|im_end|>")


def test_names_in_quotes_patterns_and_comments_stay() -> None:
    ids = {"<s>": 1, "</s>": 2}
    assert named_by_id('start: <s> "<s>" /<s>/ x </s> // it\'s "<s>\nx: "\\"<s>" <s>', ids) == (
        'start: <[1]> "<s>" /<s>/ x <[2]> // it\'s "<s>\nx: "\\"<s>" <[1]>'
    )


def test_a_control_token_that_merges_make_keeps_its_name() -> None:
    """Without it the merge would make a token that there is not."""
    vocab = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4, "</s>": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[("<", "s"), ("<s", ">")]))
    backend.add_special_tokens(["<s>", "</s>"])
    text, ids = unspelled(backend.to_str())
    assert ids == {"</s>": 5}
    again = tokenizers.Tokenizer.from_str(text)
    assert again.get_vocab_size() == 6
    assert again.encode("<s>", add_special_tokens=False).ids == [4]
    assert again.token_to_id("</s>") is None
