"""OpenVINO GenAI's continuous batching, step by step; its prefix cache is off, so that every prompt is computed."""

from __future__ import annotations

from typing import Any

from peers.protocol import Generate, Options, Prompts, Step, main


def prepare(options: Options) -> None:
    """Exported by optimum: half precision as it is, or 8-bit weights."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    quantised = OVWeightQuantizationConfig(bits=8) if options.dtype == "int8" else None
    model = OVModelForCausalLM.from_pretrained(
        options.model, export=True, compile=False, load_in_8bit=False, quantization_config=quantised
    )
    model.save_pretrained(options.converted)
    _write_tokenizer(options)


def _write_tokenizer(options: Options) -> None:
    """Token ids go in and come out, but the pipeline does not load without one."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(options.model)
    found.save_pretrained(options.converted)
    tokenizer, detokenizer = convert_tokenizer(found, with_detokenizer=True)
    openvino.save_model(tokenizer, options.converted / "openvino_tokenizer.xml")
    openvino.save_model(detokenizer, options.converted / "openvino_detokenizer.xml")


def load(options: Options) -> Generate:
    """A pipeline on the CPU."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1
    scheduler.max_num_seqs = options.streams
    scheduler.max_num_batched_tokens = 2048
    scheduler.enable_prefix_caching = False
    hint = "f32" if options.dtype == "fp32" else "bf16"
    properties = {"INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": hint}
    try:
        pipeline = genai.ContinuousBatchingPipeline(str(options.converted), scheduler, "CPU", properties)
    except RuntimeError:  # this processor has no bfloat16 arithmetic
        properties["INFERENCE_PRECISION_HINT"] = "f32"
        pipeline = genai.ContinuousBatchingPipeline(str(options.converted), scheduler, "CPU", properties)

    def generate(prompts: Prompts, new: int, step: Step) -> Prompts:
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens = wanted.min_new_tokens = new
        wanted.ignore_eos = True
        wanted.do_sample = False
        handles: list[Any] = [
            pipeline.add_request(number, openvino.Tensor(np.array([prompt], dtype=np.int64)), wanted)
            for number, prompt in enumerate(prompts)
        ]
        replies: Prompts = [[] for _ in prompts]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for reply, handle in zip(replies, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        reply.extend(output.generated_ids)
            if not step([len(reply) for reply in replies]):
                for handle in handles:
                    (getattr(handle, "stop", None) or handle.cancel)()
        return replies

    return generate


if __name__ == "__main__":
    main(load, prepare)
