"""What a fleet costs beside one engine, and what the parts of its updates cost:  python benchmarks/cluster.py

    --part serving   one server, one replica, two replicas: seconds of a request, requests a second
    --part scaling   replicas and threads: tokens a second beside servers without Ray; needs --ckpt of a real model
    --part costs     packing, the object store between two nodes, unpacking, plan, journal, calls: for docs/scaling.md

A Ray cluster of two or three nodes is started on this machine, so that "network" is its loopback.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from gtp_serve.cluster.bundles import Unpacking, pack_source
from gtp_serve.config import ModelConfig, MoeConfig
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.digest import digest_bytes
from gtp_serve.refit.plan import build_plan

MIB = 1 << 20
LLAMA_70B = ModelConfig(
    family="llama", num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=28672,
    vocab_size=128256, vocab_rows=128256,
)  # fmt: skip
MOE_1T = replace(
    LLAMA_70B,
    family="qwen3_moe",
    num_layers=61,
    hidden_size=7168,
    num_heads=64,
    num_kv_heads=8,
    ffn_size=0,
    moe=MoeConfig(num_experts=384, top_k=8, ffn_size=2048, normalise_top_k=True),
)


def main() -> None:
    """Run the parts asked for; a JSON line for each number."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("serving", "scaling", "costs", "both"), default="both")
    parser.add_argument("--ckpt", type=Path, help="of serving, a tiny model otherwise, and of scaling")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=3.0, help="the scaling part begins no round after this")
    parser.add_argument("--mib", type=int, default=64, help="of the transfers that are measured")
    args = parser.parse_args()
    if args.part in ("costs", "both"):
        measure_costs(args.mib)
    if args.part in ("serving", "both"):
        measure_serving(args)
    if args.part == "scaling":
        measure_scaling(args)


def say(what: str, **numbers: Any) -> None:
    """One result."""
    print(json.dumps({"what": what, **numbers}), flush=True)


