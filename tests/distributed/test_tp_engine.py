"""Tensor-parallel ranks as real processes over gloo: the same numbers, and what happens when one is gone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks_harness import Ranks, greedy, is_gone, listening, plan_of, running, scored, until
from safetensors.torch import load_file

from gtp_serve.engine.collective import join_group
from gtp_serve.engine.peer import Patience
from gtp_serve.engine.rank_messages import Step
from gtp_serve.engine.ranks import Leader
from gtp_serve.errors import EngineFault
from gtp_serve.loaders.tokenizer import load_tokenizer
from gtp_serve.loaders.tokenizer_files import find_tokenizer
from gtp_serve.request import TokenEvent

pytestmark = pytest.mark.distributed

DATA = Path(__file__).parents[1] / "data"
LLAMA = DATA / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"
CHECKPOINTS = {
    "llama": (LLAMA, 2),
    "llama, KV heads held twice": (LLAMA, 4),
    "qwen2": (DATA / "megatron" / "qwen2-tp2-pp1-gtp2-pad32-padded-per-layer-keys", 2),
    "moe": (DATA / "megatron" / "moe-tp2-pp1-gtp2-egtp2-pad32-logical", 2),
}
ROUNDING = 2e-5
PROMPTS = [[3, 7, 250, 17, 9], [26], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22], [100, 50]]


@pytest.fixture(autouse=True)
def _single_thread() -> None:
    torch.set_num_threads(1)


def two_steps(ranks: Ranks) -> torch.Tensor:
    """Logits of four prompts' last tokens, then of one more token each in another mixture."""
    first = ranks.runner.forward(plan_of(0, *((0, prompt) for prompt in PROMPTS)))
    second = ranks.runner.forward(plan_of(1, *((len(prompt), [42]) for prompt in PROMPTS)))
    return torch.cat([first, second]).clone()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_ranks_give_the_logits_and_the_greedy_text_of_one(name: str) -> None:
    ckpt, tp = CHECKPOINTS[name]
    with running(ckpt, 1) as alone:
        logits, text = two_steps(alone), greedy(alone.engine(), PROMPTS, 16)
        events = scored(alone.engine(), PROMPTS[0], routes=name == "moe")
    with running(ckpt, tp) as ranks:
        assert ranks.decoder.num_kv_heads == max(1, ranks.config.model.num_kv_heads // tp)
        torch.testing.assert_close(two_steps(ranks), logits, rtol=0, atol=ROUNDING)
        assert greedy(ranks.engine(), PROMPTS, 16) == text
        assert_same(scored(ranks.engine(), PROMPTS[0], routes=name == "moe"), events)
        for pid in (os.getpid(), *(peer.pid or 0 for peer in ranks.peers_of_rank_0.peers)):
            assert listening(pid) == {"0100007F"}  # 127.0.0.1
    assert all(is_gone(peer.pid or 0) for peer in ranks.peers_of_rank_0.peers)
    assert logits.abs().max() > 0.1


def assert_same(events: list[TokenEvent], expected: list[TokenEvent]) -> None:
    """Tokens and routes are the same, log-probabilities are within rounding."""
    assert [event.token_ids for event in events] == [event.token_ids for event in expected]
    assert [event.routed_experts for event in events] == [event.routed_experts for event in expected]
    for name in ("prompt_logprobs", "logprobs"):
        values, wanted = ([x for event in some for x in getattr(event, name)] for some in (events, expected))
        known = [(a, b) for a, b in zip(values, wanted, strict=True) if b is not None]
        assert len(known) >= 3
        assert all(a == pytest.approx(b, abs=ROUNDING) for a, b in known)


def test_logits_on_two_ranks_are_those_of_the_trainer() -> None:
    record = load_file(DATA / "truth" / "llama-logits.safetensors")
    tokens = record["input_ids"].tolist()
    with running(LLAMA, 2) as ranks:
        logits = ranks.runner.forward(plan_of(0, (0, tokens)))
    torch.testing.assert_close(logits, record["logits"][-1:], rtol=0, atol=1e-4)


PATIENT = Patience(silence=2.0)


@pytest.fixture(params=[2])
def ranks(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Two ranks (or as many as a test says) with a short patience, and an empty folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with running(LLAMA, request.param, patience=PATIENT) as ranks:
        ranks.runner.forward(plan_of(0, (0, [1, 2, 3])))
        yield ranks
    assert list(tmp_path.iterdir()) == []


def step_until_it_fails(ranks: Ranks) -> EngineFault:
    step = 1
    while True:
        try:
            ranks.runner.forward(plan_of(step, (0, [1, 2, 3])))
        except EngineFault as fault:
            return fault
        step += 1


def fault_of(leader: Leader, seconds: float) -> EngineFault:
    """What ``check`` raises within so many seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            leader.check()
        except EngineFault as fault:
            return fault
        time.sleep(0.01)
    raise AssertionError("all ranks are well")


@pytest.mark.parametrize("ranks", [4], indirect=True)
def test_a_rank_that_is_killed_between_steps_is_named_and_ends_the_others(ranks: Ranks) -> None:
    leader = ranks.peers_of_rank_0
    pids = [peer.pid or 0 for peer in leader.peers]
    started = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    fault = step_until_it_fails(ranks)
    assert time.monotonic() - started < 2.0
    assert fault.message == f"tensor-parallel rank tp2 (pid {pids[1]}) got signal 9 while serving"
    assert (fault.code, fault.exit_code) == ("worker-died", 6)
    until(lambda: all(map(is_gone, pids)), 2.0)
    with pytest.raises(EngineFault, match=r"rank tp2 "):
        leader.check()


def test_an_idle_group_notices_a_death_without_a_step(ranks: Ranks) -> None:
    leader = ranks.peers_of_rank_0
    pid = leader.peers[0].pid or 0
    os.kill(pid, signal.SIGTERM)  # left to rank 0: a rank does not heed it
    time.sleep(0.3)
    leader.check()
    os.kill(pid, signal.SIGKILL)

    assert f"rank tp1 (pid {pid}) got signal 9" in fault_of(leader, 2.0).message


def test_a_rank_that_is_stopped_is_named_at_the_deadline_and_ended(ranks: Ranks) -> None:
    pid = ranks.peers_of_rank_0.peers[0].pid or 0
    started = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    fault = step_until_it_fails(ranks)
    assert PATIENT.silence - 1.1 < time.monotonic() - started < PATIENT.silence + 2.0
    assert f"rank tp1 (pid {pid}) has been silent for 2 s while serving" in fault.message
    until(lambda: is_gone(pid), 2.0)


def test_a_rank_whose_forward_fails_is_named_with_its_error(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    leader = ranks.peers_of_rank_0
    plan = plan_of(1, (0, [1]))
    without_blocks = replace(plan, items=(replace(plan.items[0], block_table=()),))
    leader.peers[0].link.send(Step(plan=without_blocks))
    fault = fault_of(leader, 3.0)
    assert str(fault).endswith("failed in a step; error: IndexError: tuple index out of range")
    assert f"rank tp1 (pid {leader.peers[0].pid})" in fault.message
    assert "Traceback" in capfd.readouterr().err


def test_an_error_of_rank_0_in_the_middle_of_a_step_is_fatal_and_the_others_are_told_of(ranks: Ranks) -> None:
    pid = ranks.peers_of_rank_0.peers[0].pid
    with (
        pytest.raises(EngineFault, match=r"rank tp0 .* failed in a step with ValueError") as caught,
        ranks.peers_of_rank_0.step(plan_of(1, (0, [1]))),
    ):
        raise ValueError("something unforeseen")
    assert dict(caught.value.details) == {"error": "something unforeseen", "tp1": f"pid {pid}, serving"}


def test_the_last_words_of_a_rank_that_cannot_start_are_told() -> None:
    code = "import sys; sys.stderr.write('one\\nlibfoo.so: not found\\n'); sys.exit(3)"
    leader = Leader([sys.executable, "-c", code], 2)
    with pytest.raises(EngineFault) as caught:
        leader.join(lambda meeting: join_group(meeting, "cpu"))
    leader.close()
    assert "rank tp1 (pid" in caught.value.message
    assert caught.value.message.endswith("ended with exit code 3 while starting")
    assert dict(caught.value.details)["last output"].splitlines()[-1] == "libfoo.so: not found"


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    code = "import time; time.sleep(60)"
    leader = Leader([sys.executable, "-c", code], 3, patience=Patience(start=0.6, silence=0.3))
    with pytest.raises(EngineFault, match=r"rank tp[12] \(pid \d+\) did not start within 0.6 s"):
        leader.join(lambda meeting: join_group(meeting, "cpu"))
    leader.close()
    assert all(is_gone(peer.pid or 0) for peer in leader.peers)


def test_a_command_that_cannot_be_run_is_told() -> None:
    leader = Leader(["/nonexistent/python"], 2)
    with pytest.raises(Exception, match="tp1 cannot be started"):
        leader.join(lambda meeting: join_group(meeting, "cpu"))
    leader.close()


@pytest.mark.slow
def test_three_ranks_give_the_greedy_text_of_one_on_a_real_model(demo_dir: Path) -> None:
    files = find_tokenizer(demo_dir / "hf")
    assert files is not None
    tokenizer = load_tokenizer(files)
    words = ("Paris is", "Two plus two", "Once upon a time", "The sea", "def add(a, b):")
    ends = ("", " and", " of the", " not")
    prompts = [tokenizer.encode(word + end) for word in words for end in ends]
    with running(demo_dir / "hf", 1) as alone:
        expected = greedy(alone.engine(), prompts, 32)
    with running(demo_dir / "hf", 3) as ranks:
        assert greedy(ranks.engine(), prompts, 32) == expected
    assert len({tuple(tokens) for tokens in expected}) == 20
