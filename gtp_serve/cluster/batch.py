"""Offline batch generation on a fleet through Ray Data:  python -m gtp_serve.cluster.batch --in PROMPTS --out FOLDER

JSON lines or Parquet in; completions with log-probabilities and weight versions out, in part files that appear whole
or not at all.  Started again with the same folder, it does what is not in there yet.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pyarrow
import pyarrow.parquet
import ray
import ray.data

from gtp_serve.cluster.bringup import join
from gtp_serve.cluster.fleet_actor import find_fleet
from gtp_serve.cluster.rollout import Rollout, RolloutWorker
from gtp_serve.cluster.settings import FleetConfig
from gtp_serve.errors import EngineFault, GtpServeError, RequestRejected, UsageError
from gtp_serve.loaders.tokenizer import Tokenizer, load_tokenizer
from gtp_serve.loaders.tokenizer_files import tokenizer_at
from gtp_serve.request import SamplingParams
from gtp_serve.server.failures import print_failure

_TRIES = 5
_PART_CPUS = 0.01
"""Replicas have the cores; what feeds them needs next to none, and must find a place beside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be done."""

    inputs: tuple[str, ...]
    """Files that end in ``.jsonl`` or ``.parquet``, readable on every node."""
    out: str
    fleet: str = "default"
    sampling: SamplingParams = field(default_factory=SamplingParams)
    samples: int = 1
    batch: int = 64
    """Prompts of one part file."""
    workers: int = 2
    parquet: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What was done, and what had been done before."""

    rows: int
    before: int
    tokens: int
    refused: int


def run(job: Job, *, progress: bool = True) -> Done:
    """Do all that is not done yet.

    :raises UsageError: for input that cannot be read.
    :raises EngineFault: when the fleet could not go on; what is finished is kept.
    """
    files = [_checked(path) for path in job.inputs]
    Path(job.out).mkdir(parents=True, exist_ok=True)
    finished = finished_ids(job.out)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = progress
    context.print_on_execution_start = False
    paths = ray.data.from_items([{"path": path} for path in files], override_num_blocks=len(files))
    rows = paths.flat_map(_Reader(frozenset(finished)), num_cpus=_PART_CPUS)
    parts = rows.map_batches(
        BatchWorker,
        fn_constructor_kwargs={"job": job},
        batch_size=job.batch,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=job.workers),
        num_cpus=_PART_CPUS,
    )
    count = tokens = refused = 0
    try:
        for part in parts.iter_rows():
            count, tokens, refused = count + part["rows"], tokens + part["tokens"], refused + part["refused"]
    except ray.exceptions.RayError as error:
        raise EngineFault(
            "the batch ended before its end",
            [
                ("ray", str(error).strip().splitlines()[-1][:300]),
                ("try", "the same command again: it goes on from here"),
            ],
            code="batch-cut",
        ) from error
    return Done(rows=count, before=len(finished), tokens=tokens, refused=refused)


def _checked(path: str) -> str:
    if not path.endswith((".jsonl", ".parquet")):
        raise UsageError(f"{path} is neither .jsonl nor .parquet")
    if not Path(path).is_file():
        raise UsageError(f"there is no file {path}")
    return str(Path(path).absolute())


def finished_ids(out: str) -> set[str]:
    """Ids in the part files of a folder."""
    found: set[str] = set()
    for part in Path(out).glob("part-*"):
        if part.suffix == ".parquet":
            found.update(pyarrow.parquet.read_table(part, columns=["id"]).column("id").to_pylist())
        elif part.suffix == ".jsonl":
            with part.open(encoding="utf-8") as lines:
                found.update(str(json.loads(line)["id"]) for line in lines)
    return found


class _Reader:
    """A file's rows that are not finished, each with an id that is the same in every run."""

    def __init__(self, finished: frozenset[str]) -> None:
        self._finished = finished

    def __call__(self, file: dict[str, Any]) -> list[dict[str, Any]]:
        path = Path(file["path"])
        rows: list[dict[str, Any]] = []
        for number, row in enumerate(_rows(path)):
            name = str(row.get("id", f"{path.name}:{number}"))
            if name not in self._finished:
                rows.append({"id": name, "row": json.dumps(row)})
        return rows


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".parquet":
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{path.name}, line {number}: no JSON ({error})") from error
            if not isinstance(row, dict):
                raise UsageError(f"{path.name}, line {number}: not an object")
            yield row


