"""16 streams and 40 updates, from disk and over gloo: nobody is refused, every token is by the weights it says."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkpoint_files import SMALL, random_tensors, write_hf
from load_world import Load, Replay, Trainer, check_borders, in_turn, stall_report
from parity.model_harness import filled_decoder
from safetensors.torch import save_file
from serve_command import Command

from gtp_serve.layout.huggingface import stored_name
from gtp_serve.loaders.checkpoint import open_checkpoint

pytestmark = [pytest.mark.e2e, pytest.mark.distributed]

CONFIG = replace(SMALL, hidden_size=64, head_dim=16, ffn_size=96, max_context=1024, dtype="float32")
STREAMS = 16
UPDATES = 20
STALL_STEPS = 2.5


@dataclass
class Loaded:
    """A server, two checkpoints of its model, and what has been pushed."""

    url: str
    command: Command
    folders: dict[str, Path]
    work: Path
    made: dict[str, str] = field(default_factory=lambda: {"0": "a"})

    def get(self, path: str) -> Any:
        reply = httpx.get(f"{self.url}{path}", trust_env=False, timeout=60)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def committed(self) -> list[dict[str, Any]]:
        """Records, the first one first."""
        return [one for one in reversed(self.get("/weights")["history"]) if one["state"] == "committed"]

    def push_disk(self, versions: list[str], in_flight: str) -> None:
        def push(weights: str, version: str) -> None:
            source = {"kind": "disk", "path": str(self.folders[weights])}
            body = {"version": version, "source": source, "in_flight": in_flight, "wait": True}
            reply = httpx.post(f"{self.url}/weights/updates", json=body, trust_env=False, timeout=120)
            assert reply.status_code == 200, reply.text

        self.made |= in_turn(push, versions)

    def push_gloo(self, versions: list[str], in_flight: str, trainer: Trainer) -> None:
        def push(weights: str, version: str) -> None:
            told = trainer.push(weights, version, in_flight=in_flight)
            assert [one["event"] for one in told] == ["pushed"] * 2, told

        self.made |= in_turn(push, versions)


def versions(kind: str, count: int) -> list[str]:
    return [f"{kind}-{number}" for number in range(count)]


def serve(folders: dict[str, Path], work: Path, *words: str) -> Iterator[Loaded]:
    command = Command("--ckpt", str(folders["a"]), "--port", "0", "--max-running", str(STREAMS), *words)
    try:
        yield Loaded(command.url(), command, folders, work)
    finally:
        command.stop()


@pytest.fixture(scope="module")
def small_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Values that bfloat16 holds exactly: the trainer's shards are of that type."""
    found = {}
    for seed, name in enumerate("ab"):
        found[name] = tmp_path_factory.mktemp(name)
        write_hf(found[name], CONFIG)
        values = {
            stored_name(key, CONFIG.family): tensor.to(torch.bfloat16).float() * 0.25
            for key, tensor in random_tensors(CONFIG, seed).items()
        }
        save_file(values, found[name] / "model.safetensors")
    return found


def run_load(loaded: Loaded, new: int, vocab: int, close: float, policies: tuple[str, str]) -> dict[str, float]:
    """All of it: disk under one policy, gloo under the other; numbers of the run."""
    digests = {"a": loaded.get("/weights/checksum")["digest"]}
    trainer = Trainer(loaded.url, loaded.folders, loaded.work, bucket_bytes=1 << 22)
    load = Load(loaded.url, STREAMS, new, vocab)
    try:
        load.wait_for_tokens(2)
        loaded.push_disk(versions("disk", UPDATES), policies[0])
        loaded.push_gloo(versions("gloo", UPDATES), policies[1], trainer)
    finally:
        trainer.close()
        answers = load.end()
    records = loaded.committed()
    assert [one["kind"] for one in records] == ["disk"] * UPDATES + ["distributed"] * UPDATES
    for record in records:  # a, b, a, ... is the same bits each time, whichever way they came
        assert digests.setdefault(loaded.made[record["version"]], record["digest"]) == record["digest"]
    assert loaded.get("/weights/checksum")["digest"] == digests[loaded.made[records[-1]["version"]]]

    assert len(answers) >= STREAMS
    assert [answer.trouble for answer in answers if answer.trouble] == []
    assert {(answer.finish, len(answer.tokens) - answer.new) for answer in answers} == {("length", 0)}
    check_borders(answers, records)
    crossed = {version for answer in answers if len(answer.spans) > 1 for version, _, _ in answer.spans}
    assert len(crossed) > UPDATES

    decoders = {name: _decoder(folder) for name, folder in loaded.folders.items()}
    replay = Replay(decoders, records, loaded.made, close)
    for answer in answers:
        replay.check(answer)
    told = [f"token {at} of {answer.spans} {answer.tokens}" for answer, at in replay.wrong[:3]]
    assert not replay.wrong, f"{len(replay.wrong)} of {replay.tokens} tokens are not as replayed: {told}"
    all_tokens = sum(len(answer.tokens) for answer in answers)
    assert replay.tokens > 0.8 * all_tokens
    swapped = Replay(decoders, records, {v: "ba"["ab".index(w)] for v, w in loaded.made.items()}, close)
    swapped.check(answers[0])
    assert len(swapped.wrong) > swapped.tokens / 4  # or the replay would prove nothing

    numbers = stall_report(answers, records)
    numbers |= {"answers": len(answers), "tokens": all_tokens, "replayed": replay.tokens}
    print(json.dumps({name: round(value, 2) for name, value in numbers.items()}))
    assert numbers["median_stall_steps"] <= STALL_STEPS, numbers
    return numbers


def _decoder(folder: Path) -> Any:
    checkpoint = open_checkpoint(folder)
    try:
        return filled_decoder(checkpoint.config, {name: tensor.float() for name, tensor in checkpoint.tensors()})
    finally:
        checkpoint.close()


@pytest.mark.parametrize("policies", [("recompute", "keep"), ("keep", "recompute")], ids="/".join)
def test_streams_go_on_over_forty_updates_and_each_token_is_by_the_weights_it_says(
    small_folders: dict[str, Path], tmp_path: Path, policies: tuple[str, str]
) -> None:
    words = ("--no-tokenizer", "--dtype", "float32", "--kv-memory", "16MiB", "--tp", "2")
    for loaded in serve(small_folders, tmp_path, *words):
        run_load(loaded, 60, CONFIG.vocab_size, 2e-3, policies)


@pytest.mark.slow
@pytest.mark.skipif(
    "GTP_SERVE_LONG_TESTS" not in os.environ, reason="takes a quiet machine and half an hour: GTP_SERVE_LONG_TESTS=1"
)
@pytest.mark.timeout(1800)
def test_smollm_streams_go_on_over_forty_updates(demo_dir: Path, tmp_path: Path) -> None:
    folders = {"a": demo_dir / "hf", "b": tmp_path / "b"}
    shutil.copytree(folders["a"], folders["b"], ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(0)
    checkpoint = open_checkpoint(folders["a"])
    changed = {
        stored_name(name, checkpoint.config.family): tensor * (1 + 0.3 * torch.randn(tensor.shape, generator=generator))
        for name, tensor in checkpoint.tensors()
    }
    checkpoint.close()
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in changed.items()}, folders["b"] / "model.safetensors")
    for loaded in serve(folders, tmp_path, "--dtype", "float32", "--context", "512", "--no-prefix-cache"):
        numbers = run_load(loaded, 48, 49000, 2e-2, ("keep", "keep"))
    assert numbers["longest_minus_median_steps"] <= STALL_STEPS, numbers
