"""A whole server under ``python -O``: whatever is refused with asserts is refused without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from markov_model import MarkovModel
from safetensors.torch import load_file, save_file
from serve_command import Command

pytestmark = pytest.mark.e2e

NORM = "model.norm.weight"
BODIES: tuple[tuple[str, str, int], ...] = (
    ("/generate", '{"text": "a", "sampling_params": {"temperature": NaN}}', 400),
    ("/generate", '{"text": "a", "sampling_params": {"top_k": -7}}', 400),
    ("/generate", '{"text": "a", "sampling_params": {"logit_bias": {"273": 1}}}', 400),
    ("/generate", '{"input_ids": [273]}', 400),
    ("/generate", '{"input_ids": [-1]}', 400),
    ("/generate", '{"input_ids": []}', 400),
    ("/generate", '{"text": "a", "sampling_params": {"max_new_tokens": 100000}}', 400),
    ("/generate", '{"text": "a", "sampling_params": {"regex": "("}}', 400),
    ("/generate", '{"text": "!", "sampling_params": {"temperature": 0}}', 500),
    ("/generate", '{"text": "a", "return_logprob": true, "top_logprobs_num": 1000}', 400),
    ("/v1/completions", '{"prompt": "a", "n": 1000}', 400),
    ("/v1/chat/completions", '{"messages": [{"role": "user", "content": 5}]}', 400),
    ("/weights/updates", '{"version": "x y", "source": {"kind": "disk", "path": "/"}}', 400),
    ("/weights/updates/nothing/commit", "{}", 404),
    ("/weights/rollback", "{}", 409),
)


def folder_of(path: Path, *letters: str) -> Path:
    path.mkdir()
    model = MarkovModel()
    model.follow(*letters)
    model.overflow_after("!")
    return model.write(path)


def test_d7_a_server_without_asserts_refuses_and_serves_what_it_does_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = folder_of(tmp_path / "first", *"abcd"), folder_of(tmp_path / "second", *"aceg")
    changes: dict[str, Any] = {"nan": torch.full((288,), torch.nan), "missing": None, "misshapen": torch.ones(3)}
    for name, changed in changes.items():
        tensors = load_file(second / "model.safetensors")
        tensors = {key: value for key, value in {**tensors, NORM: changed}.items() if value is not None}
        save_file(tensors, folder_of(tmp_path / name, *"aceg") / "model.safetensors")
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # the engine's process has it from the server's
    command = Command("--ckpt", str(first), "--port", "0", "--device", "cpu", "--kv-memory", "4MiB")
    try:
        with httpx.Client(base_url=command.url(), timeout=60, trust_env=False) as http:

            def text() -> str:
                body = {"text": "a", "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
                return str(http.post("/generate", json=body).json()["text"])

            def push(folder: Path) -> httpx.Response:
                source = {"kind": "disk", "path": str(folder)}
                return http.post("/weights/updates", json={"version": folder.name, "source": source, "wait": True})

            for path, body, status in BODIES:
                reply = http.post(path, content=body, headers={"content-type": "application/json"})
                assert reply.status_code == status, (body, reply.text)
                assert text() == "bcd"
            for name in changes:
                assert push(tmp_path / name).status_code == 422, name
                assert text() == "bcd"
            data = (second / "model.safetensors").read_bytes()
            headers = {"content-type": "application/octet-stream"}
            cut = http.post("/weights/updates?version=cut&wait=true", content=data[:-1], headers=headers)
            assert (cut.status_code, cut.json()["error"]["code"]) == (422, "cut-off")
            assert push(second).json()["state"] == "committed"
            assert text() == "ceg"
    finally:
        command.stop()
