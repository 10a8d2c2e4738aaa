"""The engine in the caller's own process: ``LLM`` on a fixture checkpoint."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from runpy import run_path

import pytest
import torch

from gtp_serve import LLM, Completion, SamplingParams
from gtp_serve.engine.engine import Engine
from gtp_serve.errors import EngineFault, GtpServeError, NoTokenizer, PromptTooLong, RequestRejected, UsageError

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
CKPT = DATA / "megatron" / "llama-tp2-pp1-gtp2-pad16-padded"
TOKENIZER = DATA / "tokenizer251"
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(CKPT, tokenizer=TOKENIZER, kv_memory="4MiB", deterministic=True) as made:
        yield made


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, gtp_serve; gtp_serve.__version__; assert 'torch' not in sys.modules; gtp_serve.LLM"

    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_form_of_prompt_gives_the_same_completion(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("hello")

    forms: list[list[Completion]] = [
        llm.generate("hello", GREEDY),
        llm.generate(["hello"], GREEDY),
        llm.generate(ids, {"max_new_tokens": 8, "temperature": 0}),
        llm.generate([ids], [GREEDY]),
        llm.generate((tuple(ids),), max_new_tokens=8, temperature=0),
    ]

    first = forms[0][0]
    assert first.prompt_ids == tuple(ids)
    assert len(first.ids) == len(first.logprobs) == 8
    assert first.finish_reason.type == "length"
    assert [(span.version, span.start, span.end) for span in first.weight_versions] == [("0", 0, 8)]
    assert [[replace(one, cached_tokens=0) for one in form] for form in forms] == [[first]] * 5


def test_several_prompts_are_answered_in_their_order_each_by_its_own_parameters(llm: LLM) -> None:
    prompts: list[str | list[int]] = ["abc", [1, 2, 3], "xyz"]

    together = llm.generate(prompts, [{"max_new_tokens": n, "temperature": 0} for n in (2, 5, 3)])

    assert [len(one.ids) for one in together] == [2, 5, 3]
    for prompt, one in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert one.ids == alone.ids[: len(one.ids)]
        assert one.logprobs == alone.logprobs[: len(one.ids)]


def test_n_sequences_of_a_seeded_prompt_take_consecutive_seeds(llm: LLM) -> None:
    four = llm.generate("abc", n=4, seed=10, max_new_tokens=6)

    alone = [llm.generate("abc", seed=seed, max_new_tokens=6)[0] for seed in (10, 11, 12, 13)]
    assert [one.ids for one in four] == [one.ids for one in alone]
    assert len({one.ids for one in four}) > 1


def test_more_prompts_than_the_queue_holds_are_fed_in_turn(llm: LLM) -> None:
    count = llm.config.max_waiting + 40

    done = llm.generate([[1 + n % 50] for n in range(count)], max_new_tokens=1, temperature=0)

    assert len(done) == count
    assert done[3] == replace(done[53], cached_tokens=0)
    assert llm.stats().requests_total["rejected"] == 0
    assert llm.stats().kv_blocks_used == 0


def test_a_stream_adds_up_to_the_completion(llm: LLM) -> None:
    (whole,) = llm.generate("hello", GREEDY)

    deltas = list(llm.stream("hello", GREEDY))

    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(token for delta in deltas for token in delta.ids) == whole.ids
    assert tuple(value for delta in deltas for value in delta.logprobs) == whole.logprobs
    assert [delta.finish_reason for delta in deltas] == [None] * 7 + [whole.finish_reason]


def test_a_closed_stream_leaves_nothing_in_the_engine(llm: LLM) -> None:
    stream = llm.stream("hello", max_new_tokens=40)
    next(stream)

    stream.close()  # type: ignore[attr-defined]  # it is a generator
    llm.generate("x", max_new_tokens=1)

    assert llm.stats().running == 0
    assert llm.stats().kv_blocks_used == 0


def test_streams_and_generate_share_the_engine(llm: LLM) -> None:
    alone = [list(llm.stream(prompt, GREEDY)) for prompt in ("abc", "xyz")]

    first, second = llm.stream("abc", GREEDY), llm.stream("xyz", GREEDY)
    mixed: list[list[object]] = [[next(first)], [next(second)]]
    llm.generate(["between"] * 3, GREEDY)
    mixed[0] += first
    mixed[1] += second

    assert mixed == alone


def test_threads_get_the_answers_that_they_would_get_alone(llm: LLM) -> None:
    prompts = ["abc", "xyz", "hello", "once"]
    alone = [llm.generate(prompt, GREEDY)[0].logprobs for prompt in prompts]
    found: dict[str, list[Completion]] = {}

    def work(prompt: str) -> None:
        found[prompt] = llm.generate(prompt, GREEDY)

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [found[prompt][0].logprobs for prompt in prompts] == alone


def test_a_stop_string_ends_text_and_sequence_and_is_kept_on_request(llm: LLM) -> None:
    (whole,) = llm.generate("hello", GREEDY)
    stop = whole.text[2:4]
    end = whole.text.index(stop)

    (cut,) = llm.generate("hello", GREEDY, stop=stop)
    (kept,) = llm.generate("hello", GREEDY, stop=[stop], no_stop_trim=True)

    assert cut.text == whole.text[:end]
    assert kept.text == whole.text[:end] + stop
    assert cut.finish_reason.type == "stop"
    assert cut.finish_reason.matched == stop
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert len(cut.ids) < 8


def test_scores_are_the_log_probabilities_of_generating(llm: LLM) -> None:
    (made,) = llm.generate("hello", GREEDY)
    ids = (*made.prompt_ids, *made.ids)

    (score,) = llm.score([ids], start=len(made.prompt_ids) - 1)
    (from_first,) = llm.score([ids])

    assert score.logprobs == made.logprobs
    assert score.total == sum(made.logprobs)
    assert from_first.ids == ids
    assert len(from_first.logprobs) == len(ids) - 1
    assert from_first.logprobs[-8:] == made.logprobs


def test_top_log_probabilities_hold_the_greedy_token_first(llm: LLM) -> None:
    (made,) = llm.generate("hello", GREEDY, top_logprobs=3)

    assert [top[0] for top in made.top_logprobs] == list(zip(made.ids, made.logprobs, strict=True))
    assert {len(top) for top in made.top_logprobs} == {3}
    assert llm.generate("hello", GREEDY, return_logprob=False)[0].logprobs == ()


def test_chat_renders_the_template_and_takes_one_conversation_or_several(llm: LLM) -> None:
    assert llm.tokenizer is not None
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.tokenizer.encode(llm.tokenizer.render_chat(messages), add_special_tokens=False)

    one, several = llm.chat(messages, GREEDY), llm.chat([messages, messages], GREEDY)

    assert one[0].prompt_ids == tuple(ids)
    assert [answer.ids for answer in several] == [one[0].ids] * 2


def test_output_follows_a_regex(llm: LLM) -> None:
    (made,) = llm.generate("a", regex="[0-9]{3}x", max_new_tokens=10, seed=1)

    assert made.text[:3].isdigit()
    assert made.text[3:] == "x"


def _endless() -> list[object]:
    """A list within itself."""
    inside: list[object] = []
    inside.append(inside)
    return inside


@pytest.mark.parametrize(
    ("prompt", "fields", "kind", "words"),
    [
        ("a", {"max_tokens": 3}, UsageError, "did you mean: max_new_tokens"),
        ("a", {"temperature": "hot"}, UsageError, "temperature"),
        ("a", {"top_p": 3.0}, RequestRejected, "top_p is 3.0"),
        ("a", {"n": 0}, UsageError, "n is 0"),
        ("a", {"n": 1.5}, UsageError, "n is 1.5"),
        ("a", {"n": "2"}, UsageError, "n is '2'"),
        ("a", {"top_logprobs": True}, RequestRejected, "top_logprobs_num is True"),
        ("a", {"top_logprobs": 1.5}, RequestRejected, "top_logprobs_num is 1.5"),
        ("a", {"top_logprobs": 129}, RequestRejected, "top_logprobs_num is 129"),
        ("a", {"seed": -1}, RequestRejected, "seed is -1"),
        ("a", {"seed": 1 << 63, "n": 2}, RequestRejected, "seed is 9223372036854775808"),
        ("a", {"stop": ["x", ""]}, UsageError, "a stop string is empty"),
        ("a", {"return_routed_experts": True}, UsageError, "no experts"),
        ("a", {"regex": "a", "choice": ["b"]}, UsageError, "exclude each other"),
        ("a", {"json_schema": {"type": "nope"}}, RequestRejected, "Invalid type: nope"),
        ("a", {"json_schema": object()}, UsageError, "json_schema cannot be written as JSON"),
        ("a", {"json_schema": {(1, 2): 3}}, UsageError, "json_schema cannot be written as JSON"),
        ("a", {"choice": _endless()}, UsageError, "choice cannot be written as JSON"),
        ("a", {"max_new_tokens": 500}, PromptTooLong, "context of 64"),
        ([1, 999], {}, RequestRejected, "no token id"),
        ([1, "a"], {}, UsageError, "not int"),
        ([[1], [2.5]], {}, UsageError, "not list"),
        (3, {}, UsageError, "not int"),
        ("", {}, RequestRejected, "no tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name_and_leaves_nothing(
    llm: LLM, prompt: object, fields: dict[str, object], kind: type[GtpServeError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        llm.generate(prompt, **fields)  # type: ignore[arg-type]

    assert llm.stats().running == llm.stats().waiting == 0


def test_one_bad_prompt_refuses_the_call_and_the_others_do_not_stay(llm: LLM) -> None:
    with pytest.raises(RequestRejected):
        llm.generate([[1], [2], [999]], GREEDY)

    llm.generate([5], max_new_tokens=1)
    assert llm.stats().running == llm.stats().waiting == llm.stats().kv_blocks_used == 0


def test_a_dead_engine_says_so_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(CKPT, tokenizer=False, kv_memory="2MiB")
    fault = EngineFault("the device is gone")

    def step(engine: Engine) -> object:
        raise fault

    monkeypatch.setattr(Engine, "step", step)

    for _ in range(2):
        with pytest.raises(EngineFault, match="the device is gone"):
            llm.generate([1, 2])


def test_without_a_tokenizer_ids_work_and_text_is_refused() -> None:
    with LLM(CKPT, tokenizer=False, kv_memory="2MiB") as llm:
        (made,) = llm.generate([1, 2, 3], GREEDY)
        assert made.text == ""
        assert len(made.ids) == 8
        with pytest.raises(NoTokenizer):
            llm.generate("text")
        with pytest.raises(NoTokenizer):
            llm.generate([1], stop="x")

    with pytest.raises(UsageError, match="closed"):
        llm.generate([1, 2, 3])


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"dtype": "int4"}, "dtype='int4' is not possible; possible: auto, float32"),
        ({"device": "tpu"}, "device='tpu' is not possible"),
        ({"quant": "int3"}, "quant='int3' is not possible; possible: none, int8"),
        ({"refit_memory": "x"}, "refit_memory='x' is not possible; possible: auto, staged, inplace"),
        ({"attention_backend": "sdpa"}, "attention_backend='sdpa' is not possible"),
        ({"context": 0}, "context=0 is not possible"),
        ({"context": 65}, "a context of 65 tokens is more than the model's 64 positions"),
        ({"max_running": 0}, "max_running=0 is not possible; possible: a whole number from 1 to 4096"),
        ({"max_running": True}, "max_running=True is not possible"),
        ({"mem_fraction": 0}, "mem_fraction=0 is not possible; possible: a number from 0.01 to 1"),
        ({"mem_fraction": 2.0}, "mem_fraction=2.0 is not possible"),
        ({"kv_memory": -5}, "kv_memory=-5 is not possible"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_its_name(option: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        LLM(CKPT, tokenizer=False, progress=False, **option)  # type: ignore[arg-type]

    assert words in str(caught.value)


def test_a_start_outside_what_is_scored_is_refused(llm: LLM) -> None:
    for start in (-1, 3, 1.5, True):
        with pytest.raises(UsageError, match=f"start is {start} and there are 3 tokens"):
            llm.score([[1, 2, 3]], start=start)  # type: ignore[arg-type]

    assert llm.score([[1, 2, 3]], start=2)[0].logprobs == ()


def test_routed_experts_are_those_that_the_same_tokens_go_to_when_they_are_fed_as_a_prompt() -> None:
    with LLM(DATA / "megatron" / "moe-tp1-pp1-ep2", tokenizer=False, kv_memory="1MiB", deterministic=True) as moe:
        (made,) = moe.generate([5, 6, 7], GREEDY, return_routed_experts=True)
        fed = made.prompt_ids + made.ids
        (again,) = moe.generate(list(fed), max_new_tokens=1, return_routed_experts=True)

    layers, chosen = 2, 2
    row = 4 * layers * chosen
    assert len(made.routed_experts) == row * (len(fed) - 1)
    assert made.routed_experts == again.routed_experts[: len(made.routed_experts)]
    experts = memoryview(made.routed_experts).cast("i").tolist()
    pairs = list(zip(experts[::2], experts[1::2], strict=True))
    assert all(0 <= a < 4 and 0 <= b < 4 and a != b for a, b in pairs)
    assert len(set(pairs)) > 1


def test_several_ranks_are_refused_with_the_command_that_has_them() -> None:
    with pytest.raises(UsageError, match="gtp-serve --tp 2"):
        LLM(CKPT, tp=2)


def test_the_offline_example_prints_completions(capsys: pytest.CaptureFixture[str]) -> None:
    main = run_path(str(ROOT / "examples" / "offline_generate.py"))["main"]

    status = main([str(CKPT), "hello", "abc", "--tokenizer", str(TOKENIZER), "--max-new-tokens", "4"])

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[0].startswith("'hello' -> ")
    assert [line.split(",")[0].strip() for line in lines[1::2]] == ["4 tokens", "4 tokens"]


def test_the_offline_example_ends_with_the_errors_code(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main = run_path(str(ROOT / "examples" / "offline_generate.py"))["main"]

    assert main([str(tmp_path / "none"), "x"]) == 3
    assert capsys.readouterr().err.startswith("error: ")
