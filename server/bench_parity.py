"""``bench --parity``: how far the server's log-probabilities are from somebody else's, on the same tokens.

Against a Hugging Face folder the server generates greedily and transformers scores what it made, in the server's dtype.
Against a file the server scores what a trainer has scored: one JSON object a line, ``input_ids``, ``output_ids`` and
``logprobs``.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult

from gtp_serve.errors import EngineFault, EnvironmentFault, UsageError
from gtp_serve.progress import Bar
from gtp_serve.server.bench_http import Connection
from gtp_serve.server.bench_load import Job

WORRYING = 1.05
"""``token_mult_prob_error`` from which on people call the two sides apart."""
_MODULE = "gtp_serve.transformers_scores"
_MAX_LINES = 100_000
_SHOWN = 5


@dataclass(kw_only=True, slots=True)
class Scored:
    """One sequence with both sides' log-probabilities of its output tokens."""

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...] = ()
    """Empty: to be made."""
    wanted: int = 0
    """So many of them."""
    served: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    best: list[int] = field(default_factory=list)
    """The other side's greedy choice at each token, where it tells."""
    margins: list[float] = field(default_factory=list)
    """By how much that is more probable to it than the token."""


def read_scores(path: Path) -> list[Scored]:
    """A trainer's file.

    :raises UsageError: naming the line at fault.
    """
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            found.append(_read_line(line, f"{path.name}, line {number}"))
    if not 1 <= len(found) <= _MAX_LINES:
        raise UsageError(f"{path} has {len(found)} sequences", [("possible", f"1 to {_MAX_LINES}")])
    return found


def _read_line(line: str, where: str) -> Scored:
    try:
        one = json.loads(line)
        ids, made = tuple(one["input_ids"]), tuple(one["output_ids"])
        scores = [float(value) for value in one["logprobs"]]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{where} is no object with input_ids, output_ids and logprobs: {error}") from None
    if not ids or not made or len(made) != len(scores) or not all(type(token) is int for token in (*ids, *made)):
        raise UsageError(
            f"{where} has {len(ids)} input ids, {len(made)} output ids and {len(scores)} log-probabilities",
            [("needed", "some of each, and as many log-probabilities as output ids")],
        )
    if not all(map(math.isfinite, scores)):
        raise UsageError(f"{where} has a log-probability that is no finite number")
    return Scored(input_ids=ids, output_ids=made, theirs=scores)


def to_make(job: Job) -> Scored:
    """A sequence that the server is to generate greedily."""
    return Scored(input_ids=job.input_ids, wanted=job.output_tokens)


def _body(one: Scored) -> dict[str, Any]:
    if not one.output_ids:
        sampling = {"temperature": 0, "max_new_tokens": one.wanted, "ignore_eos": True}
        return {"input_ids": one.input_ids, "sampling_params": sampling, "return_logprob": True}
    return {
        "input_ids": (*one.input_ids, *one.output_ids),
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": len(one.input_ids) - 1,
    }


async def ask_all(
    url: SplitResult, key: str | None, seconds: float, scored: Sequence[Scored], concurrency: int
) -> None:
    """Let the server generate what is to be made, score what is there, and fill in its numbers.

    :param seconds: of silence until a request counts as lost.
    :raises EngineFault: when it refuses a sequence.
    """
    waiting = iter(scored)
    with Bar("sequences", len(scored), unit="sequences") as bar:

        async def work() -> None:
            connection = Connection(url, key, seconds)
            try:
                for one in waiting:  # shared: each worker takes the next one
                    _take(one, await connection.post_json("/generate", _body(one)))
                    bar.advance("")
            finally:
                connection.close()

        await asyncio.gather(*(work() for _ in range(min(concurrency, len(scored)))))


def _take(one: Scored, reply: Mapping[str, Any]) -> None:
    meta = reply["meta_info"]
    if meta["finish_reason"]["type"] == "abort":
        raise EngineFault(f"a sequence was aborted: {meta['finish_reason'].get('message', '')}", code="bench-failed")
    if one.output_ids:
        one.served = [_number(value) for value, _, _ in meta["input_token_logprobs"][1:]]
    else:
        one.output_ids = tuple(reply["output_ids"])
        one.served = [_number(value) for value, _, _ in meta["output_token_logprobs"]]


def _number(value: float | None) -> float:
    """JSON has no word for the logarithm of 0."""
    return -math.inf if value is None else value


