"""The comparison as a table and as a picture: medians and spread, shares of the machine's limits, ratios, agreement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench_parts.machine import Limits
from bench_parts.model import Size
from bench_parts.numbers import Spread, same_beginning, significant, spread
from bench_parts.plot import Bar, Panel, draw_bars
from bench_parts.table import table

_STREAMS = (1, 8, 32)
_EXACT = ("bf16", "bf16-deterministic", "fp32")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """All runs of one peer in one format."""

    title: str
    dtype: str
    ours: bool
    rounds: Sequence[Mapping[str, Any] | None]
    """One entry for each round; None where the time was up or it failed."""

    @property
    def runs(self) -> list[Mapping[str, Any]]:
        """Those that were measured."""
        return [run for run in self.rounds if run is not None]

    @property
    def exact(self) -> bool:
        """Whether its weights are the checkpoint's own values."""
        return self.dtype in _EXACT

    def decode(self, streams: int) -> Spread | None:
        """Tokens a second after the first ones, of all streams together."""
        cases = [run["cases"].get(str(streams), {}) for run in self.runs]
        return spread(case["decode_tps"] for case in cases if "decode_tps" in case)

    def prefill(self) -> Spread | None:
        """Prompt tokens a second."""
        cases = [run["cases"]["prefill"] for run in self.runs if "prefill" in run["cases"]]
        return spread(case["prompt_tokens"] / case["first_seconds"] for case in cases)

    def shares(self, limits: Sequence[Limits], size: Size) -> dict[str, Spread | None]:
        """For each number of streams and for the prompt, what part of the limit was reached.

        :param limits: of each round; memory's was measured again right before and after each run, where it says so.
        """
        found: dict[str, list[float]] = {}
        for run, limit in zip(self.rounds, limits, strict=True):
            if run is None:
                continue
            near = Limits(read_gbps=run.get("read_gbps", limit.read_gbps), gemm_gflops=limit.gemm_gflops)
            for name, case in run["cases"].items():
                if name == "prefill":
                    share = case["prompt_tokens"] / case["first_seconds"] / near.prefill_tps(size.layer_parameters)
                elif "decode_tps" in case:
                    most = near.decode_tps(size.weight_bytes(self.dtype), size.parameters, int(name))
                    share = case["decode_tps"] / most
                else:
                    continue
                found.setdefault(name, []).append(share)
        return {name: spread(shares) for name, shares in found.items()}

    def first_token(self) -> Spread | None:
        """Seconds from the start of the process."""
        return spread(run["first_token_seconds"] for run in self.runs)

    def peak_mib(self) -> Spread | None:
        """Resident at most."""
        return spread(run["peak_rss"] / 2**20 for run in self.runs)


def report(
    outcomes: Sequence[Outcome], limits: Sequence[Limits], size: Size, failures: Mapping[str, str], others: float
) -> str:
    """Everything in Markdown."""
    limit = middle(limits)
    parts = [
        table(
            [
                "",
                "weights",
                "1 stream, tok/s",
                "8 streams",
                "32 streams",
                "one long prompt, tok/s",
                "start to first token, s",
                "peak MiB",
                "rounds",
            ],
            [_limit_row(limit, size), *(_row(outcome) for outcome in outcomes)],
        ),
        _limit_words(limits, others),
    ]
    ratios = ratio_rows(outcomes, limits, size)
    if ratios:
        parts.append(table(["ours", "share of the limit", "beside the best peer with the same values"], ratios))
    agreement = agreement_rows(outcomes)
    if agreement:
        parts.append(
            table(["greedy output beside ours", "weights", "first 16 tokens equal", "tokens equal at first"], agreement)
        )
    if failures:
        parts.append("Not measured:\n\n" + "\n".join(f"- {name}: {why}" for name, why in failures.items()))
    return "\n\n".join(parts)


def middle(limits: Sequence[Limits]) -> Limits:
    """The medians of all rounds.

    :raises ValueError: there is no round.
    """
    read, gemm = spread(one.read_gbps for one in limits), spread(one.gemm_gflops for one in limits)
    if read is None or gemm is None:
        raise ValueError("no round was measured")
    return Limits(read_gbps=read.median, gemm_gflops=gemm.median)


def _limit_row(limit: Limits, size: Size) -> list[str]:
    rates = [limit.decode_tps(size.weight_bytes("bf16"), size.parameters, streams) for streams in _STREAMS]
    return [
        "the machine's limit",
        "bf16",
        *(significant(rate) for rate in rates),
        significant(limit.prefill_tps(size.layer_parameters)),
        "",
        "",
        "",
    ]


