"""Complete prompts from a checkpoint in this process, without a server.

    python examples/offline_generate.py /ckpts/my-run "2+2=" "The sky is"

Prompts are texts; without a tokenizer they are token ids with commas between them, for example 1,2,3.
"""

from __future__ import annotations

import argparse
import sys

from gtp_serve import LLM
from gtp_serve.errors import GtpServeError


def main(argv: list[str] | None = None) -> int:
    """Print each prompt's completion with its mean log-probability; returns the exit code."""
    parser = argparse.ArgumentParser(description="Complete prompts without a server.")
    parser.add_argument("ckpt", help="Megatron torch_dist folder, Hugging Face folder or GGUF file")
    parser.add_argument("prompts", nargs="+", metavar="prompt")
    parser.add_argument("--tokenizer", help="folder with tokenizer.json (the checkpoint's)")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args(argv)
    try:
        run(args)
    except GtpServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def run(args: argparse.Namespace) -> None:
    """Load, complete, print."""
    with LLM(args.ckpt, tokenizer=args.tokenizer, deterministic=args.deterministic) as llm:
        prompts = args.prompts
        if llm.tokenizer is None:
            prompts = [[int(word) for word in prompt.split(",")] for prompt in prompts]
        completions = llm.generate(prompts, max_new_tokens=args.max_new_tokens, temperature=args.temperature)
        for prompt, completion in zip(prompts, completions, strict=True):
            mean = sum(completion.logprobs) / len(completion.logprobs)
            print(f"{prompt!r} -> {completion.text or list(completion.ids)!r}")
            print(f"    {len(completion.ids)} tokens, {mean:.3f} each, ended by {completion.finish_reason.type}")


if __name__ == "__main__":
    sys.exit(main())
