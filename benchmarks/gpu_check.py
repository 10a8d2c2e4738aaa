"""One GPU, a few minutes: are captured decode steps right, and how close to the memory's speed are they?

Builds a random Llama-like model of about a billion parameters in bfloat16 (nothing is downloaded), captures
its decode step, compares replayed with eager logits, swaps weights under the graphs, and measures tokens per
second against the measured copy bandwidth.  Then a mixture-of-experts model, collectives in a graph, and each attention
backend that is installed.  Exit code 0: all held; 1: something did not; 5: no GPU.
``--device cpu --tiny`` runs the same script on a small model, where steps are run and not recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from gpu_parts.bench import SIZES, Bench, Size, with_experts
from gpu_parts.report import Report
from torch import Tensor

from gtp_serve.config import AttentionBackend
from gtp_serve.engine.capture import CudaCapture
from gtp_serve.engine.collective import join_group
from gtp_serve.engine.graphs import DecodeGraphs, refusal
from gtp_serve.engine.ranks import Meeting
from gtp_serve.errors import EngineFault, GtpServeError
from gtp_serve.ops.paged import PagedPlan
from gtp_serve.ops.table import REFERENCE

NO_DEVICE = 5
MEAN_GAP = 0.05
"""Log-probabilities of one bfloat16 model computed in two orders may differ by this on average."""
MEAN_SPARSE_GAP = 0.3
"""With experts: where two are nearly equal, rounding decides which one is taken.  Unrelated logits differ by 1.1."""
EXTRAS: tuple[tuple[AttentionBackend, int], ...] = (("flash-attn", 256), ("flashinfer", 16))
"""Attention backends with the sizes of their blocks; the one that compiles its kernels comes last."""


def measure_copy(bench: Bench) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(bench.size.copied_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / bench.timer.seconds(lambda: target.copy_(source), 5)


def capture_all(bench: Bench, report: Report) -> DecodeGraphs:
    """All buckets, with the time that each took."""
    graphs = bench.graphs()
    seconds: list[float] = []
    before = torch.cuda.memory_reserved(bench.device) if bench.device.type == "cuda" else 0
    while True:
        started = time.perf_counter()
        if not graphs.capture_next():
            break
        bench.timer.wait()
        seconds.append(time.perf_counter() - started)
    for size, why in graphs.failures.items():
        report.holds(f"capture of {size} rows", False, why)
    report.fact("captured sizes", graphs.captured)
    report.fact("capture, first and slowest of the others", [round(seconds[0], 2), round(max(seconds[1:]), 2)], "s")
    if bench.device.type == "cuda":
        grown = torch.cuda.memory_reserved(bench.device) - before
        report.fact("memory of all graphs", grown / 2**20, "MiB")
    return graphs


def agree(report: Report, name: str, got: Tensor, expected: Tensor, allowed: float = MEAN_GAP) -> None:
    """Log-probabilities of two ways of rounding: close on average, and the largest difference is told."""
    gap = (got.log_softmax(-1) - expected.log_softmax(-1)).abs()
    mean, largest = float(gap.mean()), float(gap.max())
    report.holds(name, mean < allowed, f"(log-probabilities differ by {mean:.2g}, at most {largest:.2g})")


def compare(bench: Bench, graphs: DecodeGraphs, report: Report) -> None:
    """Replayed with eager, full and padded buckets; padding and its writes."""
    for count in bench.size.batches:
        batch = bench.decode(count)
        replayed = graphs.replay(batch).clone()
        report.holds(f"replayed = eager, bit for bit, {count} rows", torch.equal(replayed, bench.eager(batch)))
        report.holds(f"logits are finite, {count} rows", bool(torch.isfinite(replayed).all()))
    count = max(bench.size.batches) - 1
    batch = bench.decode(count)
    before = [cache.clone() for cache in (bench.pool.keys[0], bench.pool.values[-1])]
    replayed = graphs.replay(batch).clone()
    after = bench.pool.keys[0], bench.pool.values[-1]
    cache = bench.config.cache
    owned = cache.num_blocks * cache.block_size
    touched = [
        set((now != then).flatten(0, 1).flatten(1).any(-1)[:owned].nonzero().flatten().tolist())
        for now, then in zip(after, before, strict=True)
    ]
    slots = set(batch.slots_T.tolist())
    report.holds("padding rows touch no sequence's cache", all(found <= slots for found in touched))
    agree(report, f"a padded bucket agrees, {count} rows", replayed, bench.eager(batch))


def compare_with_reference(bench: Bench, report: Report, what: str = "") -> None:
    """The device's ops with the specification in plain torch, on the same weights."""
    allowed = MEAN_GAP if bench.size.model.moe is None else MEAN_SPARSE_GAP
    plain = bench.build(REFERENCE)
    for mine, other in zip(plain.targets(), bench.decoder.targets(), strict=True):
        mine.tensor.copy_(other.tensor)
    for name, batch in (("single tokens", bench.decode(2)), ("prompt chunks", bench.prompt())):
        agree(report, f"{what}{name} agree with plain torch", bench.eager(batch), bench.eager(batch, plain), allowed)


