"""Updates on two real ranks: both swap between the same two steps, or neither does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from checkpoint_files import SMALL, random_tensors, write_hf
from ranks_harness import Ranks, is_gone, running, until
from safetensors.torch import save_file

from gtp_serve.engine.engine import Engine
from gtp_serve.engine.peer import Patience
from gtp_serve.engine.rank_messages import AskRank
from gtp_serve.engine.rank_tasks import ChecksumNow
from gtp_serve.engine.updates import Updates
from gtp_serve.errors import EngineFault, GtpServeError
from gtp_serve.layout.huggingface import stored_name
from gtp_serve.refit.orders import (
    Begin,
    Checksum,
    Commit,
    Control,
    DiskOrder,
    Layout,
    ReadTensor,
    RollBack,
    UpdateRecord,
    UpdateRequest,
)
from gtp_serve.request import Request, SamplingParams

pytestmark = pytest.mark.distributed

CONFIG = replace(SMALL, max_context=2048, dtype="float32")
PROMPT = (3, 1, 4, 1, 5)


@dataclass
class Served:
    """Two ranks and an engine that is driven by the test."""

    ranks: Ranks
    engine: Engine
    updates: Updates
    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    answers: dict[int, Any] = field(default_factory=dict)
    calls: int = 0

    def step(self) -> None:
        self.ranks.peers_of_rank_0.check()
        for outcome in self.updates.poll():
            self.answers[outcome.call] = outcome
        if not self.engine.has_work():
            time.sleep(0.002)
            return
        for event in self.engine.step():
            self.tokens += event.token_ids
            self.versions += [event.weight_version] * len(event.token_ids)

    def step_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.step()

    def ask(self, command: Control) -> Any:
        """Its answer; steps go on meanwhile."""
        self.calls += 1
        self.updates.control(self.calls, command)
        deadline = time.monotonic() + 30
        while self.calls not in self.answers:
            assert time.monotonic() < deadline
            self.step()
        outcome = self.answers[self.calls]
        if outcome.error is not None:
            raise outcome.error
        return msgspec.json.decode(outcome.body)

    def start(self, count: int) -> None:
        sampling = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
        self.tokens, self.versions = [], []
        self.engine.add(Request(rid=f"r{self.calls}-{count}", input_ids=PROMPT, sampling=sampling))

    def generate(self, count: int = 8) -> list[int]:
        self.start(count)
        while self.engine.has_requests():
            self.step()
        return self.tokens

    def update(self, name: str, version: str, path: Path, **fields: Any) -> UpdateRecord:
        request = UpdateRequest(order=DiskOrder(path=str(path)), version=version, **fields)
        self.ask(Begin(id=name, request=request))
        deadline = time.monotonic() + 30
        while True:
            assert time.monotonic() < deadline
            self.step()
            ended = [record for record in self.updates.status().history if record.id == name]
            if ended:
                return ended[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for seed, name in enumerate(("a", "b")):
        found[name] = tmp_path_factory.mktemp(name)
        write_hf(found[name], CONFIG)
        stored = {stored_name(key, CONFIG.family): value for key, value in random_tensors(CONFIG, seed).items()}
        save_file(stored, found[name] / "model.safetensors")
    return found


@pytest.fixture
def served(folders: dict[str, Path]) -> Iterator[Served]:
    with running(folders["a"], 2, patience=Patience(silence=3.0)) as ranks:
        engine = ranks.engine()
        yield Served(ranks, engine, ranks.updates(engine))


def cold(folder: Path, prompt_and: int) -> tuple[list[int], str]:
    """Tokens and digest of two ranks that have loaded nothing else."""
    with running(folder, 2) as ranks:
        engine = ranks.engine()
        served = Served(ranks, engine, ranks.updates(engine))
        return served.generate(prompt_and), served.ask(Checksum())["digest"]


def test_both_ranks_commit_between_the_same_two_steps_and_are_then_as_after_a_cold_load(
    served: Served, folders: dict[str, Path]
) -> None:
    old = served.ask(Checksum())["digest"]
    before = served.generate()
    served.start(800)
    for _ in range(5):
        served.step()
    record = served.update("u", "1", folders["b"], in_flight="keep")
    assert record.state == "committed", record
    assert record.votes == 2
    while served.engine.has_requests():
        served.step()
    mixed, versions = served.tokens, served.versions
    assert len(mixed) == 800
    assert versions == sorted(versions)
    assert set(versions) == {"0", "1"}

    tokens, digest = cold(folders["b"], 8)
    assert served.ask(Checksum()) | {"ranks": []} == {"version": "1", "digest": digest, "ranks": [], "matches": True}
    assert served.generate() == tokens != before

    assert served.ask(RollBack())["version"] == "0"
    assert served.ask(Checksum())["digest"] == old
    assert served.generate() == before
    of_old = versions.count("0")
    assert served.generate(of_old) == mixed[:of_old]  # not one token more or less is by the old weights
    assert served.generate(of_old + 20) != mixed[: of_old + 20]


def test_a_failure_leaves_both_ranks_as_they_were(served: Served, folders: dict[str, Path], tmp_path: Path) -> None:
    before, digest = served.generate(), served.ask(Checksum())["digest"]
    write_hf(tmp_path, replace(CONFIG, num_layers=CONFIG.num_layers + 1))
    record = served.update("u", "1", tmp_path)
    assert record.state == "aborted"
    assert record.code
    assert dict(record.details)["on"] in ("rank tp0", "rank tp1")
    assert served.ask(Checksum())["digest"] == digest
    assert served.generate() == before
    assert served.update("v", "1", folders["b"]).state == "committed"


def test_a_dry_run_reads_on_both_ranks_and_changes_neither(served: Served, folders: dict[str, Path]) -> None:
    digest = served.ask(Checksum())["digest"]
    record = served.update("u", "1", folders["b"], dry_run=True)
    assert (record.state, record.votes) == ("verified", 2)
    assert served.ask(Checksum())["digest"] == digest


def test_layout_and_values_are_put_together_from_both_ranks(served: Served) -> None:
    layout = served.ask(Layout())
    assert len(layout["ranks"]) == 2
    assert [shard["key"] for shard in layout["ranks"][0]] == [shard["key"] for shard in layout["ranks"][1]]
    tensors = random_tensors(CONFIG, 0)
    for name, tensor in tensors.items():  # cut by rows, by columns, or not at all
        found = served.ask(ReadTensor(name=name, limit=3))
        assert found["values"] == tensor[:3].tolist()
        assert tuple(layout["tensors"][name]) == tuple(found["shape"]) == tuple(tensor.shape)


def test_a_rank_that_dies_while_it_stages_ends_the_engine(served: Served, folders: dict[str, Path]) -> None:
    leader = served.ranks.peers_of_rank_0
    pid = leader.peers[0].pid or 0
    order = DiskOrder(path=str(folders["b"]), max_bytes_per_second=1000)
    served.ask(Begin(id="u", request=UpdateRequest(order=order, version="1")))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(GtpServeError, match=r"rank tp1 .* got signal 9"):
        served.step_for(10)
    until(lambda: is_gone(pid), 2.0)


def test_a_rank_that_stands_still_at_the_commit_ends_the_engine_by_name(
    served: Served, folders: dict[str, Path]
) -> None:
    pid = served.ranks.peers_of_rank_0.peers[0].pid or 0
    served.update("u", "1", folders["b"], dry_run=True)
    request = UpdateRequest(order=DiskOrder(path=str(folders["b"])), version="1", commit="manual")
    served.ask(Begin(id="v", request=request))
    deadline = time.monotonic() + 20
    while (now := served.updates.status().update) is None or now.state != "verified":
        assert time.monotonic() < deadline
        served.step()
    os.kill(pid, signal.SIGSTOP)
    served.updates.control(99, Commit(id="v"))
    with pytest.raises(EngineFault, match=r"rank tp1 .* has been silent for 3 s"):
        served.step_for(10)
    until(lambda: is_gone(pid), 3.0)


def test_a_rank_that_has_run_another_number_of_steps_is_not_asked_for_its_weights(served: Served) -> None:
    leader = served.ranks.peers_of_rank_0
    served.generate(2)
    leader.peers[0].link.send(AskRank(call=7, steps=1, what=ChecksumNow()))
    with pytest.raises(EngineFault, match=r"rank tp1 has run \d+ steps where rank 0 has run 1"):
        served.step_for(10)
