"""The benchmarks' own arithmetic: statistics, fits, tables, limits, pictures, the clock; nothing is timed."""

from __future__ import annotations

import json
import math
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_the_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As it is for the scripts; what was imported is forgotten again, for other tests have modules of such names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("bench_parts", "peers", "compare", "make_peers", "scaling"):
            del sys.modules[name]


def test_the_median_comes_with_the_lowest_and_the_highest() -> None:
    from bench_parts.numbers import spread

    found = spread([3.0, 1.0, 2.0, 10.0])
    assert found is not None
    assert (found.median, found.low, found.high, found.count) == (2.5, 1.0, 10.0, 4)
    assert found.words() == "2.50 (1.00 to 10.0)"
    assert found / 5.0 == 0.5
    assert found / found == 1.0
    assert spread([]) is None
    same = spread([7.0, 7.0])
    assert same is not None
    assert same.words() == "7.00"
    with pytest.raises(ValueError, match="finite"):
        spread([1.0, math.nan])


@pytest.mark.parametrize(
    ("value", "words"),
    [(0.0, "0"), (1234.5, "1,230"), (99.96, "100.0"), (0.012345, "0.0123"), (5.0, "5.00"), (-42.123, "-42.1")],
)
def test_numbers_have_three_significant_digits(value: float, words: str) -> None:
    from bench_parts.numbers import significant

    assert significant(value) == words


def test_a_power_law_is_found_again() -> None:
    from bench_parts.numbers import fit_power

    xs = [1.0, 2.0, 8.0, 100.0]
    fit = fit_power(xs, [3.0 * x**0.75 for x in xs])
    assert fit.exponent == pytest.approx(0.75)
    assert fit.factor == pytest.approx(3.0)
    assert fit.r_squared == pytest.approx(1.0)
    flat = fit_power(xs, [5.0] * 4)
    assert flat.exponent == pytest.approx(0.0)
    assert flat.r_squared == 1.0
    assert fit_power([1.0, 10.0, 100.0], [1.0, 30.0, 100.0]).r_squared < 0.99
    assert fit.words() == "0.75 (r² 1.000)"


@pytest.mark.parametrize(("xs", "ys"), [([1.0], [1.0]), ([2.0, 2.0], [1.0, 3.0]), ([1.0, 2.0], [0.0, 1.0])])
def test_what_cannot_be_fitted_is_refused(xs: list[float], ys: list[float]) -> None:
    from bench_parts.numbers import fit_power

    with pytest.raises(ValueError, match=r"two different|positive"):
        fit_power(xs, ys)


def test_the_common_beginning_ends_at_the_first_difference() -> None:
    from bench_parts.numbers import same_beginning

    assert same_beginning([1, 2, 3], [1, 2, 4]) == 2
    assert same_beginning([1, 2], [1, 2, 4]) == 2
    assert same_beginning([5], [1]) == same_beginning([], [1]) == 0


def test_a_table_has_even_columns_and_escapes_bars() -> None:
    from bench_parts.table import table

    lines = table(["a", "what"], [["1|2", "x"], ["", "longer"]]).splitlines()
    assert lines == ["| a    | what   |", "|------|--------|", "| 1\\|2 | x      |", "|      | longer |"]
    with pytest.raises(ValueError, match="2 cells"):
        table(["a", "b"], [["1"]])


def test_a_section_of_a_document_is_replaced_and_nothing_else() -> None:
    from bench_parts.table import fill_section

    document = "# T\n<!-- measured: a -->\nold\n<!-- end -->\nkept\n<!-- measured: b -->\n<!-- end -->\n"
    filled = fill_section(document, "a", "new\n")
    assert filled == "# T\n<!-- measured: a -->\n\nnew\n\n<!-- end -->\nkept\n<!-- measured: b -->\n<!-- end -->\n"
    assert fill_section(filled, "a", "new") == filled
    with pytest.raises(ValueError, match="no section 'c'"):
        fill_section(document, "c", "x")


