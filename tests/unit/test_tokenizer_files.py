"""Where a tokenizer is found, and how its small files are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gtp_serve.errors import CheckpointCorrupt, NoTokenizer
from gtp_serve.loaders.tokenizer_files import TokenizerFiles, find_tokenizer, tokenizer_at

CONFIG = {"eos_token": "<|im_end|>", "chat_template": "from the config"}


def write(folder: Path, config: object = None, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text("{}")
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text, encoding="utf-8")
    return folder


def found(folder: Path) -> TokenizerFiles:
    files = find_tokenizer(folder)
    assert files is not None
    return files


def test_the_folder_itself_comes_before_its_tokenizer_folder(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer")
    assert found(tmp_path).folder == tmp_path / "tokenizer"
    write(tmp_path)
    assert found(tmp_path).folder == tmp_path


def test_an_iteration_also_has_its_roots_tokenizer(tmp_path: Path) -> None:
    iteration = tmp_path / "iter_0000100"
    iteration.mkdir()
    assert find_tokenizer(iteration) is None
    write(tmp_path / "tokenizer")
    assert found(iteration).folder == tmp_path / "tokenizer"
    write(iteration / "tokenizer")
    assert found(iteration).folder == iteration / "tokenizer"


def test_only_an_iteration_looks_one_level_up(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "other").mkdir()
    assert find_tokenizer(tmp_path / "other") is None


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_an_operator_may_name_the_folder_or_the_file(tmp_path: Path, name: str) -> None:
    write(tmp_path, CONFIG)
    assert tokenizer_at(tmp_path / name).special_tokens == {"eos_token": "<|im_end|>"}


def test_a_slow_tokenizer_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(NoTokenizer, match=r"tokenizer\.model: a slow tokenizer.*--tokenizer PATH.*--no-tokenizer"):
        tokenizer_at(tmp_path)


def test_a_path_to_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(NoTokenizer, match=r"model\.bin is not a tokenizer\.json"):
        tokenizer_at(tmp_path / "model.bin")
    with pytest.raises(NoTokenizer, match="nowhere"):
        tokenizer_at(tmp_path / "nowhere")


def test_a_special_token_may_be_text_or_an_object(tmp_path: Path) -> None:
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "pad_token": None,
        "additional_special_tokens": ["<a>", {"content": "<b>"}, 7],
    }
    files = found(write(tmp_path, config))
    assert files.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert files.other_special_tokens == ("<a>", "<b>")


def test_special_tokens_map_fills_what_the_config_does_not_say(tmp_path: Path) -> None:
    special = json.dumps({"eos_token": "old", "unk_token": {"content": "<unk>"}})
    files = found(write(tmp_path, {"eos_token": "new"}, special_tokens_map__json=special))
    assert files.special_tokens == {"eos_token": "new", "unk_token": "<unk>"}


@pytest.mark.parametrize(
    ("value", "ids"),
    [(5, (5,)), ([5, 7], (5, 7)), (0, (0,)), (None, ()), ("5", ()), (True, ()), ([5, None, -1], (5,))],
)
def test_generation_config_gives_one_or_many_end_tokens(tmp_path: Path, value: Any, ids: tuple[int, ...]) -> None:
    write(tmp_path, generation_config__json=json.dumps({"eos_token_id": value}))
    assert found(tmp_path).eos_token_ids == ids


def test_byte_order_marks_and_crlf_change_nothing(tmp_path: Path) -> None:
    plain = write(tmp_path / "plain", CONFIG, generation_config__json='{\n"eos_token_id": 4\n}')
    marked = tmp_path / "marked"
    shutil.copytree(plain, marked)
    for path in marked.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    (marked / "chat_template.jinja").write_bytes("\ufeffé\r\n".encode())
    assert found(marked).special_tokens == found(plain).special_tokens
    assert found(marked).eos_token_ids == (4,)
    assert found(marked).chat_template == "é\r\n"


def test_the_jinja_file_wins_over_the_config(tmp_path: Path) -> None:
    write(tmp_path, CONFIG)
    assert found(tmp_path).chat_template == "from the config"
    write(tmp_path, CONFIG, chat_template__jinja="from the file")
    files = found(tmp_path)
    assert (files.chat_template, files.chat_template_origin) == (
        "from the file",
        str(tmp_path / "chat_template.jinja"),
    )


@pytest.mark.parametrize(
    ("names", "template"),
    [(["tool_use", "default"], "1"), (["only"], "0"), (["a", "b"], None), ([], None)],
)
def test_of_named_templates_the_default_or_the_only_one_is_taken(
    tmp_path: Path, names: list[str], template: str | None
) -> None:
    named = [{"name": name, "template": str(number)} for number, name in enumerate(names)]
    assert found(write(tmp_path, {"chat_template": named})).chat_template == template


@pytest.mark.parametrize(("value", "asked"), [(True, True), (False, False), ("true", False), (None, False)])
def test_clean_up_of_spaces_needs_a_plain_true(tmp_path: Path, value: Any, asked: bool) -> None:
    assert found(write(tmp_path, {"clean_up_tokenization_spaces": value})).clean_up_spaces is asked


@pytest.mark.parametrize("name", ["tokenizer_config__json", "special_tokens_map__json", "generation_config__json"])
@pytest.mark.parametrize("text", ["{", "[1]", "\x00", '{"a": ' * 100_000])
def test_a_damaged_small_file_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, **{name: text})
    with pytest.raises(CheckpointCorrupt, match=name.replace("__", r"\.")):
        find_tokenizer(tmp_path)


def test_a_template_that_is_not_utf8_or_is_huge_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointCorrupt, match=r"chat_template\.jinja is not UTF-8"):
        find_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * 300_000)
    with pytest.raises(CheckpointCorrupt, match="300000 bytes"):
        find_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"])
def test_a_link_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "model")
    (tmp_path / "secret").write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointCorrupt, match="leaves the checkpoint folder"):
        find_tokenizer(folder)


def test_links_of_a_hub_cache_are_followed(tmp_path: Path) -> None:
    entry = tmp_path / "models--some--model"
    snapshot = entry / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    blobs = write(entry / "blobs", CONFIG)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (snapshot / name).symlink_to(blobs / name)
    assert found(snapshot).chat_template == "from the config"
