"""``LLM`` with other weights while it generates, in one process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoint_files import SMALL, random_tensors, write_hf
from safetensors.torch import save_file

from gtp_serve import LLM
from gtp_serve.completion import Completion
from gtp_serve.errors import RequestRejected, UpdateFailed, UpdateRefused, UsageError
from gtp_serve.layout.huggingface import stored_name

CONFIG = replace(SMALL, max_context=4096, dtype="float32")
PROMPT = [3, 1, 4, 1, 5]
KV = "8MiB"
LONG = 4000
"""Tokens that take much longer than an update does."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.set_num_threads(1)
    found = {}
    for seed, name in enumerate(("a", "b")):
        found[name] = tmp_path_factory.mktemp(name)
        write_hf(found[name], CONFIG)
        stored = {stored_name(key, CONFIG.family): value for key, value in random_tensors(CONFIG, seed).items()}
        save_file(stored, found[name] / "model.safetensors")
    return found


@pytest.fixture
def llm(folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM(folders["a"], tokenizer=False, kv_memory=KV, progress=False) as made:
        yield made


def complete(llm: LLM, count: int = 8) -> Completion:
    return llm.generate(PROMPT, max_new_tokens=count, temperature=0, ignore_eos=True, progress=False)[0]


def versions(completion: Completion) -> list[str]:
    return [span.version for span in completion.weight_versions]


def test_other_weights_give_what_an_llm_of_them_gives_and_a_rollback_what_was(
    llm: LLM, folders: dict[str, Path]
) -> None:
    with LLM(folders["b"], tokenizer=False, kv_memory=KV, progress=False) as other:
        expected = complete(other).ids
    before = complete(llm)
    record = llm.update_weights(folders["b"])
    assert (record.state, record.version, record.base) == ("committed", "1", "0")
    after = complete(llm)
    assert after.ids == expected != before.ids
    assert (versions(before), versions(after)) == (["0"], ["1"])
    assert llm.weights.rollback_version == "0"
    assert llm.roll_back().version == "0"
    assert complete(llm).ids == before.ids
    with pytest.raises(UpdateRefused, match=r"version .1. was"):
        llm.update_weights(folders["b"], "1")
    assert llm.weights.version == "0"


def test_a_thread_that_generates_goes_on_while_another_one_updates(llm: LLM, folders: dict[str, Path]) -> None:
    found: list[Completion] = []
    thread = threading.Thread(target=lambda: found.append(complete(llm, LONG)))
    thread.start()
    while llm.stats().generation_tokens_total < 20:
        pass
    record = llm.update_weights(folders["b"], "step-7", in_flight="recompute")
    assert thread.is_alive(), "it was too short a completion to see anything"
    thread.join()
    (completion,) = found
    assert record.state == "committed"
    assert len(completion.ids) == LONG
    assert versions(completion) == ["0", "step-7"]


@pytest.mark.parametrize("in_flight", ["wait", "abort"])
def test_running_sequences_are_waited_for_or_ended(llm: LLM, folders: dict[str, Path], in_flight: str) -> None:
    found: list[Completion] = []
    thread = threading.Thread(target=lambda: found.append(complete(llm, LONG)))
    thread.start()
    while not llm.stats().generation_tokens_total:
        pass
    assert llm.update_weights(folders["b"], in_flight=in_flight).state == "committed"  # type: ignore[arg-type]
    thread.join()
    (completion,) = found
    assert versions(completion) == ["0"]
    assert completion.finish_reason.type == ("length" if in_flight == "wait" else "abort")
    assert (len(completion.ids) == LONG) == (in_flight == "wait")


def test_what_cannot_be_taken_is_refused_and_the_old_weights_serve_on(
    llm: LLM, folders: dict[str, Path], tmp_path: Path
) -> None:
    before = complete(llm).ids
    write_hf(tmp_path / "deeper", replace(CONFIG, num_layers=3))
    with pytest.raises(UpdateFailed) as other_model:
        llm.update_weights(tmp_path / "deeper")
    assert other_model.value.code == "other-model"
    with pytest.raises(UpdateFailed):
        llm.update_weights(tmp_path / "nothing")
    with pytest.raises(UpdateRefused) as label:
        llm.update_weights(folders["b"], "a b")
    assert label.value.code == "bad-label"
    assert llm.update_weights(folders["b"], dry_run=True).state == "verified"
    assert complete(llm).ids == before
    assert llm.weights.version == "0"
    assert llm.update_weights(folders["b"]).state == "committed"


def test_in_place_there_is_no_second_set_and_a_bad_one_leaves_none(folders: dict[str, Path], tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    write_hf(bad, CONFIG)
    tensors = random_tensors(CONFIG, 2)
    tensors["model.norm.weight"][3] = float("nan")
    save_file({stored_name(k, CONFIG.family): v for k, v in tensors.items()}, bad / "model.safetensors")
    with LLM(folders["a"], tokenizer=False, kv_memory=KV, progress=False, refit_memory="inplace") as llm:
        assert llm.weights.memory == "inplace"
        first = complete(llm).ids
        with pytest.raises(UpdateFailed):
            llm.update_weights(bad)
        assert llm.weights.history[0].state == "torn"
        with pytest.raises(RequestRejected) as torn:
            complete(llm)
        assert torn.value.code == "weights_torn"
        assert llm.update_weights(folders["a"], "good").state == "committed"
        assert complete(llm).ids == first


def test_a_closed_llm_updates_nothing(folders: dict[str, Path]) -> None:
    llm = LLM(folders["a"], tokenizer=False, kv_memory=KV, progress=False)
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        llm.update_weights(folders["b"])
    with pytest.raises(UsageError, match="closed"):
        llm.roll_back()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"in_flight": "nonsense"}, "Invalid enum value 'nonsense'"),
        ({"version": 5}, "Expected `str"),
        ({"iteration": "1"}, "int"),
    ],
)
def test_an_argument_that_cannot_be_changes_nothing(
    llm: LLM, folders: dict[str, Path], argument: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        llm.update_weights(folders["b"], **argument)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Invalid enum value"):
        llm.roll_back(in_flight="nonsense")  # type: ignore[arg-type]
    assert (llm.weights.version, llm.weights.history) == ("0", ())
