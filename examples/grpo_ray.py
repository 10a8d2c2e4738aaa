"""GRPO on a Ray cluster: a fleet of engines, trainer actors at GTP=2, a rollout worker between them.

    ray start --head
    gtp-serve cluster --ckpt .demo/megatron --replicas 2 --deterministic
    python examples/grpo_ray.py --ckpt .demo/megatron --steps 4 --deterministic

Each step samples a group of answers to each prompt from the fleet, rewards what can be verified, takes one policy
gradient step on shards, and pushes the new weights: each trainer's rows go into Ray's object store once, and from one
replica to the others.  The loss is that of ``examples/grpo.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch

# By its name: cloudpickle, which takes this file's classes to the actors, finds torch.distributed.config behind a
# method that names ``torch.distributed`` and some ``config``, and no module of that kind can be pickled.
from torch.distributed import init_process_group

from gtp_serve.cluster.push import bundle_shards, offered_shards
from gtp_serve.cluster.rollout import Rollout, rollout_worker
from gtp_serve.cluster.settings import NAMESPACE
from gtp_serve.errors import GtpServeError
from gtp_serve.layout.gtp import Grid
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.request import SamplingParams
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.decoder import build_train_decoder
from gtp_serve.training.gradients import clip_gradients
from gtp_serve.training.groups import build_training_groups
from gtp_serve.training.loss import group_advantages, policy_loss, target_logprobs
from gtp_serve.training.publish import publish


class Trainer:
    """One trainer rank: its shards of the model, its optimizer, its place in the trainers' group."""

    def __init__(self, rank: int, args: argparse.Namespace, meet: str) -> None:
        torch.set_num_threads(1)
        init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=args.gtp)
        self.rank = rank
        checkpoint = open_checkpoint(Path(args.ckpt))
        self.model = build_train_decoder(
            checkpoint.config,
            dtype=getattr(torch, args.dtype),
            groups=build_training_groups(Grid(gtp=args.gtp)),
            alignment=args.alignment,
            deterministic=args.deterministic,
        )
        self.model.load_weights(checkpoint.source)
        checkpoint.close()
        self.optimizer = AdamW(self.model, lr=args.learning_rate)

    def offered(self) -> Any:
        """What this rank holds: metadata."""
        return offered_shards(publish(self.model))

    def bundles(self, ranks: Any, tensors: Any) -> Any:
        """Its part of the model in the object store, straight from its shards."""
        return bundle_shards(publish(self.model), self.rank, ranks, tensors)

    def step(self, groups: list[list[Rollout]], rewards: list[list[float]]) -> float:
        """One policy gradient step on this rank's groups; mean over tokens of |its log-probability - the fleet's|."""
        samples = [one for group in groups for one in group]
        total = sum(len(one.output_ids) for one in samples)
        counts = torch.tensor([len(one.output_ids) for one in samples])
        logprobs = self.logprobs(samples)
        told = torch.tensor([value for one in samples for value in one.logprobs])
        advantages = group_advantages(torch.tensor(rewards)).flatten().repeat_interleave(counts)
        torch.autograd.backward(policy_loss(logprobs, told, advantages, divisor=total))
        self.model.finish_gradients()
        clip_gradients(self.optimizer.shards, 1.0)
        self.optimizer.step()
        self.optimizer.zero_gradients()
        return float((logprobs.detach() - told).abs().mean())

    def logprobs(self, samples: list[Rollout]) -> torch.Tensor:
        """The trainer's log-probabilities of the sampled tokens, one sample behind another."""
        whole = [[*one.prompt_ids, *one.output_ids] for one in samples]
        ids = torch.tensor([token for sample in whole for token in sample])
        lengths = [len(sample) for sample in whole]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        each = zip(ends, samples, strict=True)
        rows = torch.cat([torch.arange(end - len(one.output_ids), end) - 1 for end, one in each])
        return target_logprobs(self.model(ids, lengths, rows), ids[rows + 1], self.model.config, self.model.placement)


def main() -> int:
    """The loop; a line for each step."""
    args = parser().parse_args()
    ray.init(address=args.address, namespace=NAMESPACE, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            loop(args, f"{folder}/meet")
    except GtpServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description="Sample from a fleet, train on shards, push, again.")
    made.add_argument("--ckpt", required=True, help="what the fleet serves and training starts from")
    made.add_argument("--address", default="auto", help="of the Ray cluster")
    made.add_argument("--fleet", default="default")
    made.add_argument("--gtp", type=int, default=2)
    made.add_argument("--alignment", type=int, default=16)
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--prompts", type=int, default=2, help="of each trainer rank")
    made.add_argument("--samples", type=int, default=4)
    made.add_argument("--max-new-tokens", type=int, default=6)
    made.add_argument("--target", type=int, default=7, help="the id that is rewarded")
    made.add_argument("--learning-rate", type=float, default=1e-4)
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--deterministic", action="store_true", help="the fleet was started with --deterministic")
    made.add_argument("--seed", type=int, default=0)
    return made


def loop(args: argparse.Namespace, meet: str) -> None:
    """Sample, reward, train, push."""
    dice = random.Random(args.seed)
    worker = rollout_worker(args.fleet)
    layout = ray.get(worker.layout.remote())
    remote: Any = ray.remote
    trainers = [remote(Trainer).options(num_cpus=0).remote(rank, args, meet) for rank in range(args.gtp)]
    ranks = ray.get([trainer.offered.remote() for trainer in trainers])
    version = ray.get(worker.version.remote())
    base, _, last = version.partition("+")
    done = int(last) if last.isdecimal() else 0  # by a run before this one
    for step in range(done + 1, done + args.steps + 1):
        prompts = [[dice.randrange(1, 16) for _ in range(4)] for _ in range(args.prompts * args.gtp)]
        sampling = SamplingParams(max_new_tokens=args.max_new_tokens, min_new_tokens=1, seed=dice.randrange(1 << 30))
        groups = ray.get(worker.generate.remote(prompts, sampling, samples=args.samples))
        stale = {span[0] for group in groups for one in group for span in one.versions} - {version}
        rewards = [[sum(token == args.target for token in one.output_ids) / args.max_new_tokens for one in group]
                   for group in groups]  # fmt: skip
        shares = [slice(rank * args.prompts, (rank + 1) * args.prompts) for rank in range(args.gtp)]
        errors = ray.get(
            [one.step.remote(groups[mine], rewards[mine]) for one, mine in zip(trainers, shares, strict=True)]
        )
        parts = ray.get([trainer.bundles.remote(ranks, layout["tensors"]) for trainer in trainers])
        record = ray.get(worker.push.remote(parts, f"{base}+{step}", base=version))
        version = record.version
        flat = [reward for group in rewards for reward in group]
        line = {"step": step, "reward": round(sum(flat) / len(flat), 4), "logprob_error": sum(errors) / len(errors)}
        line |= {"version": version, "push_s": round(record.seconds["total"], 3), "stale": sorted(stale)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
