"""Folders as copies, downloads and crashed runs leave them: what is odd is named, nothing is lost without a word."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_files import append_item, write_hf, write_megatron
from markov_model import MarkovModel
from safetensors.torch import save_file

from gtp_serve import LLM
from gtp_serve.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, RequestRejected
from gtp_serve.loaders import Checkpoint, open_checkpoint
from gtp_serve.loaders.tokenizer import Tokenizer, load_tokenizer
from gtp_serve.loaders.tokenizer_files import tokenizer_at

torch.set_num_threads(1)

TRACKER = "latest_checkpointed_iteration.txt"


def opened(path: Path) -> Checkpoint:
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return checkpoint


# which iteration


@pytest.mark.parametrize("text", [b"", b"garbage", b"-5", b"1e1", b"\xff\xfe2\x000\x00", b"9" * 5000, "²".encode()])
def test_a_tracker_that_says_nothing_usable_is_named_and_the_folders_decide(text: bytes, tmp_path: Path) -> None:
    write_megatron(tmp_path, iteration=10)
    write_megatron(tmp_path, iteration=20)
    (tmp_path / TRACKER).write_bytes(text)

    facts = opened(tmp_path).facts

    assert facts.iteration == 20
    assert len(facts.warnings) == 1
    assert TRACKER in facts.warnings[0]
    assert "iter_0000020 is used" in facts.warnings[0]


@pytest.mark.parametrize("text", [b"20", b"\xef\xbb\xbf20\r\n", b" 20 \n\n", b"release"])
def test_a_tracker_that_agrees_or_names_a_release_says_nothing(text: bytes, tmp_path: Path) -> None:
    write_megatron(tmp_path, iteration=20)
    (tmp_path / TRACKER).write_bytes(text)

    assert opened(tmp_path).facts.warnings == ()


@pytest.mark.parametrize("other", ["iter_20", "iter_000000020"])
def test_an_incomplete_folder_of_the_same_number_does_not_hide_the_complete_one(other: str, tmp_path: Path) -> None:
    write_megatron(tmp_path, iteration=10)
    write_megatron(tmp_path, iteration=20)
    (tmp_path / other).mkdir()

    assert opened(tmp_path).path.name == "iter_0000020"


def test_an_item_that_was_saved_as_nothing_is_nothing(tmp_path: Path) -> None:
    folder, truth = write_megatron(tmp_path / "run")
    for key in ("decoder.layers.0.mlp._extra_state/shard_0_1", "rng_state/shard_0_1"):
        append_item(folder, key, b"")

    checkpoint = open_checkpoint(folder)

    assert all(torch.equal(tensor, truth[name]) for name, tensor in checkpoint.tensors())
    checkpoint.close()


# which files


def test_a_shard_that_the_index_does_not_name_is_told(tmp_path: Path) -> None:
    write_hf(tmp_path, shards=2)
    assert opened(tmp_path).facts.warnings == ()
    save_file({"lm_head.weight": torch.ones(22, 16)}, tmp_path / "model-00003-of-00002.safetensors")

    warnings = opened(tmp_path).facts.warnings

    assert len(warnings) == 1
    assert "model-00003-of-00002.safetensors" in warnings[0]
    assert "not read" in warnings[0]


def test_an_index_beside_a_single_file_is_told(tmp_path: Path) -> None:
    write_hf(tmp_path, shards=2)
    write_hf(tmp_path)

    warnings = opened(tmp_path).facts.warnings

    assert "model.safetensors.index.json is not read" in warnings[0]
    assert "model-00001-of-00002.safetensors, model-00002-of-00002.safetensors" in warnings[1]


def test_other_formats_of_the_same_weights_are_no_news(tmp_path: Path) -> None:
    write_hf(tmp_path)
    for name in ("consolidated.safetensors", "adapter_model.safetensors"):
        save_file({"x": torch.ones(1)}, tmp_path / name)

    assert opened(tmp_path).facts.warnings == ()


def link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "blob")


@pytest.mark.parametrize(
    ("make", "what"), [(Path.mkdir, "a folder"), (os.mkfifo, "a pipe"), (link_to_nothing, "a link to nothing")]
)
def test_a_weight_file_that_is_no_file_is_named_as_what_it_is(
    make: Callable[[Path], None], what: str, tmp_path: Path
) -> None:
    write_hf(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    make(tmp_path / "model.safetensors")

    with pytest.raises(CheckpointNotFound, match="no weight file") as caught:
        open_checkpoint(tmp_path)

    assert f"model.safetensors, {what}" in str(caught.value)


# end tokens


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["x", "2", True, 2.0, {"a": 1}, [[5]], [5, "7"], [True]])
def test_end_tokens_of_the_wrong_kind_are_refused_and_not_forgotten(value: Any, file: str, tmp_path: Path) -> None:
    write_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / file).write_text(json.dumps({**config, "eos_token_id": value}))

    with pytest.raises(CheckpointCorrupt, match="eos_token_id"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(("value", "ends"), [([5, 7], (5, 7)), (7, (7,)), (None, (2,)), ([], (2,)), ([5, -1], (5,))])
def test_end_tokens_are_one_a_list_or_the_models(value: Any, ends: tuple[int, ...], tmp_path: Path) -> None:
    write_hf(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))

    assert opened(tmp_path).config.eos_token_ids == ends


# tokenizers


def tokenizer_with(tmp_path: Path, source: Path, **changes: Any) -> Callable[[], Tokenizer]:
    shutil.copytree(source, tmp_path / "t")
    path = tmp_path / "t" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")
    return lambda: load_tokenizer(tokenizer_at(tmp_path / "t"))


def test_a_tokenizer_with_a_byte_order_mark_is_the_same_tokenizer(tmp_path: Path, tokenizer_dir: Path) -> None:
    load = tokenizer_with(tmp_path, tokenizer_dir)
    path = tmp_path / "t" / "tokenizer.json"
    plain = load()
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    assert load().to_json() == plain.to_json()


def test_a_tokenizer_in_a_folder_whose_name_is_no_text_loads(tmp_path: Path, tokenizer_dir: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    shutil.copytree(tokenizer_dir, folder)

    assert load_tokenizer(tokenizer_at(folder)).encode("a")


def test_a_tokenizer_that_fails_at_its_first_text_is_refused_at_start(tmp_path: Path, tokenizer_dir: Path) -> None:
    missing = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
    single = [{"SpecialToken": {"id": "<none>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]

    with pytest.raises(CheckpointCorrupt, match="not a tokenizer that can be read"):
        tokenizer_with(tmp_path, tokenizer_dir, post_processor=missing | {"single": single})()


def test_a_text_that_the_tokenizers_pattern_gives_up_on_costs_its_request(tmp_path: Path, tokenizer_dir: Path) -> None:
    """The package panics, which is no Exception: left alone it passes every handler."""
    split = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer = tokenizer_with(
        tmp_path, tokenizer_dir, pre_tokenizer={"type": "Sequence", "pretokenizers": [split, level]}
    )()

    with pytest.raises(RequestRejected, match="cannot take this text apart") as caught:
        tokenizer.encode("x" * 40)

    assert caught.value.code == "invalid-text"
    assert tokenizer.decode(tokenizer.encode("xxy and on")) == "xxy and on"


def test_f1_files_that_may_not_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user without the permission; whoever runs the tests may have every permission."""
    folder, _ = write_megatron(tmp_path / "run")
    write_hf(tmp_path / "hf")
    real = Path.open

    files = (folder / ".metadata", tmp_path / "hf" / "config.json", tmp_path / "hf" / "model.safetensors")
    for path in files:

        def refuse(self: Path, *args: Any, closed: Path = path, **keywords: Any) -> Any:
            if self == closed:
                raise PermissionError(13, "Permission denied")
            return real(self, *args, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", refuse)
            with pytest.raises(CheckpointError, match="Permission denied") as caught:
                open_checkpoint(path.parent)
        assert str(path) in str(caught.value)


def test_f7_a_model_that_serves_never_looks_at_its_files_again(tmp_path: Path) -> None:
    """Changed where they lie, then cut, then gone: as a trainer's next save and a cleaner leave them."""
    model = MarkovModel()
    model.follow(*"abcdef")
    with LLM(model.write(tmp_path), kv_memory="1MiB", dtype="float32", progress=False) as llm:

        def text() -> str:
            return llm.generate("a", max_new_tokens=9, temperature=0, progress=False)[0].text

        assert text() == "bcdef"
        for path in tmp_path.iterdir():
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.write(b"\xff" * size)
        assert text() == "bcdef"
        for path in tmp_path.iterdir():
            path.write_bytes(b"")
        assert text() == "bcdef"
        shutil.rmtree(tmp_path)
        assert text() == "bcdef"
