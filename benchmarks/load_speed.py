"""How fast weights reach parameters, beside reading the same files once: ``cat FILES > /dev/null``, in one run.

Writes a synthetic Llama-like checkpoint (about 1.7 GB) as a Hugging Face folder and as a Megatron checkpoint at TP=2,
GTP=2, then fills a bf16 decoder from each, its parameters laid out as a server lays them out: once into memory that
nobody has touched, then again and again in place.  The first fill also pays for that memory, as cat does not: the
system zeroes it.  Beside it stands the floor: reading once (cat) and having so much memory zeroed by as many threads.
Fills by the native reader and without it take turns, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import json
import mmap
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
from gtp_serve.loaders import files as checkpoint_files
from gtp_serve.loaders import open_checkpoint, scatter
from gtp_serve.loaders.megatron_writer import write_checkpoint
from gtp_serve.models.decoder import build_decoder
from gtp_serve.refit import writers
from gtp_serve.refit.apply import apply_plan
from gtp_serve.refit.native_copy import native_reader
from gtp_serve.refit.plan import build_plan
from gtp_serve.refit.store import WeightStore

GIB = 1 << 30
_POPULATE_WRITE = 23
"""Of ``madvise``, since Linux 5.14."""


def main() -> int:
    """Print one line for each layout: GiB/s of each fill, and its ratio to cat right before and after it."""
    parser = argparse.ArgumentParser(description="weights into parameters, beside cat")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5, help="fills in place after the first one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ckpt", type=Path, help="measure this Megatron or Hugging Face folder instead")
    args = parser.parse_args()
    if args.ckpt:
        files = sorted([*args.ckpt.rglob("*.distcp"), *args.ckpt.rglob("*.safetensors")])
        _measure(args.ckpt.name, args.ckpt, files, args.rounds, args.threads)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        for name, files in _write(Path(folder), args.layers).items():
            _measure(name, Path(folder) / name, files, args.rounds, args.threads)
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


def _measure(name: str, path: Path, files: list[Path], rounds: int, threads: int) -> None:
    _cat(files)  # into the page cache
    size = sum(file.stat().st_size for file in files)
    checkpoint = open_checkpoint(path)
    readers = [native_reader(), None] if native_reader() is not None else [None]
    fresh: dict[bool, str] = {}
    ratios: dict[bool, list[float]] = {reader is not None: [] for reader in readers}
    rates: dict[bool, list[float]] = {reader is not None: [] for reader in readers}
    cats: list[float] = []
    try:
        decoder = build_decoder(checkpoint.config, dtype=torch.bfloat16, device="cpu")
        for turn in range(rounds + 1):
            for reader in readers:
                if turn == 0:
                    store = WeightStore(decoder.targets())
                    plan = build_plan(checkpoint.source.shards(), store.shards, logical_tensors(checkpoint.config))
                _use(reader)
                before = _cat(files)
                started = time.perf_counter()
                apply_plan(plan, checkpoint.source, store.live, threads=threads)
                seconds = time.perf_counter() - started
                cat = statistics.mean((before, _cat(files)))
                if turn == 0:
                    floor = cat + _zeroed(size, threads)
                    fresh[reader is not None] = f"{cat / seconds:.2f} x cat = {floor / seconds:.2f} x floor"
                else:
                    ratios[reader is not None].append(cat / seconds)
                    rates[reader is not None].append(size / GIB / seconds)
                    cats.append(size / GIB / cat)
    finally:
        checkpoint.close()
    for native, found in ratios.items():
        print(
            f"{name:10s} {'native' if native else 'plain':6s} fresh {fresh[native]}; in place"
            f" {statistics.median(rates[native]):.1f} GiB/s (best {max(rates[native]):.1f}), cat"
            f" {statistics.median(cats):.1f} (best {max(cats):.1f}); x cat: median {statistics.median(found):.2f},"
            f" best {max(found):.2f}, best of one to best of other {max(rates[native]) / max(cats):.2f}",
            flush=True,
        )


def _use(reader: object) -> None:
    """Have checkpoints read by it, or without it."""
    for module in (checkpoint_files, scatter, writers):
        vars(module)["native_reader"] = lambda: reader


def _zeroed(size: int, threads: int) -> float:
    """Seconds in which the system gives so much fresh memory, in large pages where it does that."""
    step = 8 << 20
    memory = mmap.mmap(-1, -(-size // step) * step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: memory.madvise(_POPULATE_WRITE, start, step), range(0, len(memory), step)))
    seconds = time.perf_counter() - started
    memory.close()
    return seconds


def _cat(files: list[Path]) -> float:
    """Seconds to read the files once with cat."""
    started = time.perf_counter()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
