"""Whatever ids and texts come: nothing raises, text survives, a sequence's bytes are its tokens' bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp_serve.loaders.tokenizer import Tokenizer, load_tokenizer
from gtp_serve.loaders.tokenizer_files import find_tokenizer

DATA = Path(__file__).parents[1] / "data"


def load(name: str) -> Tokenizer:
    files = find_tokenizer(DATA / name)
    assert files is not None
    return load_tokenizer(files)


TOKENIZERS = {name: load(name) for name in ("tokenizer", "tokenizer251")}
each = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@each
@settings(deadline=None, max_examples=200)
@given(text=TEXT)
def test_any_text_survives_the_way_to_ids_and_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


@each
@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(-5, 300) | st.integers()))
def test_any_ids_decode_without_an_error_to_their_tokens_bytes(tokenizer: Tokenizer, ids: list[int]) -> None:
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert text == b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
    visible = [i for i in ids if i not in tokenizer.special_ids]
    assert tokenizer.decode(ids) == tokenizer.decode(visible, skip_special_tokens=False)
