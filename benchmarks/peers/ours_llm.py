"""This project's ``LLM``, in-process; no prefix cache, so that every prompt is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from peers.protocol import Generate, Options, Prompts, Step, main

if TYPE_CHECKING:
    from gtp_serve.llm import LLM


def load(options: Options) -> Generate:
    """A model that takes and gives token ids."""
    return by(open_llm(options), temperature=0)


def open_llm(options: Options) -> LLM:
    """The engine."""
    import torch

    from gtp_serve.llm import LLM

    torch.set_num_threads(options.threads)
    build: Callable[..., LLM] = LLM
    return build(
        options.model,
        device="cpu",
        tokenizer=False,
        prefix_cache=False,
        context=options.context,
        max_running=options.streams,
        refit_memory="inplace",
        progress=False,
        **format_options(options.dtype),
    )


def by(llm: LLM, **sampling: Any) -> Generate:
    """Completions that are chosen so."""

    def generate(prompts: Prompts, new: int, step: Step) -> Prompts:
        replies: Prompts = [[] for _ in prompts]
        streams = [llm.stream(prompt, max_new_tokens=new, ignore_eos=True, **sampling) for prompt in prompts]
        try:
            while len(replies[-1]) < new:
                for reply, stream in zip(replies, streams, strict=True):
                    delta = next(stream, None)
                    if delta is not None:
                        reply.extend(delta.ids)
                if not step([len(reply) for reply in replies]):
                    break
        finally:
            for stream in streams:
                stream.close()  # type: ignore[attr-defined]
        return replies

    return generate


def format_options(dtype: str) -> dict[str, Any]:
    """Keywords of ``LLM`` for a format of the weights, and for ``--deterministic``."""
    form, _, deterministic = dtype.partition("-")
    found: dict[str, Any] = {"dtype": "bfloat16", "deterministic": bool(deterministic)}
    return found if form == "bf16" else {**found, "quant": form}


if __name__ == "__main__":
    main(load)
