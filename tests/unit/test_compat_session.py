"""Buckets over HTTP make one update: what a session asks the engine, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from fed_client import FedClient, one, pieces

from gtp_serve.errors import GtpServeError, UpdateFailed, UpdateRefused
from gtp_serve.layout.huggingface import HEAD
from gtp_serve.refit.orders import AbortUpdate, Begin, Feed, UpdateRecord
from gtp_serve.server.compat.session import FedSession


async def take_all(
    session: FedSession, client: FedClient, version: str | None = None, count: int = 3
) -> UpdateRecord | None:
    record = None
    for piece in pieces(client, count):
        record = await session.take(client.serving(), piece, version, "keep")
    return record


def run(work: Any) -> Any:
    return asyncio.run(work)


def test_an_update_commits_with_its_last_tensor() -> None:
    client, session = FedClient(), FedSession()

    async def work() -> None:
        serving = client.serving()
        first, second, third = pieces(client)
        assert await session.take(serving, first, "5", "keep") is None
        assert await session.take(serving, second, "5", "keep") is None
        assert client.weights.version == "0"
        record = await session.take(serving, third, "5", "keep")
        assert record is not None
        assert record.state == "committed"

    run(work())
    assert client.weights.version == "5"
    (begin,) = client.asked(Begin)
    assert begin.request.any_order
    assert begin.request.order.group == "g"


def test_buckets_of_several_groups_make_one_update() -> None:
    client, session = FedClient(), FedSession()

    async def work() -> None:
        for index, piece in enumerate(pieces(client)):
            piece = msgspec.structs.replace(piece, group=f"stage-{index}")
            await session.take(client.serving(), piece, "1", "keep")

    run(work())
    assert len(client.asked(Begin)) == 1
    assert [feed.piece.group for feed in client.asked(Feed)] == ["stage-0", "stage-1", "stage-2"]
    assert client.weights.version == "1"


def test_without_a_version_the_next_one_is_taken() -> None:
    client, session = FedClient(), FedSession()
    client.set_weights(version="step-41")
    run(take_all(session, client))
    assert client.weights.version == "step-42"


def test_an_update_whose_end_is_told_waits_for_it_and_takes_its_label_from_there() -> None:
    client, session = FedClient(), FedSession()

    async def work() -> None:
        await session.begin(client.serving(), label_later=True)
        assert await take_all(session, client) is None
        assert client.weights.version == "0"
        record = await session.end(client.serving(), "policy-7")
        assert record is not None

    run(work())
    assert client.weights.version == "policy-7"


def test_an_end_with_nothing_to_end_is_nothing() -> None:
    client, session = FedClient(), FedSession()

    async def work() -> None:
        assert await session.end(client.serving()) is None
        await session.begin(client.serving())
        assert await session.end(client.serving()) is None

    run(work())
    assert client.commands == []


def test_an_end_before_the_last_tensor_fails_by_name_and_leaves_nothing_open() -> None:
    client, session = FedClient(), FedSession()

    async def work() -> None:
        await session.take(client.serving(), pieces(client)[0], "1", "keep")
        with pytest.raises(UpdateFailed, match="never came"):
            await session.end(client.serving())
        assert await session.end(client.serving()) is None

    run(work())
    assert client.weights.version == "0"
    assert client.weights.update is None


def test_after_a_refused_bucket_the_rest_is_received_and_refused_until_the_end_is_told() -> None:
    client, session = FedClient(), FedSession()
    client.bad = {"model.extra"}

    async def work() -> None:
        first, second, third = pieces(client)
        serving = client.serving()
        await session.take(serving, first, "1", "keep")
        with pytest.raises(UpdateFailed, match=r"no model\.extra"):
            await session.take(serving, one("model.extra", (1,)), "1", "keep")
        for piece in (second, third):
            with pytest.raises(GtpServeError, match=r"is not taken: this model has no model\.extra"):
                await session.take(serving, piece, "1", "keep")
        with pytest.raises(GtpServeError, match=r"is not taken: this model has no model\.extra"):
            await session.end(serving)
        assert await session.end(serving) is None
        assert client.weights.update is None
        client.bad = set()
        await take_all(session, client, "2")

    run(work())
    assert len(client.asked(Feed)) == 4 + 3
    assert [begin.request.order.discard for begin in client.asked(Begin)] == [False, True, False]
    assert client.weights.version == "2"


@pytest.mark.parametrize("version", [None, "1"])
@pytest.mark.parametrize("refused_first", [True, False])
def test_a_trainer_that_begins_again_after_a_refused_bucket_needs_no_end_in_between(
    version: str | None, refused_first: bool
) -> None:
    client, session = FedClient(), FedSession()
    first, second, third = pieces(client)
    client.bad = {first.names[0] if refused_first else second.names[0]}

    async def work() -> None:
        serving = client.serving()
        if not refused_first:
            await session.take(serving, first, version, "keep")
        for piece in (first,) if refused_first else (second, third):
            with pytest.raises(GtpServeError):
                await session.take(serving, piece, version, "keep")
        client.bad = set()
        await take_all(session, client, version)

    run(work())
    assert client.weights.version == "1"
    assert client.weights.update is None


def test_another_version_drops_what_has_come_before() -> None:
    client, session = FedClient(), FedSession()

    async def work() -> None:
        await session.take(client.serving(), pieces(client)[0], "1", "keep")
        await take_all(session, client, "2")

    run(work())
    assert [begin.request.version for begin in client.asked(Begin)] == ["1", "2"]
    assert len(client.asked(AbortUpdate)) == 1
    assert client.weights.version == "2"


def test_an_update_that_the_engine_gave_up_meanwhile_is_told_with_the_next_bucket() -> None:
    client, session = FedClient(), FedSession()

    async def work() -> None:
        serving = client.serving()
        first, second, _ = pieces(client)
        await session.take(serving, first, "1", "keep")
        client.end_update("aborted", code="update-deadline", message="late")
        with pytest.raises(GtpServeError, match="not taken: late"):
            await session.take(serving, second, "1", "keep")
        with pytest.raises(GtpServeError, match="not taken: late"):
            await session.end(serving)

    run(work())
    assert client.weights.version == "0"


def test_an_update_that_cannot_begin_leaves_nothing_open() -> None:
    client, session = FedClient(), FedSession()

    async def work() -> None:
        client.set_weights(update=UpdateRecord(id="other", version="9", base="0", state="staging", kind="disk"))
        with pytest.raises(UpdateRefused, match="under way"):
            await session.take(client.serving(), pieces(client)[0], "1", "keep")
        client.set_weights(update=None)
        await take_all(session, client, "1")

    run(work())
    assert client.weights.version == "1"


@pytest.mark.parametrize("version", [None, "1"])
def test_a_tied_head_that_comes_when_all_is_committed_is_let_pass(version: str | None) -> None:
    client, session = FedClient(tied=True), FedSession()
    head = one(HEAD, (273, 16))

    async def work() -> None:
        await take_all(session, client, version)
        assert client.weights.version == "1"
        assert await session.take(client.serving(), head, version, "keep") is None
        assert await session.end(client.serving()) is None

    run(work())
    assert client.weights.version == "1"
    assert client.weights.update is None
    assert [begin.request.order.discard for begin in client.asked(Begin)] == [False, True]
