"""``gtp-serve convert``: the same tensors in the other kind of checkpoint, and nothing half-made under a final name."""

from __future__ import annotations

import json
import shutil
import weakref
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import SMALL, random_tensors, write_hf, write_megatron
from safetensors import safe_open
from torch import Tensor

from gtp_serve.config import ModelConfig, MoeConfig, RopeConfig
from gtp_serve.errors import UnsupportedModel
from gtp_serve.loaders import convert as writers
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.checkpoint import TensorReader
from gtp_serve.loaders.hf_config import model_config
from gtp_serve.loaders.hf_config_write import huggingface_config
from gtp_serve.server import cli

DATA = Path(__file__).parents[1] / "data"
FIXTURES = sorted(path.name for path in (DATA / "megatron").iterdir())
GRIDS = (
    ("--tp", "2", "--gtp", "2", "--alignment", "32", "--layout", "padded"),
    ("--gtp", "4", "--layout", "logical"),
    ("--pp", "2"),
)

torch.set_num_threads(1)


def tensors_of(path: Path) -> dict[str, Tensor]:
    with closing(open_checkpoint(path)) as checkpoint:
        return dict(checkpoint.tensors())


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Equal to the bit, where the copy has no more vocabulary rows than its source."""
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor[: len(found[name])])
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("fixture", FIXTURES)
def test_what_megatron_wrote_becomes_a_hugging_face_folder_and_any_grid_again(fixture: str, tmp_path: Path) -> None:
    source, hf = DATA / "megatron" / fixture, tmp_path / "hf"
    expected = tensors_of(source)

    assert cli.main(["convert", str(source), "--to", "hf", str(hf)]) == 0
    plain = tensors_of(hf)
    assert same(plain, expected)
    assert len(plain["model.embed_tokens.weight"]) == json.loads((hf / "config.json").read_text())["vocab_size"]

    for number, grid in enumerate(GRIDS):
        out = tmp_path / f"megatron-{number}"
        words = ["convert", str(hf), "--to", "megatron", str(out), *grid]
        again = tensors_of(out) if cli.main(words) == 0 else {}
        rows = len(plain["model.embed_tokens.weight"])
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in again:
                assert not again[name][rows:].any()
                again[name] = again[name][:rows]
        assert same(again, plain), grid


def test_a_hugging_face_copy_is_cut_into_files_that_the_library_reads(tmp_path: Path) -> None:
    root, expected = write_megatron(tmp_path / "run")
    out = tmp_path / "hf"

    assert cli.main(["convert", str(root), "--to", "hf", str(out), "--shard-size", "2KiB", "--dtype", "float32"]) == 0

    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    found: dict[str, Tensor] = {}
    for name in files:
        with safe_open(out / name, "pt") as opened:
            found |= {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            assert {index["weight_map"][key] for key in opened.keys()} == {name}  # noqa: SIM118
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())
    assert same(found, {name: tensor.float() for name, tensor in expected.items()})
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"


def test_tokenizer_and_configuration_go_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    write_hf(source)
    for path in (DATA / "tokenizer").iterdir():
        shutil.copy(path, source)
    values = json.loads((source / "config.json").read_text()) | {"my_note": 7}
    (source / "config.json").write_text(json.dumps(values))

    assert cli.main(["convert", str(source), "--to", "megatron", str(tmp_path / "m")]) == 0
    assert cli.main(["convert", str(tmp_path / "m"), "--to", "hf", str(tmp_path / "a")]) == 0
    assert cli.main(["convert", str(source), "--to", "hf", str(tmp_path / "b"), "--dtype", "bf16"]) == 0

    for folder in (tmp_path / "m" / "tokenizer", tmp_path / "a", tmp_path / "b"):
        assert (folder / "tokenizer.json").read_bytes() == (DATA / "tokenizer" / "tokenizer.json").read_bytes()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["my_note"] == 7
    with closing(open_checkpoint(tmp_path / "m")) as checkpoint:
        assert checkpoint.tokenizer is not None


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_one_tensor_at_a_time_is_in_memory(to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, _ = write_megatron(tmp_path / "run")
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    read = TensorReader.read

    def watched(self: TensorReader, *args: object) -> Tensor:
        nonlocal most
        tensor = read(self, *args)  # type: ignore[arg-type]
        alive.append(weakref.ref(tensor))
        most = max(most, sum(one() is not None for one in alive))
        return tensor

    monkeypatch.setattr(TensorReader, "read", watched)
    assert cli.main(["convert", str(root), "--to", to, str(tmp_path / "out")]) == 0
    assert len(alive) > 20
    assert most == 1


@pytest.mark.parametrize("to", ["hf", "megatron"])
@pytest.mark.parametrize("stage", ["write", "verify"])
def test_an_interrupted_conversion_leaves_nothing(
    to: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = write_megatron(tmp_path / "run")
    reads = 0
    read = writers.Conversion.read

    def interrupted(self: writers.Conversion, *args: object) -> Tensor:
        nonlocal reads
        reads += 1
        if reads == (5 if stage == "write" else 30):
            raise KeyboardInterrupt
        return read(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(writers.Conversion, "read", interrupted)
    assert cli.main(["convert", str(root), "--to", to, str(tmp_path / "out")]) == 130
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_bytes_that_come_back_otherwise_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = write_megatron(tmp_path / "run")
    write = writers.Conversion.write_huggingface

    def damaged(self: writers.Conversion, folder: Path, *args: object) -> None:
        write(self, folder, *args)  # type: ignore[arg-type]
        with (folder / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            last = file.read(1)
            file.seek(-1, 2)
            file.write(bytes([last[0] ^ 1]))

    monkeypatch.setattr(writers.Conversion, "write_huggingface", damaged)
    assert cli.main(["convert", str(root), "--to", "hf", str(tmp_path / "out")]) == 3
    assert "lm_head.weight was read back otherwise than it was written" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_there_already_is_never_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, _ = write_megatron(tmp_path / "run")
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine").write_text("precious")

    assert cli.main(["convert", str(root), "--to", "hf", str(out)]) == 2
    assert capsys.readouterr().err.startswith("error[output-exists] ")
    assert [path.name for path in out.iterdir()] == ["mine"]

    (out / "mine").unlink()
    assert cli.main(["convert", str(root), "--to", "hf", str(out)]) == 0
    assert (out / "config.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--to", "gguf"), "--to 'gguf' is not possible"),
        (("--to", "hf", "--tp", "2"), "--tp is for --to megatron"),
        (("--to", "hf", "--layout", "logical"), "--layout is for --to megatron"),
        (("--to", "megatron", "--shard-size", "1GiB"), "--shard-size is for --to hf"),
        (("--to", "megatron", "--layout", "flat"), "--layout 'flat' is not possible"),
        (("--to", "megatron", "--tp", "0"), "'0' is not a number from 1"),
        (("--to", "megatron", "--tp", "3"), "does not divide over TP 3"),
        (("--to", "hf", "--dtype", "int8"), "--dtype 'int8' is not possible"),
    ],
)
def test_options_that_cannot_be_are_refused_and_nothing_is_written(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, _ = write_megatron(tmp_path / "run")

    assert cli.main(["convert", str(root), str(tmp_path / "out"), *words]) == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_values_beyond_float16_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    norm = random_tensors(SMALL)["model.norm.weight"]
    norm[3] = 1e30
    source = tmp_path / "source"
    write_hf(source, extra={"model.norm.weight": norm})

    assert cli.main(["convert", str(source), "--to", "hf", "--dtype", "fp16", str(tmp_path / "out")]) == 2
    assert "model.norm.weight has values that float16 cannot hold" in capsys.readouterr().err


MODELS = [
    SMALL,
    replace(SMALL, family="mistral", sliding_window=16, norm_eps=1e-6),
    replace(SMALL, family="qwen2", qkv_bias=True, tied=True, sliding_window=8),
    replace(SMALL, family="qwen3", qk_norm=True, eos_token_ids=(1, 2), bos_token_id=0),
    replace(SMALL, family="mixtral", ffn_size=0, moe=MoeConfig(num_experts=4, top_k=2, ffn_size=12)),
    replace(
        SMALL,
        family="qwen3_moe",
        qk_norm=True,
        ffn_size=0,
        moe=MoeConfig(num_experts=4, top_k=2, ffn_size=12, normalise_top_k=False),
    ),
    replace(SMALL, rope=RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_context=32)),
    replace(SMALL, rope=RopeConfig(theta=1e6, scaling="yarn", factor=4.0, original_context=16, attention_factor=1.5)),
    replace(SMALL, rope=RopeConfig(scaling="linear", factor=2.0)),
]


@pytest.mark.parametrize("config", MODELS, ids=lambda config: f"{config.family}-{config.rope.scaling}")
def test_a_model_written_as_config_json_reads_back_the_same(config: ModelConfig) -> None:
    values = json.loads(json.dumps(huggingface_config(config)))

    assert model_config(values, {}, "config.json") == replace(config, vocab_size=config.vocab_rows)


def test_a_model_that_config_json_cannot_describe_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="llama cannot say this model's qkv_bias"):
        huggingface_config(replace(SMALL, qkv_bias=True))
