"""The failures that a newcomer meets, each as it is printed: what was seen, what is needed, what to paste."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from checkpoint_files import set_args, write_megatron
from fakes_server import serving
from golden_file import same_as_golden

from gtp_serve.budget import plan_memory
from gtp_serve.config import ModelConfig
from gtp_serve.engine.process import death_of
from gtp_serve.errors import GtpServeError
from gtp_serve.hardware import Gpu, Hardware, Memory, TorchBuild
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import open_checkpoint
from gtp_serve.server import cli
from gtp_serve.server.bringup import _look, _tokenizer_files
from gtp_serve.server.codes import find_code
from gtp_serve.server.failures import format_error
from gtp_serve.server.options import ServeOptions

GIB = 1 << 30
BIG = ModelConfig(
    family="qwen3",
    num_layers=64,
    hidden_size=5120,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=25600,
    vocab_size=151936,
    vocab_rows=151936,
    qk_norm=True,
    max_context=40960,
)
ONE_GPU = Hardware(
    cores=16,
    ram=Memory(total=128 * GIB, available=100 * GIB),
    cpu_flags=frozenset(),
    gpus=(Gpu(name="NVIDIA H200", memory=Memory(total=int(79.1 * GIB), available=int(44.4 * GIB))),),
    torch=TorchBuild(version="2.14.1", cuda="13.0"),
)


def printed(error: GtpServeError, folder: Path) -> str:
    return f"{format_error(error)}\n".replace(str(folder), "/ckpts")


def wrong_folder(folder: Path) -> str:
    root = folder / "my-run"
    for iteration in (100, 200):
        write_megatron(root, iteration=iteration)
    (root / "latest").mkdir()
    with pytest.raises(GtpServeError) as caught:
        open_checkpoint(root / "latest")
    return printed(caught.value, folder)


def too_big(folder: Path) -> str:
    with pytest.raises(GtpServeError) as caught:
        plan_memory(BIG, logical_tensors(BIG), ServeOptions(ckpt=folder, refit_memory="inplace"), ONE_GPU)
    return printed(caught.value, folder)


def another_servers_option(folder: Path) -> str:
    with pytest.raises(GtpServeError) as caught:
        cli.parse_serve(["--ckpt", "/ckpts/my-run", "--pipeline-parallel-size", "2"], {}, folder)
    return printed(caught.value, folder)


def key_of_the_file(folder: Path) -> str:
    (folder / "gtp-serve.toml").write_text('ckpt = "my-run"\nmax_runing = 8\n')
    with pytest.raises(GtpServeError) as caught:
        cli.parse_serve([], {}, folder)
    return printed(caught.value, folder)


def bad_request(folder: Path) -> str:
    async def ask() -> str:
        async with serving() as server:
            reply = await server.generate(text="a", sampling_params={"max_tokens": 4})
            return f"HTTP {reply.status_code}\n{json.dumps(reply.json(), indent=1)}\n"

    return asyncio.run(ask())


def rank_died(folder: Path) -> str:
    return printed(death_of("rank tp1 (pid 8123)", -9, "loading weights", ["reading __3_0.distcp"]), folder)


def no_tokenizer(folder: Path) -> str:
    path, _ = write_megatron(folder / "bare")
    set_args(path, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="/lustre/team/qwen3-8b")
    options = ServeOptions(ckpt=path)
    with pytest.raises(GtpServeError) as caught:
        _tokenizer_files(options, _look(options))
    return printed(caught.value, folder)


CASES = {
    "wrong folder": wrong_folder,
    "does not fit": too_big,
    "option of another server": another_servers_option,
    "key of the configuration file": key_of_the_file,
    "bad request": bad_request,
    "a rank died": rank_died,
    "no tokenizer": no_tokenizer,
}


def test_each_failure_reads_as_committed(tmp_path: Path) -> None:
    text = "\n".join(f"# {name}\n{case(tmp_path)}" for name, case in CASES.items())

    same_as_golden("failures.txt", text)
    for code in re.findall(r'error\[([\w-]+)\]|"code": "([\w-]+)"', text):
        assert find_code("".join(code)) is not None
