"""Log lines and metrics of weight updates that have ended."""

from __future__ import annotations

import asyncio
from typing import Any

from fakes_server import FakeClient, engine_config

from gtp_serve.refit.orders import UpdateRecord, WeightsStatus
from gtp_serve.server.metrics import Metrics
from gtp_serve.server.startup import Lines
from gtp_serve.server.state import ServerState, Serving
from gtp_serve.server.weights_watch import watch_weights

SECONDS = {"open": 0.01, "transfer": 0.5, "verify": 0.1, "wait": 0.003, "total": 0.64}


class Said(Lines):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, dict[str, Any]]] = []

    def line(self, level: str, event: str, fields: Any) -> None:
        self.lines.append((level, event, dict(fields)))


def record(number: int, state: Any, **fields: Any) -> UpdateRecord:
    return UpdateRecord(id=f"u{number}", version=str(number), base="0", state=state, **{"kind": "disk", **fields})


def test_each_update_that_ends_is_told_once() -> None:
    async def go() -> None:
        client, state, said = FakeClient(), ServerState(), Said()
        metrics = Metrics(state)
        state.set_serving(Serving(client=client, engine=engine_config(), tokenizer=None, name="fake"))
        watching = asyncio.create_task(watch_weights(client, metrics, said))
        good = record(1, "committed", seconds=SECONDS, stall_seconds=0.0004, source_bytes=3 << 20, target_bytes=5)
        bad = record(2, "aborted", code="not-finite", message="w has a NaN", source_bytes=1)
        tried = record(3, "verified", dry_run=True)
        torn = record(4, "torn", code="swap", message="rank tp1 failed", kind="memory")
        for history in ((good,), (bad, good), (bad, good), (torn, tried, bad, good)):
            client.set_weights(history=history, version="1")
            await asyncio.sleep(0.01)
        levels = [(level, fields["state"], fields["version"]) for level, _, fields in said.lines]
        assert levels == [
            ("INFO", "committed", "1"),
            ("WARNING", "aborted", "2"),
            ("INFO", "dry_run", "3"),
            ("WARNING", "torn", "4"),
        ]
        first = said.lines[0][2]
        assert (first["mib"], first["stall_ms"], first["seconds"]) == (3.0, 0.4, 0.64)
        assert said.lines[1][2]["says"] == "w has a NaN"
        text = metrics.render().decode()
        for result, kind in (("committed", "disk"), ("aborted", "disk"), ("dry_run", "disk"), ("torn", "memory")):
            assert f'gtp_serve_weight_updates_total{{kind="{kind}",result="{result}"}} 1.0' in text
        assert 'gtp_serve_weight_update_seconds_sum{phase="transfer"} 0.5' in text
        assert "gtp_serve_weight_update_stall_seconds_count 1.0" in text
        assert f'gtp_serve_weight_update_bytes_total{{side="source"}} {3 * 2**20 + 1:.6e}'.partition("}")[0] in text
        assert 'gtp_serve_weight_version_info{source="disk",version="1"} 1.0' in text
        client.state = "dead"
        client.set_weights()
        await asyncio.wait_for(watching, 5)

    asyncio.run(go())


def test_weights_that_were_loaded_at_the_start_come_from_the_checkpoint() -> None:
    state = ServerState()
    metrics = Metrics(state)
    weights = WeightsStatus(
        version="9", history=(record(9, "committed", kind="label"), record(1, "aborted")), paused=True
    )
    client = FakeClient(weights=weights)
    state.set_serving(Serving(client=client, engine=engine_config(), tokenizer=None, name="fake"))
    text = metrics.render().decode()
    assert 'gtp_serve_weight_version_info{source="checkpoint",version="9"} 1.0' in text
    assert "gtp_serve_engine_paused 1.0" in text
    assert "gtp_serve_weights_torn 0.0" in text
