"""The twelve checks of a newcomer's experience, each with the tests that show it; and those that had none elsewhere."""

from __future__ import annotations

import ast
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from checkpoint_files import SMALL, random_tensors, write_hf
from safetensors.torch import save_file
from serve_command import Command

from gtp_serve import LLM
from gtp_serve.layout.huggingface import stored_name

pytestmark = pytest.mark.e2e

TESTS = Path(__file__).parents[1]
DATA = TESTS / "data"
CKPT = DATA / "megatron" / "llama-tp1-pp1-gtp2-pad16-padded"

CHECKS: Mapping[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "--help answers within 300 ms and imports neither torch nor transformers",
        (
            "unit/test_structure.py::test_help_imports_no_torch_and_exits_with_zero",
            "unit/test_structure.py::test_help_answers_within_300_milliseconds",
            "unit/test_cli.py::test_help_is_fast_and_imports_nothing_heavy",
        ),
    ),
    2: (
        "the port answers /ready with 503 and the phase within a second",
        (
            "e2e/test_serve_process.py::test_the_port_answers_within_a_second_and_no_phase_is_silent",
            "unit/test_server_parts.py::test_the_porch_answers_503_with_the_phase_and_leaves_later_clients_to_the_server",
        ),
    ),
    3: (
        "no gap of more than five seconds in the log of the start",
        (
            "e2e/test_serve_process.py::test_the_port_answers_within_a_second_and_no_phase_is_silent",
            "unit/test_startup.py::test_no_phase_is_silent_for_more_than_five_seconds",
        ),
    ),
    4: (
        "a start that fails has its committed exit code and first line, and no traceback",
        (
            "e2e/test_serve_process.py::test_each_failure_to_start_reads_as_committed",
            "golden/test_failures.py::test_each_failure_reads_as_committed",
            "unit/test_cli.py::test_each_mistake_has_the_committed_answer_and_exit_code_2",
        ),
    ),
    5: (
        "a worker that is killed ends the server within two seconds, as worker-died",
        ("e2e/test_serve_process.py::test_a_worker_that_is_killed_ends_the_server_within_two_seconds",),
    ),
    6: (
        "a push beside 64 running requests fails none, its spans cover every token, and no old KV is used after it",
        (
            "e2e/test_acceptance.py::test_a_push_beside_64_requests_fails_none_and_nothing_old_is_used_after_it",
            "e2e/test_update_under_load.py::"
            "test_streams_go_on_over_forty_updates_and_each_token_is_by_the_weights_it_says",
        ),
    ),
    7: (
        "the openai client and slime's own requests work as they are",
        (
            "e2e/test_openai_http.py::test_openai_client_completes_lists_and_streams_the_same_text",
            "e2e/test_openai_http.py::test_openai_client_gets_tool_calls_and_sends_their_results",
            "e2e/test_client_generation.py::test_recorded_requests_are_answered_with_what_their_client_reads",
            "e2e/test_openai_process.py::test_chat_answers_and_a_stream_says_the_same",
        ),
    ),
    8: (
        "without a network serving, the page and /docs work",
        (
            "e2e/test_acceptance.py::test_without_a_network_everything_is_served",
            "unit/test_page_parts.py::test_page_is_one_small_file_that_names_no_other_host",
        ),
    ),
    9: (
        "SIGTERM: /ready is 503 at once, running requests finish, the exit code is 0",
        ("e2e/test_serve_process.py::test_l2_sigterm_lets_running_requests_finish_and_refuses_new_ones",),
    ),
    10: (
        "names of metrics and flags are the committed ones",
        (
            "unit/test_server_parts.py::test_o1_metric_names_and_labels_are_the_committed_ones",
            "unit/test_cli.py::test_help_is_the_committed_text",
        ),
    ),
    11: (
        "every command of the README and the docs is run",
        (
            "e2e/test_docs_commands.py::test_the_command_does_what_the_page_says",
            "e2e/test_docs_commands.py::test_every_command_of_every_page_is_run_or_says_why_not",
        ),
    ),
    12: (
        "a client that leaves a stream aborts its request within a second, with one line in the log",
        (
            "e2e/test_generate_http.py::test_a_client_that_leaves_frees_its_sequences",
            "e2e/test_serve_process.py::test_l1_clients_that_leave_free_their_blocks",
        ),
    ),
}