def check_model(bench: Bench, report: Report, what: str) -> None:
    """The essentials for another model or other ops: one bucket, full and padded, and its speed."""
    report.fact(f"{what}: ops", bench.decoder.placement.ops.name)
    graphs = bench.graphs()
    started = time.perf_counter()
    graphs.capture_next()
    bench.timer.wait()
    report.fact(f"{what}: first capture", time.perf_counter() - started, "s")
    largest = max(bench.size.batches)
    report.holds(f"{what}: {largest} rows are captured", graphs.failures == {}, str(graphs.failures or ""))
    if graphs.captured:
        for count in (largest, largest - 1):
            batch = bench.decode(count)
            agree(report, f"{what}: replayed agrees, {count} rows", graphs.replay(batch).clone(), bench.eager(batch))
        seconds = bench.timer.seconds(partial(graphs.replay, bench.decode(largest)), bench.size.steps)
        report.fact(f"{what}: decode, {largest} rows, replayed", largest / seconds, "tokens/s")
    compare_with_reference(bench, report, f"{what}: ")


def check_collectives(bench: Bench, report: Report) -> None:
    """NCCL's operations in a graph, in a group of one rank."""
    if bench.device.type != "cuda":
        report.skip("collectives in a graph", "gloo's run on the host")
        return
    descriptor = os.memfd_create("gpu-check-ranks")
    group = join_group(Meeting(descriptor=descriptor, rank=0, size=1, form_seconds=60, step_seconds=60), "cuda")
    x = torch.ones(64, 2048, device=bench.device)
    capture = CudaCapture(bench.device)

    def step() -> Tensor:
        return group.all_gather(group.all_reduce(x * 2) + 1)

    capture.warm_up(step)
    recorded = capture.record(step, ())
    x.fill_(3.0)
    report.holds("collectives are replayed in a graph", torch.equal(recorded.replay(1), torch.full_like(x, 7.0)))
    group.abort()
    os.close(descriptor)


def check_extras(size: Size, device: str, report: Report, end: float) -> None:
    """Each attention backend that is an extra, if it is installed."""
    for attention, block_size in EXTRAS:
        what = f"--attention-backend {attention}"
        if time.monotonic() > end:
            report.skip(what, "the time was up")
            continue
        try:
            bench = Bench(size, device, attention=attention, block_size=block_size)
        except GtpServeError as refused:
            report.skip(what, refused.message)
        else:
            check_model(bench, report, attention)


def swap_weights(bench: Bench, graphs: DecodeGraphs, report: Report) -> None:
    """New weights in place; then one parameter moved."""
    batch = bench.decode(max(bench.size.batches))
    old = graphs.replay(batch).clone()
    seconds = bench.timer.seconds(lambda: bench.fill(3), 1, repeats=1)
    graphs.addresses.check()
    new = graphs.replay(batch).clone()
    report.fact("weights rewritten in", seconds, "s")
    report.holds("replay uses weights changed in place", torch.equal(new, bench.eager(batch)))
    report.holds("and they are other ones", not torch.allclose(new, old))
    norm = bench.decoder.norm
    kept, norm.weight = norm.weight, norm.weight.clone()
    try:
        graphs.addresses.check()
        found = ""
    except EngineFault as fault:
        found = fault.message
    norm.weight = kept
    report.holds("a moved parameter is named", found.startswith("model.norm.weight has moved"))


