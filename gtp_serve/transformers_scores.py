"""A child process that scores sequences with transformers, for ``gtp-serve bench --parity FOLDER``.

JSON in on stdin: ``{"folder", "dtype", "sequences": [{"input_ids", "output_ids"}]}``.  JSON out on stdout: for each
output token its log-probability, the id that transformers would choose, and how far that one is ahead of the sequence's
own; or ``{"error"}``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PARTS = ("logprobs", "best", "margins")


def main() -> int:
    """Answer once; the exit code is 0 also where the answer is an error."""
    order = json.load(sys.stdin)
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        answer: dict[str, Any] = {"error": f"{error}", "missing": True}
    else:
        torch.set_grad_enabled(False)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                order["folder"], dtype=getattr(torch, order["dtype"]), local_files_only=True
            )
            model.eval()
            answer = {"sequences": [score(model, **one) for one in order["sequences"]]}
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)
    return 0


def score(model: Any, input_ids: list[int], output_ids: list[int]) -> dict[str, list[Any]]:
    """One sequence, in one pass.

    :param model: ids ``[1, T]`` to an object with ``logits`` ``[1, T, V]``.
    """
    import torch

    ids = torch.tensor([[*input_ids, *output_ids]])
    rows = slice(len(input_ids) - 1, len(input_ids) + len(output_ids) - 1)
    logprobs = model(ids).logits[0, rows].float().log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(output_ids)[:, None])[:, 0]
    best, places = logprobs.max(-1)
    return {"logprobs": chosen.tolist(), "best": places.tolist(), "margins": (best - chosen).tolist()}


if __name__ == "__main__":
    sys.exit(main())
