"""How fast weights reach parameters, beside reading the same files once: ``cat FILES > /dev/null``, in one run.

Writes a synthetic Llama-like checkpoint (about 1.7 GB) as a Hugging Face folder and as a Megatron checkpoint at TP=2,
GTP=2, then fills a bf16 decoder from each: once into memory that nobody has touched, then again and again in place.
The first fill also pays for that memory, as cat does not; beside it stands what the same threads need to read the same
bytes into fresh memory and do nothing else.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from gtp_serve.config import ModelConfig
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders import open_checkpoint
from gtp_serve.loaders.megatron_writer import write_checkpoint
from gtp_serve.models.decoder import build_decoder
from gtp_serve.refit.apply import PIECE_BYTES, apply_plan
from gtp_serve.refit.plan import build_plan

GIB = 1 << 30


def main() -> int:
    """Print one line for each layout: GiB/s of each fill, and its ratio to cat right before and after it."""
    parser = argparse.ArgumentParser(description="weights into parameters, beside cat")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5, help="fills in place after the first one")
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
        total = sum(file.stat().st_size for file in files) / GIB
        bare = total / _read_into_fresh_memory(files, threads)
        words: list[str] = []
        ratios: list[float] = []
        for turn in range(rounds + 1):
            before = _cat(files)
            started = time.perf_counter()
            count = apply_plan(plan, checkpoint.source, targets, threads=threads)
            ours = count / GIB / (time.perf_counter() - started)
            cat = total / statistics.mean((before, _cat(files)))
            if turn:
                ratios.append(ours / cat)
                words.append(f"{ours:.1f} GiB/s = {ours / cat:.2f} x cat")
            else:
                words.append(f"fresh {ours:.1f} GiB/s = {ours / cat:.2f} x cat = {ours / bare:.2f} x bare   in place")
    finally:
        checkpoint.close()
    return "  ".join([*words, f"  median {statistics.median(ratios):.2f}"])


def _read_into_fresh_memory(files: list[Path], threads: int) -> float:
    """Seconds to read the files into memory that is new, with nothing decided and nothing checked."""
    memory = mmap.mmap(-1, sum(file.stat().st_size for file in files))
    pieces: list[tuple[int, int, memoryview]] = []
    descriptors = [os.open(file, os.O_RDONLY) for file in files]
    at = 0
    with memoryview(memory) as whole:
        for descriptor, file in zip(descriptors, files, strict=True):
            size = file.stat().st_size
            for start in range(0, size, PIECE_BYTES):
                count = min(PIECE_BYTES, size - start)
                pieces.append((descriptor, start, whole[at + start : at + start + count]))
            at += size
        started = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(_read_piece, pieces))
        seconds = time.perf_counter() - started
        for _, _, piece in pieces:
            piece.release()
    for descriptor in descriptors:
        os.close(descriptor)
    memory.close()
    return seconds


def _read_piece(piece: tuple[int, int, memoryview]) -> None:
    descriptor, start, memory = piece
    done = 0
    while done < len(memory):
        done += os.preadv(descriptor, [memory[done:]], start + done)


def _cat(files: list[Path]) -> float:
    """Seconds to read the files once with cat."""
    started = time.perf_counter()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