def timed(do: Callable[[], Any], times: int = 3, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of the fastest of some runs."""
    best = float("inf")
    for _ in range(times):
        began = clock()
        do()
        best = min(best, clock() - began)
    return best


def rate(size: int, do: Callable[[], Any]) -> float:
    """GiB for each second of a core: what else runs on the machine hardly matters."""
    return round(size / (1 << 30) / timed(do, clock=time.process_time), 2)


# -- costs of an update ------------------------------------------------------------------------------


class Block:
    """Weights of some MiB in matrices of 4 MiB."""

    def __init__(self, mib: int) -> None:
        box = Box.whole((1024, 2048))
        self._shards = [Shard(f"w{n}", (1024, 2048), "bfloat16", (Span(f"w{n}", box, box),)) for n in range(mib // 4)]
        self._data = [np.full(4 * MIB, n, np.uint8) for n in range(mib // 4)]

    def shards(self) -> list[Shard]:
        """All."""
        return self._shards

    def read(self, index: int) -> memoryview:
        """Bytes."""
        return self._data[index].data

    def close(self) -> None:
        """Nothing to do."""


def measure_costs(mib: int) -> None:
    """Each part of an update by itself."""
    import ray
    from cluster_world import World

    from gtp_serve.cluster.ray_port import GcsStore

    source = Block(mib)
    size = mib * MIB
    bundles = pack_source(source, lambda data: data)
    say("digest", gib_per_core_s=rate(size, lambda: [digest_bytes(block.data) for block in source._data]))
    say("pack", gib_per_core_s=rate(size, lambda: pack_source(source, lambda data: data)))
    say("unpack", gib_per_core_s=rate(size, lambda: unpack_all(bundles)))
    for name, config, tp in (("70B", LLAMA_70B, 8), ("1T MoE", MOE_1T, 16)):
        shapes = logical_tensors(config)
        have = [whole(name, shape) for name, shape in shapes.items()]
        want = [first_rows(name, shape, tp) for name, shape in shapes.items()]
        parameters = sum(int(np.prod(shape)) for shape in shapes.values())
        seconds = timed(partial(build_plan, have, want, shapes), 1, time.process_time)
        say(f"plan of {name}", tensors=len(shapes), parameters=parameters, core_seconds=round(seconds, 3))
    world = World(2, cpus=4)
    try:
        ray.init(address=world.address, log_to_driver=False)
        say("put", gib_per_s=round(4 * MIB / (1 << 30) / timed(lambda: ray.put(source._data[0])), 2))
        measure_transfer(world, size)
        store = GcsStore("benchmark")
        say("journal", ms=round(1000 * timed(lambda: store.put(b"x" * 4000), 50), 3))
        store.delete()
        measure_calls()
        ray.shutdown()
    finally:
        world.close()


def measure_transfer(world: Any, size: int) -> None:
    """An object from one node to another."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class Taker:
        def take(self, refs: list[Any]) -> int:
            return sum(len(ray.get(ref)) for ref in refs)

    place = NodeAffinitySchedulingStrategy(world.nodes[0].node_id, soft=False)
    remote: Any = ray.remote
    taker = remote(Taker).options(scheduling_strategy=place).remote()
    ray.get(taker.take.remote([ray.put(b"x")]))

    def once() -> None:
        refs = [ray.put(np.zeros(min(size, 32 * MIB), np.uint8))]
        began = time.perf_counter()
        ray.get(taker.take.remote(refs))
        seconds.append(time.perf_counter() - began)

    seconds: list[float] = []
    for _ in range(5):
        once()
    say("between nodes", gib_per_s=round(min(size, 32 * MIB) / (1 << 30) / min(seconds), 2))


def measure_calls() -> None:
    """A call of every replica at once, as a commit is: by the number of replicas."""
    import ray

    class Replica:
        async def commit(self) -> int:
            return 0

    remote: Any = ray.remote
    actors = [remote(Replica).options(num_cpus=0).remote() for _ in range(8)]
    ray.get([actor.commit.remote() for actor in actors])
    for count in (1, 2, 4, 8):
        some = actors[:count]
        seconds = timed(partial(call_all, some), 20)
        say("call of all", replicas=count, ms=round(1000 * seconds, 3))


def call_all(actors: list[Any]) -> None:
    """Once each."""
    import ray

    ray.get([actor.commit.remote() for actor in actors])


def unpack_all(bundles: list[Any]) -> None:
    """Bundles into sealed memory."""
    unpacking = Unpacking(bundles)
    for index, bundle in enumerate(bundles):
        unpacking.add(index, bundle.data)
    unpacking.seal()
    unpacking.memory.close()


def whole(name: str, shape: tuple[int, ...]) -> Shard:
    """A tensor as one shard."""
    box = Box.whole(shape)
    return Shard(name, shape, "bfloat16", (Span(name, box, box),))


def first_rows(name: str, shape: tuple[int, ...], tp: int) -> Shard:
    """What rank 0 of ``tp`` would want of it, about."""
    rows = shape[0] // tp if len(shape) > 1 and shape[0] % tp == 0 else shape[0]
    cut = (rows, *shape[1:])
    return Shard(name, cut, "bfloat16", (Span(name, Box.whole(cut), Box.whole(cut)),))


# -- serving -----------------------------------------------------------------------------------------


def measure_serving(args: argparse.Namespace) -> None:
    """The same requests to one server, to a fleet of one, to a fleet of two."""
    from checkpoint_files import SMALL, write_hf
    from cluster_world import Front, World
    from serve_command import Command

    with tempfile.TemporaryDirectory() as folder:
        ckpt = args.ckpt
        if ckpt is None:
            ckpt = Path(folder) / "tiny"
            write_hf(ckpt, replace(SMALL, max_context=2048, dtype="float32"), max_position_embeddings=2048)
        single = Command(
            "--ckpt", str(ckpt), "--port", "0", "--device", "cpu", "--no-tokenizer", "--threads", "1",
            "--kv-memory", "64MiB",
        )  # fmt: skip
        try:
            serve("one server", Front(single), args)
        finally:
            single.stop()
        world = World(3)
        try:
            for replicas in (1, 2):
                front = world.front(ckpt, "--replicas", str(replicas), "--fleet", f"of-{replicas}")
                front.until(partial(are_ready, replicas))
                serve(f"fleet of {replicas}", front, args)
                front.command.process.terminate()
                front.command.end()
        finally:
            world.close()


# -- replicas and threads ----------------------------------------------------------------------------

ROUNDS = 4
AT_A_TIME = (8, 32)
PROMPT_TOKENS = 4


def measure_scaling(args: argparse.Namespace) -> None:
    """All are up at the same time and asked in turn, so that what changes on the machine hits them alike."""
    from cluster_world import Front, World
    from serve_command import Command

    common = [
        "--ckpt",
        str(args.ckpt),
        "--no-tokenizer",
        "--device",
        "cpu",
        "--context",
        "512",
        "--kv-memory",
        "512MiB",
    ]
    rest = common[2:]
    ends: list[Callable[[], Any]] = []
    over = time.monotonic() + 60 * args.minutes
    try:
        servers = [Command(*common, "--port", "0", "--threads", "1") for _ in range(2)]
        ends += [server.stop for server in servers]
        world = World(3)
        ends.append(world.close)
        threads2 = world.front(args.ckpt, *rest, "--cpus-per-rank", "2", "--fleet", "threads")
        two = world.front(args.ckpt, *rest, "--replicas", "2", "--fleet", "two")
        two.until(partial(are_ready, 2))
        one = world.front(args.ckpt, *rest, "--fleet", "one")
        plain = [Front(server) for server in servers]
        asked = {
            "a server of 1 thread": plain[:1],
            "two servers of 1 thread, no Ray": plain,
            "1 replica of 1 thread": [one],
            "1 replica of 2 threads": [threads2],
            "2 replicas of 1 thread": [two],
        }
        for fronts in asked.values():
            tokens_a_second(fronts, AT_A_TIME[0], 2)
        rates: dict[tuple[str, int], list[float]] = {}
        for _ in range(ROUNDS):
            if time.monotonic() > over:
                break
            for count in AT_A_TIME:
                for what, fronts in asked.items():
                    found = rates.setdefault((what, count), [])
                    found.append(round(tokens_a_second(fronts, count, args.tokens), 1))
                    say(what, at_a_time=count, tokens_per_s=found)
    finally:
        for end in reversed(ends):
            end()


def tokens_a_second(fronts: list[Any], count: int, tokens: int) -> float:
    """So many requests at the same time, shared among the fronts."""
    prompts = np.random.default_rng().integers(10, 40_000, (count, PROMPT_TOKENS)).tolist()  # none is in a cache
    began = time.perf_counter()
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda n: fronts[n % len(fronts)].generate(prompts[n], tokens), range(count)))
    return count * tokens / (time.perf_counter() - began)


def are_ready(count: int, body: Any) -> bool:
    """So many replicas."""
    return [one["state"] for one in body["replicas"]] == ["ready"] * count


def serve(what: str, front: Any, args: argparse.Namespace) -> None:
    """One request after the other, then many at a time."""
    for index in range(8):
        front.generate([3, 7, index + 1], args.tokens)
    alone = [timed(partial(front.generate, [5, n % 20 + 1, 2], args.tokens), 1) for n in range(20)]
    one_token = [timed(partial(front.generate, [5, n % 20 + 1, 2], 1), 1) for n in range(20)]
    began = time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda n: front.generate([n % 20 + 1, 7, 3], args.tokens), range(args.requests)))
    seconds = time.perf_counter() - began
    say(
        what,
        ms_of_one_token=round(1000 * sorted(one_token)[10], 2),
        ms_of_a_request=round(1000 * sorted(alone)[10], 2),
        requests_per_s=round(args.requests / seconds, 1),
        tokens_per_s=round(args.requests * args.tokens / seconds),
    )


if __name__ == "__main__":
    main()
