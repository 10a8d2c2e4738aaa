"""One rank through updates: staged beside serving, voted on, committed, rolled back, dropped, torn."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from checkpoint_files import SMALL, SMALL_MOE, random_tensors
from parity.model_harness import TensorSource
from refit_harness import (
    Gate,
    Rank,
    SourceWith,
    cold_digest,
    cold_logits,
    memory_order,
    open_fds,
    resident,
    slowly,
)
from torch import Tensor

from gtp_serve.config import ModelConfig
from gtp_serve.errors import CheckpointNotFound, UpdateRefused
from gtp_serve.refit.orders import DiskOrder
from gtp_serve.refit.source import WeightSource


@pytest.fixture
def rank() -> Rank:
    rank = Rank()
    rank.load(1)
    return rank


def test_old_weights_serve_until_the_commit_and_the_new_ones_after_it(rank: Rank) -> None:
    before = rank.logits()

    vote = rank.stage_seed("u", 2)

    assert (vote.error, vote.rank, vote.touched) == (None, 0, True)
    assert torch.equal(rank.logits(), before)
    assert rank.weights.commit("u", "2") == vote.digest == cold_digest(SMALL, 2)
    assert torch.equal(rank.logits(), cold_logits(SMALL, 2))


def test_vote_tells_bytes_and_seconds_of_each_phase(rank: Rank) -> None:
    vote = rank.stage_seed("u", 2)

    size = sum(tensor.nbytes for tensor in random_tensors(SMALL).values())
    assert vote.source_bytes == size
    assert vote.target_bytes == 2 * size  # bfloat16 to float32
    assert set(vote.seconds) == {"open", "plan", "transfer", "verify", "derive"}
    assert rank.progress("u")[-1].done == rank.progress("u")[-1].total == size


def test_addresses_of_parameters_never_change(rank: Rank) -> None:
    before = [target.tensor.data_ptr() for target in rank.decoder.targets()]

    rank.push("a", 2)
    rank.weights.roll_back()
    rank.push("b", 3, memory="inplace")
    rank.weights.release(["weights"])
    rank.weights.restore(["weights"])

    assert [target.tensor.data_ptr() for target in rank.decoder.targets()] == before


def test_roll_back_restores_the_version_before_bit_for_bit_and_again_the_one_after(rank: Rank) -> None:
    old, before = rank.weights.checksum(), rank.logits()
    new = rank.push("u", 2)

    assert rank.weights.roll_back() == old == rank.weights.checksum()
    assert torch.equal(rank.logits(), before)
    assert rank.weights.roll_back() == new == rank.weights.checksum()


def test_roll_back_knows_the_digest_of_weights_that_nobody_asked_about(rank: Rank) -> None:
    rank.push("u", 2)

    assert rank.weights.roll_back() == cold_digest(SMALL, 1)


def test_a_b_a_returns_to_a(rank: Rank) -> None:
    digests = [rank.push(f"u{number}", seed) for number, seed in enumerate([5, 6, 5])]

    assert digests == [cold_digest(SMALL, 5), cold_digest(SMALL, 6), cold_digest(SMALL, 5)]
    assert torch.equal(rank.logits(), cold_logits(SMALL, 5))


def test_w5_same_weights_again_change_nothing_bit_for_bit(rank: Rank) -> None:
    before = [target.tensor.clone() for target in rank.store.live]
    digest = rank.weights.checksum()

    assert rank.push("u", 1) == digest

    assert all(torch.equal(old, now.tensor) for old, now in zip(before, rank.store.live, strict=True))


@pytest.mark.parametrize("config", [SMALL_MOE, replace(SMALL, tied=True), replace(SMALL, qkv_bias=True)])
def test_every_kind_of_model_can_be_updated(config: ModelConfig) -> None:
    rank = Rank(config)
    rank.load(1)

    assert rank.push("u", 2) == cold_digest(config, 2)
    assert torch.equal(rank.logits(), cold_logits(config, 2))


def test_nothing_is_committed_without_a_vote_for_it(rank: Rank) -> None:
    before = rank.weights.checksum()
    with pytest.raises(UpdateRefused, match="nothing verified of update u"):
        rank.weights.commit("u", "2")
    gate = Gate(3)
    rank.disk["u"] = lambda: SourceWith(random_tensors(SMALL, 2), gate)
    rank.stage("u", DiskOrder(path="u"))
    assert gate.reached.wait(10)

    with pytest.raises(UpdateRefused, match="nothing verified of update u"):
        rank.weights.commit("u", "2")
    gate.open()
    rank.vote("u")
    with pytest.raises(UpdateRefused, match="nothing verified of update other"):
        rank.weights.commit("other", "2")
    assert rank.weights.checksum() == before
    rank.weights.commit("u", "2")
    with pytest.raises(UpdateRefused):
        rank.weights.commit("u", "2")


def test_second_update_is_refused_while_one_is_staged_and_waits_for_a_dropped_one(rank: Rank) -> None:
    gate = Gate(3)
    rank.disk["slow"] = lambda: SourceWith(random_tensors(SMALL, 2), gate)
    rank.stage("slow", DiskOrder(path="slow"))
    assert gate.reached.wait(10)
    with pytest.raises(UpdateRefused, match="still staging update slow"):
        rank.stage("next", DiskOrder(path="next"))

    rank.weights.drop("slow")
    rank.disk["next"] = lambda: TensorSource(random_tensors(SMALL, 3))
    rank.stage("next", DiskOrder(path="next"))
    time.sleep(0.1)
    assert rank.votes("next") == []
    gate.open()

    assert rank.vote("slow").error is not None
    assert rank.vote("next").error is None
    assert rank.weights.commit("next", "3") == cold_digest(SMALL, 3)


def test_drop_in_the_middle_returns_at_once_and_the_old_weights_serve_on(rank: Rank) -> None:
    before = rank.weights.checksum()
    source = SourceWith(random_tensors(SMALL, 2), slowly(0.05))
    count = len(source.tensors)
    rank.disk["u"] = lambda: source
    rank.stage("u", DiskOrder(path="u"))
    while source.reads < 3:
        time.sleep(0.005)

    began = time.monotonic()
    rank.weights.drop("u")
    assert time.monotonic() - began < 0.05
    vote = rank.vote("u")
    assert time.monotonic() - began < 1.5

    assert vote.error is not None
    assert vote.error[0] == "dropped"
    assert source.closed
    assert source.reads < count
    with pytest.raises(UpdateRefused):
        rank.weights.commit("u", "2")
    assert rank.weights.checksum() == before
    assert len(rank.votes("u")) == 1


def test_drop_after_the_vote_takes_it_back(rank: Rank) -> None:
    rank.stage_seed("u", 2)

    rank.weights.drop("u")
    rank.weights.drop("u")
    rank.weights.drop("never heard of")

    with pytest.raises(UpdateRefused):
        rank.weights.commit("u", "2")


def test_deadline_ends_the_update_and_says_what_it_was_doing(rank: Rank) -> None:
    rank.disk["u"] = lambda: SourceWith(random_tensors(SMALL, 2), slowly(0.1))

    rank.stage("u", DiskOrder(path="u"), seconds=0.3)

    code, message, _ = rank.vote("u").error or ("", "", ())
    assert code == "update-deadline"
    assert message == "the update's deadline of 0.3 s passed while rank 0 was copying"


def test_rate_of_a_disk_order_is_kept(rank: Rank) -> None:
    size = sum(tensor.nbytes for tensor in random_tensors(SMALL).values())
    rank.disk["u"] = lambda: TensorSource(random_tensors(SMALL, 2))
    began = time.monotonic()

    rank.stage("u", DiskOrder(path="u", max_bytes_per_second=2 * size))

    assert rank.vote("u").error is None
    assert time.monotonic() - began > 0.3


@pytest.mark.parametrize(("memory", "added"), [("staged", 7), ("inplace", 0)])
def test_staging_beside_decoding_steps_back_from_the_processor(rank: Rank, memory: str, added: int) -> None:
    seen: list[tuple[int, bool]] = []

    def look(number: int) -> None:
        niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        seen.append((niceness, os.sched_getscheduler(0) == os.SCHED_IDLE))

    rank.disk["u"] = lambda: SourceWith(random_tensors(SMALL, 2), look)
    rank.stage("u", DiskOrder(path="u"), memory=memory)
    assert rank.vote("u").error is None

    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert set(seen) == {(min(19, own + added), memory == "staged")}


# -- what is wrong with weights --------------------------------------------------------------------


def failure(rank: Rank, tensors: dict[str, Tensor], update: str = "bad") -> tuple[str, str]:
    rank.disk[update] = lambda: TensorSource(tensors)
    rank.stage(update, DiskOrder(path=update))
    error = rank.vote(update).error
    assert error is not None
    return error[0], error[1]


def test_w2_each_wrong_set_of_tensors_is_refused_by_name_and_the_old_weights_serve_on(rank: Rank) -> None:
    name, good = "model.layers.1.mlp.up_proj.weight", random_tensors(SMALL, 2)
    before = rank.weights.checksum()
    wrong = {
        "missing": {key: value for key, value in good.items() if key != name},
        "misshapen": {**good, name: good[name][:-1]},
        "mistyped": {**good, name: good[name].to(torch.int32)},
        "nan": {**good, name: good[name].index_fill(0, torch.tensor([5]), float("nan"))},
        "overflow": {**good, name: torch.full(good[name].shape, 1e308, dtype=torch.float64)},
    }

    for update, tensors in wrong.items():
        code, message = failure(rank, tensors, update)
        assert name in message, update
        assert rank.weights.checksum() == before
        assert code == ("not-finite" if update in ("nan", "overflow") else "ckpt-coverage")

    assert failure(rank, {**good, "model.layers.9.mlp.up_proj.weight": good[name]}, "unknown")[0] == "ckpt-coverage"
    assert "row 5" in failure(rank, wrong["nan"], "again")[1]
    assert rank.push("good", 2) == cold_digest(SMALL, 2)


def test_refusal_before_the_first_byte_keeps_the_set_to_roll_back_to(rank: Rank) -> None:
    rank.push("a", 2)
    rank.disk["bad"] = lambda: TensorSource({"x": torch.ones(1)})
    rank.stage("bad", DiskOrder(path="bad"))
    assert not rank.vote("bad").touched

    assert rank.weights.roll_back() == cold_digest(SMALL, 1)


def test_failure_after_the_first_byte_leaves_nothing_to_roll_back_to(rank: Rank) -> None:
    rank.push("a", 2)
    rank.disk["bad"] = lambda: SourceWith(random_tensors(SMALL, 3), break_at(4))
    rank.stage("bad", DiskOrder(path="bad"))
    vote = rank.vote("bad")
    assert vote.touched
    assert vote.error is not None

    with pytest.raises(UpdateRefused, match="no set of weights to go back to"):
        rank.weights.roll_back()
    assert rank.weights.checksum() == cold_digest(SMALL, 2)


def break_at(read: int) -> Callable[[int], None]:
    def check(number: int) -> None:
        if number == read:
            raise OSError("the disk is gone")

    return check


def test_error_of_a_source_is_told_as_it_is(rank: Rank) -> None:
    def missing() -> WeightSource:
        raise CheckpointNotFound("there is nothing at /x", [("looked for", "metadata.json")])

    rank.disk["u"] = missing
    rank.stage("u", DiskOrder(path="u"))

    assert rank.vote("u").error == ("ckpt-not-found", "there is nothing at /x", (("looked for", "metadata.json"),))


def test_error_that_nobody_foresaw_becomes_a_vote_too(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    rank.stage("u", DiskOrder(path="not there"))

    assert rank.vote("u").error == ("internal", "rank 0: KeyError: 'not there'", ())
    assert "Traceback" in capsys.readouterr().err


def test_roll_back_without_a_commit_before_it_is_refused(rank: Rank) -> None:
    with pytest.raises(UpdateRefused, match="no set of weights to go back to") as caught:
        rank.weights.roll_back()
    assert caught.value.code == "nothing-to-roll-back"


def test_two_hundred_failed_updates_leave_memory_and_descriptors_flat() -> None:
    config = replace(SMALL, hidden_size=128, head_dim=32, ffn_size=512, vocab_size=4000, vocab_rows=4000)
    rank = Rank(config)
    rank.load(1)
    before = rank.weights.checksum()
    tensors = random_tensors(config, 2)
    tensors["model.norm.weight"][-1] = float("nan")
    order, memory = memory_order(tensors)

    def fail(update: str) -> None:
        rank.stage(update, order)
        assert rank.vote(update).error is not None
        rank.weights.drop(update)
        rank.reports.clear()

    for number in range(60):
        fail(f"warm up {number}")
    gc.collect()
    objects, start, descriptors, threads = (
        len(gc.get_objects()),
        resident(),
        open_fds(),
        threading.active_count(),
    )
    for number in range(200):
        fail(str(number))
    gc.collect()

    assert len(gc.get_objects()) - objects < 200  # less than one for each update
    assert resident() - start < rank.store.num_bytes
    assert rank.store.num_bytes > 4 << 20
    assert open_fds() <= descriptors
    assert threading.active_count() <= threads
    assert rank.weights.checksum() == before
    memory.close()


# -- in place --------------------------------------------------------------------------------------


def test_update_in_place_overwrites_the_live_weights_and_keeps_no_second_set(rank: Rank) -> None:
    digest = rank.push("u", 2, memory="inplace")

    assert digest == cold_digest(SMALL, 2) == rank.weights.checksum()
    assert torch.equal(rank.logits(), cold_logits(SMALL, 2))
    with pytest.raises(UpdateRefused, match="no set of weights to go back to"):
        rank.weights.roll_back()


def test_failure_in_place_says_that_the_live_weights_were_touched_and_a_good_update_mends_them(rank: Rank) -> None:
    before = rank.weights.checksum()
    rank.disk["bad"] = lambda: SourceWith(random_tensors(SMALL, 2), break_at(4))

    rank.stage("bad", DiskOrder(path="bad"), memory="inplace")

    assert rank.vote("bad").touched
    assert rank.weights.checksum() != before
    assert rank.push("good", 3, memory="inplace") == cold_digest(SMALL, 3)


def test_refusal_in_place_before_the_first_byte_leaves_the_live_weights_whole(rank: Rank) -> None:
    before = rank.weights.checksum()
    rank.disk["bad"] = lambda: TensorSource({"x": torch.ones(1)})

    rank.stage("bad", DiskOrder(path="bad"), memory="inplace")

    assert not rank.vote("bad").touched
    assert rank.weights.checksum() == before
