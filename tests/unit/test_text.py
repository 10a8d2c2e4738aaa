from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from fakes_server import byte_ids, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from gtp_serve.loaders.tokenizer import Tokenizer
from gtp_serve.loaders.tokenizer_files import TokenizerFiles
from gtp_serve.text import ByteRuns, IncrementalDecoder, StopMatcher, StoppingText


def spelled_tokenizer(**files: Any) -> Tokenizer:
    """As Llama 2's: U+2581 for spaces, a run of lone bytes decoded as a whole, the first space dropped."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ["\u2581", "a", "b", "c", "\u2581a", "\u2581Paris", "is", "."]:
        vocab[token] = len(vocab)
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocab, merges=[("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
    decoders = tokenizers.decoders
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    unused = Path("unused")
    return Tokenizer(backend, TokenizerFiles(folder=unused, tokenizer_json=unused, **files), None)


BYTES = byte_tokenizer()
SPELLED = spelled_tokenizer()
TOKENIZERS = pytest.mark.parametrize("tokenizer", [BYTES, SPELLED], ids=["byte-level", "byte-fallback"])


def decode_in_pieces(tokenizer: Tokenizer, ids: list[int], *, size: int = 1, skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    pieces = [decoder.push(ids[start : start + size]) for start in range(0, len(ids), size)]
    return [*pieces, decoder.flush()]


@TOKENIZERS
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_join_to_the_one_shot_decoding_for_any_ids(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=120))
    size, skip = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    pieces = decode_in_pieces(tokenizer, ids, size=size, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@TOKENIZERS
@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_no_piece_of_valid_text_holds_a_broken_character(tokenizer: Tokenizer, text: str) -> None:
    ids = [3 + byte for byte in text.encode()]
    pieces = decode_in_pieces(tokenizer, ids)
    joined = "".join(pieces)
    assert joined == tokenizer.decode(ids)
    assert joined.count("\ufffd") == text.count("\ufffd")


def test_ten_thousand_random_bytes_are_decoded_exactly_and_in_linear_time() -> None:
    ids = random.Random(7).choices(range(3, 259), k=10_000)
    started = time.process_time()
    assert "".join(decode_in_pieces(BYTES, ids)) == BYTES.decode(ids)
    assert time.process_time() - started < 3


def test_broken_bytes_without_end_are_given_out_in_linear_time() -> None:
    ids = byte_ids(b"\x80" * 5000 + b"\xe6" * 5000 + b"\xe6\xbc" * 500)
    decoder = IncrementalDecoder(BYTES)
    started = time.process_time()
    early = "".join([decoder.push([token]) for token in ids])
    assert time.process_time() - started < 3
    assert len(early) > 10_000
    assert early + decoder.flush() == BYTES.decode(ids)


def test_a_character_comes_with_the_token_that_completes_it() -> None:
    decoder = IncrementalDecoder(BYTES)
    assert [decoder.push([token]) for token in byte_ids("a漢b".encode())] == ["a", "", "", "漢", "b"]


def test_a_prompt_that_ends_inside_a_character_shows_it_once_it_is_complete() -> None:
    start, end = byte_ids("x漢".encode())[:-1], byte_ids("漢".encode())[-1:]
    decoder = IncrementalDecoder(BYTES, context=start)
    assert [decoder.push(end), decoder.push(byte_ids(b"y"))] == ["漢", "y"]


def test_a_prompt_with_a_broken_end_adds_nothing_of_its_own() -> None:
    decoder = IncrementalDecoder(BYTES, context=byte_ids("x漢".encode())[:-1])
    assert [decoder.push([token]) for token in byte_ids(b"yz")] == ["y", "z"]


def test_a_space_before_the_first_new_word_is_kept_when_there_is_a_prompt() -> None:
    paris = SPELLED.encode("x", add_special_tokens=False)
    word = next(token for token in range(SPELLED.vocab_size) if SPELLED.token_bytes(token) == b" Paris")
    assert IncrementalDecoder(SPELLED, context=paris).push([word]) == " Paris"
    assert IncrementalDecoder(SPELLED).push([word]) == "Paris"


def test_a_run_of_lone_bytes_waits_for_its_end_since_one_bad_byte_spoils_it() -> None:
    decoder = IncrementalDecoder(SPELLED)
    good = [3 + byte for byte in "é".encode()]
    assert [decoder.push([token]) for token in [*good, 3 + 0x80]] == ["", "", ""]
    assert decoder.push(SPELLED.encode("a", add_special_tokens=False)[-1:]) == "\ufffd\ufffd\ufffda"


def test_byte_runs_are_found_by_behaviour() -> None:
    assert 3 + 0x0A in ByteRuns(SPELLED)
    assert 3 + 0xE4 in ByteRuns(SPELLED)
    assert SPELLED.encode("b", add_special_tokens=False)[-1] not in ByteRuns(SPELLED)
    assert not any(token in ByteRuns(BYTES) for token in range(BYTES.vocab_size))


def test_special_tokens_are_hidden_or_shown_as_asked() -> None:
    ids = [*byte_ids(b"a"), 2, *byte_ids(b"b")]
    assert "".join(decode_in_pieces(BYTES, ids)) == "ab"
    assert "".join(decode_in_pieces(BYTES, ids, skip=False)) == "a<|im_end|>b"


def run_matcher(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher, shown = StopMatcher(stops), []
    for piece in pieces:
        safe, matched = matcher.push(piece)
        shown.append(safe)
        if matched is not None:
            return shown, matched
    return [*shown, matcher.flush()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        (["b c"], ["a", "b", " c", "d"], ["a", "", ""], "b c"),
        (["DEFGHIJ"], ["DEF", "G", "HI", "J"], ["", "", "", ""], "DEFGHIJ"),
        (["DEFGHIJ"], ["DEF", "G", "HX", "y"], ["", "", "DEFGHX", "y", ""], None),
        ([".."], ["..."], [""], ".."),
        (["aab"], ["aaa", "b"], ["a", ""], "aab"),
        (["abab"], ["xab", "ax", "abab"], ["x", "abax", ""], "abab"),
        (["c", "abcd"], ["ab", "cd"], ["", "ab"], "c"),
        (["bc", "abc"], ["xabc"], ["x"], "abc"),
        (["漢字"], ["漢", "字"], ["", ""], "漢字"),
        ([], ["a", "b"], ["a", "b", ""], None),
        (["ab"], ["xa"], ["x", "a"], None),
    ],
)
def test_stop_strings_are_found_across_pieces_and_nothing_of_them_is_shown(
    stops: list[str], pieces: list[str], shown: list[str], matched: str | None
) -> None:
    assert run_matcher(stops, pieces) == (shown, matched)


def test_text_that_cannot_become_a_stop_is_not_held_back() -> None:
    matcher = StopMatcher(["q" * 200])
    assert [matcher.push("word ")[0] for _ in range(50)] == ["word "] * 50


@settings(max_examples=120, deadline=None)
@given(
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_the_first_stop_to_be_completed_wins_wherever_the_pieces_are_cut(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [(end, -len(stop), stop) for stop in stops for end in range(len(text) + 1) if text[:end].endswith(stop)]
    shown, matched = run_matcher(stops, pieces)
    if ends:
        end, _, stop = min(ends)
        assert (("".join(shown)), matched) == (text[: end - len(stop)], stop)
    else:
        assert ("".join(shown), matched) == (text, None)


def until_stopped(stops: list[str], text: str, least: int) -> tuple[str, str | None, int]:
    """(what is shown, the stop, tokens taken), a byte a token."""
    shown = StoppingText(BYTES, context=(), stops=stops, min_tokens=least)
    for count, token in enumerate(byte_ids(text.encode()), 1):
        matched = shown.push(token)
        if matched is not None:
            return "".join(shown.pieces), matched, count
    shown.finish()
    return "".join(shown.pieces), None, len(text)


@pytest.mark.parametrize(
    ("stops", "least", "expected"),
    [
        (["ef"], 0, ("abcd", "ef", 6)),
        (["ef"], 6, ("abcd", "ef", 6)),  # begins before the sixth token, and is completed by it
        (["ef"], 7, ("abcdefgh", None, 8)),
        (["b", "gh"], 3, ("abcdef", "gh", 8)),
        (["abcdefgh"], 8, ("", "abcdefgh", 8)),
        (["h"], 9, ("abcdefgh", None, 8)),
        ([], 3, ("abcdefgh", None, 8)),
    ],
)
def test_a_stop_counts_where_it_is_completed_by_a_token_that_may_end_the_reply(
    stops: list[str], least: int, expected: tuple[str, str | None, int]
) -> None:
    assert until_stopped(stops, "abcdefgh", least) == expected


@settings(max_examples=120, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.text("abc", max_size=20), st.integers(0, 20))
def test_the_first_stop_to_be_completed_late_enough_wins(stops: list[str], text: str, least: int) -> None:
    ends = [
        (end, -len(stop), stop)
        for stop in stops
        for end in range(max(1, least), len(text) + 1)
        if text[:end].endswith(stop)
    ]
    got = until_stopped(stops, text, least)
    if ends:
        end, _, stop = min(ends)
        assert got == (text[: end - len(stop)], stop, end)
    else:
        assert got == (text, None, len(text))


def test_many_long_stops_cost_little_for_each_token() -> None:
    matcher = StopMatcher([f"{'a' * 250}{index:02}" for index in range(32)])
    started = time.process_time()
    for _ in range(1000):
        matcher.push("aaaa")
    assert time.process_time() - started < 2
