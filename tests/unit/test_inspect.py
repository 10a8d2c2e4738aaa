from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import SMALL, SMALL_MOE, write_hf, write_megatron

from gtp_serve.errors import UsageError
from gtp_serve.hardware import find_hardware
from gtp_serve.layout.gtp import Grid
from gtp_serve.server import inspect

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "megatron"
KEYS = ["format", "layout", "saved", "fc1_permuted", "model", "padding", "tokenizer", "supported", "reason"]


def run(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    inspect.add_arguments(parser)
    status = inspect.run(parser.parse_args([str(word) for word in words]))
    return status, capsys.readouterr().out


def report(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    status, out = run(*words, "--json", capsys=capsys)
    value: dict[str, Any] = json.loads(out)
    assert status == (0 if value["supported"] else 3)
    assert all(key in value for key in KEYS)
    return value


def test_a_padded_checkpoint_is_told_with_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    value = report(DATA / "llama-tp1-pp1-gtp2-pad16-padded", capsys=capsys)

    assert value["layout"] == "padded"
    assert value["fc1_permuted"] is True
    assert value["saved"] == {"tp": 1, "pp": 1, "ep": 1, "etp": 1, "gtp": 2, "egtp": 1}
    assert value["padding"] == [
        {"key": key, "stored_rows": 256, "real_rows": 252}
        for key in ("embedding.word_embeddings.weight", "output_layer.weight")
    ]
    assert value["model"]["family"] == "llama"
    assert (value["model"]["vocab_size"], value["model"]["vocab_rows"]) == (251, 252)
    assert (value["supported"], value["reason"]) == (True, None)
    assert (value["iteration"], value["iterations"]) == (100, [100])
    assert value["possible_tp"] == [1, 2, 4]
    assert value["weight_bytes"] == 2 * value["parameters"]
    assert value["memory"]["fits"] is True


def test_optimizer_bytes_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    value = report(DATA / "tiny-tp2-pp1-fp32-with-optimizer", capsys=capsys)

    assert value["dtype"] == "float32"
    assert value["weight_bytes"] == 4 * value["parameters"]
    assert value["optimizer_bytes"] > 2 * value["weight_bytes"]


def test_the_text_says_the_same_in_a_few_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_megatron(tmp_path, replace(SMALL_MOE, vocab_size=20), Grid(tp=2, gtp=2, egtp=2, alignment=16), iteration=7)

    status, out = run(tmp_path, capsys=capsys)

    assert status == 0
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "Megatron torch_dist (common state inside), steps 7" in lines["format"]
    assert "TP2 PP1 GTP2 EGTP2, step 7" in lines["saved with"]
    assert "padded (fc1 rows permuted" in lines["layout"]
    assert "mixtral: 2 layers, hidden 16, 4/2 heads of 4, 3 experts of 12, 2 per token" in lines["model"]
    assert "vocab 20 -> 22 rows" in lines["padding"]
    assert "linear_proj 16 -> 32" in lines["padding"]
    assert "none here" in lines["tokenizer"]
    assert "--tp 1, 2, 4" in lines["ranks"]
    assert f"gtp-serve --ckpt {tmp_path} --tp 1" in lines["supported"]


def test_a_hugging_face_folder_and_its_tokenizer_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hf(tmp_path, SMALL)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "x"}', encoding="utf-8")

    value = report(tmp_path, capsys=capsys)

    assert value["format"] == "huggingface"
    assert value["tokenizer"] == {"folder": str(tmp_path), "chat_template": True}
    assert "chat template found" in run(tmp_path, capsys=capsys)[1]


def test_what_cannot_be_served_is_told_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = write_megatron(tmp_path / "run")
    (folder / ".metadata").write_bytes(b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00id\x85R.")
    write_hf(tmp_path / "gpt", SMALL, model_type="gpt2")
    for path, words in (
        (folder, "os.system"),
        (tmp_path / "gpt", "gpt2"),
        (tmp_path / "none", "does not exist"),
    ):
        value = report(path, capsys=capsys)
        assert value["supported"] is False
        assert words in value["reason"]
        status, out = run(path, capsys=capsys)
        assert status == 3
        assert "supported   no" in out
        assert words in out


def test_options_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_hf(tmp_path, SMALL)
    with pytest.raises(UsageError, match="--iteration 3"):
        run(tmp_path, "--iteration", "3", capsys=capsys)
    with pytest.raises(UsageError, match="below 0"):
        run(tmp_path, "--iteration", "-3", capsys=capsys)
    with pytest.raises(SystemExit):
        run(tmp_path, "--saved-tp", "0", capsys=capsys)


def test_a_model_that_does_not_fit_is_still_supported(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    small = find_hardware()
    memory = replace(small.ram, total=1 << 20, available=1 << 20)
    monkeypatch.setattr(inspect, "find_hardware", lambda: replace(small, ram=memory, gpus=()))

    value = report(DATA / "llama-tp1-pp2", capsys=capsys)

    assert value["supported"] is True
    assert value["memory"]["fits"] is False
    assert "does not fit" in run(DATA / "llama-tp1-pp2", capsys=capsys)[1]


PROBE = """
import sys
import time
from gtp_serve.server.cli import main
status = main(["inspect", sys.argv[1], "--json"])
heavy = [name for name in ("torch", "numpy", "pickle") if name in sys.modules]
print(heavy, status, time.process_time(), file=sys.stderr)
"""


def test_the_command_imports_neither_torch_nor_numpy_and_is_quick() -> None:
    best = 60.0  # seconds of CPU: the clock on the wall tells more of the machine than of the command
    for _ in range(3):
        result = subprocess.run(
            [sys.executable, "-c", PROBE, str(DATA / "moe-tp1-pp1-ep2")],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        heavy, status, seconds = result.stderr.rsplit(" ", 2)
        best = min(best, float(seconds))
    assert json.loads(result.stdout)["supported"] is True
    assert "torch" not in heavy
    assert "numpy" not in heavy
    assert status.strip() == "0"
    assert best < 1.0
