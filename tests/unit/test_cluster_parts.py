"""The parts of a fleet that decide: routing, scaling, placement, the journal, bundles, who may join as a rank."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import runpy
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gtp_serve.cluster.autoscale import Autoscaler
from gtp_serve.cluster.bundles import BUNDLE_BYTES, Bundle, Unpacking, pack_source, pack_stored, share_out
from gtp_serve.cluster.journal import Decision, InMemory, Journal
from gtp_serve.cluster.outbox import Outbox
from gtp_serve.cluster.placement import bundles, choose_strategy
from gtp_serve.cluster.routing import Candidate, Router
from gtp_serve.cluster.settings import Scale
from gtp_serve.cluster.wire import Beat, pack, unpack_down, unpack_up
from gtp_serve.engine.far import KEY_VARIABLE, Door, FarRanks, knock
from gtp_serve.engine.messages import Abort, EngineStats, Events, Stats, Submit
from gtp_serve.errors import DoesNotFit, EngineFault, EnvironmentFault, UpdateFailed, UsageError
from gtp_serve.layout.spans import Box, Shard, Span
from gtp_serve.refit.orders import MemoryOrder, UpdateRecord
from gtp_serve.refit.shared import MemorySource
from gtp_serve.request import FinishReason, Request, SamplingParams, TokenEvent
from gtp_serve.server import cluster as command


def candidate(name: str, load: int = 0, *, version: str = "1", free: int = 100, waiting: int = 0) -> Candidate:
    return Candidate(name=name, version=version, load=load, kv_free=free, kv_total=100, waiting=waiting)


# -- routing -----------------------------------------------------------------------------------------


def test_a_prompt_goes_where_its_beginning_went_before() -> None:
    router, shared = Router(4), list(range(40))
    here, there = candidate("a"), candidate("b", 2)
    router.note(there, [*shared, 1, 2, 3])

    assert router.choose([here, there], [*shared, 9, 9, 9]) == there
    assert router.choose([here, candidate("b", 50)], [*shared, 9, 9]) == here  # far more to do than the other
    assert router.choose([here, candidate("b", 2, version="2")], [*shared, 9]) == here  # another version's cache
    assert router.choose([here, there], [*shared, 9], salt="x") == here


def test_the_longer_beginning_wins() -> None:
    router, prompt = Router(4), list(range(41))
    router.note(candidate("a"), prompt[:9])
    router.note(candidate("b"), prompt[:33])

    chosen = router.choose([candidate("a"), candidate("b")], prompt)
    assert chosen is not None
    assert chosen.name == "b"


def test_fronts_that_know_nothing_of_one_another_agree_on_a_new_prompts_place() -> None:
    dice = random.Random(0)
    places: dict[str, int] = {}
    for _ in range(200):
        prompt = [dice.randrange(1000) for _ in range(20)]
        chosen = {
            Router(4).choose([candidate(name) for name in names], prompt).name  # type: ignore[union-attr]
            for names in ("abc", "cab")
        }
        assert len(chosen) == 1
        name = chosen.pop()
        places[name] = places.get(name, 0) + 1
    assert len(places) == 3


def test_a_replica_without_room_or_with_a_queue_is_taken_last() -> None:
    router = Router(4)
    full, queued, free = candidate("a", free=1), candidate("b", waiting=1), candidate("c", 3)

    assert router.choose([full, queued, free], list(range(40))) == free
    assert router.choose([full, queued], list(range(40))) is not None
    assert router.choose([], [1, 2, 3]) is None


def test_shared_beginnings_hit_one_cache_and_random_routing_does_not() -> None:
    """Eight groups of prompts over four replicas: how often a prompt meets its beginning."""
    dice = random.Random(1)
    groups = [[dice.randrange(1000) for _ in range(64)] for _ in range(8)]
    requests = [(g, [*groups[g], dice.randrange(1000)]) for g in [dice.randrange(8) for _ in range(400)]]

    def hits(choose: object) -> float:
        seen: dict[str, set[int]] = {}
        found = 0
        for group, prompt in requests:
            name = choose(prompt)  # type: ignore[operator]
            found += group in seen.setdefault(name, set())
            seen[name].add(group)
        return found / len(requests)

    router = Router(16)

    def routed(prompt: list[int]) -> str:
        chosen = router.choose([candidate(name) for name in "abcd"], prompt)
        assert chosen is not None
        router.note(chosen, prompt)
        return chosen.name

    assert hits(routed) == 1 - 8 / 400
    assert hits(lambda _: dice.choice("abcd")) < 0.95


def test_the_table_of_places_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gtp_serve.cluster.routing.MOST_ENTRIES", 50)
    router = Router(1)
    for start in range(100):
        router.note(candidate("a"), list(range(start, start + 10)))
    assert len(router._places) == 50


# -- scaling and placement ---------------------------------------------------------------------------


def test_replicas_follow_the_demand_with_delays() -> None:
    scaler = Autoscaler(Scale(low=1, high=4, target=10, up_seconds=5, down_seconds=20))

    assert scaler.look(0, 35) == 1
    assert scaler.look(4.9, 35) == 1
    assert scaler.look(5, 35) == 4
    assert scaler.look(6, 500) == 4  # no more than the most
    assert scaler.look(10, 0) == 4
    assert scaler.look(20, 25) == 4  # a lull that was none
    assert scaler.look(29, 0) == 4
    assert scaler.look(30, 0) == 3  # as many as were wanted at most in that time
    assert scaler.look(31, 0) == 3
    assert scaler.look(52, 0) == 1


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3, 2)])
def test_a_scale_that_cannot_be_is_refused(low: int, high: int) -> None:
    with pytest.raises(UsageError, match="replicas cannot be"):
        Scale(low=low, high=high).check()


def test_ranks_are_packed_where_they_fit_and_spread_where_not() -> None:
    needed = bundles(4, 1, 1)
    assert needed == [{"CPU": 1, "GPU": 1}] * 4
    large, small = {"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 2.0}

    assert choose_strategy("auto", needed, [small, large]) == "STRICT_PACK"
    assert choose_strategy("auto", needed, [small, small]) == "PACK"
    assert choose_strategy("pack", needed, [large]) == "PACK"
    assert choose_strategy("spread", needed, [large]) == "STRICT_SPREAD"
    with pytest.raises(DoesNotFit, match="4 GPU, the cluster has 2 GPU"):
        choose_strategy("auto", needed, [small])


# -- the journal -------------------------------------------------------------------------------------


def test_a_journal_is_read_as_it_was_written() -> None:
    store = InMemory()
    journal = Journal(store)
    assert journal.is_new
    record = UpdateRecord(id="u", version="2", base="1", state="committed", kind="disk")
    journal.write(committed="2", deciding=Decision(update="u", version="2", base="1"))
    assert Journal(store).memory.deciding == Decision(update="u", version="2", base="1")
    journal.end(record, "digest", deciding=None)

    again = Journal(store)
    assert not again.is_new
    assert (again.memory.committed, again.memory.deciding, again.memory.records) == ("2", None, (record,))
    assert again.memory.contents == {"u": "digest"}
    again.forget()
    assert Journal(store).is_new


def test_a_journal_that_cannot_be_read_is_not_taken_for_a_new_one() -> None:
    store = InMemory()
    store.put(b'{"committed": 3}')
    with pytest.raises(EngineFault, match="journal cannot be read"):
        Journal(store)


# -- bundles -----------------------------------------------------------------------------------------


class Values:
    """A source of small whole tensors."""

    def __init__(self, sizes: list[int]) -> None:
        self.arrays = [np.arange(size, dtype=np.float32) + index for index, size in enumerate(sizes)]

    def shards(self) -> list[Shard]:
        boxes = [Box.whole((len(one),)) for one in self.arrays]
        return [Shard(f"t{n}", (len(one),), "float32", (Span(f"t{n}", box, box),))
                for n, (one, box) in enumerate(zip(self.arrays, boxes, strict=True))]  # fmt: skip

    def read(self, index: int) -> memoryview:
        return memoryview(self.arrays[index].tobytes())

    def close(self) -> None:
        return None


def test_bundles_hold_every_byte_once_and_verify_when_they_are_read() -> None:
    source = Values([5, 300, 1, 70, 2])
    made = pack_source(source, lambda data: data.copy(), size=400)
    assert [len(bundle.shards) for bundle in made] == [1, 1, 3]
    assert sum(bundle.payload for bundle in made) == 4 * 378

    unpacking = Unpacking(made)
    for index in (2, 0, 1):
        unpacking.add(index, made[index].data)
    with pytest.raises(UpdateFailed, match="bytes"):
        unpacking.add(0, made[1].data)
    stored = unpacking.seal()
    with unpacking.memory as memory:
        read = MemorySource(MemoryOrder(segments=(memory.segment(),), shards=stored))
        for index, shard in enumerate(read.shards()):
            assert bytes(read.read(index)) == source.arrays[int(shard.key[1:])].tobytes()
        elsewhere = MemoryOrder(segments=(), shards=stored, elsewhere={1: (memory.segment(),)})
        other = MemorySource(elsewhere, rank=1)
        assert bytes(other.read(0)) == source.arrays[0].tobytes()
        other.close()
        again = pack_stored(read._segments[0].view, stored, lambda data: data.copy(), size=BUNDLE_BYTES)
        read.close()
    assert [one.digest for one in again[0].shards] == [one.digest for one in stored]


def test_a_changed_byte_in_a_bundle_is_found() -> None:
    bundle = pack_source(Values([8]), lambda data: data.copy())[0]
    bundle.data[3] ^= 1
    unpacking = Unpacking([bundle])
    unpacking.add(0, bundle.data)
    stored = unpacking.seal()
    with unpacking.memory as memory:
        source = MemorySource(MemoryOrder(segments=(memory.segment(),), shards=stored))
        with pytest.raises(UpdateFailed, match="digest"):
            source.read(0)
        source.close()


def test_every_bundle_goes_to_one_taker_and_all_take_about_as_much() -> None:
    made = [Bundle(shards=(), size=size, data=None) for size in (5, 1, 1, 1, 4, 2)]
    shares = share_out(made, 3)

    assert sorted(index for share in shares for index in share) == list(range(6))
    assert sorted(sum(made[index].size for index in share) for share in shares) == [4, 5, 5]


# -- messages ----------------------------------------------------------------------------------------


def test_events_of_one_step_travel_together_and_in_order() -> None:
    async def story() -> None:
        box, stats = Outbox(), Stats(stats=EngineStats(running=1))
        first = TokenEvent(rid="a", token_ids=(1,))
        second = TokenEvent(rid="b", token_ids=(2,), finish=FinishReason(type="length"))
        box.put_event(first)
        box.put_event(second)
        taken = unpack_up(pack(await box.take(1, stats)))
        assert taken == [Events(events=(first, second)), stats]
        assert await box.take(0.01, stats) == [Beat()]

    asyncio.run(story())


def test_what_goes_down_is_requests_and_aborts() -> None:
    request = Request(rid="r", input_ids=(1, 2), sampling=SamplingParams(max_new_tokens=3))
    assert unpack_down(pack([Submit(requests=(request,)), Abort(rids=("x",))])) == [
        Submit(requests=(request,)), Abort(rids=("x",)),
    ]  # fmt: skip


# -- ranks from other machines -----------------------------------------------------------------------


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_rank_that_has_the_secret_is_let_in_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    far = FarRanks(host="127.0.0.1", port=free_port(), store_port=1)
    with pytest.raises(EnvironmentFault, match="need a secret"):
        Door(far)
    monkeypatch.setenv(KEY_VARIABLE, "s3cret")
    door = Door(far)
    with socket.create_connection((far.host, far.port)) as stranger:
        stranger.recv(32)
        stranger.sendall(b"\x01\x00\x00\x00" + b"x" * 32)
        assert stranger.recv(1) == b""  # shown out
    with pytest.raises(TimeoutError):
        door.wait(1, 0.1)

    ends: list[socket.socket] = []
    thread = threading.Thread(target=lambda: ends.append(knock(far, 1, 20)[0]))
    thread.start()
    inside = door.wait(1, 20)
    thread.join()
    inside.sendall(b"hello")
    assert ends[0].recv(5) == b"hello"
    for end in (inside, *ends):
        end.close()
    door.close()
    with pytest.raises(EngineFault, match="could not reach rank 0"):
        knock(far, 1, 0.1)


# -- the command -------------------------------------------------------------------------------------


def test_the_commands_own_options_are_taken_and_the_rest_left_to_serve() -> None:
    args, rest = command.parser().parse_known_args(["--replicas", "3", "--tp", "2", "--ckpt", "x", "--rolling"])
    assert (args.replicas, args.rolling, args.address, rest) == (3, True, "auto", ["--tp", "2", "--ckpt", "x"])
    for words in (["--replicas", "0"], ["--target-requests", "-1"], ["--placement", "x"]):
        with pytest.raises(UsageError):
            command.parser().parse_known_args(words)


def test_without_ray_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault, match="Ray is not installed") as caught:
        command.run(["--ckpt", "x"], lambda *_: None)
    assert "gtp-serve[ray]" in str(caught.value)


# -- Ray Serve ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # Ray's own, when it is imported
def test_the_ingress_that_serve_pickles_finds_the_process_own_application(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import cloudpickle

    from gtp_serve.cluster import app

    seen: list[str] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])

    ingress = cloudpickle.loads(cloudpickle.dumps(app.deployment.func_or_class))  # type: ignore[no-untyped-call]
    assert app.Front in ingress.__mro__  # not a copy of it, whose application the door would not see
    copy = cloudpickle.loads(cloudpickle.dumps(app.door))  # type: ignore[no-untyped-call]
    monkeypatch.setattr(app, "_APPS", [application])
    asyncio.run(copy({"type": "http", "path": "/ready", "root_path": "/x"}, None, None))
    assert seen == ["/ready"]


@pytest.mark.filterwarnings("ignore")
def test_a_signal_is_ours_again_after_something_in_c_has_taken_it() -> None:
    from gtp_serve.cluster.bringup import take_signals_back

    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 1)  # SIG_IGN, which Python does not hear of
        os.kill(os.getpid(), signal.SIGTERM)
        assert not heard
        take_signals_back()
        os.kill(os.getpid(), signal.SIGTERM)
        assert heard == [signal.SIGTERM]
        with ThreadPoolExecutor(1) as pool:
            pool.submit(take_signals_back).result()  # as in an actor of Ray Serve's: they are not ours there
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.filterwarnings("ignore")
def test_the_examples_trainer_can_be_sent_to_an_actor() -> None:
    """As Ray sends it when the example is run as a script: by value, with all that its methods name."""
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "grpo_ray.py"), run_name="__main__example")
    assert "torch.distributed.config" in sys.modules  # the module that cannot be pickled is there to be found

    assert b"policy_loss" in cloudpickle.dumps(example["Trainer"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("said", "url"),
    [(b"10.0.0.7:8299", "http://10.0.0.7:8299"), (b"https://ray.example", "https://ray.example"), (None, "")],
)
def test_a_front_that_ray_serve_runs_tells_the_clusters_own_dashboard(
    said: bytes | None, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gtp_serve.cluster import bringup

    asked: list[tuple[bytes, bytes]] = []

    def get(key: bytes, namespace: bytes) -> bytes | None:
        asked.append((key, namespace))
        return said

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_get", get)
    assert bringup.join("auto") == url
    assert asked == [(b"webui:url", b"dashboard")]


@pytest.mark.filterwarnings("ignore")
def test_serves_arguments_are_the_commands() -> None:
    from gtp_serve.cluster.app import read_args

    words = {"ckpt": "x", "tp": "2", "no_tokenizer": "true", "replicas": 3, "placement": "spread", "down_after": "60"}
    options, cluster = read_args(words)
    assert (options.tp, options.no_tokenizer) == (2, True)
    assert (cluster.scale.low, cluster.scale.high, cluster.strategy, cluster.keep) == (3, 3, "spread", True)
    assert (cluster.scale.up_seconds, cluster.scale.down_seconds) == (10, 60)
    for wrong in ({"ckpt": "x", "tq": "2"}, {"ckpt": "x", "placement": "x"}, {"ckpt": "x", "max_replicas": 0}):
        with pytest.raises(UsageError):
            read_args(wrong)
