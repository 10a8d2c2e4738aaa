"""Trainer actors at GTP=2 and a rollout worker on a Ray cluster; prints what came of it as one line of JSON.

Run as a script:  cluster_trainers.py ADDRESS FLEET CHECKPOINT VERSION
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import ray
import torch

from gtp_serve.cluster.push import bundle_shards, offered_shards
from gtp_serve.cluster.rollout import rollout_worker
from gtp_serve.cluster.settings import NAMESPACE
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.request import SamplingParams

GTP = 2
PAD = 16
"""Each rank's rows are a multiple of this many, padded where the tensor has fewer."""


class Trainer:
    """One rank: padded rows of each matrix, vectors whole, as GTP cuts them; every weight halved."""

    def __init__(self, rank: int, ckpt: str) -> None:
        self.rank = rank
        self.pairs: list[tuple[Shard, torch.Tensor]] = []
        for name, tensor in open_checkpoint(Path(ckpt)).tensors():
            self.pairs.append(self._cut(name, tensor * 0.5))

    def _cut(self, name: str, tensor: torch.Tensor) -> tuple[Shard, torch.Tensor]:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        whole = Box.whole(shape)
        if len(shape) == 1:
            return Shard(name, shape, dtype, (Span(name, whole, whole),)), tensor
        rows = -(-shape[0] // (PAD * GTP)) * PAD
        first = self.rank * rows
        real = max(0, min(rows, shape[0] - first))
        padded = torch.full((rows, *shape[1:]), float("nan"), dtype=tensor.dtype)
        padded[:real] = tensor[first : first + real]
        local, logical = Box((0, 0), (real, shape[1])), Box((first, 0), (real, shape[1]))
        spans = (Span(name, local, logical),) if real else ()
        return Shard(f"{name}.{self.rank}", tuple(padded.shape), dtype, spans), padded

    def offered(self) -> Any:
        return offered_shards(self.pairs)

    def bundles(self, ranks: Any, tensors: Any) -> Any:
        self.made = bundle_shards(self.pairs, self.rank, ranks, tensors)
        return self.made

    def sent(self) -> int:
        return sum(bundle.payload for bundle in self.made)


def main(address: str, fleet: str, ckpt: str, version: str) -> None:
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
    worker = rollout_worker(fleet)
    remote: Any = ray.remote
    trainers = [remote(Trainer).options(num_cpus=0).remote(rank, ckpt) for rank in range(GTP)]
    tensors = ray.get(worker.layout.remote())["tensors"]
    sampling = SamplingParams(max_new_tokens=6, temperature=0, ignore_eos=True)
    prompts = [[3, 7, 11], [5, 1]]
    before = ray.get(worker.generate.remote(prompts, sampling, samples=2))
    ranks = ray.get([trainer.offered.remote() for trainer in trainers])
    parts = ray.get([trainer.bundles.remote(ranks, tensors) for trainer in trainers])
    record = ray.get(worker.push.remote(parts, version))
    after = ray.get(worker.generate.remote(prompts, sampling))
    one = after[0][0]
    scores = ray.get(worker.score.remote([[*one.prompt_ids, *one.output_ids]], start=len(one.prompt_ids) - 1))[0]
    size = sum(tensor.nbytes for _, tensor in open_checkpoint(Path(ckpt)).tensors())
    print(
        json.dumps(
            {
                "state": record.state,
                "version": version,
                "ratio": sum(ray.get([trainer.sent.remote() for trainer in trainers])) / size,
                "before": [[list(one.output_ids) for one in group] for group in before],
                "after": [list(group[0].output_ids) for group in after],
                "versions": [group[0].versions for group in after],
                "score_error": max(abs(a - b) for a, b in zip(scores, one.logprobs, strict=True)),
            }
        )
    )
    ray.get(worker.close.remote())


if __name__ == "__main__":
    main(*sys.argv[1:])
