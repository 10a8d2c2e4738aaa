"""onnxruntime-genai's generator, a static batch."""

from __future__ import annotations

import json
import subprocess
import sys

from peers.protocol import Generate, Options, Prompts, Step, main


def prepare(options: Options) -> None:
    """By the package's own model builder; on one thread unless its settings say otherwise."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(options.model), "-e", "cpu"]
    subprocess.run([*command, "-o", str(options.converted), "-p", options.dtype], check=True)


def load(options: Options) -> Generate:
    """The model with as many threads as the others."""
    import numpy as np
    import onnxruntime_genai as genai

    path = options.converted / "genai_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    session = settings["model"]["decoder"]["session_options"]
    if session.get("intra_op_num_threads") != options.threads:
        session["intra_op_num_threads"] = options.threads
        path.write_text(json.dumps(settings), encoding="utf-8")
    model = genai.Model(str(options.converted))

    def generate(prompts: Prompts, new: int, step: Step) -> Prompts:
        length = len(prompts[0])
        wanted = genai.GeneratorParams(model)
        total = length + new
        wanted.set_search_options(max_length=total, min_length=total, do_sample=False, batch_size=len(prompts))
        generator = genai.Generator(model, wanted)
        generator.append_tokens(np.array(prompts, dtype=np.int32))
        count = 0
        while count < new:
            generator.generate_next_token()
            count += 1
            if not step([count] * len(prompts)):
                break
        return [list(generator.get_sequence(row)[length : length + count]) for row in range(len(prompts))]

    return generate


if __name__ == "__main__":
    main(load, prepare)
