"""What is asked about the weights that serve: digest, layout, values, memory, groups."""

from __future__ import annotations

import time
from typing import Any

import pytest
from fakes import request, scripted_output
from update_fakes import Bench, begin, code_of

from gtp_serve.errors import RequestRejected, UpdateFailed, WeightsTorn
from gtp_serve.refit.digest import combine
from gtp_serve.refit.orders import (
    Checksum,
    FlushCache,
    Join,
    JoinGroup,
    Layout,
    Leave,
    Pause,
    ReadTensor,
    Release,
    Restore,
    Resume,
)

LONG: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True}


# -- what serves ----------------------------------------------------------------------------------------------------


def test_a_checksum_is_of_all_ranks_and_says_whether_it_is_what_was_committed() -> None:
    bench = Bench()
    first = bench.answer(Checksum())
    assert first["digest"] == combine(["first@0", "first@1"]) == bench.updates.status().digest
    assert first["matches"] is None
    bench.answer(begin())
    assert bench.answer(Checksum())["matches"]
    bench.ranks[1].live = "bits have flipped"
    assert bench.answer(Checksum())["matches"] is False


def test_the_layout_is_told_rank_by_rank() -> None:
    bench = Bench()
    layout = bench.answer(Layout())
    assert [[shard["key"] for shard in rank] for rank in layout["ranks"]] == [["p0"], ["p1"]]
    assert layout["tensors"]["model.norm.weight"] == [8]


def test_values_of_a_tensor_are_put_together_from_the_ranks() -> None:
    bench = Bench()
    name = "model.embed_tokens.weight"
    answer = bench.answer(ReadTensor(name=name, limit=2))
    assert answer["shape"] == [64, 8]
    assert answer["values"] == [[0.0] * 4 + [1.0] * 4, [10.0] * 4 + [11.0] * 4]
    with pytest.raises(RequestRejected, match="no tensor") as caught:
        bench.answer(ReadTensor(name="model.nothing", limit=2))
    assert caught.value.code == "unknown-tensor"


def test_memory_is_released_while_nothing_runs_and_weights_must_come_again() -> None:
    bench = Bench()
    req = request("a", **LONG)
    bench.add(req)
    bench.step(3)
    assert code_of(bench, Release(tags=("weights",))) == "engine-busy"
    assert code_of(bench, Release(tags=("disk",))) == "bad-tag"
    bench.answer(Pause())
    status = bench.answer(Release(tags=("weights", "kv_cache")))
    assert status["sleeping"] == ["kv_cache", "weights"]
    with pytest.raises(WeightsTorn, match="released"):
        bench.add(request("b"))
    assert code_of(bench, begin()) == "weights-released"
    bench.answer(Restore(tags=("weights", "kv_cache")))
    bench.answer(Resume())
    bench.step(3)
    assert bench.tokens("a") == scripted_output(req)[: len(bench.tokens("a"))]
    assert not bench.engine.has_work()  # still no weights
    bench.answer(begin())
    bench.run()
    assert bench.tokens("a") == scripted_output(req)
    assert [rank.calls.count("release") for rank in bench.ranks] == [1, 1]


def test_a_flush_makes_the_prefix_cache_begin_anew() -> None:
    bench = Bench()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for rid, flush in (("a", False), ("b", True), ("c", False)):
        if flush:
            bench.answer(FlushCache())
        bench.add(request(rid, prompt, max_new_tokens=1))
        bench.run()
    assert [bench.events[rid][-1].cached_tokens for rid in "abc"] == [0, 0, 8]


def test_a_group_is_joined_beside_the_steps_and_answered_when_all_are_in() -> None:
    bench = Bench()
    bench.add(request("a", **LONG))
    bench.step(2)
    group = JoinGroup(name="g", host="h", port=1, rank_offset=1, world_size=3, backend="gloo")
    bench.others.held = []
    call = bench.ask(Join(group=group))
    bench.step(3)
    assert call not in bench.outcomes
    assert len(bench.tokens("a")) > 2
    for held in bench.others.held:
        held()
    deadline = time.monotonic() + 10
    while call not in bench.outcomes and time.monotonic() < deadline:
        bench.step()
    assert bench.result(call) == {"ranks": 2}

    alone = bench.ask(Join(group=group))
    bench.now += 121.0
    bench.poll()
    with pytest.raises(UpdateFailed, match="rank 0 listens at h:1 and all of its 3 members"):
        bench.result(alone)

    late = bench.ask(Leave(name="g"))
    bench.now += 121.0
    bench.poll()
    with pytest.raises(UpdateFailed) as caught:
        bench.result(late)
    assert ("late", "tp1") in [(label, text[:3]) for label, text in caught.value.details] or "tp1" in str(caught.value)
