"""One GPU, a few minutes: are captured decode steps right, and how close to the memory's speed are they?

Builds a random Llama-like model of about a billion parameters in bfloat16 (nothing is downloaded), captures
its decode step, compares replayed with eager logits, swaps weights under the graphs, and measures tokens per
second against the measured copy bandwidth.  Exit code 0: all held; 1: something did not; 5: no GPU.
``--device cpu --tiny`` runs the same script on a small model, where steps are run and not recorded.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gtp_serve.config import CacheConfig, EngineConfig, ModelConfig, RopeConfig
from gtp_serve.engine.graphs import SCRATCH_BLOCKS, DecodeGraphs, EagerCapture, build_graphs, refusal
from gtp_serve.errors import EngineFault
from gtp_serve.kv.pool import KVPool
from gtp_serve.models.decoder import Decoder, build_decoder
from gtp_serve.ops.batch import Batch
from gtp_serve.ops.choice import choose_ops
from gtp_serve.ops.paged import PagedPlan
from gtp_serve.ops.table import PLAIN_PAGED, REFERENCE, Ops

NO_DEVICE = 5
MEAN_GAP = 0.05
"""Log-probabilities of one bfloat16 model computed in two orders may differ by this on average."""

LARGE = ModelConfig(
    family="llama",
    num_layers=16,
    hidden_size=2048,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    ffn_size=8192,
    vocab_size=128256,
    vocab_rows=128256,
    max_context=8192,
    tied=True,
    rope=RopeConfig(theta=500000.0),
    dtype="bfloat16",
)
TINY = replace(
    LARGE,
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=96,
    vocab_size=300,
    vocab_rows=320,
    max_context=64,
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is built and measured."""

    model: ModelConfig
    context: int
    """Positions of each sequence; the last of them is decoded."""
    batches: tuple[int, ...]
    prompt: int
    steps: int
    """Steps of one measurement."""
    copied_bytes: int
    """Of the copy that measures the memory."""


SIZES = {
    "large": Size(model=LARGE, context=1024, batches=(1, 8, 32, 64), prompt=2048, steps=50, copied_bytes=2 << 30),
    "tiny": Size(model=TINY, context=48, batches=(1, 2, 4), prompt=40, steps=3, copied_bytes=1 << 20),
}


@dataclass
class Report:
    """What was found, printed line by line as it comes."""

    facts: dict[str, object] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def fact(self, name: str, value: object, unit: str = "") -> None:
        """A number or a name."""
        self.facts[name] = value
        shown = f"{value:,.4g}" if isinstance(value, float) else str(value)
        print(f"  {name:<44} {shown} {unit}".rstrip(), flush=True)

    def holds(self, name: str, good: bool, detail: str = "") -> None:
        """Something that must be so."""
        if not good:
            self.failed.append(name)
        print(f"  {'ok    ' if good else 'FAILED'} {name} {detail}".rstrip(), flush=True)

    def skip(self, what: str, why: str) -> None:
        """Something that was not looked at."""
        self.skipped.append(f"{what}: {why}")

    def finish(self) -> int:
        """The last lines, and the exit code."""
        for line in self.skipped:
            print(f"  skipped {line}")
        print(f"failed: {', '.join(self.failed)}" if self.failed else "all of it held")
        return 1 if self.failed else 0