class BatchWorker:
    """Generates for one batch after the other and writes each batch's part file.

    An actor of Ray Data's: its calls come from one thread, and a loop of its own runs the requests.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loop = asyncio.new_event_loop()
        self._worker = RolloutWorker(job.fleet)
        self._tokenizer = self._find_tokenizer()

    def _find_tokenizer(self) -> Tokenizer | None:
        config = msgspec.json.decode(ray.get(find_fleet(self._job.fleet).config.remote()), type=FleetConfig)
        path = config.launch.tokenizer
        return None if path is None else load_tokenizer(tokenizer_at(Path(path)))

    def __call__(self, batch: pyarrow.Table) -> pyarrow.Table:
        rows = [(row["id"], json.loads(row["row"])) for row in batch.to_pylist()]
        results = self._loop.run_until_complete(self._generate(rows))
        lines = [line for result in results for line in result]
        _write(self._job, lines)
        tokens = sum(len(line["output_ids"]) for line in lines)
        refused = sum(1 for line in lines if line["error"])
        return pyarrow.table({"rows": [len(rows)], "tokens": [tokens], "refused": [refused]})

    async def _generate(self, rows: Sequence[tuple[str, dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        return list(await asyncio.gather(*(self._row(name, row) for name, row in rows)))

    async def _row(self, name: str, row: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            ids = self._ids(row)
            found = await self._patiently(ids)
        except RequestRejected as error:
            return [_line(name, 0, None, self._tokenizer, str(error))]
        return [_line(name, index, one, self._tokenizer, "") for index, one in enumerate(found)]

    def _ids(self, row: dict[str, Any]) -> list[int]:
        ids, text = row.get("input_ids"), row.get("prompt", row.get("text"))
        if isinstance(ids, list) and ids and all(type(one) is int for one in ids):
            return ids
        if not isinstance(text, str):
            raise RequestRejected("the row has neither input_ids nor prompt", code="no-prompt")
        if self._tokenizer is None:
            raise RequestRejected("the fleet has no tokenizer: rows need input_ids", code="no-tokenizer")
        return self._tokenizer.encode(text)

    async def _patiently(self, ids: list[int]) -> list[Rollout]:
        """A replica that is lost in the middle of a sequence costs the sequence only time."""
        for tried in range(_TRIES):
            try:
                return (await self._worker.generate([ids], self._job.sampling, samples=self._job.samples))[0]
            except RequestRejected as error:
                if error.http_status != 503 or tried == _TRIES - 1:
                    raise
            except EngineFault:
                if tried == _TRIES - 1:
                    raise
            await asyncio.sleep(0.5 * 2**tried)
        raise AssertionError("the last try has raised")


def _line(name: str, sample: int, found: Rollout | None, tokenizer: Tokenizer | None, error: str) -> dict[str, Any]:
    output = [] if found is None else list(found.output_ids)
    return {
        "id": name,
        "sample": sample,
        "output_ids": output,
        "logprobs": [] if found is None else list(found.logprobs),
        "weight_versions": [] if found is None else [list(map(str, span)) for span in found.versions],
        "finish_reason": "refused" if found is None else found.finish,
        "text": "" if tokenizer is None or found is None else tokenizer.decode(output),
        "error": error,
    }


def _write(job: Job, lines: Sequence[dict[str, Any]]) -> None:
    """A part file, there as a whole or not at all."""
    folder = Path(job.out)
    name = uuid.uuid4().hex
    draft = folder / f".draft-{name}"
    if job.parquet:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(lines)), draft)
    else:
        draft.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    with draft.open("rb") as written:
        os.fsync(written.fileno())
    draft.rename(folder / f"part-{name}.{'parquet' if job.parquet else 'jsonl'}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m gtp_serve.cluster.batch", description=__doc__)
    parser.add_argument("--in", dest="inputs", nargs="+", required=True, metavar="FILE")
    parser.add_argument("--out", required=True, metavar="FOLDER")
    parser.add_argument("--address", default="auto", help="of the Ray cluster (auto)")
    parser.add_argument("--fleet", default="default")
    parser.add_argument("--samples", type=int, default=1, help="of each prompt (1)")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--batch", type=int, default=64, help="prompts of one part file (64)")
    parser.add_argument("--workers", type=int, default=2, help="batches at a time (2)")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    sampling = SamplingParams(max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed)
    job = Job(
        inputs=tuple(args.inputs), out=str(Path(args.out).absolute()), fleet=args.fleet, sampling=sampling,
        samples=args.samples, batch=args.batch, workers=args.workers, parquet=args.format == "parquet",
    )  # fmt: skip
    try:
        join(args.address)
        done = run(job, progress=not args.quiet)
    except GtpServeError as error:
        return print_failure(error, sys.stderr)
    print(json.dumps(asdict(done)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