def _row(outcome: Outcome) -> list[str]:
    cells = [outcome.decode(streams) for streams in _STREAMS]
    cells += [outcome.prefill(), outcome.first_token(), outcome.peak_mib()]
    return [
        outcome.title,
        outcome.dtype,
        *("" if cell is None else cell.words() for cell in cells),
        str(len(outcome.runs)),
    ]


def _limit_words(limits: Sequence[Limits], others: float) -> str:
    read, gemm = spread(one.read_gbps for one in limits), spread(one.gemm_gflops for one in limits)
    if read is None or gemm is None:
        raise ValueError("no round was measured")
    return (
        f"Median (lowest to highest) of the rounds. The machine in the same rounds: {read.words()} GB/s read,"
        f" {gemm.words()} GFLOP/s in torch's best matrix product. Other processes used {others:.2f} cores meanwhile."
    )


def ratio_rows(outcomes: Sequence[Outcome], limits: Sequence[Limits], size: Size) -> list[list[str]]:
    """For each of our rows that was measured: how near the limit, and how far ahead of the best peer."""
    peers = [outcome for outcome in outcomes if not outcome.ours and outcome.exact]
    rows = []
    for outcome in outcomes:
        if not outcome.ours:
            continue
        rivals = peers if outcome.exact else []
        shares, name = outcome.shares(limits, size), f"{outcome.title}, {outcome.dtype}"
        for streams in _STREAMS:
            best = _best([(peer, peer.decode(streams)) for peer in rivals])
            rows.append(_ratio(f"{name}, {streams} streams", outcome.decode(streams), shares.get(str(streams)), best))
        best = _best([(peer, peer.prefill()) for peer in rivals])
        rows.append(_ratio(f"{name}, prompt", outcome.prefill(), shares.get("prefill"), best))
    return [row for row in rows if row]


def _best(found: Sequence[tuple[Outcome, Spread | None]]) -> tuple[str, float] | None:
    known = [(peer.title, value.median) for peer, value in found if value is not None]
    return max(known, key=lambda pair: pair[1], default=None)


def _ratio(what: str, value: Spread | None, share: Spread | None, best: tuple[str, float] | None) -> list[str]:
    if value is None or share is None:
        return []
    beside = "" if best is None else f"{value / best[1]:.2f} x {best[0]}"
    return [what, f"{share.median:.2f}", beside]


def agreement_rows(outcomes: Sequence[Outcome], length: int = 16) -> list[list[str]]:
    """How long each peer's greedy output is the same as ours in the same rounds."""
    ours = next((outcome for outcome in outcomes if outcome.ours and outcome.exact), None)
    rows = []
    for outcome in outcomes:
        if ours is None or outcome is ours:
            continue
        pairs = [
            pair
            for mine, other in zip(ours.rounds, outcome.rounds, strict=True)
            if mine is not None and other is not None
            for name in mine["cases"]
            if name != "prefill"
            for pair in zip(mine["cases"][name]["ids"], other["cases"].get(name, {}).get("ids", []), strict=False)
        ]
        long = [pair for pair in pairs if min(map(len, pair)) >= length]
        if not pairs:
            continue
        same = sum(same_beginning(*pair) >= length for pair in long)
        equal, compared = sum(same_beginning(*pair) for pair in pairs), sum(min(map(len, pair)) for pair in pairs)
        rows.append([outcome.title, outcome.dtype, f"{same} of {len(long)} replies", f"{equal} of {compared}"])
    return rows


def picture(outcomes: Sequence[Outcome], limits: Sequence[Limits], size: Size) -> str:
    """A panel for each number of streams, and one for prompts."""
    limit = middle(limits)
    panels = []
    for streams in _STREAMS:
        most = limit.decode_tps(size.weight_bytes("bf16"), size.parameters, streams)
        bars = _bars([(outcome, outcome.decode(streams)) for outcome in outcomes])
        panels.append(Panel(title=f"{streams} streams: tokens a second (limit: bf16)", bars=bars, limit=most))
    bars = _bars([(outcome, outcome.prefill()) for outcome in outcomes])
    panels.append(
        Panel(title="one long prompt: tokens a second", bars=bars, limit=limit.prefill_tps(size.layer_parameters))
    )
    return draw_bars("gtp-serve and its peers on this machine's CPU", [panel for panel in panels if panel.bars])


def _bars(found: Sequence[tuple[Outcome, Spread | None]]) -> list[Bar]:
    return [
        Bar(label=f"{outcome.title}, {outcome.dtype}", value=value, ours=outcome.ours)
        for outcome, value in found
        if value is not None
    ]
