"""llama.cpp by the low-level calls of llama-cpp-python: one context, one ``llama_decode`` a step for all sequences."""

from __future__ import annotations

import ctypes
from typing import Any

from peers.protocol import Generate, Options, Prompts, Step, main

_CHUNK = 512


def prepare(options: Options) -> None:
    """A GGUF file without a tokenizer, with the checkpoint's own bfloat16 values or their q8_0 form."""
    from peers.gguf_writer import write_gguf  # needs the gguf package, which only the installation has to have

    write_gguf(options.model, options.converted / "model.gguf", options.dtype)


def load(options: Options) -> Generate:
    """The model in a context for all streams."""
    import llama_cpp as lib
    import numpy as np

    lib.llama_backend_init()
    silent = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    path = str(options.converted / "model.gguf").encode()
    model = lib.llama_model_load_from_file(path, lib.llama_model_default_params())
    if not model:
        raise RuntimeError("llama.cpp does not read the GGUF file")
    vocab_size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    wanted = lib.llama_context_default_params()
    wanted.n_ctx = options.streams * options.context
    wanted.n_batch = _CHUNK * 4
    wanted.n_ubatch = _CHUNK
    wanted.n_seq_max = options.streams
    wanted.n_threads = wanted.n_threads_batch = options.threads
    if hasattr(wanted, "kv_unified"):
        wanted.kv_unified = True
    context = lib.llama_init_from_model(model, wanted)
    memory = lib.llama_get_memory(context)
    batch = lib.llama_batch_init(_CHUNK * 4, 0, 1)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """One call; the likeliest tokens of those rows (token, position, sequence, wanted) that want one."""
        for at, (token, position, sequence, want) in enumerate(rows):
            batch.token[at], batch.pos[at], batch.logits[at] = token, position, want
            batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence
        batch.n_tokens = len(rows)
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        found = []
        for at, row in enumerate(rows):
            if row[3]:
                logits: Any = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, at), shape=(vocab_size,))
                found.append(int(logits.argmax()))
        return found

    def generate(prompts: Prompts, new: int, step: Step) -> Prompts:
        _ = silent  # must outlive the calls
        lib.llama_memory_clear(memory, True)
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        newest: list[int] = []
        for start in range(0, len(rows), _CHUNK * 4):
            newest += decode(rows[start : start + _CHUNK * 4])
        replies = [[token] for token in newest]
        while step([len(reply) for reply in replies]) and len(replies[0]) < new:
            at = len(replies[0]) - 1
            newest = decode([(reply[-1], len(prompts[s]) + at, s, True) for s, reply in enumerate(replies)])
            for reply, token in zip(replies, newest, strict=True):
                reply.append(token)
        return replies

    return generate


if __name__ == "__main__":
    main(load, prepare)