def score_with_transformers(folder: Path, dtype: str, scored: Sequence[Scored]) -> None:
    """Fill in transformers' numbers.

    :raises EnvironmentFault: when it is not installed, or cannot load the folder.
    """
    sequences = [{"input_ids": one.input_ids, "output_ids": one.output_ids} for one in scored]
    order = {"folder": str(folder.absolute()), "dtype": dtype, "sequences": sequences}
    child = subprocess.run(
        [sys.executable, "-m", _MODULE], input=json.dumps(order), capture_output=True, text=True, check=False
    )
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        raise EnvironmentFault(
            "transformers ended without an answer",
            [("exit code", str(child.returncode)), ("said", child.stderr[-300:])],
        ) from None
    if "error" in answer:
        advice = [("try", "pip install 'gtp-serve[hf]'")] if answer.get("missing") else []
        raise EnvironmentFault(f"transformers cannot score this: {answer['error'][:500]}", advice)
    for one, theirs in zip(scored, answer["sequences"], strict=True):
        one.theirs, one.best, one.margins = theirs["logprobs"], theirs["best"], theirs["margins"]


def summarise_parity(scored: Sequence[Scored]) -> dict[str, Any]:
    """Everything as JSON values.

    :raises EngineFault: when one side gave no numbers for a token.
    """
    pairs = [
        (a, b, at, index)
        for index, one in enumerate(scored)
        for at, (a, b) in enumerate(zip(one.served, one.theirs, strict=True))
    ]
    if not pairs or not all(math.isfinite(a) and math.isfinite(b) for a, b, _, _ in pairs):
        raise EngineFault("a log-probability is no finite number", code="bench-failed")
    gaps = [abs(a - b) for a, b, _, _ in pairs]
    # A difference beyond every reason must not be an overflow.
    errors = [math.exp(min(gap, 700.0)) for gap in gaps]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    others = [
        {"sequence": index, "token": at, "served": made, "theirs": best, "behind": margin}
        for index, one in enumerate(scored)
        for at, (made, best, margin) in enumerate(zip(one.output_ids, one.best, one.margins, strict=False))
        if made != best
    ]
    told = [one for one in scored if one.best]
    return {
        "sequences": len(scored),
        "tokens": len(pairs),
        "token_mult_prob_error": math.fsum(errors) / len(errors),
        "mean_difference": math.fsum(gaps) / len(gaps),
        "largest_difference": gaps[worst],
        "worst": {
            "sequence": pairs[worst][3],
            "token": pairs[worst][2],
            "served": pairs[worst][0],
            "theirs": pairs[worst][1],
        },
        "equal": sum(a == b for a, b, _, _ in pairs),
        "greedy_tokens": sum(len(one.best) for one in told),
        "greedy_disagreements": others,
    }


def _word(error: float) -> str:
    return "equal" if error == 1 else "good" if error <= WORRYING else "apart"


def parity_table(info: Mapping[str, Any], place: Path, numbers: Mapping[str, Any]) -> list[str]:
    """The comparison for a person."""
    error = numbers["token_mult_prob_error"]
    worst = numbers["worst"]
    lines = [
        f"{info['served_model_name']} (weights {info['weight_version']}, {info['dtype']}) against {place}",
        f"{numbers['sequences']} sequences, {numbers['tokens']:,} tokens",
        "",
        f"  token_mult_prob_error  {error:>12.6f}   {_word(error)}",
        f"  mean |difference|      {numbers['mean_difference']:>12.3e}",
        f"  largest |difference|   {numbers['largest_difference']:>12.3e}   sequence {worst['sequence']}, "
        f"token {worst['token']}: {worst['served']:.6f} here, {worst['theirs']:.6f} there",
        f"  same number            {numbers['equal']:>12,} of {numbers['tokens']:,}",
    ]
    if numbers["greedy_tokens"]:
        others = numbers["greedy_disagreements"]
        same = numbers["greedy_tokens"] - len(others)
        lines.append(f"  same greedy choice     {same:>12,} of {numbers['greedy_tokens']:,}")
        lines += [
            f"    sequence {one['sequence']}, token {one['token']}: {one['served']} here, {one['theirs']} there, "
            f"which is more probable there by {one['behind']:.2e}"
            for one in others[:_SHOWN]
        ]
        lines += [f"    and {len(others) - _SHOWN} more"] if len(others) > _SHOWN else []
    return lines
