"""A whole loop in one process: sample from a running server, take a policy gradient step, push the new weights, again.

    gtp-serve --ckpt .demo/hf --dtype float32 &
    python examples/train_and_push.py http://127.0.0.1:30000 --ckpt .demo/hf "The sky is" "Once upon a time"

Needs transformers (the extra hf).  The reward is a stand-in, the share of even token ids: something that a few steps
can be seen to raise.  With a server that has no tokenizer prompts are token ids with commas, for example 1,2,3.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from gtp_serve.errors import GtpServeError
from gtp_serve.refit import Publisher


def main(argv: list[str] | None = None) -> int:
    """Run the loop, a line for each step; returns the exit code."""
    parser = argparse.ArgumentParser(description="Sample, train, push, again.")
    parser.add_argument("url", help="of a running gtp-serve")
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    parser.add_argument("--ckpt", required=True, help="Hugging Face folder: the weights that the server started with")
    parser.add_argument("--key", help="the server's admin key, if it has one")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt, each step")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    args = parser.parse_args(argv)
    try:
        run(args)
    except GtpServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(args: argparse.Namespace) -> None:
    """The loop."""
    model = AutoModelForCausalLM.from_pretrained(args.ckpt, dtype=torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    publisher = Publisher(args.url, args.key)
    serving = ask(args.url, "/model_info")["weight_version"]
    for step in range(1, args.steps + 1):
        replies = sample(args)
        rewards = torch.tensor([reward(reply["output_ids"]) for reply in replies])
        ratio = train(model, optimizer, replies, rewards - rewards.mean())
        # The push returns when the new weights serve: the next samples are theirs.
        report = publisher.push(model, version=f"{serving.partition('+')[0]}+{step}", base=serving)
        serving = report.version
        print(
            f"step {step}: reward {rewards.mean():.3f}, server against trainer {ratio:.6f}, pushed {serving}"
            f" in {report.seconds:.2f} s by {report.transport}, engine held {1000 * report.stall_seconds:.1f} ms"
        )


def sample(args: argparse.Namespace) -> list[Any]:
    """Replies to all prompts, several each, with ids and log-probabilities."""
    ids = [[int(word) for word in prompt.split(",")] for prompt in args.prompts if is_ids(prompt)]
    prompts = {"input_ids": ids} if len(ids) == len(args.prompts) else {"text": args.prompts}
    sampling = {"max_new_tokens": args.max_new_tokens, "n": args.samples, "temperature": 1.0}
    body = {**prompts, "sampling_params": sampling, "return_logprob": True, "return_prompt_token_ids": True}
    replies: list[Any] = ask(args.url, "/generate", body)
    return [reply for reply in replies if reply["output_ids"]]


def is_ids(prompt: str) -> bool:
    """Whether a prompt is written as token ids."""
    return all(word.strip().isdigit() for word in prompt.split(","))


def reward(ids: Sequence[int]) -> float:
    """What is to be raised."""
    return sum(token % 2 == 0 for token in ids) / len(ids)


def train(model: Any, optimizer: torch.optim.Optimizer, replies: Sequence[Any], advantages: torch.Tensor) -> float:
    """One policy gradient step; the mean factor between the server's and the trainer's probability of a token."""
    optimizer.zero_grad()
    factors: list[torch.Tensor] = []
    for reply, advantage in zip(replies, advantages, strict=True):
        prompt, output = reply["prompt_token_ids"], reply["output_ids"]
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(output)[:, None])[:, 0]
        (-advantage * logprobs.mean() / len(replies)).backward()
        told = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
        factors.append((told - logprobs.detach()).abs().exp())
    optimizer.step()
    return float(torch.cat(factors).mean())


def ask(url: str, path: str, body: Any = None) -> Any:
    """A JSON request."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


if __name__ == "__main__":
    sys.exit(main())