def test_each_check_has_its_tests_and_they_exist() -> None:
    assert list(CHECKS) == list(range(1, 13))
    for what, tests in CHECKS.values():
        assert tests, what
        for one in tests:
            file, _, name = one.partition("::")
            found = {
                node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)
            }
            assert name in found, f"{what}: there is no {one}"


def scored(told: Mapping[str, Any]) -> list[float]:
    return [value for value, _, _ in told["meta_info"]["input_token_logprobs"][1:]]


def test_a_push_beside_64_requests_fails_none_and_nothing_old_is_used_after_it(tmp_path: Path) -> None:
    config = replace(SMALL, hidden_size=64, head_dim=16, ffn_size=96, max_context=512, dtype="float32")
    for seed, folder in enumerate("ab"):
        (tmp_path / folder).mkdir()
        write_hf(tmp_path / folder, config)
        tensors = random_tensors(config, seed).items()
        save_file(
            {stored_name(name, config.family): one * 0.25 for name, one in tensors},
            tmp_path / folder / "model.safetensors",
        )
    prompt = [1 + at % 19 for at in range(64)]
    command = Command("--ckpt", str(tmp_path / "a"), "--no-tokenizer", "--port", "0", "--max-running", "64")
    try:
        with httpx.Client(base_url=command.url(), timeout=600, trust_env=False, verify=False) as http:

            def ask(at: int) -> Any:
                sampling = {"max_new_tokens": 300, "ignore_eos": True, "sampling_seed": at}
                body = {"input_ids": [*prompt, at % 21, at // 21], "sampling_params": sampling}
                return httpx.post(f"{http.base_url}/generate", json=body, timeout=600, trust_env=False)

            first = http.post("/generate", json={"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}).json()
            again = http.post("/generate", json={"input_ids": prompt, "sampling_params": {"max_new_tokens": 1}}).json()
            assert (first["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"] > 0) == (0, True)
            with ThreadPoolExecutor(64) as pool:
                # All 64 come before the first step, so that none has ended when the last one begins.
                http.post("/pause", params={"mode": "keep"}).raise_for_status()
                running = [pool.submit(ask, at) for at in range(64)]
                while http.get("/v1/loads").json()["loads"][0]["num_total_reqs"] < 64:
                    time.sleep(0.05)
                update = {"version": "1", "source": {"kind": "disk", "path": str(tmp_path / "b")}, "commit": "manual"}
                begun = http.post("/weights/updates", json={**update, "wait": True})
                assert begun.json()["state"] == "verified", begun.text
                http.post("/resume").raise_for_status()
                while http.get("/stats").json()["running"] < 64:
                    assert not any(one.done() for one in running)
                committed = http.post(f"/weights/updates/{begun.json()['id']}/commit", json={"wait": True})
                assert committed.json()["state"] == "committed", committed.text
                replies = [one.result() for one in running]
            assert {reply.status_code for reply in replies} == {200}
            mixed = 0
            for reply in replies:
                told = reply.json()
                spans = told["meta_info"]["weight_versions"]
                assert [spans[0]["start"], spans[-1]["end"]] == [0, told["meta_info"]["completion_tokens"]]
                assert len(told["output_ids"]) == 300
                assert all(one["end"] == other["start"] for one, other in itertools.pairwise(spans))
                mixed += len(spans) > 1
            assert mixed > 0
            body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
            after = http.post(
                "/generate", json={**body, "sampling_params": {"max_new_tokens": 1}, "logprob_start_len": -1}
            )
            assert after.json()["meta_info"]["cached_tokens"] == 0
            served = scored(http.post("/generate", json={**body, "logprob_start_len": 0}).json())
    finally:
        command.stop()
    with LLM(tmp_path / "b", tokenizer=False, device="cpu", dtype="float32", progress=False) as fresh:
        (expected,) = fresh.score([prompt])
    assert served == pytest.approx(list(expected.logprobs), abs=1e-4)


def test_without_a_network_everything_is_served() -> None:
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-rn", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives a user no network namespace of their own")
    words = [unshare, "-rn", sys.executable, str(TESTS / "cut_off.py"), str(CKPT), str(DATA / "tokenizer251")]
    env = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    ran = subprocess.run(words, capture_output=True, text=True, timeout=600, env=env, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = json.loads(ran.stdout.splitlines()[-1])
    assert (told["interfaces"], told["reachable"]) == (["lo"], False)
    assert {told[path] for path in ("/", "/docs", "/openapi.json", "/ready", "/stats")} == {200}
    assert told["tokens"] == 3
