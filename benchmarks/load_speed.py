"""How fast weights reach parameters, beside reading the same files once: ``cat FILES > /dev/null``, in one run.

Writes a synthetic Llama-like checkpoint (about 1.7 GB) as a Hugging Face folder and as a Megatron checkpoint at TP=2,
GTP=2, then fills a bf16 decoder from each: once into memory that nobody has touched, then again and again in place.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.megatron_writer import write_checkpoint
from gtp_serve.models.decoder import build_decoder
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.plan import build_plan

GIB = 1 << 30


def main() -> int:
    """Print one line for each layout: GiB/s of each fill, and its ratio to cat right after it."""
    parser = argparse.ArgumentParser(description="weights into parameters, beside cat")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3, help="fills in place after the first one")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, files in _write(Path(folder), args.layers).items():
            print(f"{name:12s} {_measure(Path(folder) / name, files, args.rounds, args.threads)}", flush=True)
    return 0


def _write(folder: Path, layers: int) -> dict[str, list[Path]]:
    """Both checkpoints; the files with the weights of each."""
    config = ModelConfig(
        family="llama",
        num_layers=layers,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_size=8192,
        vocab_size=32000,
        vocab_rows=32000,
    )
    tensors = {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in logical_tensors(config).items()}
    (folder / "hf").mkdir()
    save_file(tensors, folder / "hf" / "model.safetensors")
    described = {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "vocab_size": 32000,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
    }
    (folder / "hf" / "config.json").write_text(json.dumps(described), encoding="utf-8")
    saved = write_checkpoint(folder / "megatron", config, tensors, Grid(tp=2, gtp=2, alignment=32))
    return {"hf": [folder / "hf" / "model.safetensors"], "megatron": sorted(saved.glob("*.distcp"))}


def _measure(path: Path, files: list[Path], rounds: int, threads: int) -> str:
    _cat(files)  # into the page cache
    checkpoint = open_checkpoint(path)
    try:
        decoder = build_decoder(checkpoint.config, dtype=torch.bfloat16, device="cpu")
        targets = decoder.targets()
        wanted = [target.shard for target in targets]
        plan = build_plan(checkpoint.source.shards(), wanted, logical_tensors(checkpoint.config))
        words: list[str] = []
        for turn in range(rounds + 1):
            started = time.perf_counter()
            count = apply_plan(plan, checkpoint.source, targets, threads=threads)
            ours = count / GIB / (time.perf_counter() - started)
            cat = sum(file.stat().st_size for file in files) / GIB / _cat(files)
            words.append(f"{'fresh' if turn == 0 else 'in place'} {ours:.1f} GiB/s = {ours / cat:.2f} x cat")
    finally:
        checkpoint.close()
    return "   ".join(words)


def _cat(files: list[Path]) -> float:
    """Seconds to read the files once with cat."""
    started = time.perf_counter()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