def measure(bench: Bench, graphs: DecodeGraphs, copy_speed: float, report: Report, end: float) -> None:
    """Tokens per second and share of the copy bandwidth, replayed and eager."""
    for count in bench.size.batches:
        if time.monotonic() > end:
            report.skip(f"speed of {count} rows", "the time was up")
            continue
        replay = partial(graphs.replay, bench.decode(count))
        replayed = bench.timer.seconds(replay, bench.size.steps)
        run_eagerly = partial(bench.eager, bench.decode(count, bench.device))
        eager = bench.timer.seconds(run_eagerly, max(1, bench.size.steps // 5))
        share = (bench.weight_bytes() + bench.kv_bytes(count)) / replayed / copy_speed
        report.fact(f"decode, {count} rows, replayed", count / replayed, "tokens/s")
        report.fact(f"decode, {count} rows, eager", count / eager, "tokens/s")
        report.fact(f"decode, {count} rows, share of copy bandwidth", 100 * share, "%")


def measure_prompt(bench: Bench, report: Report) -> None:
    """Tokens per second of prompt chunks."""
    batch = bench.prompt()
    seconds = bench.timer.seconds(lambda: bench.eager(batch), max(1, bench.size.steps // 10))
    report.fact("prompt chunks", len(batch.token_ids_T) / seconds, "tokens/s")
    plan = bench.decoder.placement.ops.plan_attention(batch, bench.config.cache.block_size, None)
    if bench.device.type == "cuda" and isinstance(plan, PagedPlan):
        report.skip("varlen_attn for prompt chunks", "it does not serve this GPU; the paged kernel did")


def check_attention_alone(bench: Bench, report: Report, copy_speed: float) -> None:
    """The attention of one layer: how much of the bandwidth it gets by itself."""
    count, model = max(bench.size.batches), bench.size.model
    batch = bench.decode(count, bench.device)
    plan = bench.decoder.placement.ops.plan_attention(batch, bench.config.cache.block_size, None)
    query = torch.randn(count, model.num_heads, model.head_dim, device=bench.device, dtype=torch.bfloat16)
    keys, values = bench.pool.keys[0], bench.pool.values[0]
    seconds = bench.timer.seconds(lambda: plan.attend(query, keys, values, 0.125), bench.size.steps)
    share = bench.kv_bytes(count) / model.num_layers / seconds / copy_speed
    report.fact(f"attention of one layer, {count} rows, share", 100 * share, "%")


@torch.inference_mode()
def run(size: Size, device: str, seconds: float) -> Report:
    """All checks, the longest ones last."""
    end = time.monotonic() + seconds
    report = Report()
    print(f"gpu_check on {device}: torch {torch.__version__}")
    bench = Bench(size, device)
    if bench.device.type == "cuda":
        report.fact("GPU", torch.cuda.get_device_name(bench.device))
    report.fact("ops", bench.decoder.placement.ops.name)
    report.fact("parameters", sum(t.tensor.numel() for t in bench.decoder.targets()) / 1e9, "billion")
    copy_speed = measure_copy(bench)
    report.fact("copy bandwidth, read and write", copy_speed / 1e9, "GB/s")
    graphs = capture_all(bench, report)
    compare(bench, graphs, report)
    compare_with_reference(bench, report)
    swap_weights(bench, graphs, report)
    measure(bench, graphs, copy_speed, report, end)
    check_attention_alone(bench, report, copy_speed)
    if time.monotonic() < end:
        measure_prompt(bench, report)
    else:
        report.skip("speed of prompt chunks", "the time was up")
    if (reason := refusal(bench.decoder, bench.config)) is not None:
        report.skip("recording of steps", reason)
    check_collectives(bench, report)
    del bench, graphs
    if time.monotonic() < end:
        check_model(Bench(with_experts(size), device), report, "experts")
    else:
        report.skip("mixture-of-experts models", "the time was up")
    check_extras(size, device, report, end)
    report.skip("several GPUs", "this script uses one; tests/gpu/test_ranks_gpu.py takes two")
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda (default), cuda:N, or cpu")
    parser.add_argument("--tiny", action="store_true", help="a small model, for a quick look")
    parser.add_argument("--seconds", type=float, default=240.0, help="start no new measurement after this")
    parser.add_argument("--json", type=Path, help="write all that was found here")
    args = parser.parse_args(argv)
    if torch.device(args.device).type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device here; --device cpu --tiny tries the script itself.")
        return NO_DEVICE
    report = run(SIZES["tiny" if args.tiny else "large"], args.device, args.seconds)
    if args.json is not None:
        found = {"facts": report.facts, "failed": report.failed, "skipped": report.skipped}
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