def test_the_documentation_has_the_sections_that_the_benchmarks_fill() -> None:
    from bench_parts.table import fill_section

    document = (BENCHMARKS.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    for name in ("compare", "decode_limit", "scaling", "start", "http_overhead"):
        assert "@@" in fill_section(document, name, "@@")


def test_the_limit_is_what_reading_or_multiplying_takes_longer_for() -> None:
    from bench_parts.machine import Limits

    limits = Limits(read_gbps=20.0, gemm_gflops=200.0)
    assert limits.decode_tps(weight_bytes=2 * 10**9, parameters=10**9, streams=1) == pytest.approx(10.0)
    assert limits.decode_tps(weight_bytes=2 * 10**9, parameters=10**9, streams=8) == pytest.approx(80.0)
    assert limits.decode_tps(weight_bytes=2 * 10**9, parameters=10**9, streams=64) == pytest.approx(100.0)
    assert limits.prefill_tps(10**9) == pytest.approx(100.0)


def test_a_models_size_counts_a_tied_head_once_and_no_embedding(tmp_path: Path) -> None:
    from bench_parts.model import model_size

    shapes = {
        "model.embed_tokens.weight": [10, 4],
        "model.norm.weight": [4],
        "model.layers.0.mlp.up_proj.weight": [6, 4],
    }
    write_header(tmp_path / "model.safetensors", shapes)
    size = model_size(tmp_path)
    assert (size.parameters, size.layer_parameters, size.matrix_parameters) == (68, 28, 64)
    assert size.weight_bytes("bf16") == 136
    assert size.weight_bytes("int8") == 64 + 8
    write_header(tmp_path / "model.safetensors", shapes | {"lm_head.weight": [10, 4]})
    assert model_size(tmp_path).parameters == 68
    with pytest.raises(FileNotFoundError, match="safetensors"):
        model_size(tmp_path / "nothing")


def write_header(path: Path, shapes: dict[str, list[int]]) -> None:
    header = json.dumps(
        {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode())


class Ticks:
    """A clock that is told the time."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


def test_the_clock_starts_when_every_sequence_has_a_token() -> None:
    from peers.protocol import Case, Clock

    ticks = Ticks()
    clock = Clock(Case(name="2", prompts=[[1, 2], [3, 4]], new=9, seconds=1.0), ticks)
    ticks.at = 1.0
    assert clock.step([1, 0])
    ticks.at = 2.0
    assert clock.step([2, 1])  # from here on
    for count, at in ((3, 2.5), (4, 3.0)):
        ticks.at = at
        assert clock.step([count, count - 1])
    ticks.at = 3.5
    assert not clock.step([5, 4])
    times = clock.times()
    assert times == {"first_seconds": 2.0, "prompt_tokens": 4.0, "decode_tokens": 6.0, "decode_tps": 4.0}


def test_a_case_that_is_slow_gets_four_tokens_of_each_all_the_same() -> None:
    from peers.protocol import Case, Clock

    ticks = Ticks()
    clock = Clock(Case(name="1", prompts=[[1]], new=9, seconds=0.1), ticks)
    going = []
    for count in range(1, 6):
        ticks.at += 10.0
        going.append(clock.step([count]))
    assert going == [True, True, True, False, False]


def test_a_case_without_a_first_token_is_no_measurement() -> None:
    from peers.protocol import Case, Clock

    clock = Clock(Case(name="2", prompts=[[1], [2]], new=1, seconds=0.1), Ticks())
    clock.step([1, 0])
    with pytest.raises(RuntimeError, match="not every sequence"):
        clock.times()


def fake_load(replies: dict[int, int]) -> Any:
    """A peer whose n-th new token is the prompt's first plus n; with how many tokens each call was to make."""

    def load() -> Any:
        def generate(prompts: list[list[int]], new: int, step: Any) -> list[list[int]]:
            replies[len(prompts)] = new
            made: list[list[int]] = [[] for _ in prompts]
            while len(made[0]) < new:
                for prompt, reply in zip(prompts, made, strict=True):
                    reply.append(prompt[0] + len(reply))
                if not step([len(reply) for reply in made]):
                    break
            return made

        return generate

    return load


def test_a_run_has_all_cases_with_ids_and_the_start() -> None:
    from peers.protocol import measure

    asked: dict[int, int] = {}
    cases = [{"name": "2", "prompts": [[10, 1], [20, 1]], "new": 6, "seconds": 1e9}]
    found = measure(fake_load(asked), {"warm": [1, 2], "cases": cases}, began=0.0)
    assert found["cases"]["2"]["ids"] == [[10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25]]
    assert found["cases"]["2"]["decode_tokens"] == 10.0
    assert found["first_token_seconds"] >= found["loaded_seconds"] > 1e9
    assert found["peak_rss"] > 1 << 20
    assert asked == {1: 8, 2: 6}


def test_a_peer_that_leaves_a_prompt_out_is_not_measured() -> None:
    from peers.protocol import measure

    def load() -> Any:
        return lambda prompts, new, step: [[1]][: step([1] * len(prompts))] if len(prompts) > 1 else [[1]]

    cases = [{"name": "2", "prompts": [[1], [2]], "new": 1, "seconds": 0.0}]
    with pytest.raises(RuntimeError, match="1 replies to 2 prompts"):
        measure(load, {"warm": [1], "cases": cases}, began=0.0)


def run_of(rate: float, ids: list[int], **more: float) -> dict[str, Any]:
    case = {"decode_tps": rate, "first_seconds": 0.5, "prompt_tokens": 8.0, "ids": [ids]}
    cases = {"1": case, "8": case, "32": case, "prefill": {"first_seconds": 2.0, "prompt_tokens": 1024.0, "ids": [[1]]}}
    return {"cases": cases, "first_token_seconds": 1.5, "peak_rss": 100 << 20, **more}


def outcomes_of() -> list[Any]:
    from bench_parts.comparison import Outcome

    same, other = list(range(20)), [*range(18), 99, 98]
    early = [0, 77, *range(18)]
    return [
        Outcome(title="ours", dtype="bf16", ours=True, rounds=[run_of(10.0, same), run_of(20.0, same)]),
        Outcome(title="slow", dtype="bf16", ours=False, rounds=[run_of(4.0, other), None]),
        Outcome(title="fast", dtype="bf16", ours=False, rounds=[None, run_of(5.0, early)]),
        Outcome(title="small", dtype="int4", ours=False, rounds=[run_of(9.0, same), None]),
    ]


def small_size() -> Any:
    from bench_parts.model import Size

    return Size(parameters=10**9, layer_parameters=8 * 10**8, matrix_parameters=10**9, bytes=2 * 10**9)


def test_ours_is_compared_with_the_best_peer_of_the_same_values() -> None:
    from bench_parts.comparison import ratio_rows
    from bench_parts.machine import Limits

    limits = [Limits(read_gbps=60.0, gemm_gflops=1638.4)] * 2
    rows = ratio_rows(outcomes_of(), limits, small_size())
    assert rows[0] == ["ours, bf16, 1 streams", "0.50", "3.00 x fast"]  # 15 of 30; int4 is no rival
    assert rows[3] == ["ours, bf16, prompt", "0.50", "1.00 x slow"]


def test_a_share_of_the_limit_is_of_what_memory_gave_at_that_moment() -> None:
    from bench_parts.comparison import Outcome, ratio_rows
    from bench_parts.machine import Limits

    rounds = [run_of(10.0, [1], read_gbps=20.0), None, run_of(18.0, [1], read_gbps=40.0)]
    limits = [Limits(read_gbps=100.0, gemm_gflops=1638.4)] * 3
    rows = ratio_rows([Outcome(title="ours", dtype="bf16", ours=True, rounds=rounds)], limits, small_size())
    assert rows[0][:2] == ["ours, bf16, 1 streams", "0.95"]  # 10 of 10 and 18 of 20


def test_agreement_is_counted_within_a_round() -> None:
    from bench_parts.comparison import agreement_rows

    rows = agreement_rows(outcomes_of())
    assert rows[0] == ["slow", "bf16", "3 of 3 replies", "54 of 60"]
    assert rows[1] == ["fast", "bf16", "0 of 3 replies", "3 of 60"]
    assert rows[2] == ["small", "int4", "3 of 3 replies", "60 of 60"]


def test_the_report_has_the_limit_every_peer_and_what_was_not_measured() -> None:
    from bench_parts.comparison import picture, report
    from bench_parts.machine import Limits

    limits = [Limits(read_gbps=50.0, gemm_gflops=100.0), Limits(read_gbps=70.0, gemm_gflops=100.0)]
    words = report(outcomes_of(), limits, small_size(), {"vllm:bf16": "not installed"}, 0.25)
    assert "| the machine's limit" in words
    assert "15.0 (10.0 to 20.0)" in words
    assert "60.0 (50.0 to 70.0) GB/s read" in words
    assert "- vllm:bf16: not installed" in words
    root = ET.fromstring(picture(outcomes_of(), limits, small_size()))
    bars = [element for element in root.iter() if element.tag.endswith("rect") and element.get("fill") != "#fff"]
    assert len(bars) == 4 * 4


def test_curves_are_drawn_on_logarithmic_axes() -> None:
    from bench_parts.plot import Curve, draw_curves

    root = ET.fromstring(draw_curves("t", "x <1>", "y", [Curve(label="a & b", points=[(1, 1), (10, 10), (100, 100)])]))
    (line,) = [element.attrib["points"] for element in root.iter() if element.tag.endswith("polyline")]
    points = [tuple(map(float, pair.split(","))) for pair in line.split()]
    assert points[1][0] == pytest.approx((points[0][0] + points[2][0]) / 2)
    assert points[1][1] == pytest.approx((points[0][1] + points[2][1]) / 2)
    with pytest.raises(ValueError, match="positive"):
        draw_curves("t", "x", "y", [Curve(label="a", points=[(0, 1)])])


def test_a_peer_that_is_not_installed_is_left_out_and_named(tmp_path: Path) -> None:
    from compare import choose

    configs, missing = choose(None, tmp_path, quick=False)
    assert {config.peer.name for config in configs} == {"llm", "http"}
    assert missing["llama-cpp:bf16"] == missing["vllm:bf16"] == "not installed"
    assert [config.name for config in configs][:2] == ["llm:bf16", "http:bf16"]
    (only,), _ = choose("llm:int8", tmp_path, quick=True)
    assert only.name == "llm:int8"
    with pytest.raises(KeyError, match="no peer is called 'x'"):
        choose("x", tmp_path, quick=True)


def test_one_peer_that_cannot_be_installed_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import make_peers

    done: list[str] = []

    def install(peer: Any, folder: Path) -> list[str]:
        if peer.name == "vllm":
            raise make_peers.StepFailed("no wheel for this machine")
        done.append(peer.name)
        return ["installed"]

    monkeypatch.setattr(make_peers, "install", install)
    monkeypatch.setattr(make_peers, "prepare", lambda peer, folder, model: [])
    code = make_peers.main(["--model", str(tmp_path), "--folder", str(tmp_path), "vllm", "transformers"])
    assert (code, done) == (1, ["transformers"])
    said = capsys.readouterr().out
    assert "vllm: FAILED: no wheel for this machine" in said
    assert "1 of 2 peers are not there: vllm" in said


def test_heads_are_written_in_the_other_rotarys_order() -> None:
    np = pytest.importorskip("numpy")
    pytest.importorskip("gguf")
    from peers.gguf_writer import gguf_name, interleave_heads

    rows = interleave_heads(np.arange(8, dtype=np.float32).reshape(8, 1), 2)[:, 0]
    assert rows.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert gguf_name("model.layers.7.self_attn.o_proj.weight") == "blk.7.attn_output.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"


def test_numpy_measures_where_there_is_no_compiler() -> None:
    from bench_parts.machine import numpy_bandwidth

    assert numpy_bandwidth(1, repetitions=2, mib=1) > 0


def test_a_made_up_plan_copies_every_shard_once() -> None:
    from scaling import plan_seconds

    assert plan_seconds(200) > 0
