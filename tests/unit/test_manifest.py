"""A list of files with their SHA-256: what it finds, and what is wrong with a list itself."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from checkpoint_files import SMALL, write_hf, write_megatron

from gtp_serve.errors import CheckpointCorrupt
from gtp_serve.loaders.manifest import check_manifest

FLIPS = 1000


def listed(folder: Path, target: Path) -> Path:
    """The list that ``sha256sum`` makes of all files of a folder."""
    names = sorted(one.name for one in folder.iterdir() if one.is_file())
    target.write_bytes(subprocess.run(["sha256sum", "--", *names], cwd=folder, capture_output=True, check=True).stdout)
    return target


@pytest.fixture(params=["megatron", "huggingface"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "megatron":
        return write_megatron(tmp_path / "run")[0]
    write_hf(tmp_path / "hf", SMALL, shards=2)
    return tmp_path / "hf"


def refusal(manifest: Path, folder: Path) -> str:
    with pytest.raises(CheckpointCorrupt) as caught:
        check_manifest(manifest, folder)
    return str(caught.value)


def test_f6_each_of_a_thousand_flipped_bits_is_found(folder: Path, tmp_path: Path) -> None:
    manifest = listed(folder, tmp_path / "list")
    files = [one for one in folder.iterdir() if one.is_file()]
    assert check_manifest(manifest, folder) == sum(one.stat().st_size for one in files)

    rng = random.Random(6)
    sizes = [one.stat().st_size for one in files]
    for _ in range(FLIPS):
        file = rng.choices(files, sizes)[0]
        good = file.read_bytes()
        place, bit = rng.randrange(len(good)), 1 << rng.randrange(8)
        bad = bytearray(good)
        bad[place] ^= bit
        file.write_bytes(bad)
        words = refusal(manifest, folder)
        assert words.startswith(f"{file} is not the file that {manifest} lists")
        assert f"listed: {hashlib.sha256(good).hexdigest()}" in words
        file.write_bytes(good)
    assert check_manifest(manifest, folder) > 0


def test_a_file_that_is_cut_missing_or_came_later_is_named(folder: Path, tmp_path: Path) -> None:
    manifest = listed(folder, tmp_path / "list")
    victim = max(folder.iterdir(), key=lambda one: one.stat().st_size)
    data = victim.read_bytes()
    victim.write_bytes(data[:-1])
    assert f"{victim} is not the file" in refusal(manifest, folder)
    victim.unlink()
    assert f"{victim} cannot be read: No such file" in refusal(manifest, folder)
    victim.write_bytes(data)
    for name in ("model-9.safetensors", "__9_9.distcp", "extra.json", "common.pt"):
        (folder / name).write_bytes(b"x")
        assert f"does not list '{name}', which would be read" in refusal(manifest, folder)
        (folder / name).unlink()
    (folder / "README.md").write_text("not read")
    (folder / "logs").mkdir()
    assert check_manifest(manifest, folder) > 0


def test_the_list_may_lie_in_the_folder_and_be_written_by_hand(tmp_path: Path) -> None:
    write_hf(tmp_path / "hf", SMALL)
    folder = tmp_path / "hf"
    lines = [f"{hashlib.sha256(one.read_bytes()).hexdigest().upper()} *./{one.name}" for one in folder.iterdir()]
    manifest = folder / "sums.json"
    manifest.write_text("# made by hand\r\n\r\n" + "\r\n".join(lines), encoding="utf-8")
    assert check_manifest(manifest, folder) > 0


def test_of_a_single_file_only_its_own_line_counts(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"abc")
    (tmp_path / "b.gguf").write_bytes(b"def")
    manifest = tmp_path / "list"
    manifest.write_text(f"{hashlib.sha256(b'abc').hexdigest()}  a.gguf\n{'0' * 64}  b.gguf\n")
    assert check_manifest(manifest, tmp_path / "a.gguf") == 3
    assert "b.gguf is not the file" in refusal(manifest, tmp_path / "b.gguf")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n# nothing\n", "lists no file"),
        ("abc  model.safetensors\n", "line 1: 'abc  model.safetensors' is no line of a list of digests"),
        (f"{'0' * 64}  ../secret\n", "names the file '../secret'; needed: a plain file name"),
        (f"{'0' * 64}  /etc/passwd\n", "names the file '/etc/passwd'"),
        (f"{'0' * 64}  a.json\n{'1' * 64}  a.json\n", "line 2: 'a.json' comes twice"),
        (f"{'0' * 63}g  a.json\n", "is no line of a list"),
    ],
)
def test_a_list_that_is_none_is_refused_by_its_line(tmp_path: Path, text: str, words: str) -> None:
    folder = tmp_path / "hf"
    write_hf(folder, SMALL)
    shutil.move(folder / "config.json", tmp_path / "config.json")
    (folder / "model.safetensors").unlink()
    manifest = tmp_path / "list"
    manifest.write_text(text)
    assert words in refusal(manifest, folder)