class Timer:
    """Seconds per call on one device, the median of several measurements."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def seconds(self, call: Callable[[], object], count: int, repeats: int = 3) -> float:
        """Of one call out of ``count`` in a row."""
        call()
        return sorted(self._once(call, count) for _ in range(repeats))[repeats // 2]

    def _once(self, call: Callable[[], object], count: int) -> float:
        self.wait()
        started = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - started) / count

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class Bench:
    """The model, its cache and its captured steps."""

    def __init__(self, size: Size, device: str) -> None:
        self.size, self.device = size, torch.device(device)
        self.timer = Timer(self.device)
        largest = max(size.batches)
        blocks = largest * -(-size.context // 16)
        self.config = EngineConfig(
            model=size.model,
            cache=CacheConfig(num_blocks=blocks),
            dtype="bfloat16",
            device=device,
            max_running=largest,
            max_context=size.context,
        )
        self.decoder = self.build(self.ops())
        self.fill(0)
        self.pool = self.build_pool()

    def ops(self) -> Ops:
        """What is served with on a GPU; on a CPU plain torch that can be captured."""
        if self.device.type != "cuda":
            return PLAIN_PAGED
        return choose_ops(device=self.config.device, dtype=torch.bfloat16, head_dim=self.size.model.head_dim)

    def build(self, ops: Ops) -> Decoder:
        """A decoder without weights."""
        return build_decoder(self.size.model, dtype=torch.bfloat16, device=self.config.device, ops=ops)

    def build_pool(self) -> KVPool:
        """With random numbers in every block: contexts that nobody had to compute."""
        model, cache = self.size.model, self.config.cache
        pool = KVPool(
            num_layers=model.num_layers,
            num_blocks=cache.num_blocks + SCRATCH_BLOCKS,
            block_size=cache.block_size,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=torch.bfloat16,
            device=self.device,
        )
        generator = torch.Generator(self.device).manual_seed(1)
        for tensor in (*pool.keys, *pool.values):
            tensor.normal_(generator=generator)
        return pool

    def fill(self, seed: int) -> None:
        """New weights into the memory of the old ones."""
        generator = torch.Generator(self.device).manual_seed(seed)
        for target in self.decoder.targets():
            scale = target.tensor.shape[-1] ** -0.5 if target.tensor.dim() > 1 else 1.0
            target.tensor.normal_(generator=generator).mul_(scale)
            if target.tensor.dim() == 1:
                target.tensor.mul_(0.1).add_(1.0)

    def weight_bytes(self) -> int:
        """Read by each step: all parameters; of a table that is not the head, only rows."""
        counted = 0
        for target in self.decoder.targets():
            if target.shard.key == "model.embed_tokens.weight" and not self.size.model.tied:
                continue
            counted += target.tensor.nbytes
        return counted

    def kv_bytes(self, sequences: int) -> int:
        """Read by each step."""
        model = self.size.model
        return 2 * model.num_layers * sequences * self.size.context * model.num_kv_heads * model.head_dim * 2

    def decode(self, count: int, device: torch.device | str = "cpu") -> Batch:
        """The last token of ``count`` sequences, whose blocks lie scattered."""
        block = self.config.cache.block_size
        order = torch.randperm(self.config.cache.num_blocks, generator=torch.Generator().manual_seed(2))
        tables = order.view(max(self.size.batches), -1)[:count]
        last = self.size.context - 1
        return Batch(
            token_ids_T=torch.arange(count) + 1,
            positions_T=torch.full((count,), last),
            slots_T=tables[:, last // block] * block + last % block,
            query_starts=tuple(range(count + 1)),
            context_lens=(self.size.context,) * count,
            block_tables_SB=tables,
            logit_rows_S=torch.arange(count),
        ).to(device)

    def prompt(self) -> Batch:
        """Chunks of several sequences, each at the end of its context."""
        block, context = self.config.cache.block_size, self.size.context
        decode = self.decode(max(1, self.size.prompt // (context // 2)))
        tables, count = decode.block_tables_SB, len(decode.block_tables_SB)
        rows = self.size.prompt // count
        positions = torch.arange(context - rows, context)
        return Batch(
            token_ids_T=torch.arange(rows * count) % self.size.model.vocab_size,
            positions_T=positions.repeat(count),
            slots_T=(tables[:, positions // block] * block + positions % block).flatten(),
            query_starts=tuple(range(0, rows * count + 1, rows)),
            context_lens=(context,) * count,
            block_tables_SB=tables,
            logit_rows_S=torch.arange(1, count + 1) * rows - 1,
        ).to(self.device)

    def eager(self, batch: Batch, decoder: Decoder | None = None) -> Tensor:
        """Logits of the step as it runs without a graph."""
        return (decoder or self.decoder).forward(batch.to(self.device), self.pool.keys, self.pool.values)

    def graphs(self) -> DecodeGraphs:
        """Nothing captured yet."""
        capture = None if self.device.type == "cuda" else EagerCapture()
        return build_graphs(self.decoder, self.pool, self.config, capture)


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


def agree(report: Report, name: str, got: Tensor, expected: Tensor) -> None:
    """Log-probabilities of two ways of rounding: close on average, and the largest difference is told."""
    gap = (got.log_softmax(-1) - expected.log_softmax(-1)).abs()
    mean, largest = float(gap.mean()), float(gap.max())
    report.holds(name, mean < MEAN_GAP, f"(log-probabilities differ by {mean:.2g}, at most {largest:.2g})")


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
    owned = bench.config.cache.num_blocks
    touched = [
        set((now != then).flatten(0, 1).flatten(1).any(-1)[: owned * 16].nonzero().flatten().tolist())
        for now, then in zip(after, before, strict=True)
    ]
    slots = set(batch.slots_T.tolist())
    report.holds("padding rows touch no sequence's cache", all(found <= slots for found in touched))
    agree(report, f"a padded bucket agrees, {count} rows", replayed, bench.eager(batch))


def compare_with_reference(bench: Bench, report: Report) -> None:
    """The device's ops with the specification in plain torch, on the same weights."""
    plain = bench.build(REFERENCE)
    for mine, other in zip(plain.targets(), bench.decoder.targets(), strict=True):
        mine.tensor.copy_(other.tensor)
    for name, batch in (("single tokens", bench.decode(2)), ("prompt chunks", bench.prompt())):
        agree(report, f"{name} agree with plain torch", bench.eager(batch), bench.eager(batch, plain))


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
    report.skip("mixture-of-experts models", "their routing asks the host, so their steps are not captured")
    report.skip("several GPUs", "this script uses one")
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
