"""Tokenizer: text to ids and back, whatever the ids and the texts are."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gtp_serve.errors import CheckpointCorrupt, RequestRejected, UsageError
from gtp_serve.loaders.tokenizer import Tokenizer, load_tokenizer
from gtp_serve.loaders.tokenizer_files import find_tokenizer

DATA = Path(__file__).parents[1] / "data"
TEXT = "hello the wörld, 中文 😀 1234\n\tx <|im_end|> \x00"


def load(folder: Path, **kwargs: Any) -> Tokenizer:
    files = find_tokenizer(folder)
    assert files is not None
    return load_tokenizer(files, **kwargs)


def copy_with(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    """A copy whose tokenizer.json has some fields replaced."""
    target = tmp_path / "copy"
    shutil.copytree(folder, target)
    document = json.loads((target / "tokenizer.json").read_text(encoding="utf-8")) | changes
    (target / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return target


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def write_tokenizer(folder: Path, model: dict[str, Any], **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    document = {"version": "1.0", "added_tokens": [], "model": model} | fields
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return folder


def test_committed_tokenizers_are_what_their_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_tokenizers", DATA / "make_tokenizers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for folder, files in module.all_documents().items():
        for name, text in files.items():
            assert (DATA / folder / name).read_text(encoding="utf-8") == text, f"{folder}/{name}"


@pytest.mark.parametrize(("folder", "size"), [("tokenizer", 273), ("tokenizer251", 251)])
def test_text_survives_the_way_to_ids_and_back(folder: str, size: int) -> None:
    tokenizer = load(DATA / folder)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.vocab_size == size
    assert max(ids) < size
    assert tokenizer.decode(ids, skip_special_tokens=False) == TEXT
    assert tokenizer.decode(ids) == TEXT.replace("<|im_end|>", "")
    assert b"".join(map(tokenizer.token_bytes, ids)) == TEXT.encode()


def test_merges_and_special_tokens_get_their_own_ids(tokenizer_dir: Path) -> None:
    tokenizer = load(tokenizer_dir)
    assert tokenizer.encode("hello the<|im_end|>") == [272, 261, 2]
    assert [tokenizer.token_text(i) for i in (272, 261, 2)] == ["hello", " the", "<|im_end|>"]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)


def test_ids_that_do_not_exist_decode_to_nothing(tokenizer251_dir: Path) -> None:
    tokenizer = load(tokenizer251_dir)
    good = tokenizer.encode("hi")
    assert tokenizer.decode([-1, good[0], 251, 2**32, good[1], 2**70]) == "hi"
    for unknown in (-1, 251, 2**32, 2**70):
        assert tokenizer.token_text(unknown) == ""
        assert tokenizer.token_bytes(unknown) == b""


def test_ids_in_a_hole_of_the_vocabulary_have_no_text(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0, "b": 9}, "unk_token": "a"}
    tokenizer = load(write_tokenizer(tmp_path, model))
    assert tokenizer.vocab_size == 10
    assert tokenizer.token_text(5) == ""
    assert tokenizer.decode([5, 9]) == "b"


def test_added_tokens_count_in_the_vocabulary_size(tmp_path: Path, tokenizer251_dir: Path) -> None:
    document = json.loads((tokenizer251_dir / "tokenizer.json").read_text(encoding="utf-8"))
    extra = document["added_tokens"][0] | {"id": 251, "content": "<think>", "special": False}
    tokenizer = load(copy_with(tokenizer251_dir, tmp_path, added_tokens=[*document["added_tokens"], extra]))
    assert tokenizer.vocab_size == 252
    assert tokenizer.encode("<think>") == [251]
    assert tokenizer.decode([251]) == "<think>"
    assert 251 not in tokenizer.special_ids


def test_half_a_surrogate_pair_is_the_clients_fault(tokenizer_dir: Path) -> None:
    with pytest.raises(RequestRejected, match="surrogate pair at character 2") as caught:
        load(tokenizer_dir).encode("ab\ud83d")
    assert caught.value.code == "invalid-text"


def test_a_length_limit_or_padding_in_the_file_does_not_change_prompts(tmp_path: Path, tokenizer_dir: Path) -> None:
    folder = copy_with(
        tokenizer_dir,
        tmp_path,
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 99},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    )
    assert load(folder).encode("abcdef") == load(tokenizer_dir).encode("abcdef")


def test_special_tokens_are_added_only_as_the_post_processor_says(tmp_path: Path, tokenizer_dir: Path) -> None:
    processor = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    plain = load(tokenizer_dir).encode("a")
    tokenizer = load(copy_with(tokenizer_dir, tmp_path, post_processor=processor))
    assert tokenizer.encode("a") == [1, *plain]
    assert tokenizer.encode("a", add_special_tokens=False) == plain


def test_generation_configs_end_tokens_join_the_tokenizers_own(tmp_path: Path, tokenizer_dir: Path) -> None:
    folder = copy_with(tokenizer_dir, tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 0, 900], "bos_token_id": 5}')
    tokenizer = load(folder)
    assert tokenizer.eos_token_ids == (0, 2, 7, 900)
    assert tokenizer.bos_token_id == 1, "the tokenizer's own bos_token wins over generation_config"


def test_tokens_that_only_the_config_calls_special_are_special(tmp_path: Path, tokenizer_dir: Path) -> None:
    folder = copy_with(tokenizer_dir, tmp_path, added_tokens=[])
    edit_config(folder, additional_special_tokens=["<|im_start|>", "not in the vocabulary"], pad_token=None)
    tokenizer = load(folder)
    assert tokenizer.special_ids == {1, 2}
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.vocab_size == 273


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Nonsense"}}', "version https://git-lfs"])
def test_a_damaged_tokenizer_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointCorrupt, match=r"tokenizer\.json"):
        load(tmp_path)


# Spaces before punctuation


def punctuation_tokenizer(folder: Path, model: str, clean_up: bool | None) -> Tokenizer:
    vocab = {"a": 0, ".": 1, "b": 2}
    shape: dict[str, Any] = {"type": model, "vocab": vocab, "unk_token": "a"}
    if model == "BPE":
        shape["merges"] = []
    write_tokenizer(folder, shape, decoder={"type": "WordPiece", "prefix": "##", "cleanup": False})
    config = {} if clean_up is None else {"clean_up_tokenization_spaces": clean_up}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load(folder)


@pytest.mark.parametrize(
    ("model", "clean_up", "text"),
    [
        ("WordLevel", True, "a."),
        ("WordLevel", False, "a ."),
        ("WordLevel", None, "a ."),
        ("BPE", True, "a ."),
    ],
)
def test_spaces_are_cleaned_up_only_where_the_config_asks_and_never_for_bpe(
    tmp_path: Path, model: str, clean_up: bool | None, text: str
) -> None:
    assert punctuation_tokenizer(tmp_path, model, clean_up).decode([0, 1]) == text


# Bytes of single tokens


def test_sentencepiece_tokens_give_spaces_and_lone_bytes(tmp_path: Path) -> None:
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    vocab = {"\u2581hi": 0, "<0xE4>": 1, "<0x0A>": 2, "\u00e9": 3}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "byte_fallback": True}
    tokenizer = load(write_tokenizer(tmp_path, model, decoder=decoder))
    assert [tokenizer.token_bytes(i) for i in range(4)] == [b" hi", b"\xe4", b"\n", "\u00e9".encode()]
    assert tokenizer.token_text(1) == "\ufffd"


def test_word_pieces_give_a_space_unless_they_continue_a_word(tmp_path: Path) -> None:
    model = {
        "type": "WordPiece",
        "vocab": {"[UNK]": 0, "un": 1, "##like": 2},
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": False}
    tokenizer = load(write_tokenizer(tmp_path, model, decoder=decoder))
    assert tokenizer.token_bytes(1) + tokenizer.token_bytes(2) == b" unlike"


# Chat


def test_chat_messages_become_the_templates_text(tokenizer_dir: Path) -> None:
    tokenizer = load(tokenizer_dir)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(messages) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_without_a_template_chat_names_the_option_and_text_still_works(tmp_path: Path, tokenizer_dir: Path) -> None:
    folder = copy_with(tokenizer_dir, tmp_path)
    (folder / "chat_template.jinja").unlink()
    tokenizer = load(folder)
    assert not tokenizer.has_chat_template
    assert tokenizer.encode("hello") == [272]
    with pytest.raises(RequestRejected, match="--chat-template FILE") as caught:
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert (caught.value.code, caught.value.http_status) == ("no-chat-template", 400)


def test_a_broken_template_of_the_folder_stops_chat_only(tmp_path: Path, tokenizer_dir: Path) -> None:
    folder = copy_with(tokenizer_dir, tmp_path)
    (folder / "chat_template.jinja").write_text("{% if %}")
    tokenizer = load(folder)
    assert tokenizer.encode("hello") == [272]
    with pytest.raises(RequestRejected, match=r"cannot be used.*not a valid Jinja") as caught:
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert caught.value.code == "no-chat-template"


def test_the_operators_template_wins_and_must_be_valid(tokenizer_dir: Path) -> None:
    tokenizer = load(tokenizer_dir, chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"
    with pytest.raises(UsageError, match="not a valid Jinja template"):
        load(tokenizer_dir, chat_template="{{")


# Where it runs

PROBE = """
import sys
from pathlib import Path
from gtp_serve.loaders.tokenizer import load_tokenizer
from gtp_serve.loaders.tokenizer_files import find_tokenizer
tokenizer = load_tokenizer(find_tokenizer(Path(sys.argv[1])))
heavy = [name for name in ("torch", "transformers", "huggingface_hub", "numpy") if name in sys.modules]
text = tokenizer.render_chat([{"role": "user", "content": "w\\u00f6rld \\U0001F600"}])
print(ascii((heavy, text, tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text)))
"""


def test_non_ascii_files_load_without_a_utf8_locale_and_without_heavy_imports(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    folder = copy_with(tokenizer_dir, tmp_path)
    (folder / "chat_template.jinja").write_text("é→{{ messages[0].content }}", encoding="utf-8")
    edit_config(folder, unk_token="ünk")
    run = subprocess.run(
        [sys.executable, "-c", PROBE, str(folder)],
        env={
            "LC_ALL": "C",
            "PYTHONUTF8": "0",
            "PYTHONCOERCECLOCALE": "0",
            "PYTHONPATH": str(DATA.parents[1]),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == ascii(([], "é→wörld 😀", True))
