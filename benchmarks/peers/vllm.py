"""vLLM's CPU build, its engine in this process and driven step by step; no prefix cache."""

from __future__ import annotations

import os

from peers.protocol import Generate, Options, Prompts, Step, main


def load(options: Options) -> Generate:
    """An offline ``LLM``."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(options.model),
        dtype="float32" if options.dtype == "fp32" else "bfloat16",
        max_model_len=options.context,
        max_num_seqs=options.streams,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    engine = llm.llm_engine
    turns = iter(range(1 << 30))

    def generate(prompts: Prompts, new: int, step: Step) -> Prompts:
        wanted = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        turn = next(turns)
        names = [f"{turn}-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, wanted)
        replies: dict[str, list[int]] = {name: [] for name in names}
        while engine.has_unfinished_requests():
            for output in engine.step():
                replies[output.request_id] = list(output.outputs[0].token_ids)
            if not step([len(reply) for reply in replies.values()]):
                engine.abort_request(names)
                break
        return list(replies.values())

    return generate


if __name__ == "__main__":
    main(load)
