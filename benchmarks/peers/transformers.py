"""transformers' ``generate``, a static batch, with its default attention."""

from __future__ import annotations

from typing import Any

from peers.protocol import Generate, Options, Prompts, Step, main


def load(options: Options) -> Generate:
    """The model as ``from_pretrained`` gives it."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.set_num_threads(options.threads)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()  # type: ignore[no-untyped-call]

    class Watch(StoppingCriteria):
        """Called after each token."""

        def __init__(self, prompt: int, step: Step) -> None:
            self._prompt = prompt
            self._step = step

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            rows, length = input_ids.shape
            enough = not self._step([length - self._prompt] * rows)
            return torch.full((rows,), enough, dtype=torch.bool)

    def generate(prompts: Prompts, new: int, step: Step) -> Prompts:
        ids = torch.tensor(prompts)
        length = ids.shape[1]
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([Watch(length, step)]),
            )
        replies: Prompts = found[:, length:].tolist()
        return replies

    return generate


if __name__ == "__main__":
    main(load)
