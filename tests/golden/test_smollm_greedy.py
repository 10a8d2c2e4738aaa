"""SmolLM2-135M-Instruct through the whole server: from either folder the greedy tokens that transformers gives.

``make golden`` records the answers anew from transformers (float32, one prompt at a time).
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_command import Command

pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.timeout(1800)]

RECORDED = Path(__file__).parent / "smollm2_greedy.json"
NEW_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "2 + 2 = 4, 3 + 3 = 6, 4 + 4 =",
    "Water boils at 100 degrees Celsius because",
    "Dear Sir or Madam,\n\nI am writing to",
    "The three primary colours are",
    "import numpy as np\n\n# Compute the mean of an array\n",
    "Q: What is the largest planet in our solar system?\nA:",
    "To bake a chocolate cake you need",
    "In 1969, humans first",
    "Le chat est assis sur",
    "The mitochondria is",
    "List of prime numbers: 2, 3, 5, 7, 11,",
    "She opened the letter with trembling hands and",
    "SELECT name, age FROM users WHERE",
    "Photosynthesis is the process by which",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "The difference between a stack and a queue is",
    "Über den Wolken muss die Freiheit",
)


def record_with_transformers(folder: Path) -> list[dict[str, Any]]:
    """Prompt ids and greedy continuation of every prompt."""
    import torch  # only when recording: the test itself needs neither
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
        answers.append({"prompt": prompt, "input_ids": ids[0].tolist(), "output_ids": out[ids.shape[1] :]})
    return answers


@pytest.fixture(scope="module")
def recorded(demo_dir: Path) -> list[dict[str, Any]]:
    if os.environ.get("UPDATE_GOLDEN"):
        recording = record_with_transformers(demo_dir / "hf")
        RECORDED.write_text(json.dumps(recording, indent=1) + "\n", encoding="utf-8")
    answers: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert [answer["prompt"] for answer in answers] == list(PROMPTS)
    return answers


@pytest.mark.parametrize("folder", ["hf", "megatron"])
def test_greedy_tokens_are_those_of_transformers(demo_dir: Path, recorded: list[dict[str, Any]], folder: str) -> None:
    command = Command("--ckpt", str(demo_dir / folder), "--port", "0", "--dtype", "float32", "--kv-memory", "1GiB")
    try:
        with httpx.Client(base_url=command.url(), timeout=600) as client:
            paris = ask(client, "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n")
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                replies = list(pool.map(lambda prompt: ask(client, prompt), PROMPTS))
    finally:
        command.stop()

    assert "Paris" in paris["text"]
    for reply, answer in zip(replies, recorded, strict=True):
        assert reply["prompt_token_ids"] == answer["input_ids"]
        assert reply["output_ids"] == answer["output_ids"], answer["prompt"]


def ask(client: httpx.Client, prompt: str) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    body = {"text": prompt, "sampling_params": sampling, "return_prompt_token_ids": True}
    reply = client.post("/generate", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer
