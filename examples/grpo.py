"""GRPO from end to end on one machine: a server, a GTP trainer of two processes, and a push into it after each step.

    gtp-serve demo .demo
    python examples/grpo.py --ckpt .demo/megatron --steps 8

Each step samples a group of answers to each prompt from the server, rewards what can be verified, takes one policy
gradient step on shards, and pushes the new weights while a request is in flight.  Needs this package only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from gtp_serve.errors import GtpServeError
from gtp_serve.layout.gtp import Grid
from gtp_serve.layout.huggingface import logical_tensors
from gtp_serve.loaders.checkpoint import open_checkpoint
from gtp_serve.refit import Publisher, PushReport
from gtp_serve.training.adamw import AdamW
from gtp_serve.training.decoder import TrainDecoder, build_train_decoder
from gtp_serve.training.fidelity import (
    ErrorSplit,
    TensorSource,
    cold_decoder,
    gather_weights,
    prob_error,
    sequence_logprobs,
    split_error,
)
from gtp_serve.training.gradients import clip_gradients
from gtp_serve.training.groups import build_training_groups
from gtp_serve.training.loss import group_advantages, policy_loss, target_logprobs
from gtp_serve.training.publish import publish

DIST: Any = torch.distributed
START_SECONDS = 180
WORDS = (
    "apple",
    "river",
    "stone",
    "cloud",
    "tiger",
    "lemon",
    "window",
    "garden",
    "silver",
    "candle",
    "forest",
    "butter",
)


def main(argv: list[str] | None = None) -> int:
    """Run the loop, a line for each step; returns the exit code."""
    args = parser().parse_args(argv)
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the server too: sums of as many threads have the same bits
    try:
        with tempfile.TemporaryDirectory() as folder, serving(args, Path(folder)) as url:
            context = multiprocessing.get_context("spawn")
            ranks = [
                context.Process(target=train_rank, args=(rank, args, url, f"{folder}/meet")) for rank in range(args.gtp)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            return max(abs(process.exitcode or 0) for process in ranks)
    except GtpServeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description="Sample, train on shards, push, again.")
    made.add_argument("--ckpt", required=True, help="what both sides start from: anything that gtp-serve takes")
    made.add_argument("--url", help="of a server that runs already; one is started otherwise")
    made.add_argument("--key", help="its admin key")
    made.add_argument("--gtp", type=int, default=2, help="trainer processes that share each weight")
    made.add_argument("--alignment", type=int, default=16)
    made.add_argument("--steps", type=int, default=8)
    made.add_argument("--prompts", type=int, default=2, help="of each trainer process, each step")
    made.add_argument("--samples", type=int, default=8, help="of each prompt: its group")
    made.add_argument("--micro-batch", type=int, default=8, help="sequences of one forward pass")
    made.add_argument("--max-new-tokens", type=int, default=6)
    made.add_argument("--learning-rate", type=float, default=1e-5)
    made.add_argument("--task", default="copy", help="copy (words, needs a tokenizer) or an id to emit often")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the trainer")
    made.add_argument("--server-dtype", choices=("bfloat16", "float32"), help="the trainer's, if not given")
    made.add_argument("--fast", action="store_true", help="without --deterministic, on both sides")
    made.add_argument("--transport", choices=("auto", "memory", "distributed"), default="auto")
    made.add_argument("--threads", type=int, default=1, help="of each process")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--json", action="store_true", help="print JSON lines")
    return made


# -- the server --------------------------------------------------------------------------------------


@contextmanager
def serving(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """A server's URL; one that is started here ends with the block."""
    if args.url:
        yield args.url
        return
    log = folder / "server.log"
    words = ["--ckpt", args.ckpt, "--port", "0", "--dtype", args.server_dtype or args.dtype, "--device", "cpu"]
    words += [] if args.fast else ["--deterministic"]
    words += ["--no-tokenizer"] if args.task.isdigit() else []
    with log.open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "gtp_serve.server", *words, "--log", "json"], stderr=out, stdout=out
        )
    try:
        yield wait_ready(process, log)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """The URL that the server tells when it is ready."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("{") and line.endswith("}") and (event := json.loads(line)).get("event") == "ready":
                return str(event["url"])
        time.sleep(0.1)
    raise SystemExit(f"the server did not start:\n{log.read_text()}")


def ask(args: argparse.Namespace, url: str, path: str, body: Any = None) -> Any:
    """A JSON request."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {args.key}"} if args.key else {})
    data = None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url + path, data, headers), timeout=600) as reply:
        return json.load(reply)


# -- the task ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """What is sent, and what its answers are held against."""

    field: dict[str, Any]
    wanted: str


def draw_prompts(args: argparse.Namespace, step: int, rank: int, vocab_size: int) -> list[Prompt]:
    """This rank's prompts of a step."""
    dice = random.Random(f"{args.seed} {step} {rank}")
    if args.task.isdigit():
        drawn = [[dice.randrange(vocab_size) for _ in range(4)] for _ in range(args.prompts)]
        return [Prompt({"input_ids": ids}, args.task) for ids in drawn]
    shots = "".join(f"{word} -> {word}\n" for word in ("house", "music"))
    words = dice.sample(WORDS, args.prompts)
    return [Prompt({"text": f"{shots}{word} ->"}, word) for word in words]


def reward_of(prompt: Prompt, ids: Sequence[int], text: str) -> float:
    """Copying: 1 when the word and nothing else stands on the first line.  Else the share of the wanted id."""
    if prompt.wanted.isdigit():
        return sum(token == int(prompt.wanted) for token in ids) / len(ids)
    return float(text.partition("\n")[0].strip() == prompt.wanted)


@dataclass(frozen=True)
class Sample:
    """One answer."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: Tensor
    reward: float

    @property
    def ids(self) -> list[int]:
        """All of it."""
        return [*self.prompt_ids, *self.output_ids]


# -- one trainer process -----------------------------------------------------------------------------


def train_rank(rank: int, args: argparse.Namespace, url: str, meet: str) -> None:
    """A rank of the trainer, from its checkpoint to its last push."""
    torch.set_num_threads(args.threads)
    store = DIST.FileStore(meet, args.gtp)
    DIST.init_process_group("gloo", store=store, rank=rank, world_size=args.gtp)
    try:
        Trainer(rank, args, url).run()
    except GtpServeError as error:
        raise SystemExit(f"error: {error}") from None
    finally:
        DIST.destroy_process_group()


class Trainer:
    """One of the processes that share every weight; each samples and trains on prompts of its own."""

    def __init__(self, rank: int, args: argparse.Namespace, url: str) -> None:
        self.rank, self.args, self.url = rank, args, url
        checkpoint = open_checkpoint(Path(args.ckpt))
        self.config = checkpoint.config
        groups = build_training_groups(Grid(gtp=args.gtp, egtp=args.gtp if self.config.moe else 1))
        self.model = build_train_decoder(
            self.config,
            dtype=dtype_of(args.dtype),
            groups=groups,
            alignment=args.alignment,
            deterministic=not args.fast,
        )
        self.model.load_weights(checkpoint.source)
        checkpoint.close()
        self.optimizer = AdamW(self.model, lr=args.learning_rate)
        self.publisher = Publisher(url, args.key, args.transport)
        self.serving: str = ask(args, url, "/model_info")["weight_version"]

    def run(self) -> None:
        """All steps."""
        base = self.serving.partition("+")[0]
        for step in range(1, self.args.steps + 1):
            groups = self.sample(step)
            samples = [sample for group in groups for sample in group]
            trained = self.backward(samples, group_advantages(rewards_of(groups)))
            split = self.split(samples, trained) if step == self.args.steps else None
            norm = clip_gradients(self.optimizer.shards, 1.0)
            self.optimizer.step()
            self.optimizer.zero_gradients()
            # The weights change under a request that is being answered; it goes on with them, from its next token.
            waiting = InFlight(self, samples[0]) if self.rank == 0 else None
            report = self.publisher.push(publish(self.model), version=f"{base}+{step}", base=self.serving)
            self.serving = report.version
            self.tell_step(step, samples, trained, report, norm, waiting)
            if split is not None:
                self.tell(
                    **{name: str(getattr(split, name)) for name in ("total", "refit", "kernel", "precision")},
                    refit_same_bits=f"{split.refit.equal}/{split.refit.tokens}",
                )

    def tell_step(
        self,
        step: int,
        samples: Sequence[Sample],
        trained: Tensor,
        report: PushReport,
        norm: float,
        waiting: InFlight | None,
    ) -> None:
        """What came of a step, over all ranks."""
        error = prob_error(torch.cat([sample.logprobs for sample in samples]), trained)
        reward, count, mean, tokens, equal, sent = self.total(
            sum(sample.reward for sample in samples), len(samples), error.mean * error.tokens, error.tokens,
            error.equal, report.sent_bytes,
        )  # fmt: skip
        self.tell(
            step=step,
            reward=round(reward / count, 4),
            token_mult_prob_error=f"{mean / tokens:.6f}",
            same_bits=f"{equal:.0f}/{tokens:.0f}",
            grad_norm=round(norm, 4),
            version=report.version,
            transport=report.transport,
            bytes=int(sent),
            push_seconds=round(report.seconds, 3),
            stall_ms=round(1000 * report.stall_seconds, 3),
            in_flight=waiting.versions() if waiting else [],
        )

    def sample(self, step: int) -> list[list[Sample]]:
        """A group of answers to each prompt."""
        prompts = draw_prompts(self.args, step, self.rank, self.config.vocab_size)
        sampling = {
            "max_new_tokens": self.args.max_new_tokens, "min_new_tokens": 1, "n": self.args.samples, "temperature": 1.0,
            "seed": self.args.seed + 1000 * step + self.rank,
        }  # fmt: skip
        (field,) = {name for prompt in prompts for name in prompt.field}
        body = {field: [prompt.field[field] for prompt in prompts], "sampling_params": sampling}
        replies = ask(
            self.args, self.url, "/generate", {**body, "return_logprob": True, "return_prompt_token_ids": True}
        )
        each = self.args.samples
        grouped = [replies[first : first + each] for first in range(0, len(replies), each)]
        return [[sample_of(p, reply) for reply in group] for p, group in zip(prompts, grouped, strict=True)]

    def backward(self, samples: Sequence[Sample], advantages_GN: Tensor) -> Tensor:
        """Gradients of all micro-batches, finished; the trainer's log-probabilities of the sampled tokens."""
        total = sum(len(sample.output_ids) for sample in samples)
        advantages = advantages_GN.flatten().tolist()
        found: list[Tensor] = []
        for first in range(0, len(samples), self.args.micro_batch):
            part = samples[first : first + self.args.micro_batch]
            logprobs = logprobs_of(self.model, part)
            told = torch.cat([sample.logprobs for sample in part])
            counts = torch.tensor([len(sample.output_ids) for sample in part])
            weights = torch.tensor(advantages[first : first + len(part)]).repeat_interleave(counts)
            torch.autograd.backward(policy_loss(logprobs, told, weights, divisor=total))
            found.append(logprobs.detach())
        self.model.finish_gradients()
        return torch.cat(found)

    def split(self, samples: Sequence[Sample], trained: Tensor) -> ErrorSplit | None:
        """Where the difference between server and trainer comes from.  Collective; rank 0 has the answer."""
        weights = gather_weights(self.model, logical_tensors(self.config))
        if self.rank:
            return None
        dtype, exact = dtype_of(self.args.server_dtype or self.args.dtype), not self.args.fast
        decoder = cold_decoder(self.config, weights, dtype=dtype, deterministic=exact)
        cold = sequence_logprobs(decoder, [sample.ids for sample in samples])
        same = trained
        if dtype != self.model.placement.dtype:
            twin = build_train_decoder(self.config, dtype=dtype, deterministic=exact)
            twin.load_weights(TensorSource(weights))
            with torch.no_grad():
                same = logprobs_of(twin, samples)
        return split_error(
            sampled=torch.cat([sample.logprobs for sample in samples]),
            served=torch.cat([self.served(sample) for sample in samples]),
            cold=torch.cat([x[len(s.prompt_ids) - 1 :] for x, s in zip(cold, samples, strict=True)]),
            same_numbers=same,
            trained=trained,
        )

    def served(self, sample: Sample) -> Tensor:
        """What the server says of the sampled tokens when it reads them as a prompt, alone."""
        body = {"input_ids": sample.ids, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
        reply = ask(self.args, self.url, "/generate", {**body, "logprob_start_len": 0})
        entries = reply["meta_info"]["input_token_logprobs"][len(sample.prompt_ids) :]
        return torch.tensor([entry[0] for entry in entries])

    def total(self, *values: float) -> list[float]:
        """The sums over all ranks."""
        sums = torch.tensor(values, dtype=torch.float64)
        DIST.all_reduce(sums)
        found: list[float] = sums.tolist()
        return found

    def tell(self, **fields: Any) -> None:
        """A line, from rank 0."""
        if self.rank == 0:
            line = json.dumps(fields) if self.args.json else ", ".join(f"{k} {v}" for k, v in fields.items() if v != [])
            print(line, flush=True)


class InFlight:
    """Requests that are answered, one after another, while weights arrive."""

    def __init__(self, trainer: Trainer, sample: Sample) -> None:
        body = {"input_ids": sample.prompt_ids, "sampling_params": {"max_new_tokens": 24, "ignore_eos": True}}
        self._arrived = threading.Event()
        self._replies: list[Any] = []
        self._thread = threading.Thread(target=self._ask, args=(trainer.args, trainer.url, body))
        self._thread.start()

    def _ask(self, args: argparse.Namespace, url: str, body: Any) -> None:
        while not self._replies or not self._arrived.is_set():
            self._replies.append(ask(args, url, "/generate", body))

    def versions(self) -> list[str]:
        """The weights that made the tokens of one of them, of one with several if there is such a one."""
        self._arrived.set()
        self._thread.join()
        answered: list[list[Any]] = [reply["meta_info"]["weight_versions"] for reply in self._replies]
        spans: list[Any] = max(answered, key=len, default=[])
        return [span["version"] for span in spans]


def logprobs_of(model: TrainDecoder, samples: Sequence[Sample]) -> Tensor:
    """The trainer's log-probabilities of the sampled tokens, one sample behind another."""
    ids = torch.tensor([token for sample in samples for token in sample.ids])
    lengths = [len(sample.ids) for sample in samples]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    rows = torch.cat([torch.arange(end - len(s.output_ids), end) - 1 for end, s in zip(ends, samples, strict=True)])
    return target_logprobs(model(ids, lengths, rows), ids[rows + 1], model.config, model.placement)


def sample_of(prompt: Prompt, reply: Any) -> Sample:
    """A reply with its reward."""
    logprobs = torch.tensor([entry[0] for entry in reply["meta_info"]["output_token_logprobs"]])
    reward = reward_of(prompt, reply["output_ids"], reply.get("text") or "")
    return Sample(reply["prompt_token_ids"], reply["output_ids"], logprobs, reward)


def rewards_of(groups: Sequence[Sequence[Sample]]) -> Tensor:
    """[prompts, samples]."""
    return torch.tensor([[sample.reward for sample in group] for group in groups])


def dtype_of(name: str) -> torch.dtype:
    """torch's."""
    return torch.bfloat16 if name == "bfloat16" else torch.float32


if __name__ == "__main__":
    sys.exit(main())
