"""``gtp-serve bench --parity``: the numbers, a trainer's file, and transformers on the folder that is served."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fakes_server import FakeClient, serving
from serve_command import Command

from gtp_serve.errors import EngineFault, UsageError
from gtp_serve.request import FinishReason, Request, TokenEvent
from gtp_serve.server import cli
from gtp_serve.server.bench_parity import Scored, parity_table, read_scores, summarise_parity

pytestmark = pytest.mark.e2e

INFO = {"served_model_name": "m", "weight_version": "7", "dtype": "float32"}


class Scorer(FakeClient):
    """Scores prompts: the token's id, as a negative tenth."""

    async def _events(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        assert request.logprobs is not None
        assert request.logprobs.prompt_start is not None
        scored = tuple(-token / 10 for token in request.input_ids[request.logprobs.prompt_start + 1 :])
        yield TokenEvent(rid=request.rid, prompt_logprobs=scored, finish=FinishReason(type="length"))


def bench(client: FakeClient, *words: str) -> int:
    async def go() -> int:
        async with serving(client) as server:
            return await asyncio.to_thread(cli.main, ["bench", server.url, *words])

    return asyncio.run(asyncio.wait_for(go(), 60))


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def test_a_trainers_numbers_are_compared_token_by_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same = {"input_ids": [5, 6], "output_ids": [7, 8], "logprobs": [-0.7, -0.8], "step": 3}
    near = {"input_ids": [5], "output_ids": [9, 10, 11], "logprobs": [-0.9, -1.02, -1.1]}
    file, out = write(tmp_path / "scores.jsonl", same, "", near), tmp_path / "told.json"
    client = Scorer()

    assert bench(client, "--parity", str(file), "--json", str(out)) == 0

    told = json.loads(out.read_text())["parity"]
    assert (told["sequences"], told["tokens"], told["equal"]) == (2, 5, 4)
    assert told["token_mult_prob_error"] == pytest.approx((4 + math.exp(0.02)) / 5)
    assert told["largest_difference"] == pytest.approx(0.02)
    assert told["worst"] == {"sequence": 1, "token": 1, "served": -1.0, "theirs": -1.02}
    assert {request.input_ids for request in client.requests} == {(5, 6, 7, 8), (5, 9, 10, 11)}
    assert {request.sampling.max_new_tokens for request in client.requests} == {0}
    table = capsys.readouterr().out
    assert "1.004040   good" in table
    assert "greedy" not in table  # nobody said what they would have chosen


def test_sides_that_are_apart_end_with_one(tmp_path: Path) -> None:
    file = write(tmp_path / "s.jsonl", {"input_ids": [5], "output_ids": [7], "logprobs": [-0.8]})
    assert bench(Scorer(), "--parity", str(file), "--json", "-") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ({"input_ids": [1], "output_ids": [2]}, "logprobs"),
        ({"input_ids": [1], "output_ids": [2], "logprobs": [0.0, 0.0]}, "2 log-probabilities"),
        ({"input_ids": [], "output_ids": [2], "logprobs": [0.0]}, "0 input ids"),
        ({"input_ids": [1], "output_ids": [True], "logprobs": [0.0]}, "output ids"),
        ('{"input_ids": [1], "output_ids": [2], "logprobs": [NaN]}', "finite"),
    ],
)
def test_a_line_at_fault_is_named(tmp_path: Path, line: Any, said: str) -> None:
    good = {"input_ids": [1], "output_ids": [2], "logprobs": [0.0]}
    with pytest.raises(UsageError) as caught:
        read_scores(write(tmp_path / "s.jsonl", good, line))
    assert said in str(caught.value)
    assert "line 2" in str(caught.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--parity", "/nowhere"), "neither a folder nor a file"),
        (("--parity", "/", "--push", "/x"), "--push belongs to a load"),
        (("--parity", "/", "--plot", "x.svg"), "--plot belongs to a load"),
    ],
)
def test_what_does_not_go_together_is_said(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(FakeClient(), *words) == 2
    assert said in capsys.readouterr().err


def test_an_empty_file_and_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="0 sequences"):
        read_scores(write(tmp_path / "s.jsonl", ""))
    with pytest.raises(EngineFault, match="finite"):
        summarise_parity([Scored(input_ids=(1,), output_ids=(2,), served=[-math.inf], theirs=[0.0])])


def test_other_choices_are_told_with_how_near_they_were() -> None:
    one = Scored(
        input_ids=(1,), output_ids=(2, 3, 4), served=[-1.0] * 3, theirs=[-1.0] * 3, best=[2, 9, 4], margins=[0, 1e-5, 0]
    )
    numbers = summarise_parity([one])
    assert numbers["greedy_disagreements"] == [{"sequence": 0, "token": 1, "served": 3, "theirs": 9, "behind": 1e-5}]
    table = "\n".join(parity_table(INFO, Path("there"), numbers))
    assert "1.000000   equal" in table
    assert "2 of 3" in table
    assert "token 1: 3 here, 9 there, which is more probable there by 1.00e-05" in table


@pytest.mark.slow
def test_the_folder_that_is_served_gives_transformers_the_same_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.4,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "served")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.3)
    model.save_pretrained(tmp_path / "other")
    words = ("--groups", "5", "--in", "9", "--out", "12")
    command = Command("--port", "0", "--no-tokenizer", "--ckpt", str(tmp_path / "served"), "--dtype", "float32")
    try:
        url = command.url()
        out = tmp_path / "told.json"
        assert cli.main(["bench", url, "--parity", str(tmp_path / "served"), *words, "--json", str(out)]) == 0
        told = json.loads(out.read_text())["parity"]
        assert (told["sequences"], told["tokens"], told["greedy_tokens"]) == (5, 60, 60)
        assert told["largest_difference"] < 1e-4
        assert 1 <= told["token_mult_prob_error"] < 1.0001
        assert all(one["behind"] < 1e-3 for one in told["greedy_disagreements"])
        assert "same greedy choice" in capsys.readouterr().out
        assert cli.main(["bench", url, "--parity", str(tmp_path / "other"), *words]) == 1
        assert "apart" in capsys.readouterr().out
        (tmp_path / "empty").mkdir()
        assert cli.main(["bench", url, "--parity", str(tmp_path / "empty"), *words]) == 5
        assert "transformers cannot score this" in capsys.readouterr().err
    finally:
        command.stop()
